"""Processes meet before they begin, or are told why not; none waits for ever."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from process_cases import PYTHONPATH, free_port

from seeupo_jax.parallel import cluster
from seeupo_jax.parallel.cluster import ProcessPlace, find_process_place, join, report_failure

ABOUT = {"jax": "0.10.2", "config.seed": "0"}


@pytest.fixture
def initialized(monkeypatch):
    """The processes, here threads, that got as far as to begin."""
    numbers = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda _, n, i, **k: numbers.append((i, n)))
    return numbers


@pytest.fixture
def bound(monkeypatch):
    """Where the coordinators listen of those that got as far as to begin."""
    addresses = []

    def take(*_, coordinator_bind_address, **k):
        return addresses.append(coordinator_bind_address)

    monkeypatch.setattr(jax.distributed, "initialize", take)
    return addresses


def meet(*processes, timeout_s=20):
    """Runs each (process_id, num_processes, about) in a thread; what each was told, None: begin."""
    port, logged = free_port(), {}

    def run(index, number, count, about):
        try:
            join(ProcessPlace(f"localhost:{port}", number, count), about, timeout_s=timeout_s)
            logged[index] = None
        except ValueError as error:
            logged[index] = str(error)

    threads = [threading.Thread(target=run, args=(i, *p)) for i, p in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [logged[index] for index in range(len(processes))]


def test_all_begin_once_all_have_come(initialized):
    assert meet((2, 3, ABOUT), (0, 3, ABOUT), (1, 3, ABOUT)) == [None] * 3
    assert sorted(initialized) == [(0, 3), (1, 3), (2, 3)]


def test_they_meet_whatever_the_size_of_their_configuration(initialized):
    about = ABOUT | {"config.env": "x" * 10**6}
    assert meet((0, 2, about), (1, 2, about)) == [None] * 2


def test_the_coordinator_names_the_processes_that_did_not_come(initialized):
    logged = meet((0, 4, ABOUT), (2, 4, ABOUT), timeout_s=2)
    assert logged[0] == logged[1] and not initialized
    assert logged[0].startswith("2 of 4 processes did not connect to localhost:")
    assert logged[0].endswith(" within 2 s: 1, 3.")


def test_a_process_without_a_coordinator_gives_up_in_time(initialized):
    started = time.monotonic()
    (logged,) = meet((1, 2, ABOUT), timeout_s=1)
    assert "process 1 of 2 did not reach process 0 at localhost:" in logged
    assert time.monotonic() - started < 10 and not initialized


@pytest.mark.parametrize(
    "others, wanted",
    [
        ([(1, 3, ABOUT)], "--num_processes: got 3 in process 1 and 2 in process 0"),
        ([(1, 2, ABOUT | {"jax": "0.11"})], "jax: got 0.11 in process 1 and 0.10.2 in process 0"),
        ([(1, 2, {"jax": "0.10.2"})], "config.seed: got None in process 1 and 0 in process 0"),
        ([(1, 2, ABOUT | {"chat": "x"})], "chat: got x in process 1 and None in process 0"),
    ],
)
def test_processes_that_differ_are_all_told_how(initialized, others, wanted):
    logged = meet((0, 2, ABOUT), *others)
    assert len(set(logged)) == 1 and logged[0].startswith(wanted) and not initialized


@pytest.mark.parametrize("failing", [0, 2])
def test_what_keeps_one_process_from_joining_ends_all(initialized, failing):
    port, logged = free_port(), {}

    def run(number):
        place = ProcessPlace(f"localhost:{port}", number, 3)
        if number == failing:
            return report_failure(place, "config.seed: got x; allowed: a number.")
        try:
            join(place, ABOUT, timeout_s=60)
        except ValueError as error:
            logged[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    told = f"process {failing}: config.seed: got x; allowed: a number."
    assert logged == dict.fromkeys({0, 1, 2} - {failing}, told) and not initialized


def test_a_process_that_comes_after_a_difference_was_found_is_told_it_too(initialized):
    port, logged = free_port(), {}

    def run(number, about):
        try:
            join(ProcessPlace(f"localhost:{port}", number, 3), about, timeout_s=60)
        except ValueError as error:
            logged[number] = str(error)

    numbers = [(0, ABOUT), (1, ABOUT | {"jax": "0.11"}), (2, ABOUT)]
    threads = [threading.Thread(target=run, args=each) for each in numbers]
    for thread in threads[:2]:
        thread.start()
    time.sleep(1)  # in which process 0 has heard of the difference
    threads[2].start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len({*logged.values()}) == 1 and len(logged) == 3 and logged[2].startswith("jax: got")


def test_a_number_that_comes_twice_is_told(initialized):
    logged = meet((0, 3, ABOUT), (1, 3, ABOUT), (1, 3, ABOUT))
    assert (
        len(set(logged)) == 1
        and logged[0].startswith("--process_id: got 1 twice")
        and not initialized
    )


def test_the_coordinator_listens_at_its_own_address_and_no_other(bound):
    port = free_port()
    listening = threading.Thread(
        target=join, args=(ProcessPlace(f"127.0.0.1:{port}", 0, 2), ABOUT), kwargs={"timeout_s": 20}
    )
    listening.start()
    while True:  # until it listens, where it is to
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", port), timeout=5)
    join(ProcessPlace(f"127.0.0.1:{port}", 1, 2), ABOUT, timeout_s=20)
    listening.join(60)
    assert sorted(bound, key=str) == [f"127.0.0.1:{port}", None]


def test_an_address_that_this_machine_does_not_have_is_told_and_all_are_listened_on(bound, caplog):
    port = free_port()
    join(ProcessPlace(f"192.0.2.1:{port}", 0, 1), ABOUT, timeout_s=5)  # of a network for documents
    (logged,) = caplog.messages
    assert bound == [f"[::]:{port}"] or bound == [f"0.0.0.0:{port}"]
    assert logged.startswith("warning: 192.0.2.1 is no address of this machine that others reach:")


def test_the_variable_of_jax_chooses_another_address(bound, monkeypatch):
    port = free_port()
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.2:{port}")
    join(ProcessPlace(f"192.0.2.1:{port}", 0, 1), ABOUT, timeout_s=5)
    assert bound == [f"127.0.0.2:{port}"]
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"192.0.2.1:{port}")
    with pytest.raises(ValueError, match="^JAX_COORD.*: got 192.0.2.1:.*; allowed: an address of"):
        join(ProcessPlace(f"localhost:{port}", 0, 1), ABOUT, timeout_s=5)


def test_a_host_that_is_not_known_in_time_is_told(bound):
    with pytest.raises(ValueError, match="^--coordinator: got nowhere.invalid:1 .*that is known"):
        join(ProcessPlace("nowhere.invalid:1", 0, 2), ABOUT, timeout_s=0)


def test_a_port_that_is_in_use_is_told(initialized):
    with socket.create_server(("", 0)) as taken:
        place = ProcessPlace(f"localhost:{taken.getsockname()[1]}", 0, 2)
        with pytest.raises(ValueError, match="cannot be listened to .* allowed: a free one"):
            join(place, ABOUT, timeout_s=1)


def test_who_says_something_else_is_not_counted(initialized):
    port, logged = free_port(), []

    def welcome():
        try:
            join(ProcessPlace(f"localhost:{port}", 0, 2), ABOUT, timeout_s=2)
        except ValueError as error:
            logged.append(str(error))

    thread = threading.Thread(target=welcome)
    thread.start()
    for line in (b"GET / HTTP/1.1\r\n", b'{"process_id": "1"}\n', b"[1]\n", b"[" * 9999 + b"\n"):
        for _ in range(100):
            try:
                with socket.create_connection(("localhost", port)) as stranger:
                    stranger.sendall(line)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    thread.join(60)
    assert len(logged) == 1 and logged[0].startswith("1 of 2 processes did not connect")


def test_who_says_nothing_holds_up_nobody(initialized):
    """Three that connect before the others, of which one sends half a line; 4 s for all to meet."""
    port = free_port()
    first = threading.Thread(
        target=join, args=(ProcessPlace(f"localhost:{port}", 0, 2), ABOUT), kwargs={"timeout_s": 4}
    )
    first.start()
    with contextlib.ExitStack() as silent:
        strangers = []
        while len(strangers) < 3:
            with contextlib.suppress(ConnectionRefusedError):
                connection = socket.create_connection(("localhost", port))
                strangers.append(silent.enter_context(connection))
        strangers[0].sendall(b'{"process')
        join(ProcessPlace(f"localhost:{port}", 1, 2), ABOUT, timeout_s=4)
        first.join(60)
    assert sorted(initialized) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "flags, logged",
    [
        (("host:1", None, 2), "--process_id: got none; allowed: all of --coordinator"),
        (("host", 0, 2), "--coordinator: got 'host'; allowed: HOST:PORT"),
        (("host:0", 0, 2), "--coordinator: got 'host:0'"),
        (("host:1", 2, 2), "--process_id: got 2; allowed: a number from 0 to 1"),
    ],
)
def test_flags_that_do_not_fit_together_are_told(flags, logged):
    with pytest.raises(ValueError) as error:
        find_process_place(*flags, timeout_s=1)
    assert str(error.value).startswith(logged)


def test_a_process_finds_its_place_in_flags_and_in_slurm(monkeypatch):
    assert find_process_place("host:12", 1, 4, timeout_s=1) == ProcessPlace("host:12", 1, 4)
    assert find_process_place("host:12", 0, 1, timeout_s=1) is None
    assert find_process_place(None, None, None, timeout_s=1) is None
    for name, value in {
        "SLURM_JOB_ID": "4097",
        "SLURM_STEP_NODELIST": "node[007-009]",
        "SLURM_NTASKS": "6",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert find_process_place(None, None, None, timeout_s=1) == ProcessPlace(
        "node007:61441", 5, 6, (1,)
    )


@pytest.mark.parametrize("index", [None, "2"])
def test_only_a_pod_of_an_indexed_job_is_one_of_several(index, monkeypatch):
    """As JAX finds it: a Job's pods are numbered by JOB_COMPLETION_INDEX, where they are at all."""
    pod = SimpleNamespace(spec=SimpleNamespace(subdomain="pods"))
    job = SimpleNamespace(metadata=SimpleNamespace(labels={}, name="run"))
    job.spec = SimpleNamespace(parallelism=4)
    controller = SimpleNamespace(kind="Job")
    for name, found in {"_pod": pod, "_job": job, "_controller": controller}.items():
        monkeypatch.setattr(cluster.K8sCluster, name, classmethod(lambda _, x=found: x))
    monkeypatch.setattr(cluster.K8sCluster, "is_env_present", classmethod(lambda _: True))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: name)
    if index is not None:
        monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    place = None if index is None else ProcessPlace("run-0.pods:55527", 2, 4)
    assert find_process_place(None, None, None, timeout_s=1) == place


