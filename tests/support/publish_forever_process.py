"""Trainers that publish one version after another, and are killed: `FOLDER`.

Each is forked before JAX has started, and goes on from the newest version that is there.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import jax
import weights_cases as cases

from seeupo_jax.rollout.weights.publishing import publish
from seeupo_jax.rollout.weights.versions import newest_version

FOLDER, moments = Path(sys.argv[1]), random.Random(0)


def newest() -> int:
    found = newest_version(FOLDER)
    return -1 if found is None else found


def publish_forever() -> NoReturn:
    network, params, _ = cases.trainers("bfloat16")
    while True:
        version = newest() + 1
        filled = jax.tree.map(lambda x, version=version: x * 0 + version, params)
        publish(FOLDER, filled, version, network, file_bytes=3000)


for _ in range(6):
    goal = newest() + 4
    child = os.fork()
    if child == 0:
        publish_forever()
    while newest() < goal and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(moments.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
