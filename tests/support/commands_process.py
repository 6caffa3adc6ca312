"""Runs commands of the package one after the other, as lines of JSON ask for them.

A line is the name of a command's module and its arguments; the answer is the command's exit code.
"""

import importlib
import json
import sys


def run(module: str, *arguments: str) -> object:
    """The exit code of a command."""
    command = importlib.import_module(f"seeupo_jax.{module}")
    try:
        command.main([module, *arguments])
    except SystemExit as ended:
        return ended.code
    return 0


if __name__ == "__main__":
    answers = sys.stdout
    sys.stdout = sys.stderr  # of the commands
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)
