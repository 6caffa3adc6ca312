"""Steps that several processes take alike: what fails on one of them fails on all."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
from etils import epath
from jax._src import distributed  # the processes' common notes, which need no device

from seeupo_jax.checkpoint.manifest import DamagedCheckpoint
from seeupo_jax.checkpoint.storage import is_bucket, keep_root_logger
from seeupo_jax.configuration import schema
from seeupo_jax.durable_files import make_folder
from seeupo_jax.errors import reason, system_error
from seeupo_jax.parallel.distributed import broadcast_from_primary, gather
from seeupo_jax.parallel.file_lock import exclusive

with keep_root_logger():
    from orbax.checkpoint import v1 as ocp

T = TypeVar("T")
_SENT = {
    "ValueError": ValueError,
    "DamagedCheckpoint": DamagedCheckpoint,
}  # what is raised on all processes alike
_POLL_S = 1.0  # how often a process asks whether another one has failed
_SYNC_MS = 3_600_000  # until other processes have synced what they wrote, at the most
_VISIBLE_TIMEOUT_S = 10.0  # until a new file is seen by hosts that share a folder

_waits = itertools.count()


def on_primary(action: Callable[[], T]) -> T:
    """Runs an action on process 0 and returns its result on all; all raise what it raises.

    Raises:
      ValueError, DamagedCheckpoint: as process 0 did. OSError: whatever else it raised.
    """
    if jax.process_count() == 1:
        return action()
    result = error = sent = None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as raised:
            kind = next((name for name, each in _SENT.items() if isinstance(raised, each)), "")
            error = raised if kind else _received(_sent(raised))
            sent = kind, str(raised), _sent(raised)
    result, sent = broadcast_from_primary((result, sent))
    if sent is None:
        return result
    kind, text, system = sent
    if error is None:
        error = _SENT[kind](text) if kind else _received(system)
    raise error


def on_all(action: Callable[[], T]) -> T:
    """Runs an action on this process; returns its result once it has ended on all processes.

    Raises:
      DamagedCheckpoint: it raised that on any process. OSError: it raised anything else on another.
    """
    result = error = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    sent = None if error is None else (isinstance(error, DamagedCheckpoint), _sent(error))
    failures = [failure for failure in gather(sent) if failure is not None]
    if failures and (jax.process_count() == 1 or error is not None):
        raise error
    if failures:
        damaged, system = failures[0]
        raise DamagedCheckpoint(system[0]) if damaged else _received(system)
    return result


def _sent(error: Exception) -> tuple[str, int | None, str | None]:
    """An error for other processes: its reason and, where it is the system's, errno and file."""
    return (reason(error), *(system_error(error) or (None, None)))


def _received(sent: tuple[str, int | None, str | None]) -> OSError:
    text, code, file = sent
    return OSError(text) if code is None else OSError(code, text, file)


def wait_for(written: ocp.AsyncResponse, sync: Callable[[], None]) -> None:
    """Waits until what all processes write is written and synced; every process calls it as often.

    After a failure of one process, Orbax lets the others wait for minutes; here they fail at once.

    Args:
      sync: called when all is written, to sync what this process wrote; not on process 0, which
        waits for it on the others, and syncs all files itself before they count.

    Raises:
      Exception: whatever failed on this process. OSError: what failed on another.
    """
    if jax.process_count() == 1:
        return written.result()
    client, me = distributed.global_state.client, jax.process_index()
    prefix = f"seeupo_jax/checkpoint/{next(_waits)}/"  # a key for each process: "", or its failure
    try:
        while not _is_written(written):
            _raise_failures(text for _, text in client.key_value_dir_get(prefix))
        if me:
            sync()
    except _FailedElsewhere:
        raise
    except Exception as error:
        client.key_value_set(f"{prefix}{me}", reason(error))
        raise
    client.key_value_set(f"{prefix}{me}", "")
    if me == 0:
        others = range(1, jax.process_count())
        _raise_failures(client.blocking_key_value_get(f"{prefix}{k}", _SYNC_MS) for k in others)


class _FailedElsewhere(OSError):
    """An error of another process."""


def _raise_failures(texts: Iterable[str]) -> None:
    for text in texts:
        if text:
            raise _FailedElsewhere(text)


def _is_written(written: ocp.AsyncResponse) -> bool:
    """Whether it is, after a while; what failed is raised."""
    began = time.monotonic()
    try:
        written.result(timeout=_POLL_S)
    except TimeoutError:
        if time.monotonic() - began < _POLL_S / 2:  # not of this waiting
            raise
        return False
    return True


def check_shared(folder: str | os.PathLike[str], name: str = "--workdir") -> None:
    """Lets every process look for a file of process 0; every process calls it.

    Args:
      name: of the setting that names the folder, which is there.

    Raises:
      ValueError: some process does not see it.
    """
    if jax.process_count() == 1 or is_bucket(folder):
        return
    probe = epath.Path(folder) / on_primary(lambda: f".shared.{os.getpid()}")
    on_primary(lambda: probe.write_text(""))
    sees = gather(_appears(probe))
    on_primary(lambda: probe.unlink())
    blind = [str(process) for process, seen in enumerate(sees) if not seen]
    if blind:
        allowed = "a folder that all hosts share"
        if name != "--workdir":
            allowed += ", or gs://BUCKET/PATH"
        raise ValueError(
            f"{name}: got {os.fspath(folder)}, which is another one on process"
            f" {', '.join(blind)} than on process 0; allowed: {allowed}."
        )


def exclusive_run(
    workdir: Path, config: schema.Checkpoint
) -> contextlib.AbstractContextManager[None]:
    """Keeps other runs out of the workdir and of the checkpoints' folder as long as it is open."""
    folders = {"--workdir": Path(workdir)}
    # A bucket has no locks.
    if config.directory is not None and not is_bucket(config.directory):
        if Path(config.directory).resolve() != Path(workdir).resolve():
            folders["config.checkpoint.directory"] = Path(config.directory)
    return exclusive_on_primary(
        {f"{name}: got {folder}": folder / ".lock" for name, folder in folders.items()}
    )


def exclusive_output(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps others from writing the same folder as long as it is open."""
    target = Path(os.path.realpath(folder))
    return exclusive_on_primary(
        {f"--output: got {folder}": target.with_name(f".{target.name}.lock")}
    )


@contextlib.contextmanager
def exclusive_on_primary(locks: Mapping[str, Path]) -> Iterator[None]:
    """Process 0 holds locks for all processes; every process calls it.

    Args:
      locks: files, whose folders are made, by what the user gave; see `file_lock.exclusive`.

    Raises:
      ValueError: another process holds one of them; the sentence names it.
    """
    with contextlib.ExitStack() as held:

        def hold() -> None:
            for got, file in locks.items():
                make_folder(file.parent)
                held.enter_context(exclusive(file, got))

        on_primary(hold)
        yield


def _appears(file: epath.Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_TIMEOUT_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
