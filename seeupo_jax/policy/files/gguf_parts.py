"""The files of a model that llama.cpp's `gguf-split` has cut into several."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)")  # NAME-00001-of-00003.gguf


def part_files(path: Path) -> list[Path]:
    """All files of a model, by the name of its first one; the file itself where it is the only one.

    Raises:
      ValueError: a part that is not the first one, or a missing one.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, of, count, suffix = match.groups()
    names = [f"{stem}{i:05}{of}{count}{suffix}" for i in range(1, int(count) + 1)]
    if int(number) != 1 or not names:
        raise ValueError(
            f"{path} is part {int(number)} of a model in {int(count)} files; allowed: the first"
            f" one, {stem}00001{of}{count}{suffix}."
        )
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{path} is the first of {len(names)} files of a model, of which"
            f" {', '.join(missing[:5])} is not there; allowed: all of them in one folder."
        )
    return [path.parent / name for name in names]
