"""Rows of JSON: a file with an object per line, and one with a list of objects."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

from seeupo_jax.errors import DataChanged
from seeupo_jax.tasks.row_list import Row, RowList, short

_DIGEST = 16  # bytes


class JsonLines:
    """The lines of a JSONL file, each read when it is asked for; empty ones count for nothing.

    In memory are 40 bytes per line. A line that is not the one that was there at first is an error:
    a file may be written anew.
    """

    def __init__(self, path: Path, field: str, row_form: str = "a JSON object"):
        self._path, self._field, self._file = path, field, path.absolute()
        self._row_form = row_form
        self._numbers, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._digests, offset = bytearray(), 0
        with self._file.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._numbers.append(number)
                    self._offsets.append(offset)
                    self._sizes.append(len(line))
                    self._digests += _digest(line)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]
        where = self.where(index)
        try:
            with self._file.open("rb") as file:
                file.seek(self._offsets[index])
                line = file.read(self._sizes[index])
        except OSError as error:
            got = f"a file that cannot be read any more ({error.strerror})"
            raise changed(where, got) from None
        if _digest(line) != self._digests[index * _DIGEST : (index + 1) * _DIGEST]:
            raise changed(where, "another line than when the run first read it")
        return read_object(line, where, self._row_form)

    def where(self, index: int) -> str:
        return f"{self._field}: {self._path}, line {self._numbers[index]}"


def changed(where: str, got: str) -> DataChanged:
    """The error for a source that is not what it was when it was opened."""
    return DataChanged(
        f"{where}: got {got}; allowed: a file that stays as it is until the run is complete."
    )


class JsonList(RowList):
    """The objects of a JSON file's list, read at once.

    Raises:
      ValueError: the file holds something else.
    """

    def __init__(self, path: Path, field: str):
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{field}: got {str(path)!r}, which is not JSON ({error}); allowed: a list of"
                " objects, or an object per line."
            ) from None
        assert isinstance(value, list)  # `is_json_lines`
        super().__init__(value, [f"entry {index}" for index in range(len(value))], str(path), field)


def is_json_lines(path: Path) -> bool:
    """Whether a `.json` file has an object per line, as many have, and not one list.

    Raises:
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                return not line.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return True


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=_DIGEST).digest()


def read_object(line: bytes, where: str, allowed: str) -> dict[str, Any]:
    """The object on a line; ValueError with `where` the line is and what is `allowed`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        got = short(line.decode(errors="replace"))
        raise ValueError(f"{where}: got {got}, which is not JSON; allowed: {allowed}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {short(value)}; allowed: {allowed}.")
    return value
