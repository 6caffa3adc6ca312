"""Steps that several processes take alike: what fails on one of them fails on all."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax
from etils import epath
from jax._src import distributed  # the processes' common notes, which need no device

from seeupo_jax.checkpoint.manifest import Damaged
from seeupo_jax.checkpoint.storage import is_bucket, keep_root_logger, reason
from seeupo_jax.configuration import schema
from seeupo_jax.parallel.distributed import from_first, gather
from seeupo_jax.parallel.file_lock import exclusive

with keep_root_logger():
    from orbax.checkpoint import v1 as ocp

T = TypeVar("T")
_SENT = {"ValueError": ValueError, "Damaged": Damaged}  # what is raised on all processes alike
_POLL_S = 1.0  # how often a process asks whether another one has failed
_VISIBLE_TIMEOUT_S = 10.0  # until a new file is seen by hosts that share a folder

_waits = itertools.count()


def on_primary(action: Callable[[], T]) -> T:
    """What an action gives on process 0, to all; what it raises there, all raise.

    Raises:
      ValueError, Damaged: as process 0 did. OSError: whatever else it raised.
    """
    if jax.process_count() == 1:
        return action()
    result = error = sent = None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as raised:
            kind = next((name for name, each in _SENT.items() if isinstance(raised, each)), "")
            error = raised if kind else OSError(reason(raised))
            sent = kind, str(error)
    result, sent = from_first((result, sent))
    if sent is None:
        return result
    kind, text = sent
    raise _SENT.get(kind, OSError)(text) if error is None else error


def on_all(action: Callable[[], T]) -> T:
    """What an action gives on this process, once it has ended on all.

    Raises:
      Damaged: where it raised that on any. OSError: where it raised anything else on another.
    """
    result = error = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    sent = None if error is None else (isinstance(error, Damaged), reason(error))
    failures = [failure for failure in gather(sent) if failure is not None]
    if failures and (jax.process_count() == 1 or error is not None):
        raise error
    if failures:
        damaged, text = failures[0]
        raise Damaged(text) if damaged else OSError(text)
    return result


def wait_for(written: ocp.AsyncResponse) -> None:
    """Waits until what all processes write is written; every process calls it as often.

    Orbax lets the others wait for minutes where one has failed; here they are told at once.

    Raises:
      Exception: whatever failed on this process. OSError: what failed on another.
    """
    if jax.process_count() == 1:
        return written.result()
    client = distributed.global_state.client
    prefix = f"seeupo_jax/checkpoint/{next(_waits)}/"
    while True:
        began = time.monotonic()
        try:
            return written.result(timeout=_POLL_S)
        except Exception as error:
            waited = isinstance(error, TimeoutError) and time.monotonic() - began > _POLL_S / 2
            if not waited:
                client.key_value_set(f"{prefix}{jax.process_index()}", reason(error))
                raise
        for _, text in client.key_value_dir_get(prefix):
            raise OSError(text)


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
                file.parent.mkdir(parents=True, exist_ok=True)
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
