"""Rows of tables: CSV, Parquet, Arrow, folders of `datasets`, and TensorFlow Datasets."""

from __future__ import annotations

import csv
import json
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from seeupo_jax.tasks.json_rows import changed
from seeupo_jax.tasks.row_list import Records, Row, RowList, short, unreadable

_DICT_FILE, _STATE_FILE = "dataset_dict.json", "state.json"  # of `save_to_disk`
_FOLDER = "a folder that `save_to_disk` of datasets wrote"
_LONGEST_CELL = 2**24  # characters; Python's own limit is 131,072


def read_csv(path: Path, field: str) -> RowList:
    """The lines of a CSV (or, tab-separated, TSV) file below its header, all read at once.

    Raises:
      ValueError: no header, a column twice, or a line with another number of cells.
    """
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            lines = [(cells, reader.line_num) for cells in reader if cells]  # [] is an empty line
    except (csv.Error, UnicodeDecodeError) as error:
        raise unreadable(field, str(path), str(error), "CSV in UTF-8") from None
    header, rows = lines[0][0] if lines else [], []
    _check_header(header, f"{field}: {path}, line 1")
    for cells, number in lines[1:]:
        if len(cells) != len(header):
            raise ValueError(
                f"{field}: {path}, line {number}: got {len(cells)} cells; allowed: {len(header)},"
                " as the header has."
            )
        rows.append(dict(zip(header, cells, strict=True)))
    return RowList(rows, [f"line {number}" for _, number in lines[1:]], str(path), field)


def _check_header(header: Sequence[str], where: str) -> None:
    twice = [name for name in header if not name.strip() or header.count(name) > 1]
    if not header or twice:
        got = f"the column {twice[0]!r}" if twice else "nothing"
        raise ValueError(f"{where}: got {got}; allowed: the names of the columns, each once.")


class ParquetRows:
    """The rows of a Parquet file; the group of rows that was read last stays in memory.

    Raises:
      ValueError: it is no Parquet file. OSError: it cannot be read.
    """

    def __init__(self, path: Path, field: str):
        import pyarrow.parquet as pq  # it takes a moment

        self._path, self._field, self._file = path, field, path.absolute()
        self._stat = self._signature()
        try:
            self._parquet = pq.ParquetFile(self._file)
        except _arrow_error() as error:
            raise unreadable(field, str(path), _first_line(error), "a Parquet file") from None
        meta = self._parquet.metadata
        sizes = (meta.row_group(group).num_rows for group in range(meta.num_row_groups))
        self._ends = [0, *accumulate(sizes)]
        self._lock = threading.Lock()
        self._group, self._table = -1, None

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]
        group = bisect_right(self._ends, index) - 1
        with self._lock:
            if group != self._group:
                self._read(group, index)
            table = self._table
        return _row(table, index - self._ends[group])

    def where(self, index: int) -> str:
        return f"{self._field}: {self._path}, row {index}"

    def _read(self, group: int, index: int) -> None:
        if self._signature() != self._stat:
            raise changed(self.where(index), "another file than when the run first read it")
        self._table, self._group = self._parquet.read_row_group(group), group

    def _signature(self) -> tuple[int, int]:
        stat = self._file.stat()
        return stat.st_mtime_ns, stat.st_size


class ArrowRows:
    """The rows of Arrow files, one after the other, mapped into memory: processes share the pages.

    Raises:
      ValueError: one is no Arrow file. OSError: one cannot be read.
    """

    def __init__(self, files: Sequence[Path], name: str, field: str):
        import pyarrow as pa

        self._name, self._field = name, field
        tables = [_map_arrow(file, field) for file in files]
        self._table = pa.concat_tables(tables, promote_options="permissive")

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return _row(self._table, range(len(self))[index])

    def where(self, index: int) -> str:
        return f"{self._field}: {self._name}, row {index}"


