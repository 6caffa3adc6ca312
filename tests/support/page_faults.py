"""Page faults of a program's executions: `page_faults.py PREPARED`, True as commands begin."""

import resource
import sys

import jax
import jax.numpy as jnp

from seeupo_jax.cli.command_line import prepare_xla


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(prepared: str) -> None:
    if prepared == "True":
        prepare_xla()
    run = jax.jit(lambda x: jnp.outer(x, x) @ jnp.ones((4096, 8)))
    x = jnp.ones(4096)
    for _ in range(10):
        run(x).block_until_ready()
    before = faults()
    for _ in range(20):
        run(x).block_until_ready()
    print(faults() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
