"""Values as bytes between processes, and back to the bit: nothing that is received can run.

What is sent is a JSON text, after its length in 8 bytes, and then the bytes of all arrays. There
`null`, texts, numbers and booleans are themselves, and an object is a dict whose keys are texts;
everything else is a list that begins with its kind:

    ["list", ...]  ["tuple", ...]  ["dict", [key, value], ...]  ["float", HEX]  ["int", HEX]
    ["text", START, LENGTH]  ["bytes", START, LENGTH]  ["array", DTYPE, SHAPE, START]
    ["scalar", DTYPE, START]  ["class", NAME, FIELDS]
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_KINDS = "biufcSUmM"  # of NumPy's types: numbers, texts and times; no objects, no records
_HEAD = struct.Struct("<Q")
_DOUBLE = struct.Struct(">d")
_ALIGNMENT = 8  # bytes


def encode(value: Any, types: tuple[type, ...] = ()) -> bytes:
    """A value as bytes.

    Args:
      value: of texts, bytes, numbers, booleans, None, lists, tuples, mappings (which come back as
        dicts), NumPy's arrays and scalars, and dataclasses of `types`.

    Raises:
      TypeError: anything else is in it.
    """
    writer = _Writer({each.__name__: each for each in types})
    text = json.dumps(writer.tree(value), allow_nan=False, separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(text)), text, *writer.parts))


def decode(data: bytes, types: tuple[type, ...] = ()) -> Any:
    """The value of `encode`, whose arrays may be written to.

    Raises:
      ValueError: bytes that are none of `encode`'s with these types.
    """
    try:
        (length,) = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        reader = _Reader(memoryview(data)[start:], {each.__name__: each for each in types})
        return reader.value(json.loads(data[_HEAD.size : start]))
    except (struct.error, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"bytes of another process: got {error!r}; allowed: a value.") from error


class _Writer:
    """The tree of a value, and the bytes that it points to."""

    def __init__(self, types: Mapping[str, type]):
        self._types = types
        self.parts: list[bytes] = []
        self._end = 0

    def tree(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(value)
        if kind is int:
            # Python refuses to read more than some thousand digits.
            return value if abs(value) < 2**64 else ["int", hex(value)]
        if kind is float:
            return value if math.isfinite(value) else ["float", _DOUBLE.pack(value).hex()]
        if kind in (list, tuple):
            return [kind.__name__, *map(self.tree, value)]
        if isinstance(value, Mapping):
            if all(type(key) is str and key.isascii() for key in value):
                return {key: self.tree(item) for key, item in value.items()}
            return ["dict", *([self.tree(k), self.tree(v)] for k, v in value.items())]
        return self._other(value, kind)

    def _other(self, value: Any, kind: type) -> Any:
        if kind is bytes:
            return ["bytes", self._put(value), len(value)]
        if kind is np.ndarray and value.dtype.kind in _KINDS:
            where = self._put(np.ascontiguousarray(value).tobytes())
            return ["array", value.dtype.str, list(value.shape), where]
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return ["scalar", value.dtype.str, self._put(value.tobytes())]
        if self._types.get(kind.__name__) is kind:
            fields = dataclasses.fields(value)
            tree = {field.name: self.tree(getattr(value, field.name)) for field in fields}
            return ["class", kind.__name__, tree]
        what = f"{kind.__name__} of {value.dtype}" if isinstance(value, np.ndarray) else kind
        raise TypeError(f"between processes: got {what}; allowed: plain values and arrays.")

    def _text(self, text: str) -> Any:
        """JSON makes one character of two halves that stand side by side."""
        try:
            text.encode()
            return text
        except UnicodeEncodeError:
            data = text.encode(errors="surrogatepass")
            return ["text", self._put(data), len(data)]

    def _put(self, data: bytes) -> int:
        """Where the bytes will lie."""
        start = self._end
        padded = -len(data) % _ALIGNMENT
        self.parts += [data, bytes(padded)]
        self._end += len(data) + padded
        return start


class _Reader:
    """The value of a tree."""

    def __init__(self, data: memoryview, types: Mapping[str, type]):
        self._data, self._types = data, types

    def value(self, tree: Any) -> Any:
        match tree:
            case dict():
                return {key: self.value(item) for key, item in tree.items()}
            case ["list", *items]:
                return [self.value(item) for item in items]
            case ["tuple", *items]:
                return tuple(self.value(item) for item in items)
            case ["dict", *pairs]:
                return {self.value(key): self.value(item) for key, item in pairs}
            case ["int", text]:
                return int(text, 16)
            case ["float", text]:
                return _DOUBLE.unpack(bytes.fromhex(text))[0]
            case ["text", start, length]:
                return bytes(self._take(start, length)).decode(errors="surrogatepass")
            case ["bytes", start, length]:
                return bytes(self._take(start, length))
            case ["array", dtype, shape, start]:
                return self._array(np.dtype(dtype), tuple(shape), start)
            case ["scalar", dtype, start]:
                return self._array(np.dtype(dtype), (), start)[()]
            case ["class", name, fields]:
                return self._types[name](**self.value(fields))
            case list():
                raise ValueError(f"a list that begins with {tree[:1]}")
        return tree

    def _array(self, dtype: np.dtype, shape: tuple[int, ...], start: int) -> np.ndarray:
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of {dtype}")
        data = self._take(start, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(shape).copy() if data else np.zeros(shape, dtype)

    def _take(self, start: int, length: int) -> memoryview:
        if not 0 <= start <= start + length <= len(self._data):
            raise ValueError(f"bytes {start} to {start + length} of {len(self._data)}")
        return self._data[start : start + length]
