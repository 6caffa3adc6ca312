"""Several processes sample what one does, each with environments of its own."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def collect(folder, processes, devices):
    """Trajectories of two collections, as each of the processes has them."""
    port = free_port()
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"PYTHONPATH": path}
    files = [folder / f"{processes}_{devices}_{rank}.pickle" for rank in range(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, TESTS / "rollout_process.py", *map(str, (rank, processes, port))]
            + [str(devices), file],
            env=environment,
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (trajectories,) = collect(tmp_path_factory.mktemp("alone"), 1, 1)
    return trajectories


@pytest.mark.parametrize("processes, devices", [(2, 1), (2, 2), (4, 1)])
def test_several_processes_give_the_trajectories_of_one(alone, tmp_path, processes, devices):
    every = collect(tmp_path, processes, devices)
    for got in every:
        for collection, wanted in zip(got, alone, strict=True):
            assert [t.stop for t in collection] == [t.stop for t in wanted]
            for trajectory, other in zip(collection, wanted, strict=True):
                assert trajectory.messages == other.messages
                assert trajectory.info == other.info
                assert (trajectory.reward, trajectory.group) == (other.reward, other.group)
                (segment,), (same,) = trajectory.segments, other.segments
                np.testing.assert_array_equal(segment.tokens_L, same.tokens_L)
                np.testing.assert_array_equal(segment.turn_L, same.turn_L)
                np.testing.assert_allclose(segment.logp_L, same.logp_L, atol=1e-5)


def test_the_collections_of_the_test_are_no_trivial_ones(alone):
    first, second = alone
    stops = [t.stop for t in first]
    assert {"done", "max_turns", "env_error"} == set(stops)
    assert len({t.segments[0].tokens_L.tobytes() for t in (*first, *second)}) >= 40
    assert (
        min(len(t.segments[0].tokens_L) for t in first)
        < 40
        < 70
        < max(len(t.segments[0].tokens_L) for t in first)
    )