def test_a_cluster_that_does_not_answer_is_told(monkeypatch):
    def fail(*_):
        raise RuntimeError("no metadata")

    monkeypatch.setattr(cluster.ClusterEnv, "auto_detect_unset_distributed_params", fail)
    with pytest.raises(ValueError, match=r"does not say which \(no metadata\); allowed: --coord"):
        find_process_place(None, None, None, timeout_s=1)
    assert find_process_place(None, None, 1, timeout_s=1) is None


PROGRAM = """
import socket, sys
from seeupo_jax.parallel import cluster, distributed
port, number = sys.argv[1:]
with cluster.exit_on_error():
    cluster.join(cluster.ProcessPlace(f"localhost:{port}", int(number), 2), {}, timeout_s=60)
    first = distributed.broadcast_from_primary(number)
    print(distributed.gather("of " + number), first, flush=True)
    try:
        socket.create_connection(("127.0.0.2", int(port)), timeout=5)
    except ConnectionRefusedError:
        print("loopback alone", flush=True)
    distributed.gather(0)
    if number == "0":
        raise SystemExit(7)
    distributed.gather(0)  # in the middle of something with process 0
"""


def test_real_processes_begin_and_the_end_of_one_is_no_hang_of_the_other():
    port = free_port()
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "XLA_FLAGS": ""}
    started = time.monotonic()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), number],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in "01"
    ]
    printed = [process.communicate(timeout=300)[0] for process in both]
    logged = ["['of 0', 'of 1'] 0", "loopback alone"]
    assert [text.splitlines()[-2:] for text in printed] == [logged] * 2
    assert both[0].returncode == 7 and both[1].returncode != 0
    assert time.monotonic() - started < 100
