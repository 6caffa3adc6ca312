"""The training service: what each request of Tinker's API means.

Requests come in the threads of HTTP and wait in a queue; the thread that calls `run` does them:
those of a run in the order of their numbers, and sampling from the same weights together.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from seeupo_jax.train_service.adam import check_kind, read_adam
from seeupo_jax.train_service.adapter_run import AdapterRun, BasePolicy, adapters_for
from seeupo_jax.train_service.adapter_sampler import (
    SampledWeights,
    SampleJob,
    Sampler,
    SamplingSession,
    read_sample,
)
from seeupo_jax.train_service.futures import Result
from seeupo_jax.train_service.refusals import RequestRefused, refuse_unknown
from seeupo_jax.train_service.request_queue import RequestQueue, WaitingSample, describe_failure
from seeupo_jax.train_service.saved_weights import Saved, SavedWeights
from seeupo_jax.train_service.sessions import Sessions, TrainingRun
from seeupo_jax.train_service.tinker_messages import (
    SampleResult,
    parse_forward_backward,
    read_forward_backward,
    write_pass_result,
    write_sample_result,
)

_LOGGER = logging.getLogger(__name__)
_LARGEST_RANK = 512
_ENDED = "session_id: got one that has ended; allowed: one that is open."


class TrainService:
    """Everything behind the addresses of Tinker's API.

    All methods but `run` may be called in any thread.

    Args:
      model_name: of the base policy, as clients give it.
    """

    def __init__(self, base: BasePolicy, sampler: Sampler, saved: SavedWeights, model_name: str):
        self._base, self._sampler, self.saved = base, sampler, saved
        self.model_name = model_name
        self._sessions, self._queue = Sessions(), RequestQueue()
        self.futures, self.stop = self._queue.futures, self._queue.stop
        self.heartbeat = self._sessions.heartbeat
        self._base_weights = SampledWeights(base.policy, base.params, None)
        self._warned: set[str] = set()

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
        self._end(self._sessions.forget_silent())
        return self._sessions.create()

    def finish_session(self, name: str) -> None:
        """Forgets a client and its runs; RequestRefused: it is not known."""
        self._end(self._sessions.finish(name))

    def _end(self, runs: Iterable[TrainingRun]) -> None:
        for run in runs:
            self._queue.end_line(run.line, RequestRefused(_ENDED))

    def create_model(self, body: Mapping[str, Any]) -> tuple[str, str]:
        """A new run, and the id of the request whose result is that it is ready."""
        self._check_base(body.get("base_model"))
        check_kind("optimizer_config", body.get("optimizer_config"))
        options = _read_lora(body.get("lora_config"))
        if options.pop("train_unembed"):
            self._warn_once("train_unembed: the unembedding has no adapters here; the rest trains.")
        lora = adapters_for(
            self._base.network.arch,
            options["rank"],
            attention=options["train_attn"],
            feed_forward=options["train_mlp"],
        )
        about = {
            "base_model": self.model_name,
            "lora_rank": options.pop("rank"),
            **options,
            "train_unembed": False,
            "user_metadata": body.get("user_metadata"),
        }
        make = functools.partial(AdapterRun, self._base, lora, seed=options["seed"])
        return self._begin_run(body, about, make, "create_model")

    def _begin_run(
        self,
        body: Mapping[str, Any],
        about: Mapping[str, Any],
        make: Callable[[], AdapterRun],
        kind: str,
        **result: Any,
    ) -> tuple[str, str]:
        session = str(body.get("session_id"))
        name, run = self._sessions.add_run(session, body.get("model_seq_id"), about)

        def begin() -> Result:
            run.adapters = make()
            return {"model_id": name, "type": kind, **result}

        return name, self._queue.add((name, "create"), begin)

    def info(self, model_id: str) -> dict[str, Any]:
        """A run's description, in the form of `get_info`."""
        about = self._sessions.run(model_id).about
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
        message = parse_forward_backward(body)
        name, number = message.model_id, message.seq_id if message.HasField("seq_id") else None
        run = self._sessions.run(name)

        def work() -> Result:
            asked = read_forward_backward(message)
            return write_pass_result(run.ready().forward_backward(asked))

        return self._queue.add_in_order(run.line, name, number, work)

    def optim_step(self, body: Mapping[str, Any]) -> str:
        """The id of a request for a step of the optimizer."""

        def work(run: TrainingRun) -> Result:
            metrics = run.ready().step(read_adam(body))
            run.steps += 1
            return {"metrics": metrics}

        return self._add_work(body, work)

    def save_weights(self, body: Mapping[str, Any]) -> str:
        """The id of a request to save a run's adapters and its optimizer's state."""

        def work(run: TrainingRun) -> Result:
            path = self._save(run, body, "weights", overwrite=bool(body.get("overwrite")))
            return {"path": path, "type": "save_weights"}

        return self._add_work(body, work)

    def save_weights_for_sampler(self, body: Mapping[str, Any]) -> str:
        """The id of a request to save a run's adapters, or to hold them for a sampler."""

        def work(run: TrainingRun) -> Result:
            if body.get("path") is not None:
                path = self._save(run, body, "sampler_weights")
                return {"path": path, "type": "save_weights_for_sampler"}
            weights = _sampled_weights(run.ready())
            if body.get("kind") == "inflight":
                if run.inflight is None:
                    run.inflight = weights
                run.inflight.params = weights.params
                weights = run.inflight
            name = self._sessions.open_snapshot(run, weights)
            return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

        return self._add_work(body, work)

    def save_weights_external(self, body: Mapping[str, Any]) -> str:
        """The id of a request that is refused in its turn: the run's later ones wait for it."""

        def work(run: TrainingRun) -> Result:
            raise RequestRefused(
                "save_weights_external: got a request; allowed: save_weights and"
                " save_weights_for_sampler, whose folders PEFT reads."
            )

        return self._add_work(body, work)

    def _save(
        self, run: TrainingRun, body: Mapping[str, Any], kind: str, *, overwrite: bool = False
    ) -> str:
        if body.get("ttl_seconds") is not None:
            self._warn_once("ttl_seconds: saved weights stay until they are removed.")
        about = {**run.about, "steps": run.steps}
        if body.get("user_metadata") is not None:
            about["checkpoint_metadata"] = body["user_metadata"]
        path, run_id = body.get("path"), str(body["model_id"])
        name = f"step-{run.steps}" if path is None else str(path)
        return self.saved.save(run.ready(), run_id, kind, name, about, overwrite=overwrite)

    def load_weights(self, body: Mapping[str, Any]) -> str:
        """The id of a request to load saved adapters into a run, or into a new one."""
        path, optimizer = str(body.get("path")), bool(body.get("optimizer"))

        def load() -> AdapterRun:
            return self.saved.load(self._find_saved(path), optimizer=optimizer)

        if body.get("session_id") is not None:
            if body.get("base_model") is not None:
                self._check_base(body["base_model"])
            check_kind("optimizer_config", body.get("optimizer_config"))
            about = {
                **{k: v for k, v in self._find_saved(path).about.items() if k != "steps"},
                "user_metadata": body.get("user_metadata"),
            }
            return self._begin_run(body, about, load, "load_weights", path=path)[1]

        def work(run: TrainingRun) -> Result:
            loaded, own = load(), run.ready().lora
            if loaded.lora != own:
                raise RequestRefused(
                    f"path: got adapters of rank {loaded.lora.rank}; allowed: those that the run"
                    f" has, of rank {own.rank} in the same matrices."
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
        """The name of a sampler of saved weights, or of the base policy."""
        session, path = str(body.get("session_id")), body.get("model_path")
        self._sessions.check(session)
        sampler = self._make_sampler(session, path, body.get("base_model"))
        return self._sessions.open_sampler(sampler)

    def _make_sampler(self, session: str, path: Any, base: Any) -> SamplingSession:
        if path is None:
            self._check_base(base)
            return SamplingSession(session, None, self._base_weights)
        self._find_saved(str(path))
        return SamplingSession(session, str(path), None)

    def sampler(self, name: str) -> dict[str, Any]:
        """A sampler's description."""
        found = self._sessions.sampler(name)
        return {"sampler_id": name, "base_model": self.model_name, "model_path": found.path}

    def sample(self, body: dict[str, Any]) -> tuple[str, int]:
        """The id of a request to sample, and its number of sequences."""
        name, number = body.get("sampling_session_id"), body.get("seq_id")
        if name is not None:
            target = self._sessions.sampler(str(name))
        else:
            target = self._make_sampler("", body.get("model_path"), body.get("base_model"))
        request = read_sample(body)
        key = None if name is None or type(number) is not int else (str(name), number)
        request_id, future = self.futures.add(key)
        if future is None:
            return request_id, request.samples

        def finish(result: SampleResult | Exception) -> None:
            if isinstance(result, Exception):
                future.set_result(describe_failure(result))
            else:
                future.set_result(write_sample_result(result))

        self._queue.add_sample(target, SampleJob(request, finish))
        return request_id, request.samples

    def describe_runs(self) -> dict[str, dict[str, Any]]:
        """What each run is, by its id: those that are open, and those with saved weights."""
        described = {}
        for each in self.saved.list():
            run_id = each.path.split("/")[2]
            described[run_id] = {**each.about, "last_request": each.about["time"]}
        for name, run in self._sessions.runs().items():
            described[name] = {**run.about, "last_request": run.last_request}
        return described

    def _check_base(self, name: Any) -> None:
        if name != self.model_name:
            raise RequestRefused(
                f"base_model: got {name!r:.120}; allowed: the served one, {self.model_name!r}.", 404
            )

    def _warn_once(self, sentence: str) -> None:
        """Warns of what requests ask for and do not get."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            _LOGGER.warning(f"warning: {sentence}")

    def _add_work(self, body: Mapping[str, Any], work: Callable[[TrainingRun], Result]) -> str:
        name = str(body.get("model_id"))
        run = self._sessions.run(name)
        done = functools.partial(work, run)
        return self._queue.add_in_order(run.line, name, body.get("seq_id"), done)

    def run(self) -> None:
        """Does requests until `stop`."""
        self._queue.run(self._sample)
        self._queue.end(run.line for run in self._sessions.runs().values())
        self._sampler.close()

    def _sample(self, first: WaitingSample) -> None:
        """Answers a request, and those that wait with the same weights."""
        open_jobs = [first.job]
        try:
            weights = self._weights(first.target)

            def more() -> list[SampleJob]:
                new = self._queue.take_same(weights, alone=True)
                open_jobs.extend(new)
                return new

            open_jobs += self._queue.take_same(weights, alone=False)
            self._sampler.answer(weights, list(open_jobs), more)
        except Exception as error:
            for job in open_jobs:
                job.end(error)
            if not isinstance(error, RequestRefused):
                self._sampler.close()

    def _weights(self, target: SamplingSession) -> SampledWeights:
        if target.weights is None:
            saved = self.saved.find(str(target.path))
            target.weights = _sampled_weights(self.saved.load(saved, optimizer=False))
        return target.weights


def _sampled_weights(adapters: AdapterRun) -> SampledWeights:
    """A run's present weights, which later steps do not change."""
    policy = adapters.policy
    return SampledWeights(policy, policy.merged(adapters.state.params), adapters.lora)


def _read_lora(config: Any) -> dict[str, Any]:
    """`rank`, `seed`, `train_attn`, `train_mlp` and `train_unembed`, where Tinker's defaults hold.

    Raises:
      RequestRefused: one of them is none, or out of its range.
    """
    if not isinstance(config, dict):
        raise RequestRefused("lora_config: got none; allowed: one, since runs train adapters.")
    trained = ("train_attn", "train_mlp", "train_unembed")
    refuse_unknown("lora_config", config, ("rank", "seed", *trained))
    rank, seed = config.get("rank"), config.get("seed")
    if type(rank) is not int or not 1 <= rank <= _LARGEST_RANK:
        allowed = f"a whole number from 1 to {_LARGEST_RANK}"
        raise RequestRefused(f"lora_config.rank: got {rank!r:.40}; allowed: {allowed}.")
    if seed is not None and type(seed) is not int:
        raise RequestRefused(f"lora_config.seed: got {seed!r:.40}; allowed: a whole number.")
    trains = {name: config.get(name, True) for name in trained}
    for name, value in trains.items():
        if type(value) is not bool:
            raise RequestRefused(f"lora_config.{name}: got {value!r:.40}; allowed: true and false.")
    seed = secrets.randbits(31) if seed is None else seed % 2**31
    return {"rank": rank, "seed": seed, **trains}
