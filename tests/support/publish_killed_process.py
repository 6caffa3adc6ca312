"""Publishes while it is killed before one call after another that changes files.

`FOLDER`, under `FaultFs`. Each time it is a process of its own, forked before JAX has started.
"""

import json
import os
import signal
import sys
from pathlib import Path

import weights_cases as cases
from fault_fs import FaultFs

from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.versions import UnusableVersion, checked_version, newest_version

FOLDER, faults = Path(sys.argv[1]), FaultFs.attached()


def killed_at(at: int, version: int) -> bool:
    """Publishes a version in another process; whether that was killed, at its call number `at`."""
    child = os.fork()
    if child == 0:
        network, params, _ = cases.trainers("bfloat16")
        faults.fail(at, -signal.SIGKILL)
        publish(FOLDER, params, version, network, file_bytes=8000)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0
    return killed


def whole(version: int) -> bool:
    try:
        with checked_version(FOLDER / str(version)):
            return True
    except UnusableVersion:
        return False


def main() -> None:
    for version in (0, 1):
        assert not killed_at(0, version)
    at, killed = 0, True
    while killed:
        at += 1
        before = newest_version(FOLDER)
        killed = killed_at(at, before + 1)
        faults.count()
        newest = newest_version(FOLDER)
        left = sum(not path.name.isdecimal() for path in FOLDER.iterdir())
        outcome = {"before": before, "published": before + 1, "newest": newest, "left": left}
        print(json.dumps(outcome | {"whole": whole(newest), "killed": killed}))


main()
