"""Digests of files that all processes of a run must have alike: models, templates, data.

A file of up to 64 MiB is hashed whole. Of a larger one its size, its first and last MiB and 16 KiB
of every 4 MiB are: 112 MiB of a model of 28 GB. That tells another revision, another precision, a
fine-tuned copy or a truncated file; a change inside less than 4 MiB in a row may be missed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seeupo_jax.policy.files.gguf_parts import part_files
from seeupo_jax.policy.files.weights import resolve_path

_MIB = 2**20
_WHOLE = 64 * _MIB  # bytes of a file that is read to its end
_STRIDE, _SAMPLE = 4 * _MIB, 2**14  # bytes between two samples, and of one
_THREADS = 8  # files on a network disk answer side by side
_SHOWN = 16  # hexadecimal digits of a digest: 64 bits
# What is read of a model's folder, or of adapters': configurations, tokenizers, templates, weights.
_READ = {".json", ".jinja", ".model", ".txt", ".safetensors"}


def text_digest(content: bytes) -> str:
    """Names a content."""
    return hashlib.blake2b(content).hexdigest()[:_SHOWN]


def file_digest(path: str | os.PathLike[str]) -> str | None:
    """Names a file's content, a large file's by samples of it; None: it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(str(size).encode())
            for start, length in _parts(size):
                file.seek(start)
                digest.update(file.read(length))
    except OSError:
        return None
    return digest.hexdigest()[:_SHOWN]


def _parts(size: int) -> Iterator[tuple[int, int]]:
    """Where parts of a file that are hashed start, and their lengths."""
    if size <= _WHOLE:
        yield 0, size
        return
    yield 0, _MIB
    yield from ((start, _SAMPLE) for start in range(_STRIDE, size, _STRIDE))
    yield size - _MIB, _MIB


def file_digests(folder: Path, files: list[Path]) -> dict[str, str | None]:
    """The digests of some files by their path in a folder."""
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(file_digest, files)
        return {
            file.relative_to(folder).as_posix(): digest
            for file, digest in zip(files, digests, strict=True)
        }


def model_digests(path: str) -> dict[str, str | None]:
    """The digests of a model's files, or of adapters', by name.

    Args:
      path: as of `config.model.path` or `config.lora.path`.
    """
    try:
        place = resolve_path(path)
    except ValueError:  # adapters, or nothing at all
        place = Path(path)
    if place.is_file():
        try:
            return file_digests(place.parent, part_files(place))
        except ValueError:  # a part of a model, without the others: what reads it refuses it
            return {place.name: file_digest(place)}
    try:
        files = [*place.iterdir(), *place.glob("adapter_*/*")]  # the latter of adapters per turn
        found = sorted(file for file in files if file.suffix in _READ and file.is_file())
    except OSError:
        return {}
    return file_digests(place, [file for file in found if not file.name.startswith(".")])
