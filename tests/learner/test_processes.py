"""A sweep over the devices of two processes is the sweep over as many devices of one."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def swept(folder, processes, devices):
    """What each of so many processes, of so many devices, says of its sweep."""
    port = free_port()
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    files = [folder / f"{rank}_of_{processes}.pickle" for rank in range(processes)]
    program = [sys.executable, TESTS / "learner_process.py"]
    started = [
        subprocess.Popen(
            [*program, *map(str, (rank, processes, port, devices)), file],
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


def test_two_processes_do_bit_for_bit_what_one_does_on_as_many_devices(tmp_path):
    # And with the optimizer and the reference in the hosts' memory what is done without.
    (alone,) = swept(tmp_path, 1, 4)
    metrics, _ = alone
    assert metrics["sweep/turns"] == 4 and metrics["sweep/kl"] > 0
    assert swept(tmp_path, 2, 2) == [alone] * 2
