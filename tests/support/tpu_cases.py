"""TPUs that are described and compiled for, not there: what tests of a pod need."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from unittest import mock

import jax
import pytest
from jax.experimental import topologies

# Keep libtpu from looking for a TPU, and let several processes load it.
_SETTINGS = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

MISSING = "TPU_LIBRARY_PATH" not in os.environ and importlib.util.find_spec("libtpu") is None
REASON = "compiling for TPU needs libtpu"


def needs_libtpu(test: Callable[..., None]) -> Callable[..., None]:
    """In the second tier, which alone has libtpu; skipped where it is missing."""
    return pytest.mark.exhaustive(pytest.mark.skipif(MISSING, reason=REASON)(test))


def devices(topology: str, **options: int) -> Sequence[jax.Device]:
    """The devices of a topology such as `v5e:2x4`; skips the test where libtpu is missing."""
    if MISSING:
        pytest.skip(REASON)
    with mock.patch.dict(os.environ, _SETTINGS):
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    return list(found.devices)


def crash(*_: object) -> None:
    """As libtpu does with some meshes."""
    os._exit(134)


def refuse(*_: object) -> None:
    """As it does with others."""
    raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")
