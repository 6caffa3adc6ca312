"""What a command and its interpreters need of this machine, outside /usr."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

_INTERPRETERS = 5  # at most, each of the one before: Linux starts no more


def program_folders(words: Sequence[str]) -> list[str]:
    """Paths outside /usr that a command and its interpreter need.

    Of a program in a folder `bin` that is the folder around it, as of a virtual environment; of
    another word that is a file's absolute path it is the file.
    """
    found, program = [sys.base_prefix], shutil.which(words[0])
    for _ in range(_INTERPRETERS):
        if program is not None:
            found += [*_around(program), *_around(os.path.realpath(program))]
            program = _interpreter(program)
    found += [word for word in words[1:] if os.path.isabs(word) and os.path.isfile(word)]
    outside = [each for each in found if not f"{each}/".startswith(("/usr/", "/bin/", "/sbin/"))]
    return list(dict.fromkeys(each for each in outside if each != "/"))


def _around(program: str) -> list[str]:
    folder, name = os.path.split(os.path.dirname(program))
    home = os.path.expanduser("~")
    private = folder in ("/", home, f"{home}/.local")  # all of the user's files are there
    if name in ("bin", ".bin"):
        return [os.path.dirname(program) if private else folder]
    return [program]


def _interpreter(program: str) -> str | None:
    """The program that runs a script; None: it is no script, or there is no such program."""
    try:
        with open(program, "rb") as file:
            first = file.readline(512)
    except OSError:  # it may be executable and not readable
        return None
    if not first.startswith(b"#!"):
        return None
    words = [word for word in first[2:].decode(errors="replace").split() if word != "-S"]
    if len(words) > 1 and os.path.basename(words[0]) == "env":
        return shutil.which(words[1])
    return shutil.which(words[0]) if words else None
