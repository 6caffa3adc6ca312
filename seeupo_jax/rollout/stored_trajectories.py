"""How trajectories are written to files and sent to a trainer: exact to the bit, with a checksum.

What is packed is the SHA-256 of the rest, then the encoding of `parallel.codec`, compressed by
zlib.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seeupo_jax.parallel.codec import decode, encode
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.trajectories.json_lines import plain
from seeupo_jax.types import Segment, Trajectory

TYPES = (Collected, Trajectory, Segment)
_DIGEST_BYTES = 32
_COMPRESSION = 1  # of zlib: log-probabilities hardly compress, and the rest does at any level


class Damaged(ValueError):
    """Bytes that are not those that were packed; the text ends a sentence on them."""


def pack(value: Any, types: tuple[type, ...] = TYPES) -> bytes:
    """A value of plain ones, arrays and dataclasses of `types` as bytes.

    Raises:
      TypeError: of something else; see `codec.encode`.
    """
    body = zlib.compress(encode(value, types), _COMPRESSION)
    return hashlib.sha256(body).digest() + body


def is_whole(data: bytes | memoryview) -> bool:
    """Whether bytes are as they were packed."""
    return hashlib.sha256(data[_DIGEST_BYTES:]).digest() == data[:_DIGEST_BYTES]


def unpack(
    data: bytes | memoryview, types: tuple[type, ...] = TYPES, most: int | None = None
) -> Any:
    """The value that was packed.

    Args:
      most: bytes of what is decompressed; None: whatever it has.

    Raises:
      Damaged: other bytes than those. ValueError: whole, yet of another form.
    """
    if not is_whole(data):
        raise Damaged("changed after it was written")
    expand = zlib.decompressobj()
    try:
        body = expand.decompress(data[_DIGEST_BYTES:], 0 if most is None else most)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not expand.eof or expand.unused_data:
        raise ValueError("compressed bytes: got too many, or not all of them")
    return decode(body, types)


def with_json(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Trajectories with the values of messages and `info` converted to JSON's."""

    def as_json(value: Any) -> Any:
        return json.loads(json.dumps(plain(value, finite=False)))

    return tuple(
        replace(t, messages=tuple(as_json(t.messages)), info=as_json(t.info)) for t in trajectories
    )


def remove_files(folder: Path, kind: str, up_to_iteration: int) -> None:
    """Removes the files ITERATION.KIND of iterations up to this one, and unfinished writes."""
    if not folder.is_dir():
        return
    of_iteration = re.compile(rf"(\d+)\.{kind}(\.([0-9a-f]+\.)?tmp)?")
    for file in folder.iterdir():
        name = of_iteration.fullmatch(file.name)
        if name is not None and int(name[1]) <= up_to_iteration and file.is_file():
            file.unlink(missing_ok=True)
