"""The training service: sessions, runs and their requests, done one after the other.

Requests come in the threads of HTTP and are put into a queue; the thread that calls `run` does
them: those of a run in the order of their numbers, and sampling from the same weights together.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from seeupo_jax.train_service import messages
from seeupo_jax.train_service.adapter_run import Adam, AdapterRun, BasePolicy, adapters_for
from seeupo_jax.train_service.futures import Failed, Futures, Result
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.sampling import SampledWeights, SampleJob, Sampler, read_sample
from seeupo_jax.train_service.saved_weights import Saved, SavedWeights

_LOGGER = logging.getLogger(__name__)
SESSION_S = 3600.0  # without a sign of life, after which a session's runs are forgotten
SNAPSHOTS = 64  # unnamed weights for sampling that a run keeps; then the oldest are forgotten
_LARGEST_RANK = 512
_SHUTTING_DOWN = "the server is shutting down; ask again later."
_ENDED = "session_id: got one that has ended; allowed: one that is open."


@dataclass
class _ClientSession:
    """A client. seen: `time.monotonic()` of its last sign of life."""

    seen: float


@dataclass(eq=False)
class _Run:
    """A training run. expected: the number of its next request; early: later ones, which wait.

    inflight: the weights that its samplers of this kind share. snapshots: ids of sampling sessions.
    """

    session: str
    about: dict[str, Any]
    adapters: AdapterRun | None = None
    expected: int = 1
    early: dict[int, _Work] = field(default_factory=dict)
    inflight: SampledWeights | None = None
    snapshots: deque[str] = field(default_factory=deque)
    steps: int = 0
    last_request: float = field(default_factory=time.time)


@dataclass(eq=False)
class _SamplingSession:
    """weights: None: those of `path`, once they are read."""

    session: str
    path: str | None
    weights: SampledWeights | None


class _Work(NamedTuple):
    """A request that waits, and who asks for its result."""

    work: Callable[[], Result]
    future: Future[Result]

    def do(self) -> None:
        try:
            self.future.set_result(self.work())
        except Exception as error:
            self.future.set_result(_failed(error))


class _Sample(NamedTuple):
    """A request to sample that waits."""

    target: _SamplingSession
    job: SampleJob


class TrainService:
    """Everything behind the addresses of Tinker's API.

    All methods but `run` may be called in any thread.

    Args:
      model_name: of the base policy, as clients give it.
    """

    def __init__(self, base: BasePolicy, sampler: Sampler, saved: SavedWeights, model_name: str):
        self._base, self._sampler, self.saved = base, sampler, saved
        self.model_name = model_name
        self.futures = Futures()
        self._lock = threading.Condition()
        self._jobs: deque[_Work | _Sample] = deque()
        self._over = False
        self._sessions: dict[str, _ClientSession] = {}
        self._runs: dict[str, _Run] = {}
        self._samplers: dict[str, _SamplingSession] = {}
        self._base_weights = SampledWeights(base.policy, base.params, None)
        self._told: set[str] = set()

    @property
    def max_context(self) -> int:
        """Tokens of a sequence, at most."""
        return self._base.longest

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices; in force in the thread of `run`."""
        return self._base.policy.mesh

    def create_session(self) -> str:
        """A new client's name; forgets clients that gave no sign of life for long."""
        now, name = time.monotonic(), f"session-{secrets.token_hex(8)}"
        with self._lock:
            for old in [k for k, v in self._sessions.items() if now - v.seen > SESSION_S]:
                self._forget(old)
            self._sessions[name] = _ClientSession(now)
        return name

    def _forget(self, session: str) -> None:
        del self._sessions[session]
        for run in self._runs.values():
            if run.session == session:
                for each in run.early.values():
                    each.future.set_result(_failed(RequestRefused(_ENDED)))
        self._runs = {k: v for k, v in self._runs.items() if v.session != session}
        self._samplers = {k: v for k, v in self._samplers.items() if v.session != session}

    def heartbeat(self, session: str) -> None:
        """A client's sign of life; RequestRefused: it is not known."""
        with self._lock:
            self._session(session).seen = time.monotonic()

    def finish_session(self, name: str) -> None:
        """Forgets a client and its runs; RequestRefused: it is not known."""
        with self._lock:
            self._session(name)
            self._forget(name)

    def _session(self, name: str) -> _ClientSession:
        if name not in self._sessions:
            raise RequestRefused(
                f"session_id: got {name!r:.80}, which is not known (any more); allowed: an open"
                " one.",
                410,
            )
        return self._sessions[name]

    def create_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """A new run, and the id of the request whose result is that it is ready."""
        self._check_base(body.get("base_model"))
        lora = body.get("lora_config")
        if not isinstance(lora, dict):
            raise RequestRefused("lora_config: got none; allowed: one, since runs train adapters.")
        rank, seed = lora.get("rank"), lora.get("seed")
        if seed is not None and type(seed) is not int:
            raise RequestRefused(f"lora_config.seed: got {seed!r:.40}; allowed: a whole number.")
        if type(rank) is not int or not 1 <= rank <= _LARGEST_RANK:
            allowed = f"a whole number from 1 to {_LARGEST_RANK}"
            raise RequestRefused(f"lora_config.rank: got {rank!r:.40}; allowed: {allowed}.")
        _check_adam(body.get("optimizer_config"))
        seed = secrets.randbits(31) if seed is None else seed % 2**31
        adapters = adapters_for(
            self._base.network.arch,
            rank,
            attention=lora.get("train_attn", True),
            feed_forward=lora.get("train_mlp", True),
        )
        if lora.get("train_unembed", True):
            self._tell("train_unembed: the unembedding has no adapters here; the rest trains.")
        about = {
            "base_model": self.model_name,
            "lora_rank": rank,
            "seed": seed,
            "train_attn": lora.get("train_attn", True),
            "train_mlp": lora.get("train_mlp", True),
            "train_unembed": False,
            "user_metadata": body.get("user_metadata"),
        }

        def make() -> AdapterRun:
            return AdapterRun(self._base, adapters, seed=seed)

        return self._begin_run(body, about, make, "create_model")

    def _begin_run(
        self,
        body: Mapping[str, Any],
        about: dict[str, Any],
        make: Callable[[], AdapterRun],
        kind: str,
        **result: Any,
    ) -> tuple[str, str]:
        session, number = str(body.get("session_id")), body.get("model_seq_id")
        if type(number) is not int or number < 0:
            raise RequestRefused(f"model_seq_id: got {number!r:.40}; allowed: a whole number.")
        name = f"{session}:train:{number}"
        with self._lock:
            self._session(session)
            if name not in self._runs:
                self._runs[name] = _Run(session, about)
            run = self._runs[name]

        def begin() -> Result:
            run.adapters = make()
            return {"model_id": name, "type": kind, **result}

        return name, self._add((name, "create"), begin)

    def info(self, model_id: str) -> dict[str, Any]:
        """A run's description, in the form of `get_info`."""
        about = self._run(model_id).about
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_data": {
                "arch": self._base.network.arch.family,
                "model_name": self.model_name,
                "tokenizer_id": self.model_name,
            },
            "model_name": self.model_name,
            "is_lora": True,
            "lora_rank": about["lora_rank"],
        }

    def forward_backward(self, body: bytes) -> str:
        """The id of a request for a pass over data."""
        model_id, seq_id = messages.peek(body)
        run = self._run(model_id)

        def work() -> Result:
            asked = messages.read_forward_backward(body)
            return messages.write_pass_result(_ready(run).forward_backward(asked))

        return self._add_in_order(run, model_id, seq_id, work)

    def optim_step(self, body: Mapping[str, Any]) -> str:
        """The id of a request for a step of the optimizer."""

        def work(run: _Run) -> Result:
            if not isinstance(body.get("adam_params"), dict):
                raise RequestRefused("optim_step: got no adam_params; allowed: AdamW's.")
            metrics = _ready(run).step(_read_adam(body["adam_params"]))
            run.steps += 1
            return {"metrics": metrics}

        return self._add_work(body, work)

    def save_weights(self, body: Mapping[str, Any]) -> str:
        """The id of a request to save a run's adapters and its optimizer's state."""

        def work(run: _Run) -> Result:
            path = self._save(run, body, "weights", overwrite=bool(body.get("overwrite")))
            return {"path": path, "type": "save_weights"}

        return self._add_work(body, work)

    def save_weights_for_sampler(self, body: Mapping[str, Any]) -> str:
        """The id of a request to save a run's adapters, or to hold them for a sampling session."""

        def work(run: _Run) -> Result:
            if body.get("path") is not None:
                path = self._save(run, body, "sampler_weights")
                return {"path": path, "type": "save_weights_for_sampler"}
            adapters = _ready(run)
            merged = adapters.policy.merged(adapters.state.params)
            weights = SampledWeights(adapters.policy, merged, adapters.lora)
            if body.get("kind") == "inflight":
                if run.inflight is None:
                    run.inflight = weights
                run.inflight.params = merged
                weights = run.inflight
            name = self._open_sampler(_SamplingSession(run.session, None, weights))
            run.snapshots.append(name)
            if len(run.snapshots) > SNAPSHOTS:
                with self._lock:
                    self._samplers.pop(run.snapshots.popleft(), None)
            return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

        return self._add_work(body, work)

    def _save(
        self, run: _Run, body: Mapping[str, Any], kind: str, *, overwrite: bool = False
    ) -> str:
        if body.get("ttl_seconds") is not None:
            self._tell("ttl_seconds: saved weights stay until they are removed.")
        about = {**run.about, "steps": run.steps}
        if body.get("user_metadata") is not None:
            about["checkpoint_metadata"] = body["user_metadata"]
        path, run_id = body.get("path"), str(body["model_id"])
        name = f"step-{run.steps}" if path is None else str(path)
        return self.saved.save(_ready(run), run_id, kind, name, about, overwrite=overwrite)

    def load_weights(self, body: Mapping[str, Any]) -> str:
        """The id of a request to load saved adapters into a run, or into a new one."""
        path, optimizer = str(body.get("path")), bool(body.get("optimizer"))

        def load() -> AdapterRun:
            return self.saved.load(self._find_saved(path), optimizer=optimizer)

        if body.get("session_id") is not None:
            if body.get("base_model") is not None:
                self._check_base(body["base_model"])
            _check_adam(body.get("optimizer_config"))
            about = {
                **{k: v for k, v in self._find_saved(path).about.items() if k != "steps"},
                "user_metadata": body.get("user_metadata"),
            }
            return self._begin_run(body, about, load, "load_weights", path=path)[1]

        def work(run: _Run) -> Result:
            loaded = load()
            if loaded.lora != _ready(run).lora:
                raise RequestRefused(
                    f"path: got adapters of rank {loaded.lora.rank}; allowed: those that the run"
                    f" has, of rank {_ready(run).lora.rank} in the same matrices."
                )
            run.adapters = loaded
            return {"path": path, "model_id": body["model_id"], "type": "load_weights"}

        return self._add_work(body, work)

    def _find_saved(self, path: str) -> Saved:
        """The folder of a path; RequestRefused: there is none, or one of another model."""
        saved = self.saved.find(path)
        if saved.about["base_model"] != self.model_name:
            raise RequestRefused(
                f"path: got weights of {saved.about['base_model']!r}; allowed: of the served model,"
                f" {self.model_name!r}."
            )
        return saved

    def create_sampling_session(self, body: Mapping[str, Any]) -> str:
        """The id of a client of saved weights, or of the base policy."""
        session, path = str(body.get("session_id")), body.get("model_path")
        with self._lock:
            self._session(session)
        return self._open_sampler(self._sampler_of(session, path, body.get("base_model")))

    def _sampler_of(self, session: str, path: Any, base: Any) -> _SamplingSession:
        if path is None:
            self._check_base(base)
            return _SamplingSession(session, None, self._base_weights)
        self._find_saved(str(path))
        return _SamplingSession(session, str(path), None)

    def _open_sampler(self, sampler: _SamplingSession) -> str:
        name = f"sampler-{secrets.token_hex(8)}"
        with self._lock:
            self._samplers[name] = sampler
        return name

    def sampler(self, name: str) -> dict[str, Any]:
        """A sampling session's description."""
        found = self._find_sampler(name)
        return {"sampler_id": name, "base_model": self.model_name, "model_path": found.path}

    def _find_sampler(self, name: str) -> _SamplingSession:
        with self._lock:
            if name not in self._samplers:
                raise RequestRefused(
                    f"sampling_session_id: got {name!r:.80}, which is not known (any more);"
                    f" allowed: the last {SNAPSHOTS} of a run, or named weights.",
                    404,
                )
            return self._samplers[name]

    def sample(self, body: dict[str, Any]) -> tuple[str, int]:
        """The id of a request to sample, and its number of sequences."""
        name, number = body.get("sampling_session_id"), body.get("seq_id")
        if name is not None:
            target = self._find_sampler(str(name))
        else:
            target = self._sampler_of("", body.get("model_path"), body.get("base_model"))
        request = read_sample(body)
        key = None if name is None or type(number) is not int else (str(name), number)
        request_id, future = self.futures.add(key)
        if future is None:
            return request_id, request.samples

        def finish(result: messages.SampleResult | Exception) -> None:
            if isinstance(result, Exception):
                future.set_result(_failed(result))
            else:
                future.set_result(messages.write_sample_result(result))

        self._put(_Sample(target, SampleJob(request, finish)), future)
        return request_id, request.samples

    def describe_runs(self) -> dict[str, dict[str, Any]]:
        """What each run is, by its id: those that are open, and those with saved weights."""
        described = {}
        for each in self.saved.list():
            run_id = each.path.split("/")[2]
            described[run_id] = {**each.about, "last_request": each.about["time"]}
        with self._lock:
            for name, run in self._runs.items():
                described[name] = {**run.about, "last_request": run.last_request}
        return described

    def _check_base(self, name: Any) -> None:
        if name != self.model_name:
            raise RequestRefused(
                f"base_model: got {name!r:.120}; allowed: the served one, {self.model_name!r}.", 404
            )

    def _run(self, name: str) -> _Run:
        with self._lock:
            if name not in self._runs:
                raise RequestRefused(
                    f"model_id: got {name!r:.120}, which is not known (any more); allowed: a run"
                    " of an open session.",
                    404,
                )
            self._runs[name].last_request = time.time()
            return self._runs[name]

    def _tell(self, sentence: str) -> None:
        """Warns once of what requests ask for and do not get."""
        if sentence not in self._told:
            self._told.add(sentence)
            _LOGGER.warning(f"warning: {sentence}")

    def _add_work(self, body: Mapping[str, Any], work: Callable[[_Run], Result]) -> str:
        model_id, seq_id = str(body.get("model_id")), body.get("seq_id")
        run = self._run(model_id)
        return self._add_in_order(run, model_id, seq_id, functools.partial(work, run))

    def _add(self, key: Any, work: Callable[[], Result]) -> str:
        request_id, future = self.futures.add(key)
        if future is not None:
            self._put(_Work(work, future), future)
        return request_id

    def _add_in_order(
        self, run: _Run, model_id: str, seq_id: Any, work: Callable[[], Result]
    ) -> str:
        """As `_add`, once the run's requests with lower numbers are there."""
        if type(seq_id) is not int:
            return self._add(None, work)
        request_id, future = self.futures.add((model_id, seq_id))
        if future is None:
            return request_id
        with self._lock:
            if not self._over:
                run.early[seq_id] = _Work(work, future)
                while run.expected in run.early:
                    self._jobs.append(run.early.pop(run.expected))
                    run.expected += 1
                self._lock.notify()
                return request_id
        future.set_result(_failed(RuntimeError(_SHUTTING_DOWN)))
        return request_id

    def _put(self, job: _Work | _Sample, future: Future[Result]) -> None:
        with self._lock:
            if not self._over:
                self._jobs.append(job)
                return self._lock.notify()
        future.set_result(_failed(RuntimeError(_SHUTTING_DOWN)))

    def stop(self) -> None:
        """Makes `run` return; what waits is not done."""
        with self._lock:
            self._over = True
            self._lock.notify()

    def run(self) -> None:
        """Does requests until `stop`."""
        while True:
            with self._lock:
                while not self._jobs and not self._over:
                    self._lock.wait(1.0)  # within which a signal is seen
                if self._over:
                    break
                job = self._jobs.popleft()
            if isinstance(job, _Sample):
                self._sample(job)
            else:
                job.do()
        self._sampler.close()

    def _sample(self, first: _Sample) -> None:
        """Answers a request, and those that wait with the same weights."""
        open_jobs = [first.job]
        try:
            weights = self._weights(first.target)

            def more() -> list[SampleJob]:
                new = self._take_same(weights, alone=True)
                open_jobs.extend(new)
                return new

            open_jobs += self._take_same(weights, alone=False)
            self._sampler.answer(weights, list(open_jobs), more)
        except Exception as error:
            for job in open_jobs:
                job.end(error)
            if not isinstance(error, RequestRefused):
                _LOGGER.error("sampling failed", exc_info=error)
                self._sampler.close()

    def _take_same(self, weights: SampledWeights, *, alone: bool) -> list[SampleJob]:
        """Waiting requests to the same weights; with `alone` only where no other work waits."""
        with self._lock:
            same = [
                job
                for job in self._jobs
                if isinstance(job, _Sample) and job.target.weights is weights
            ]
            if self._over or (alone and len(same) < len(self._jobs)):
                return []
            for job in same:
                self._jobs.remove(job)
        return [sample.job for sample in same]

    def _weights(self, target: _SamplingSession) -> SampledWeights:
        if target.weights is None:
            run = self.saved.load(self.saved.find(str(target.path)), optimizer=False)
            merged = run.policy.merged(run.state.params)
            target.weights = SampledWeights(run.policy, merged, run.lora)
        return target.weights


