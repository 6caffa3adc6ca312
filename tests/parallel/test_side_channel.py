"""Bytes between processes: all reach all, and a lost process ends the others with a sentence."""

import contextlib
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from places import SUPPORT
from process_cases import environment, free_port

from seeupo_jax.parallel.side_channel import PeerLost, SideChannel


@contextlib.contextmanager
def channels(processes):
    """The channels of so many processes, here threads, over real connections."""
    pairs: dict[tuple[int, int], tuple[socket.socket, socket.socket]] = {}
    for i in range(processes):
        for r in range((processes - 1).bit_length()):
            pair = tuple(sorted((i, (i + 2**r) % processes)))
            if pair not in pairs:
                pairs[pair] = socket.socketpair()
    ends = [{} for _ in range(processes)]
    for (i, j), (at_i, at_j) in pairs.items():
        ends[i][j], ends[j][i] = at_i, at_j
    every = [SideChannel(i, processes, peers) for i, peers in enumerate(ends)]
    yield every
    for channel in every:
        channel.close()
    for at_i, at_j in pairs.values():
        at_i.close()
        at_j.close()


def at_once(channels, *calls):
    """The results of a call of each channel, in a thread of its own."""
    with ThreadPoolExecutor(len(channels)) as pool:
        running = [pool.submit(call, each) for call, each in zip(calls, channels, strict=True)]
        return [one.result(60) for one in running]


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8, 13])
def test_what_each_gives_reaches_all_in_their_order(processes):
    """Also blocks larger than what a socket holds, of different lengths, and empty ones."""
    rng = np.random.default_rng(processes)
    with channels(processes) as every:
        for most in (0, 1, 100, 3_000_000):
            given = [rng.bytes(int(rng.integers(0, most + 1))) for _ in every]
            got = at_once(every, *(lambda c, x=x: c.all_gather(x, 3) for x in given))
            assert got == [given] * processes


def test_processes_at_different_exchanges_are_told_apart():
    different = [lambda c, kind=kind: c.all_gather(b"", kind) for kind in (1, 2)]
    told = "at exchange 1 of kind 2"
    with channels(2) as every, pytest.raises(RuntimeError, match=told):
        at_once(every, *different)


def test_a_process_that_has_ended_its_run_is_not_waited_for():
    with channels(2) as (first, second):
        second.close()
        with pytest.raises(PeerLost, match="process 1 has ended before the run; its own output"):
            first.all_gather(b"")


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [1, 2])
def test_a_killed_process_ends_the_others_with_a_sentence(lost):
    """Whether they wait for bytes of it or in a collective of the devices."""
    port = free_port()
    command = [sys.executable, SUPPORT / "met_and_lost_process.py"]
    started = [
        subprocess.Popen(
            [*map(str, command), str(rank), "3", str(port), str(lost)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    codes = [process.returncode for process in started]
    assert codes == [-signal.SIGKILL if rank == lost else 1 for rank in range(3)], outputs
    sentence = f"error: process {lost} has ended before the run; its own output says why.\n"
    for rank in {0, 1, 2} - {lost}:
        assert outputs[rank].endswith(sentence), outputs[rank]
        assert "Traceback" not in outputs[rank]
