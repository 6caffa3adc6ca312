"""The wire format of protocol buffers, for the few messages that Tinker's clients send and read.

https://protobuf.dev/programming-guides/encoding: a message is a sequence of fields, each a number
and a value: a varint, eight or four bytes, or a counted run of bytes (text, arrays, messages).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

VARINT, EIGHT_BYTES, COUNTED, FOUR_BYTES = 0, 1, 2, 5
Value = int | bytes


class DamagedMessage(ValueError):
    """Bytes that are no message."""


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message in their order: numbers, and varints or the bytes of all others.

    Raises:
      DamagedMessage: it ends within a field, or has a kind of field that no message has here.
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind, number = key & 7, key >> 3
        if kind == VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        sizes = {EIGHT_BYTES: 8, FOUR_BYTES: 4}
        if kind == COUNTED:
            size, place = _varint(data, place)
        elif kind in sizes:
            size = sizes[kind]
        else:
            raise DamagedMessage(f"field {number} is of kind {kind}")
        if place + size > len(data):
            raise DamagedMessage(f"field {number} ends after the message")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise DamagedMessage("a number without an end")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def signed(value: int) -> int:
    """An int64 of a varint, which has negative numbers in two's complement."""
    return value - 2**64 if value >= 2**63 else value


def integers(value: Value) -> list[int]:
    """The int64 of one field of a repeated number, which may be packed."""
    if isinstance(value, int):
        return [signed(value)]
    found, place = [], 0
    while place < len(value):
        number, place = _varint(value, place)
        found.append(signed(number))
    return found


def double(value: Value) -> float:
    """The number of a field of eight bytes."""
    if not isinstance(value, bytes) or len(value) != 8:
        raise DamagedMessage("a number that has not eight bytes")
    return struct.unpack("<d", value)[0]


def text(value: Value) -> str:
    """The text of a field."""
    return message(value).decode(errors="replace")


def message(value: Value) -> bytes:
    """The bytes of a field that has a message, text or an array."""
    if not isinstance(value, bytes):
        raise DamagedMessage("a number in the place of bytes")
    return value


def write_integer(number: int, value: int) -> bytes:
    """A field with a number of 64 bits."""
    return _write_varint(number << 3 | VARINT) + _write_varint(value % 2**64)


def write_bytes(number: int, value: bytes | str) -> bytes:
    """A field with bytes, text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return _write_varint(number << 3 | COUNTED) + _write_varint(len(data)) + data


def write_double(number: int, value: float) -> bytes:
    """A field with a float64."""
    return _write_varint(number << 3 | EIGHT_BYTES) + struct.pack("<d", value)


def write_integers(number: int, values: Sequence[int]) -> bytes:
    """A field with packed numbers."""
    return write_bytes(number, b"".join(_write_varint(value % 2**64) for value in values))


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
