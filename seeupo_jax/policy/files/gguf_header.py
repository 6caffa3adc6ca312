"""The header of a GGUF file: its metadata, and the places of its tensors.

The `gguf` package's own reader keeps a NumPy view of every token and merge (2 s and 160 MB for
SmolLM2's 49,152 tokens), and its errors on a damaged file name neither file nor tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from seeupo_jax.policy.files.folder_files import check_content

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_DEEPEST = 8  # levels of arrays in each other; files of published models have one
_DTYPES = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape as [out, in] and its first byte.

    type_code: a value of `GGMLQuantizationType`, once `check` has passed.
    head_dim: of rows that llama.cpp has permuted; 0: rows are in order.
    added: what llama.cpp has added to every number.
    """

    file: Path
    shape: tuple[int, ...]
    type_code: int
    offset: int
    head_dim: int = 0
    added: float = 0.0

    @property
    def kind(self) -> GGMLQuantizationType:
        """How it is quantised."""
        return GGMLQuantizationType(self.type_code)

    @property
    def table(self) -> tuple[int, int]:
        """Rows, and bytes per row."""
        block_weights, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape[:-1]), self.shape[-1] // block_weights * block_bytes

    def part(self, index: int) -> StoredTensor:
        """One of the tensors that are stacked along the first axis."""
        rows, row_bytes = self.table
        start = index * (rows // self.shape[0] * row_bytes)
        return replace(self, shape=self.shape[1:], offset=self.offset + start)

    def check(self, name: str, axes: int = 2) -> None:
        """Raises ValueError unless `dequantize` reads it and the file holds all of it.

        axes: how many it may have, at most.
        """
        path, kinds = self.file, {kind.value: kind for kind in GGMLQuantizationType}
        if self.type_code not in kinds or not _is_readable(kinds[self.type_code]):
            got = kinds[self.type_code].name if self.type_code in kinds else self.type_code
            allowed = ", ".join(kind.name for kind in kinds.values() if _is_readable(kind))
            raise ValueError(f"{path}: {name} is of type {got}; allowed: {allowed}.")
        block = GGML_QUANT_SIZES[self.kind][0]
        if not 0 < len(self.shape) <= axes or 0 in self.shape or self.shape[-1] % block:
            raise ValueError(
                f"{path}: {name} is {self.shape} in {self.kind.name}; allowed: one to {axes} axes,"
                f" the last a multiple of {block}."
            )
        end, size = self.offset + math.prod(self.table), path.stat().st_size
        if end > size:
            raise ValueError(
                f"{path} is truncated: {name} ends at byte {end}; the file has {size} bytes."
            )


def _is_readable(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata by key, and tensors by the file's names.

    Raises:
      ValueError: no such file, another format, or a damaged header.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}; allowed: a GGUF file.")
    check_content(path)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file; allowed: one that begins with GGUF.")
        cursor = _Cursor(path, file)
        version = cursor.scalar(GGUFValueType.UINT32)
        if version not in _VERSIONS:
            raise ValueError(f"{path} is GGUF version {version}; allowed: {_VERSIONS}.")
        tensors, fields = cursor.scalars(GGUFValueType.UINT64, 2)
        values = {cursor.string(): cursor.value() for _ in range(fields)}
        infos = [cursor.tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path}: general.alignment is {alignment}; allowed: a number >= 1.")
        start = math.ceil(file.tell() / alignment) * alignment
    return values, {
        name: StoredTensor(path, shape, code, start + at) for name, shape, code, at in infos
    }


class _Cursor:
    """Reads a header value by value."""

    def __init__(self, path: Path, file: BinaryIO):
        self._path, self._file = path, file
        self._size = path.stat().st_size

    def scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        dtype = np.dtype(_DTYPES[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def scalar(self, kind: GGUFValueType) -> Any:
        (value,) = self.scalars(kind, 1)
        if kind is GGUFValueType.FLOAT32:
            return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06
        return value

    def string(self) -> str:
        data = self._take(int.from_bytes(self._take(8), "little"))  # a vocabulary has 100,000s
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path} is damaged: its header is no text: {error}.") from None

    def value(self) -> Any:
        return self._value(self._kind())

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and the offset from the start of the data."""
        name, axes = self.string(), self.scalar(GGUFValueType.UINT32)
        shape = tuple(reversed(self.scalars(GGUFValueType.UINT64, axes)))
        return name, shape, self.scalar(GGUFValueType.UINT32), self.scalar(GGUFValueType.UINT64)

    def _take(self, size: int) -> bytes:
        if self._file.tell() + size > self._size:
            raise ValueError(
                f"{self._path} is truncated: {self._size} bytes do not hold its header."
            )
        return self._file.read(size)

    def _kind(self) -> GGUFValueType:
        code = self.scalar(GGUFValueType.UINT32)
        if code not in [kind.value for kind in GGUFValueType]:
            raise ValueError(f"{self._path} is damaged: its header has a value of type {code}.")
        return GGUFValueType(code)

    def _value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind in _DTYPES:
            return self.scalar(kind)
        if depth == _DEEPEST:
            raise ValueError(
                f"{self._path} is damaged: its header has arrays nested without end; allowed: at"
                f" most {_DEEPEST} levels."
            )
        kind, count = self._kind(), self.scalar(GGUFValueType.UINT64)
        if kind in _DTYPES:
            return self.scalars(kind, count)
        return [self._value(kind, depth + 1) for _ in range(count)]
