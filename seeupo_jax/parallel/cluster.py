"""Several processes as one run: where a process finds its place, and a start that never hangs.

`jax.distributed.initialize` aborts a process that waits in vain. So the processes first meet at the
coordinator's port on their own: process 0 waits for all the others, compares what they say of
themselves, and sends all of them the verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import jax

# What jax.distributed.initialize itself looks with.
from jax._src.clusters import ClusterEnv, K8sCluster

from seeupo_jax.parallel.listening import Arrivals, listen, split_address
from seeupo_jax.parallel.side_channel import PeerLost, end, lost_peer

HEARTBEAT_S = 60  # without a heartbeat for so long a process is dead, and the others end
_MESSAGE_S = 10.0  # for one message between two processes that are connected
_MESSAGE_BYTES = 2**24  # of one: a configuration, with all options of its environment
_RETRY_S = 0.2
_NOTICED_S = 3.0  # until an ended process is noticed by the others
_LATE_S = 10.0  # that those which have not come yet have to hear what is wrong


class ProcessPlace(NamedTuple):
    """A process's place among `num_processes`; coordinator: HOST:PORT of process 0.

    local_device_ids: the devices of its machine that are its own; None: all.
    """

    coordinator: str
    process_id: int
    num_processes: int
    local_device_ids: tuple[int, ...] | None = None


def find_process_place(
    coordinator: str | None,
    process_id: int | None,
    num_processes: int | None,
    *,
    timeout_s: int,
) -> ProcessPlace | None:
    """The place that the flags give, or else Cloud TPU, Kubernetes, Slurm or Open MPI; None: alone.

    `--num_processes=1` needs no other flag.

    Raises:
      ValueError: flags that do not fit together, or a cluster that does not say who is in it.
    """
    given = {
        "--coordinator": coordinator,
        "--process_id": process_id,
        "--num_processes": num_processes,
    }
    if num_processes == 1 and coordinator is None and process_id is None:
        return None
    missing = [name for name, value in given.items() if value is None]
    if coordinator is None or process_id is None or num_processes is None:
        if len(missing) < len(given):
            raise ValueError(
                f"{missing[0]}: got none; allowed: all of {', '.join(given)}, or none."
            )
        return _detect(timeout_s)
    split_address(coordinator, "--coordinator")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"--process_id: got {process_id}; allowed: a number from 0 to {num_processes - 1}, with"
            f" --num_processes={num_processes}."
        )
    return None if num_processes == 1 else ProcessPlace(coordinator, process_id, num_processes)


def _detect(timeout_s: int) -> ProcessPlace | None:
    """This process's place in a cluster, by the environment's variables.

    A pod of Kubernetes that belongs to no indexed Job is alone, as one of a Deployment.
    """
    # Without this variable the pod has no number, and JAX would ask the API server for its Job.
    K8sCluster.opt_in_only_method = "JOB_COMPLETION_INDEX" not in os.environ
    try:
        coordinator, count, number, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, timeout_s
        )
    except Exception as error:  # metadata servers and name services fail in many ways
        raise ValueError(
            f"this is one of several processes, but the environment does not say which ({error});"
            " allowed: --coordinator, --process_id and --num_processes, or --num_processes=1 alone."
        ) from error
    if coordinator is None or count is None or number is None or count == 1:
        return None
    return ProcessPlace(coordinator, number, count, None if devices is None else tuple(devices))


def join(place: ProcessPlace, about: Mapping[str, str | None], *, timeout_s: int) -> None:
    """Makes this process one of the run's; call it before anything touches a device.

    Args:
      about: what must be the same in all processes, by name.
      timeout_s: until all have come.

    Raises:
      ValueError: processes that did not come, that came twice, or that differ.
    """
    deadline = time.monotonic() + timeout_s
    bound = None
    if place.process_id == 0:
        bound = _welcome(place, dict(about), deadline, timeout_s)
    else:
        _arrive(place, dict(about), deadline, timeout_s)
    # Ours is the handler of SIGTERM: the service's own would only take note of it.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        coordinator_bind_address=bound,
        initialization_timeout=max(10, int(deadline - time.monotonic())),
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=HEARTBEAT_S,
    )


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Lets an error end this process although others are in the middle of something with it.

    At a usual exit each waits for all, while the others wait for it in a collective.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        # What a device says of another process that has ended is no sentence.
        broken = isinstance(error, PeerLost | jax.errors.JaxRuntimeError)
        if broken and (lost := lost_peer(_NOTICED_S)) is not None:
            end(lost)
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        end(None, code if isinstance(code, int) else 1)


def report_failure(place: ProcessPlace, sentence: str) -> None:
    """Ends the other processes with what keeps this one from joining them.

    Those that have not come after `_LATE_S` are left to their own time limit.
    """
    deadline, problem = time.monotonic() + _LATE_S, f"process {place.process_id}: {sentence}"
    with contextlib.suppress(ValueError):  # of the verdict, which is its own
        if place.process_id == 0:
            _welcome(place, {}, deadline, int(_LATE_S), problem)
        else:
            _arrive(place, {}, deadline, int(_LATE_S), problem)


def _welcome(
    place: ProcessPlace,
    about: dict[str, str | None],
    deadline: float,
    timeout_s: int,
    problem: str | None = None,
) -> str:
    """Process 0: waits for all the others, and sends them whether the run can begin.

    Args:
      problem: why it cannot begin, whatever the others send.

    Returns: the address at which it listened, for the coordinator to do so too.
    """
    came: set[int] = set()
    connections: list[socket.socket] = []
    server = listen(place.coordinator, deadline)
    host, port = server.getsockname()[:2]
    bound = f"[{host}]:{port}" if server.family == socket.AF_INET6 else f"{host}:{port}"
    with contextlib.ExitStack() as opened:
        opened.enter_context(server)
        arrivals = opened.enter_context(Arrivals(server, _MESSAGE_BYTES))
        while len(connections) < place.num_processes - 1:
            arrival = arrivals.next(deadline)
            if arrival is None:
                problem = _absent(place, came, timeout_s) if problem is None else problem
                break
            connection = opened.enter_context(arrival[0])
            message = _message(arrival[1])
            if message is None or not isinstance(message.get("process_id"), int):
                continue
            connections.append(connection)
            if problem is None and (problem := _misplaced(place, about, came, message)):
                deadline = min(deadline, time.monotonic() + _LATE_S)
            came.add(message["process_id"])
        for connection in connections:
            _send(connection, {"problem": problem})
        for connection in connections:
            _receive(connection)  # it closes first, so that this port is free again at once
    if problem is not None:
        raise ValueError(problem)
    return bound


def _arrive(
    place: ProcessPlace,
    about: dict[str, str | None],
    deadline: float,
    timeout_s: int,
    problem: str | None = None,
) -> None:
    """Any other process: reports to process 0, and receives whether the run can begin."""
    address = split_address(place.coordinator, "--coordinator")
    reason = "no answer"
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=remaining_s)
        except OSError as error:
            reason = str(error)
            time.sleep(_RETRY_S)
            continue
        with connection:
            me = {"process_id": place.process_id, "num_processes": place.num_processes}
            _send(connection, me | {"about": about, "problem": problem})
            verdict = _receive(connection, max(remaining_s, _MESSAGE_S))
        if verdict is not None:
            if verdict["problem"] is not None:
                raise ValueError(verdict["problem"])
            return
        reason = "it hung up"
        time.sleep(_RETRY_S)
    raise ValueError(
        f"process {place.process_id} of {place.num_processes} did not reach process 0 at"
        f" {place.coordinator} within {timeout_s} s ({reason}); allowed: a process 0 that runs,"
        " and a port that is open."
    )


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other one has gone
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float = _MESSAGE_S) -> dict[str, Any] | None:
    """What one line says; None where something else came, or nothing."""
    connection.settimeout(timeout_s)
    try:
        with connection.makefile("rb") as lines:
            return _message(lines.readline(_MESSAGE_BYTES))
    except OSError:
        return None


def _message(line: bytes) -> dict[str, Any] | None:
    """What one line of JSON says; None: it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _absent(place: ProcessPlace, came: Set[int], timeout_s: int) -> str:
    missing = [str(i) for i in range(1, place.num_processes) if i not in came]
    return (
        f"{len(missing)} of {place.num_processes} processes did not connect to {place.coordinator}"
        f" within {timeout_s} s: {', '.join(missing)}."
    )


def first_difference(
    about: Mapping[str, str | None], number: int, other: Mapping[str, str | None]
) -> str | None:
    """Returns a sentence on the first difference of a process from process 0; None: no difference.

    Args:
      about, other: the settings of process 0 and process `number`, by name.
    """
    for name in dict.fromkeys([*about, *other]):
        if other.get(name) != about.get(name):
            return (
                f"{name}: got {other.get(name)} in process {number} and {about.get(name)} in"
                " process 0; allowed: the same."
            )
    return None


def _misplaced(
    place: ProcessPlace, about: Mapping[str, str | None], came: Set[int], message: Mapping[str, Any]
) -> str | None:
    """Returns a sentence on what is wrong with a process that joined; None: nothing."""
    number, count = message["process_id"], message.get("num_processes")
    if count != place.num_processes:
        return (
            f"--num_processes: got {count} in process {number} and {place.num_processes} in process"
            " 0; allowed: the same."
        )
    if isinstance(message.get("problem"), str):
        return message["problem"]
    if number in came or not 0 < number < place.num_processes:
        return f"--process_id: got {number} twice; allowed: each number once."
    return first_difference(about, number, message.get("about", {}))
