"""One of several trainer processes that publish: `RANK COUNT PORT OUT DIRECTORY`."""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import jax
import weights_cases as cases

from seeupo_jax.rollout.weights.publishing import publish

RANK, COUNT, PORT = map(int, sys.argv[1:4])
OUT, DIRECTORY = map(Path, sys.argv[4:6])


def main() -> None:
    jax.distributed.initialize(f"localhost:{PORT}", COUNT, RANK)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    reported = {}
    for name in ("bfloat16", "stacked", "adapters"):
        network, params, _ = cases.trainers(name)
        folder = DIRECTORY / name
        reported["written"] = publish(folder, params, 0, network, file_bytes=2000).failure
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        reported["no room"] = publish(folder, params, 1, network, file_bytes=2000).failure
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        reported["written again"] = publish(folder, params, 1, network).failure
    OUT.write_text(json.dumps(reported))
    os._exit(0)


main()
