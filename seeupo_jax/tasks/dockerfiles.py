"""The part of a Dockerfile that is followed without an image: its folder, files and variables."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

# Instructions that say nothing of the files and variables of a container.
_IGNORED = ("FROM", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "SHELL", "STOPSIGNAL", "MAINTAINER")
_ALLOWED = f"WORKDIR, COPY, ADD, ENV, {', '.join(_IGNORED)}"
_HOSTS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev", "/etc", "/logs")
_CONTINUED = re.compile(r"\\[ \t]*\n")


@dataclass(frozen=True)
class Container:
    """What a Dockerfile makes of a container.

    workdir: absolute. copies: files and folders with their absolute destinations, in order; a
      folder's contents are copied. variables: of its environment.
    """

    workdir: str = "/"
    copies: tuple[tuple[Path, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def read_dockerfile(path: Path) -> Container:
    """Reads a Dockerfile whose programs are replaced by those of this machine.

    Raises:
      ValueError: an instruction that needs an image; one sentence with the file and the line.
    """
    text = _CONTINUED.sub(" ", path.read_text(encoding="utf-8"))
    workdir, copies, variables = "/", list[tuple[Path, str]](), dict[str, str]()
    for line in map(str.strip, text.splitlines()):
        name, _, rest = line.partition(" ")
        instruction = name.upper()
        if not line or line.startswith("#") or instruction in _IGNORED:
            continue
        try:
            if instruction == "WORKDIR":
                workdir = posixpath.normpath(posixpath.join(workdir, *shlex.split(rest)))
            elif instruction in ("COPY", "ADD"):
                copies += _read_copy(rest, path.parent, workdir)
            elif instruction == "ENV":
                variables |= _read_variables(rest)
            else:
                raise ValueError("an instruction that needs an image")
        except ValueError as error:
            raise ValueError(
                f"{path}: got {line!r} ({error}); allowed with config.sandbox.runtime=local:"
                f" {_ALLOWED}; with docker or podman: any."
            ) from None
    return Container(workdir, tuple(copies), tuple(variables.items()))


def _read_copy(rest: str, folder: Path, workdir: str) -> list[tuple[Path, str]]:
    words = json.loads(rest) if rest.lstrip().startswith("[") else shlex.split(rest)
    if any(word.startswith("--") for word in words):
        raise ValueError("options are not followed")
    if len(words) < 2:
        raise ValueError("a source and a destination are needed")
    *sources, target = words
    destination = posixpath.normpath(posixpath.join(workdir, target))
    into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
    if any(destination == each or destination.startswith(f"{each}/") for each in _HOSTS):
        raise ValueError(f"{destination} belongs to this machine")
    copies = list[tuple[Path, str]]()
    for source in sources:
        places = sorted(folder.glob(source.lstrip("/"))) if source not in (".", "./") else [folder]
        inside = [each for each in places if each.resolve().is_relative_to(folder.resolve())]
        if not inside:
            raise ValueError(f"there is no {source!r} in {folder}")
        for place in inside:
            named = posixpath.join(destination, place.name)
            copies.append((place, named if into and place.is_file() else destination))
    return copies


def _read_variables(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # the old form: ENV NAME VALUE
        return {words[0]: " ".join(words[1:])}
    if "$" in rest or not all("=" in word for word in words):
        raise ValueError("only NAME=VALUE without other variables is followed")
    return dict(word.split("=", 1) for word in words)
