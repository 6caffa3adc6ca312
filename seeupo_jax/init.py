"""Writes a project that trains an agent in an environment of its own: a place to begin.

    python -m seeupo_jax.init NAME [--into=FOLDER]

NAME is a new folder. It gets an environment with two tools, tasks, a reward, a configuration,
tests and a README with the commands to run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from seeupo_jax.cli.project import write_project
from seeupo_jax.configuration.flags import Flags, path
from seeupo_jax.display.terminal import safe_output
from seeupo_jax.errors import file_sentences, sentence_errors


@safe_output()
def main(arguments: Sequence[str] = sys.argv) -> None:
    """The command."""
    with file_sentences(), sentence_errors():
        flags = Flags("init", __doc__)
        flags.add_argument(
            "name", nargs="?", metavar="NAME", help="the project's folder; required."
        )
        flags.flag("into", "the folder that NAME is made in; default: this one.", path)
        given = flags.read(arguments[1:])
        folder = write_project(given.name, given.into or Path())
    print(f"wrote {folder}/; {folder}/README.md has the commands to run, the first of them:")
    print(f"    seeupo-train --config={folder.name}/config.py --workdir=runs/{folder.name}")


if __name__ == "__main__":
    main()
