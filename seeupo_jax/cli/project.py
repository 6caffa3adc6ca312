"""A new project: its files are templates of the package, with the project's name in them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import seeupo_jax

_TEMPLATES = Path(seeupo_jax.__path__[0]) / "assets" / "project"
_SUFFIX = ".txt"  # of templates that tools would take for files of the package
_NAME = "PROJECT"  # in the templates


def write_project(name: str | None, parent: Path) -> Path:
    """Writes a project into a new or empty folder of this name; returns the folder.

    Raises:
      ValueError: a name that no folder and module should have, or a folder that is not empty.
    """
    if name is None or re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII) is None:
        got = "none" if name is None else repr(name)
        raise ValueError(
            f"NAME: got {got}; allowed: a letter and then letters, digits and underscores, at most"
            " 64."
        )
    folder = parent / name
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"NAME: got {name!r}, which is here already; allowed: a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for template in sorted(_TEMPLATES.iterdir()):
        text = template.read_text(encoding="utf-8").replace(_NAME, name)
        (folder / template.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
    return folder
