"""A process that samples for a trainer in another one: `train --role=rollout`."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.agents.agent_tasks import find_tasks
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
from seeupo_jax.rollout.asynchronous.work_messages import ADDRESS_FILE, read_address
from seeupo_jax.rollout.watch import Watch
from seeupo_jax.rollout.weights.reading import read_version
from seeupo_jax.training.sampler_parts import SamplerParts, build_sampler

PATIENCE_S = 600.0  # of a worker whose trainer is away
_FIND_S = 0.5  # between looks for the trainer
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
                _await_trainer(workdir, patience_s, lambda: request.asked)
            reader = _Reader()
            client = _connect(config, workdir, trainer, reader, patience_s, held)
            policy, params = _load(config, workdir, trainer)
            reader.use(policy, params)
            del params
            tasks, watch = held.enter_context(contextlib.closing(find_tasks(config))), Watch()
            parts = build_sampler(
                config, policy, tasks, stop=lambda: request.asked, watch=watch, log=_print
            )
            held.callback(_close, parts)
            _print(str(parts.engine.plan))
            with contextlib.closing(BackgroundSource(client)) as source:
                _sample(config, policy, parts, source, watch)
            _print("the run is over")
        except Stopped:
            _print(f"stopped by {request.why}; conversations under way are left to others")


class _Reader:
    """Reads published policies, all parameters of each, once it knows what they are of."""

    def __init__(self) -> None:
        self._policy: build.Policy | None = None
        self._shapes: Any = None

    def use(self, policy: build.Policy, params: Any) -> None:
        """Reads policies of this network; `params` are those that train."""
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self._policy = policy

    def __call__(self, folder: Path) -> Any:
        policy = self._policy
        assert policy is not None  # no policy is asked for before
        trained = read_version(folder, policy.network, self._shapes, policy.mesh).params
        return policy.merged(trained)


def _await_trainer(workdir: Path, patience_s: float, stop: Callable[[], bool]) -> None:
    """Returns when a trainer says where it is, which it does after its warm start.

    Raises:
      ValueError: none did. Stopped: this process was asked to stop.
    """
    until = time.monotonic() + patience_s
    while read_address(workdir) is None:
        if stop():
            raise Stopped
        if time.monotonic() > until:
            raise ValueError(
                f"--workdir: got {workdir}, where no trainer was found for {patience_s:g} s"
                f" (--patience), since there is no {ADDRESS_FILE}; allowed: the folder of a run"
                " with rollout.port that goes on, or --trainer=HOST:PORT."
            )
        time.sleep(_FIND_S)


def _connect(
    config: Config,
    workdir: Path,
    trainer: str | None,
    reader: _Reader,
    patience_s: float,
    held: contextlib.ExitStack,
) -> WorkClient:
    """The connection to a trainer, which refuses this process now if it ever does.

    Raises:
      ValueError: as of `run_rollout`.
    """
    name = f"{socket.gethostname()}-{os.getpid()}"
    downloads = workdir / "received_weights" / name
    held.callback(shutil.rmtree, downloads, ignore_errors=True)
    client = WorkClient(
        workdir=workdir if trainer is None else None,
        address=trainer,
        name=name,
        sampling_hash=sampling_hash(config),
        read_policy=reader,
        downloads=downloads,
        patience_s=patience_s,
        log=_print,
    )
    held.callback(client.close)
    _ = client.closed  # asks the trainer
    return client


def _load(config: Config, workdir: Path, trainer: str | None) -> tuple[build.Policy, Any]:
    """The policy that the run started from, and those of its parameters that train."""
    start = starting_folder(config, workdir)
    if start is None:
        raise ValueError(
            f"--workdir: got {workdir}, which has no warm_start; allowed with"
            f" config.warm_start.stages{'' if trainer is None else ' and --trainer'}: a folder that"
            " is shared with the trainer, or a copy of its WORKDIR/warm_start in this one."
        )
    return build.load_policy(config, start)


def _sample(
    config: Config,
    policy: build.Policy,
    parts: SamplerParts,
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


def _close(parts: SamplerParts) -> None:
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
                _print("no conversation has begun yet: there is no policy, or it is compiled")
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
