"""Reading a published policy onto a worker's devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from seeupo_jax.policy.files.placement import check_tensors, load_params
from seeupo_jax.policy.files.safetensors_files import SafetensorsFolder
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.weights.published_arrays import JoinedParts, stored_arrays
from seeupo_jax.rollout.weights.versions import checked_version, identity


class ReadPolicy(NamedTuple):
    """A published policy on a worker's mesh.

    identity: as of `versions`. params: those that train, in the types that they were published in.
    bytes: of the files. seconds: that it took to check and to read them.
    """

    version: int
    identity: str
    params: Any
    bytes: int
    seconds: float


def read_version(
    folder: Path, network: Network, shapes: Any, mesh: jax.sharding.Mesh | None
) -> ReadPolicy:
    """Reads a version onto a mesh of any layout and any number of devices.

    Every device's part of an array is read on its own and placed at once: the host holds one at a
    time. Files are compared with their SHA-256 before.

    Args:
      folder: of the version.
      network: as the worker has it; it need not stack layers as the trainer does.
      shapes: arrays or shape structs of the parameters that train.
      mesh: the worker's; None: the default device.

    Raises:
      UnusableVersion: it is damaged, or the trainer has removed or replaced it meanwhile.
      ValueError: it is of another policy than the worker's.
    """
    began = time.monotonic()
    with checked_version(folder) as manifest:
        params = _read_arrays(folder, network, shapes, mesh)
        jax.block_until_ready(params)
    size = sum(file["bytes"] for file in manifest["files"].values())
    version, seconds = manifest["version"], time.monotonic() - began
    return ReadPolicy(version, identity(manifest), params, size, seconds)


def _read_arrays(
    folder: Path, network: Network, shapes: Any, mesh: jax.sharding.Mesh | None
) -> Any:
    files = SafetensorsFolder(folder)
    tensors = JoinedParts(files)
    stored = [each for path in flatten_dict(shapes) for each in stored_arrays(network, path)]
    check_tensors(tensors, stored, shapes, folder)
    dtypes = {each: _DTYPES[files.dtypes[tensors.part_of(each.names[0])]] for each in stored}
    params = shapes
    for dtype in sorted(set(dtypes.values())):
        of_type = [each for each in stored if dtypes[each] == dtype]
        params = load_params(tensors, of_type, params, network.logical_axes(), mesh, dtype)
    return params


_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
