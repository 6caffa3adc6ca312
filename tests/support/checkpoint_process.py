"""One process of several that share checkpoints: `RANK COUNT PORT OUT DIRECTORY PART`."""

import errno
import json
import os
import resource
import sys
import time
from pathlib import Path

import checkpoint_cases
import jax
import numpy as np

from seeupo_jax.checkpoint import (
    Checkpoints,
    SaveError,
    check_shared,
    exclusive_output,
    manifest,
    process_sync,
)
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.rollout_store import RolloutStore
from seeupo_jax.types import Segment, Trajectory

RANK, COUNT, PORT = map(int, sys.argv[1:4])
OUT, DIRECTORY, PART = sys.argv[4:7]
log, hashed = [], []
digest = manifest._digest


def count(path):
    hashed.append(str(path))
    return digest(path)


def refused(action, error):
    """What an action is refused with."""
    try:
        action()
    except error as logged:
        return str(logged)
    raise AssertionError("it was not refused")


def save(checkpoints):
    """Three checkpoints, and a fourth that one of the hosts cannot write."""
    check_shared(DIRECTORY)
    own = Path(f"{OUT}.folder")
    own.mkdir()
    process_sync._VISIBLE_TIMEOUT_S = 0.3
    names = "--workdir", "config.checkpoint.directory"
    blind = [refused(lambda name=name: check_shared(own, name), ValueError) for name in names]
    taken = Path(DIRECTORY) / "taken"
    with exclusive_output(taken):
        logged = {"taken": refused(exclusive_output(taken).__enter__, ValueError)}
    mesh = checkpoint_cases.mesh(2, 2)
    for step, score in ((1, 0.9), (2, 0.5), (3, 0.1)):
        checkpoints.save(step, checkpoint_cases.state(mesh, step), {"step": step}, score)
    checkpoints.wait()
    logged |= {"blind": blind, "latest": checkpoints.latest(), "best": checkpoints.best()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    began = time.monotonic()
    checkpoints.save(4, checkpoint_cases.state(mesh, 4), {})
    logged["full"] = refused(checkpoints.wait, SaveError)
    logged["full_s"] = time.monotonic() - began
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    logged["unsynced"] = refused(lambda: process_sync.wait_for(Written(), broken_disk), OSError)
    return logged


class Written:
    """What Orbax has written already."""

    def result(self, timeout):
        pass


def broken_disk():
    """Syncs on a disk of process 1 that does not take what is written."""
    if RANK == 1:
        raise OSError(errno.EIO, "Input/output error")


def restore(checkpoints):
    """Onto other devices; the newest checkpoint is damaged."""
    mesh = checkpoint_cases.mesh(1, 4)
    example = checkpoint_cases.state(mesh, 0)
    # One of the hosts sees nothing yet of what is there.
    seen = Checkpoints(DIRECTORY if RANK == 0 else f"{OUT}.none", keep=2)
    logged = {"latest": checkpoints.latest(), "newest": seen.newest({}, partial=True)}
    step, state, extra = checkpoints.restore(example)
    logged |= {"step": step, "extra": extra, "checksum": checksum(state)}
    logged["same_layout"] = all(
        a.sharding == b.sharding
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(example), strict=True)
    )
    other = {"params": {"w": jax.ShapeDtypeStruct((3,), "float32")}}
    logged["other"] = refused(lambda: checkpoints.restore(other, partial=True), ValueError)
    logged["unknown"] = refused(lambda: checkpoints.restore(example, step=9), ValueError)
    checkpoints.save(5, state, {})
    checkpoints.wait()
    return logged | {"saved": checkpoints.latest(), "rollouts": rollouts()}


def rollouts():
    """What comes back of a collection where no process sees another one's folder."""
    segment = Segment(
        np.arange(3, dtype=np.int32), np.zeros(3, np.int32), np.full(3, np.float32(0.1))
    )
    trajectory = Trajectory.of((segment,), reward=float(RANK), group=RANK)
    store = RolloutStore(f"{OUT}.rollouts", log=log.append)
    store.save(1, Collected((trajectory,), 1.0, 0.5, 3, 0))
    (loaded,) = store.load(1).trajectories
    return [loaded.reward, loaded.segments[0].logp_L.tobytes().hex(), store.load(2)]


def main() -> None:
    jax.distributed.initialize(f"localhost:{PORT}", COUNT, RANK)
    manifest._digest = count
    checkpoints = Checkpoints(DIRECTORY, keep=2, log=log.append)
    logged = {"save": save, "restore": restore}[PART](checkpoints)
    checkpoints.close()
    Path(OUT).write_text(json.dumps(logged | {"log": log, "hashed": sorted(set(hashed))}))
    os._exit(0)  # what Orbax began and could not end would keep it waiting


main()
