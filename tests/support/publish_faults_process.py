"""Publishes while one call after another that changes files fails: `FOLDER`, under `FaultFs`."""

import errno
import json
import logging
import sys
from pathlib import Path

import weights_cases as cases
from fault_fs import FaultFs

from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.versions import UnusableVersion, checked_version, newest_version

FOLDER = Path(sys.argv[1])


def whole(version: int) -> bool:
    try:
        with checked_version(FOLDER / str(version)):
            return True
    except UnusableVersion:
        return False


def main() -> None:
    logging.disable(logging.WARNING)
    network, params, _ = cases.policy("bfloat16")
    faults = FaultFs.attached()
    publish(FOLDER, params, 0, network, file_bytes=2000)
    at, failed = 0, 1
    while failed:
        at += 1
        before = newest_version(FOLDER)
        faults.fail(at, errno.ENOSPC)
        found = publish(FOLDER, params, before + 1, network, file_bytes=2000)
        failed = faults.failed
        faults.count()
        newest = newest_version(FOLDER)
        outcome = {"before": before, "published": before + 1, "failure": found.failure or ""}
        print(json.dumps(outcome | {"newest": newest, "whole": whole(newest)}))


main()
