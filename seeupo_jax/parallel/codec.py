"""Values as bytes between processes and on disk, exact to the bit; no received byte can run.

MessagePack, with extension types for what it lacks: tuples, integers of any size, NumPy's arrays
and scalars, and dataclasses that the caller names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

import msgpack
import numpy as np

_TUPLE, _INT, _ARRAY, _SCALAR, _CLASS = range(5)
_KINDS = "biufcSUmM"  # of NumPy's types: numbers, texts and times; no objects, no records


@runtime_checkable
class StoredFields(Protocol):
    """A dataclass that is encoded by other fields than its own: files keep their format."""

    def stored_fields(self) -> dict[str, Any]:
        """The fields to encode, by name."""
        ...

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The value of such fields; those that an older file lacks have a default."""
        ...


def encode(value: Any, types: tuple[type, ...] = ()) -> bytes:
    """A value as bytes.

    Args:
      value: of texts, bytes, numbers, booleans, None, lists, tuples, mappings (which come back as
        dicts), NumPy's arrays and scalars, and dataclasses of `types`.

    Raises:
      TypeError: anything else is in it.
    """

    def pack(value: Any) -> bytes:
        # strict: no tuple passes for a list, and no subclass (NumPy's float64) for its base
        return msgpack.packb(
            value, default=extend, strict_types=True, unicode_errors="surrogatepass"
        )

    def extend(value: Any) -> Any:
        kind = type(value)
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, pack(list(value)))
        if kind is int:  # beyond 64 bits
            return msgpack.ExtType(_INT, hex(value).encode())
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
            code = _ARRAY if kind is np.ndarray else _SCALAR
            parts = [value.dtype.str, list(value.shape), value.tobytes()]
            return msgpack.ExtType(code, pack(parts))
        if kind in types:
            return msgpack.ExtType(_CLASS, pack([kind.__name__, _fields(value)]))
        if isinstance(value, Mapping):
            return dict(value)
        what = f"{kind.__name__} of {value.dtype}" if isinstance(value, np.ndarray) else kind
        raise TypeError(f"between processes: got {what}; allowed: plain values and arrays.")

    return pack(value)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, StoredFields):
        return value.stored_fields()
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def decode(data: bytes, types: tuple[type, ...] = ()) -> Any:
    """The value of `encode`, whose arrays may be written to.

    Raises:
      ValueError: bytes that are none of `encode`'s with these types.
    """
    named = {each.__name__: each for each in types}

    def unpack(data: bytes) -> Any:
        return msgpack.unpackb(
            data, ext_hook=restore, strict_map_key=False, unicode_errors="surrogatepass"
        )

    def restore(code: int, data: bytes) -> Any:
        if code == _INT:
            return int(data, 16)
        parts = unpack(data)
        if code == _TUPLE:
            return tuple(parts)
        if code == _CLASS:
            name, fields = parts
            kind = named[name]
            return kind.of(**fields) if issubclass(kind, StoredFields) else kind(**fields)
        dtype, shape, content = np.dtype(parts[0]), parts[1], parts[2]
        if code not in (_ARRAY, _SCALAR) or dtype.kind not in _KINDS:
            raise ValueError(f"an array of {dtype}")
        array = np.frombuffer(content, dtype).reshape(shape).copy()
        return array if code == _ARRAY else array[()]

    try:
        return unpack(data)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"bytes of another process: got {error!r}; allowed: a value.") from error
