"""A process that samples for a trainer in another one: `train --role=rollout`."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.schema import Config
from seeupo_jax.errors import terminal_line
from seeupo_jax.evaluation.episode_host import check_host
from seeupo_jax.evaluation.frozen_roles import check_frozen_roles
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.parallel.stop_signal import Stopped, StoppedCompiling, StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.policy_folder import starting_folder
from seeupo_jax.policy_io.resume_check import sampling_hash
from seeupo_jax.rollout.asynchronous.background_source import BackgroundSource
from seeupo_jax.rollout.asynchronous.sampling_loop import SamplingLoop
from seeupo_jax.rollout.asynchronous.work_client import TrainerLost, WorkClient
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.rollout.weights.reading import read_arrays
from seeupo_jax.training.rollout_parts import RolloutParts, build_rollout

PATIENCE_S = 600.0
_ADDRESS_FILE = "workers.json"  # of the trainer's workdir
_POLL_S = 0.5  # between looks for it
_REPORT_S = 15.0  # between lines of progress
_CLOSE_S = 5.0  # for environments to close; a call that hangs does not keep the process


def check_rollout(config: Config, trainer: str | None) -> None:
    """Finds what is wrong with a configuration that this process is to sample with.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    if config.rollout.devices:
        raise ValueError(
            f"config.rollout.devices: got {config.rollout.devices} with --role=rollout; allowed: 0,"
            " since all devices of this process sample."
        )
    if trainer is None and config.rollout.port is None:
        raise ValueError(
            "config.rollout.port: got none with --role=rollout; allowed: the trainer's, or"
            " --trainer=HOST:PORT."
        )
    check_host(config)
    build.check_network(config, make_mesh(config.mesh))
    check_frozen_roles(config)


def run_rollout(
    config: Config, workdir: Path, *, trainer: str | None = None, patience_s: float = PATIENCE_S
) -> None:
    """Samples for a trainer until its run is over, or a signal asks this process to stop.

    Args:
      workdir: the trainer's, or with `trainer` a folder of this machine.
      trainer: HOST:PORT, where they share no folder; the key is SEEUPO_ROLLOUT_KEY then.
      patience_s: how long the trainer may be away.

    Raises:
      ValueError: there is no trainer, it refuses this process, or there is no policy to begin with.
      TrainerLost: it was there, and has been away for longer than that.
    """
    with StopRequest() as request, contextlib.ExitStack() as held:
        try:
            if trainer is None:
                _await_address(workdir / _ADDRESS_FILE, patience_s, lambda: request.asked)
            policy, shapes = _load(config, workdir, trainer)
            watch = Watch()
            parts = build_rollout(
                config, policy, stop=lambda: request.asked, watch=watch, log=_print
            )
            held.callback(_close, parts)
            _print(str(parts.engine.plan))
            downloads = held.enter_context(_downloads(workdir))
            client = WorkClient(
                workdir=workdir if trainer is None else None,
                address=None if trainer is None else f"http://{trainer}",
                name=f"{socket.gethostname()}-{os.getpid()}",
                sampling_hash=sampling_hash(config),
                read_policy=functools.partial(_read, policy, shapes),
                downloads=downloads,
                patience_s=patience_s,
                log=_print,
            )
            source = BackgroundSource(client)
            held.callback(source.close)
            _sample(config, policy, parts, source, watch)
            _print("the run is over")
        except Stopped:
            _print(f"stopped by {request.why}; conversations under way are left to others")


def _sample(
    config: Config,
    policy: build.Policy,
    parts: RolloutParts,
    source: BackgroundSource,
    watch: Watch,
) -> None:
    """Plays until the run is over; arguments as of `run_rollout` and `SamplingLoop`."""
    stop = parts.worker.stop

    def between(_done: int, _total: int) -> None:
        if stop():
            raise StoppedCompiling("stopped while programs were compiled")

    loop = SamplingLoop(
        parts.worker,
        source,
        seed=config.seed,
        max_lag=config.rollout.max_lag,
        prepare=lambda params: parts.engine.compile(params, between),
    )
    try:
        with jax.set_mesh(policy.mesh), _reports(loop, watch):
            loop.run()
    except TrainerLost as lost:
        if loop.policy is None:
            raise ValueError(str(lost)) from lost
        raise


def _await_address(file: Path, patience_s: float, stop: Callable[[], bool]) -> None:
    """Returns when a trainer says where it is, which it does after its warm start.

    Raises:
      ValueError: none did. Stopped: this process was asked to stop.
    """
    until = time.monotonic() + patience_s
    while not file.exists():
        if stop():
            raise Stopped
        if time.monotonic() > until:
            raise ValueError(
                f"--workdir: got {file.parent}, where no trainer has been for {patience_s:g} s"
                f" (--patience), since there is no {file.name}; allowed: the folder of a run with"
                " rollout.port that goes on, or --trainer=HOST:PORT."
            )
        time.sleep(_POLL_S)


def _load(config: Config, workdir: Path, trainer: str | None) -> tuple[build.Policy, Any]:
    """The policy, and shape structs of the parameters that train, which the trainer publishes."""
    start = starting_folder(config, workdir)
    if start is None:
        raise ValueError(
            f"--workdir: got {workdir}, which has no warm_start; allowed with"
            f" config.warm_start.stages{'' if trainer is None else ' and --trainer'}: a folder that"
            " is shared with the trainer, or its WORKDIR/warm_start as config.model.path without"
            " stages."
        )
    policy, params = build.load_policy(config, start)
    return policy, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def _read(policy: build.Policy, shapes: Any, folder: Path) -> Any:
    """All parameters, those of a published version among them."""
    return policy.merged(read_arrays(folder, policy.network, shapes, policy.mesh))


@contextlib.contextmanager
def _downloads(workdir: Path) -> Iterator[Path]:
    """A folder of this process, for weights that come over the network."""
    folder = workdir / "received_weights" / f"{socket.gethostname()}-{os.getpid()}"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _close(parts: RolloutParts) -> None:
    """Closes environments and agents, for some seconds at most: one of them may hang."""
    closing = threading.Thread(target=parts.close, daemon=True)
    closing.start()
    closing.join(_CLOSE_S)


@contextlib.contextmanager
def _reports(loop: SamplingLoop, watch: Watch) -> Iterator[None]:
    """Prints a line now and then of what a loop does."""
    ended = threading.Event()

    def report() -> None:
        tokens, since = 0, time.monotonic()
        while not ended.wait(_REPORT_S):
            seen, policy, now = watch.look(), loop.policy, time.monotonic()
            if seen is None or policy is None:
                _print("waiting for the trainer")
                continue
            # They count from 0 again where the engine has begun anew.
            fresh = seen.tokens - tokens if seen.tokens >= tokens else seen.tokens
            _print(
                f"policy {policy.version}, {now - policy.since:.0f} s old: {seen.active}"
                f" conversations open, {fresh / (now - since):.0f} tokens/s"
            )
            tokens, since = seen.tokens, now

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _print(text: str) -> None:
    print(terminal_line(text), flush=True)
