"""Publishing: the policy after a sweep, in files that samplers read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from seeupo_jax.checkpoint.process_sync import on_all, on_primary
from seeupo_jax.errors import name_file, reason
from seeupo_jax.policy.files.safetensors_files import write_tensors
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.weights.published_arrays import FILE_BYTES, fetch, parts
from seeupo_jax.rollout.weights.versions import (
    begin_version,
    drop_unfinished,
    finish_version,
    identity,
    newest_version,
)

_LOGGER = logging.getLogger(__name__)


class Publication(NamedTuple):
    """What came of publishing a version.

    identity: as of `versions`. bytes: of its files. seconds: that it took.
    failure: a sentence; None: samplers can read it.
    """

    version: int
    identity: str
    bytes: int
    seconds: float
    failure: str | None = None


def publish(
    folder: Path,
    params: Any,
    version: int,
    network: Network,
    *,
    int8: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Publication:
    """Writes a version of the policy for samplers; every process calls it, and process 0 writes.

    A sampler computes the same bits from it as from the trainer's arrays. Arrays come to the host
    one after another, as many at a time as a file holds. When it returns, `params` may be donated.

    A file that cannot be written, for want of room or otherwise, is no error: older versions stay
    as they are, and the sentence in `failure` is also logged as a warning.

    Args:
      folder: of versions, which process 0 makes where it is missing.
      params: those that train, on the trainer's mesh.
      version: sweeps behind them, at least 0. Newer ones that are there are removed: the run went
        on from an older checkpoint.
      network: as the trainer has it.
      int8: whether samplers round matrices to 8 bits.
      file_bytes: of a file at most, unless a row of an array has more.
    """
    found = list(parts(network, params, int8=int8, file_bytes=file_bytes))
    by_name, arrays = {part.name: part for part in found}, flatten_dict(params)

    def write(unfinished: Path) -> None:
        sizes = {name: part.bytes for name, part in by_name.items()}
        writes = jax.process_index() == 0
        write_tensors(
            unfinished, sizes, lambda name: fetch(arrays, by_name[name]), file_bytes, writes=writes
        )

    return publish_folder(folder, version, write, {part.name: part.described for part in found})


def publish_folder(
    folder: Path,
    version: int,
    write: Callable[[Path], None],
    arrays: Mapping[str, str] | None = None,
) -> Publication:
    """As `publish`, of what a function writes.

    Args:
      write: takes an empty folder, which process 0 fills; all processes call it.
      arrays: types and shapes by name, for the manifest.
    """
    began, manifest, failure = time.monotonic(), None, None
    try:
        with name_file(folder):
            unfinished = Path(on_primary(lambda: str(begin_version(folder))))
            on_all(lambda: write(unfinished))
            manifest = on_primary(lambda: finish_version(folder, version, arrays or {}))
    except OSError as error:
        failure = _failure(folder, version, error)
        if jax.process_index() == 0:
            _LOGGER.warning(failure)
            drop_unfinished(folder)
    seconds = time.monotonic() - began
    if manifest is None:
        return Publication(version, "", 0, seconds, failure)
    size = sum(file["bytes"] for file in manifest["files"].values())
    return Publication(version, identity(manifest), size, seconds)


def _failure(folder: Path, version: int, error: OSError) -> str:
    left = newest_version(folder)
    stay = "there is no other for samplers" if left is None else f"samplers go on with {left}"
    return f"version {version} could not be published in {folder}: {reason(error)}; {stay}."
