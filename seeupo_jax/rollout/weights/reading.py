"""Reading a published policy onto a worker's devices."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict

from seeupo_jax.checkpoint.manifest import DamagedCheckpoint
from seeupo_jax.checkpoint.process_sync import on_all, on_primary
from seeupo_jax.errors import reason
from seeupo_jax.policy.files.placement import check_tensors, load_params
from seeupo_jax.policy.files.safetensors_files import SafetensorsFolder
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.weights.published_arrays import JoinedParts, stored_arrays
from seeupo_jax.rollout.weights.versions import Version, check_version, versions

_LOGGER = logging.getLogger(__name__)


class ReadPolicy(NamedTuple):
    """A published policy on a worker's mesh.

    name: of its folder, different for different bytes: a version may be published again.
    params: those that train, in the types that they were published in.
    """

    version: int
    name: str
    params: Any
    bytes: int
    seconds: float


class PolicyReader:
    """Reads the versions of a folder onto a mesh, of any layout and any number of devices.

    Args:
      network: as the worker has it; it need not stack layers as the trainer does.
      shapes: arrays or shape structs of the parameters that train.
      mesh: the worker's; None: the default device.
    """

    def __init__(self, folder: Path, network: Network, shapes: Any, mesh: jax.sharding.Mesh | None):
        self._folder, self._network, self._shapes, self._mesh = folder, network, shapes, mesh
        self._latest: str | None = None  # the name of what was read last
        self._damaged: set[str] = set()  # names

    def read(self) -> ReadPolicy | None:
        """The newest whole version; None: it was read last, or there is none. It does not wait.

        One that is damaged is named in a warning, once, and passed over for the one before. One
        that is removed while it is read, since the trainer has published others, is passed over,
        too. The version's number is lower than the last one's where the trainer was resumed from
        an older checkpoint.

        Every process of the worker calls it, on a folder that all of them see.

        Raises:
          ValueError: what is published is of another policy than the worker's.
        """
        while (found := on_primary(self._newest)) is not None:
            version = Version(*found)
            try:
                policy = on_all(lambda version=version: self._read(version))
            except (DamagedCheckpoint, OSError) as error:
                self._pass_over(version, error)
            else:
                self._latest = version.name
                return policy
        return None

    def _newest(self) -> tuple[int, str] | None:
        for version in reversed(versions(self._folder)):
            if version.name not in self._damaged:
                return None if version.name == self._latest else version
        return None

    def _pass_over(self, version: Version, error: Exception) -> None:
        if version in versions(self._folder):
            self._damaged.add(version.name)
            path = self._folder / version.name
            _LOGGER.warning(f"{path} {reason(error)}; this version is not used.")

    def _read(self, version: Version) -> ReadPolicy:
        began = time.monotonic()
        manifest = check_version(self._folder, version.name)
        folder = self._folder / version.name
        params = read_arrays(folder, self._network, self._shapes, self._mesh)
        jax.block_until_ready(params)
        size = sum(file["bytes"] for file in manifest["files"].values())
        return ReadPolicy(version.number, version.name, params, size, time.monotonic() - began)


def read_arrays(folder: Path, network: Network, shapes: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """The arrays of a published version, each device's part read on its own and placed at once.

    Raises:
      ValueError: they are of another policy. OSError: a file is gone.
    """
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