def _map_arrow(file: Path, field: str) -> Any:
    """A file's table: `datasets` writes streams, other programs files with an index."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
    except pa.ArrowInvalid:
        pass
    try:
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except pa.ArrowInvalid as error:
        raise unreadable(field, str(file), _first_line(error), "an Arrow file") from None


def _row(table: Any, index: int) -> Row:
    (row,) = table.slice(index, 1).to_pylist()
    return row


def _arrow_error() -> type[Exception]:
    import pyarrow as pa

    return pa.ArrowInvalid


def folder_splits(folder: Path, field: str) -> tuple[str, ...]:
    """The splits of a `DatasetDict` on disk; empty for a single dataset.

    Raises:
      ValueError: the folder is neither.
    """
    if (folder / _DICT_FILE).is_file():
        return tuple(_read_json(folder / _DICT_FILE, field, "splits"))
    if (folder / _STATE_FILE).is_file():
        return ()
    reason = f"a folder without {_STATE_FILE} or {_DICT_FILE}"
    raise unreadable(field, str(folder), reason, f"{_FOLDER}, or the path of a file in it")


def open_folder(folder: Path, field: str, split: str | None) -> ArrowRows:
    """A folder that `save_to_disk` of datasets wrote: a dataset, or one split of several.

    Raises:
      ValueError: it is none, or lacks the split. OSError: a file cannot be read.
    """
    splits = folder_splits(folder, field)
    if splits:
        if split not in splits:
            raise ValueError(
                f"{field}: got {str(folder)!r} with split {split!r}; allowed: {', '.join(splits)}."
            )
        folder = folder / str(split)
    files = _read_json(folder / _STATE_FILE, field, "_data_files")
    return ArrowRows([folder / file["filename"] for file in files], str(folder), field)


def _read_json(file: Path, field: str, key: str) -> list[Any]:
    try:
        return list(json.loads(file.read_bytes())[key])
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{file.name}: {type(error).__name__}: {error}"
        raise unreadable(field, str(file.parent), reason, _FOLDER) from None


class TfdsRows:
    """Records of a dataset of TensorFlow Datasets in ArrayRecord, by random access.

    Features become what JSON has: bytes texts, arrays lists, scalars numbers.
    """

    def __init__(self, name: str, split: str, field: str):
        self._name, self._split, self._field = name, split, field
        try:
            self._source = _tfds_builder(name).as_data_source(split=split)
        except Exception as error:  # the library's are of any class
            raise _no_tfds(field, f"'tfds:{name}' with split {split!r}", error) from None

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Row:
        record = self._source[range(len(self))[index]]
        return {name: _plain(value) for name, value in record.items()}

    def where(self, index: int) -> str:
        return f"{self._field}: tfds:{self._name}, {self._split}, record {index}"


def tfds_splits(name: str, field: str) -> tuple[str, ...]:
    """The splits of a prepared dataset. Raises ValueError if it cannot be read."""
    try:
        return tuple(_tfds_builder(name).info.splits)
    except Exception as error:  # the library's are of any class
        raise _no_tfds(field, f"'tfds:{name}'", error) from None


def _tfds_builder(name: str) -> Any:
    import tensorflow_datasets as tfds  # it takes seconds

    return tfds.builder_from_directory(name) if Path(name).is_dir() else tfds.builder(name)


def _no_tfds(field: str, got: str, error: Exception) -> ValueError:
    reason = _first_line(error)
    return ValueError(
        f"{field}: got {got}, which cannot be read ({reason}); allowed: a prepared dataset in"
        " array_record."
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def as_rows(value: Any, where: str) -> list[Any]:
    """A list of objects: as it is, or as tables hold it, a text of JSON or a list per column.

    Raises:
      ValueError: it is none of these.
    """
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: got {short(value)}; allowed: JSON.") from None
    try:
        if isinstance(value, Mapping):
            rows = zip(*value.values(), strict=True)
            return [dict(zip(value, row, strict=True)) for row in rows]
        return [dict(row) for row in value]
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: got {short(value)}; allowed: a text of JSON, or a list of objects."
        ) from None


def columns_of(records: Records) -> tuple[str, ...]:
    """The columns of the first row; empty without one."""
    return tuple(records[0]) if len(records) else ()
