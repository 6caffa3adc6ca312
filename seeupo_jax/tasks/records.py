"""Rows of a file, a folder, tfds or a user's function, by number: the one reader of all of them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import (
    check_arguments,
    expand_home,
    import_attribute,
    located,
)
from seeupo_jax.tasks.json_rows import JsonLines, JsonList, is_json_lines
from seeupo_jax.tasks.row_list import Records, RowList, unreadable
from seeupo_jax.tasks.tables import (
    ArrowRows,
    ParquetRows,
    TfdsRows,
    folder_splits,
    open_folder,
    read_csv,
    tfds_splits,
)

TFDS = "tfds:"
KINDS = (
    "a file .jsonl, .json, .csv, .tsv, .parquet or .arrow, a folder that `save_to_disk` of datasets"
    " wrote, tfds:NAME or tfds:FOLDER"
)
FUNCTION = "module:function or FILE.py:function that returns a list of dicts"


def open_records(
    source: str, field: str, split: str | None = None, *, row_form: str = "a JSON object"
) -> Records:
    """Opens the rows of a source; `field` has named it, in errors.

    A file or folder that is opened again, unchanged, is the same object: a process reads it once.

    Args:
      split: of a source that has splits (`source_splits`); not read for one that has none.
      row_form: what a row of JSON has to be, in errors.

    Raises:
      ValueError: the source cannot be read, or lacks the split; one sentence.
    """
    if source.startswith(TFDS):
        return TfdsRows(source.removeprefix(TFDS), split or "train", field)
    path = expand_home(source)
    try:
        return _open(path, _signature(path), field, split, row_form)
    except OSError as error:
        raise unreadable(field, source, error.strerror or str(error), KINDS) from None


def source_splits(source: str, field: str) -> tuple[str, ...]:
    """Returns the splits that a source itself has; empty: it has none.

    Raises:
      ValueError: the source cannot be read.
    """
    if source.startswith(TFDS):
        return tfds_splits(source.removeprefix(TFDS), field)
    folder = expand_home(source)
    return folder_splits(folder, field) if folder.is_dir() else ()


def function_records(name: str, options: Mapping[str, Any], field: str) -> Records:
    """The rows that a function `module:function` returns for these options; called once.

    Raises:
      ValueError: there is no such function, it refuses the options or returns no list of dicts.
    """
    try:
        key = json.dumps(dict(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}: {name} got options that are not JSON: {error}.") from None
    return _call(name, key, field)


def is_function(source: str) -> bool:
    """Whether a source names a function, and neither tfds nor a path that exists."""
    return ":" in source and not source.startswith(TFDS) and not expand_home(source).exists()


def _signature(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Names, nodes, times and sizes of the files of a source: others are another source."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    return tuple((name, s.st_ino, s.st_mtime_ns, s.st_size) for name, s in stats)


@functools.lru_cache(maxsize=64)
def _open(
    path: Path, signature: tuple[Any, ...], field: str, split: str | None, row_form: str
) -> Records:
    if path.is_dir():
        return open_folder(path, field, split)
    if path.suffix == ".parquet":
        return ParquetRows(path, field)
    if path.suffix == ".arrow":
        return ArrowRows([path], str(path), field)
    if path.suffix in (".csv", ".tsv"):
        return read_csv(path, field)
    if path.suffix == ".json" and not is_json_lines(path):
        return JsonList(path, field)
    return JsonLines(path, field, row_form)


@functools.lru_cache(maxsize=64)
def _call(name: str, key: str, field: str) -> Records:
    function, options = import_attribute(name, field, "function", callable), json.loads(key)
    try:
        check_arguments(inspect.signature(function), (), options)
    except TypeError as error:
        raise ValueError(f"{field}: {name} refused {options}: {error}.") from None
    try:
        rows = list(function(**options))
    except (Exception, SystemExit) as error:  # of a user's function
        if isinstance(error, ValueError) and name.startswith("seeupo_jax."):
            raise  # already a full sentence
        raise ValueError(f"{field}: {name} raised {located(error)}.") from error
    return RowList(rows, [f"row {index}" for index in range(len(rows))], name, field)