def _ready(run: _Run) -> AdapterRun:
    if run.adapters is None:
        raise RequestRefused("model_id: the run could not be created.")
    return run.adapters


def _failed(error: Exception) -> Failed:
    failed = Failed(error)
    if failed.category == "server" and str(error) != _SHUTTING_DOWN:
        _LOGGER.error("a request failed", exc_info=error)
    return failed


def _check_adam(config: Any) -> None:
    kind = config.get("type") if isinstance(config, dict) else None
    if kind not in (None, "adamw"):
        raise RequestRefused(f"optimizer_config: got {kind!r:.40}; allowed: adamw.")


def _read_adam(params: Mapping[str, Any]) -> Adam:
    """Options of a step, where Tinker's defaults hold.

    Raises:
      RequestRefused: a number that is none, or out of its range.
    """
    ranges = {
        "learning_rate": (1e-4, 0, 1e6),
        "beta1": (0.9, 0, 1),
        "beta2": (0.95, 0, 1),
        "eps": (1e-12, 0, 1),
        "weight_decay": (0.0, 0, 1e6),
        "grad_clip_norm": (0.0, -1e30, 1e30),
    }
    values = []
    for name, (default, least, most) in ranges.items():
        value = params.get(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise RequestRefused(
                f"adam_params.{name}: got {value!r:.40}; allowed: a number from {least:g} to"
                f" {most:g}."
            )
        values.append(float(value))
    return Adam(*values)
