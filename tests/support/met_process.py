"""A process of Python code that has met the others before it trains: RANK COUNT PORT OUT SEED."""

import sys
from pathlib import Path

import jax

from seeupo_jax.cli.command_line import join_cluster
from seeupo_jax.configuration.loading import from_dict

rank, count, port, out, *seeds = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
problems = []
for seed in (0, seeds[int(rank)]):
    try:
        join_cluster(from_dict({"seed": int(seed)}))
    except ValueError as error:
        problems.append(str(error))
Path(out).write_text("\n".join(problems))
