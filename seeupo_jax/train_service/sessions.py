"""The clients of the service, with the runs and the samplers that each has opened."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.train_service.adapter_run import AdapterRun
from seeupo_jax.train_service.adapter_sampler import SampledWeights, SamplingSession
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.request_queue import RequestLine

SESSION_S = 3600.0  # without a sign of life, after which a session's runs are forgotten
SNAPSHOTS = 64  # unnamed weights for sampling that a run keeps; then the oldest are forgotten


@dataclass
class _Session:
    """A client. seen: `time.monotonic()` of its last sign of life."""

    seen: float


@dataclass(eq=False)
class TrainingRun:
    """A training run.

    about: its options, as saved weights have them. adapters: None: not made yet.
    inflight: the weights that its samplers of this kind share. snapshots: names of samplers.
    steps: of the optimizer. last_request: `time.time()`.
    """

    session: str
    about: Mapping[str, Any]
    line: RequestLine = field(default_factory=RequestLine)
    adapters: AdapterRun | None = None
    inflight: SampledWeights | None = None
    snapshots: deque[str] = field(default_factory=deque)
    steps: int = 0
    last_request: float = field(default_factory=time.time)

    def ready(self) -> AdapterRun:
        """The adapters; RequestRefused: there are none."""
        if self.adapters is None:
            raise RequestRefused("model_id: the run could not be created.")
        return self.adapters


class Sessions:
    """Clients, runs and samplers by their names; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._runs: dict[str, TrainingRun] = {}
        self._samplers: dict[str, SamplingSession] = {}

    def create(self) -> str:
        """A new client's name."""
        name = f"session-{secrets.token_hex(8)}"
        with self._lock:
            self._sessions[name] = _Session(time.monotonic())
        return name

    def heartbeat(self, name: str) -> None:
        """A client's sign of life; RequestRefused: it is not known."""
        with self._lock:
            self._find(name).seen = time.monotonic()

    def check(self, name: str) -> None:
        """RequestRefused: the client is not known."""
        with self._lock:
            self._find(name)

    def _find(self, name: str) -> _Session:
        if name not in self._sessions:
            raise RequestRefused(
                f"session_id: got {name!r:.80}, which is not known (any more); allowed: an open"
                " one.",
                410,
            )
        return self._sessions[name]

    def finish(self, name: str) -> list[TrainingRun]:
        """Forgets a client; its runs. RequestRefused: it is not known."""
        with self._lock:
            self._find(name)
            return self._forget(name)

    def forget_silent(self) -> list[TrainingRun]:
        """Forgets clients that gave no sign of life for long; their runs."""
        now = time.monotonic()
        with self._lock:
            silent = [k for k, v in self._sessions.items() if now - v.seen > SESSION_S]
            return [run for name in silent for run in self._forget(name)]

    def _forget(self, session: str) -> list[TrainingRun]:
        del self._sessions[session]
        ended = [run for run in self._runs.values() if run.session == session]
        self._runs = {k: v for k, v in self._runs.items() if v.session != session}
        self._samplers = {k: v for k, v in self._samplers.items() if v.session != session}
        return ended

    def add_run(
        self, session: str, number: Any, about: Mapping[str, Any]
    ) -> tuple[str, TrainingRun]:
        """A client's run and its name, new where it is not there.

        Raises:
          RequestRefused: no number, or the client is not known.
        """
        if type(number) is not int or number < 0:
            raise RequestRefused(f"model_seq_id: got {number!r:.40}; allowed: a whole number.")
        name = f"{session}:train:{number}"
        with self._lock:
            self._find(session)
            return name, self._runs.setdefault(name, TrainingRun(session, about))

    def run(self, name: str) -> TrainingRun:
        """A run; RequestRefused: it is not known."""
        with self._lock:
            if name not in self._runs:
                raise RequestRefused(
                    f"model_id: got {name!r:.120}, which is not known (any more); allowed: a run"
                    " of an open session.",
                    404,
                )
            self._runs[name].last_request = time.time()
            return self._runs[name]

    def runs(self) -> dict[str, TrainingRun]:
        """All runs by their names."""
        with self._lock:
            return dict(self._runs)

    def open_sampler(self, sampler: SamplingSession) -> str:
        """The name of a new sampler."""
        name = f"sampler-{secrets.token_hex(8)}"
        with self._lock:
            self._samplers[name] = sampler
        return name

    def open_snapshot(self, run: TrainingRun, weights: SampledWeights) -> str:
        """The name of a new sampler of a run's weights; the oldest of too many is forgotten."""
        name = self.open_sampler(SamplingSession(run.session, None, weights))
        run.snapshots.append(name)
        if len(run.snapshots) > SNAPSHOTS:
            with self._lock:
                self._samplers.pop(run.snapshots.popleft(), None)
        return name

    def sampler(self, name: str) -> SamplingSession:
        """A sampler; RequestRefused: it is not known."""
        with self._lock:
            if name not in self._samplers:
                raise RequestRefused(
                    f"sampling_session_id: got {name!r:.80}, which is not known (any more);"
                    f" allowed: the last {SNAPSHOTS} of a run, or named weights.",
                    404,
                )
            return self._samplers[name]
