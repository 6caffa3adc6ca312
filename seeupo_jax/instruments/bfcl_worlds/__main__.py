"""Writes generated tasks as files in BFCL's official format.

    python -m seeupo_jax.envs.bfcl_worlds --output=FOLDER [--options='{"turns": [2, 4]}']

The environment `bfcl` reads the folder: `--config.env.options.data=FOLDER`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from seeupo_jax import envs
from seeupo_jax.configuration.user_code import in_one_line
from seeupo_jax.envs.base import read_options
from seeupo_jax.instruments.bfcl_worlds.environment import BfclWorlds
from seeupo_jax.instruments.bfcl_worlds.official_format import export_tasks


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    name = "python -m seeupo_jax.envs.bfcl_worlds"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--output", required=True, type=Path, help="the folder to write")
    parser.add_argument("--options", default="{}", help="the environment's, as a JSON object")
    flags = parser.parse_args(arguments)
    try:
        options = read_options(flags.options)
        environment = envs.make("bfcl_worlds", **options)
        assert isinstance(environment, BfclWorlds)
        written = export_tasks(environment, flags.output)
    except (ValueError, OSError, RecursionError) as error:
        parser.error(in_one_line(str(error), most=1000))
    for path, tasks in written.items():
        print(f"{flags.output / path}: {tasks} tasks")


if __name__ == "__main__":
    main()
