"""A sweep over the devices of two processes is the sweep over as many devices of one."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from learner_cases import quick_compilation  # noqa: F401
from learner_process import swept_alone

TESTS = Path(__file__).parents[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What each of two processes of two devices says."""
    folder, port = tmp_path_factory.mktemp("two"), free_port()
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    files = [folder / f"{rank}.pickle" for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, TESTS / "learner_process.py", str(rank), "2", str(port), "2", file],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    return [pickle.loads(file.read_bytes()) for file in files]


def test_two_processes_do_bit_for_bit_what_one_does_on_as_many_devices(of_two):
    # And with the optimizer and the reference in the hosts' memory what is done without.
    metrics, checksum, _ = swept_alone()
    assert metrics["sweep/turns"] == 4 and metrics["sweep/kl"] > 0
    assert of_two == [(metrics, checksum)] * 2
