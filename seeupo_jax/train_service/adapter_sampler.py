"""Answers sampling requests by the built-in engine, from the base policy or from runs' adapters."""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seeupo_jax.agents.sampled_text import SampledText
from seeupo_jax.configuration.schema import Config
from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.rollout.engine.protocol import Action, Turn, TurnSampling
from seeupo_jax.rollout.engine.row_sampling import MOST_TOP
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.train_service.refusals import RequestRefused, refuse_unknown
from seeupo_jax.train_service.tinker_messages import SampledSequence, SampleResult, read_prompt

_ALIKE = 32  # first tokens of prompts that are kept together
_SEEDED = 2**31  # added to the numbers of samples whose request has a seed
_MOST_SAMPLES = 1024
_FIELDS = (
    *("sampling_session_id", "model_path", "base_model", "seq_id", "type"),
    *("prompt", "num_samples", "sampling_params", "topk_sample_logprobs"),
    *("prompt_logprobs", "prompt_logprobs_last_n", "topk_prompt_logprobs"),
)
_SAMPLING_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")


@dataclass(eq=False)
class SampledWeights:
    """What is sampled from. policy, params: as `build_engine` and its engine take them.

    lora: of the adapters; None: the base policy.
    """

    policy: Policy
    params: Any
    lora: LoraAdapters | None


@dataclass(eq=False)
class SamplingSession:
    """What requests to sample name. session: of its client.

    path: of saved weights; None: they were saved nowhere. weights: None: not read yet.
    """

    session: str
    path: str | None
    weights: SampledWeights | None


@dataclass(frozen=True)
class SampleRequest:
    """A prompt and how it is continued.

    stop_tokens, stop_texts: after which a sequence ends. end_tokens: or after the tokenizer's.
    max_tokens: of a sequence; None: as many as the server allows.
    prompt_last: scored tokens at the prompt's end; None: all. prompt_top: likeliest tokens there.
    """

    prompt: Sequence[int]
    samples: int
    max_tokens: int | None
    seed: int | None
    sampling: TurnSampling
    stop_tokens: frozenset[int]
    stop_texts: tuple[str, ...]
    end_tokens: bool
    prompt_logp: bool
    prompt_last: int | None
    prompt_top: int


@dataclass(eq=False)
class SampleJob:
    """A request, and who waits for its result."""

    request: SampleRequest
    finish: Callable[[SampleResult | Exception], None]
    listeners: dict[int, _Stops] = field(default_factory=dict)  # by the key of a turn
    actions: dict[int, Action] = field(default_factory=dict)
    done: bool = False

    def end(self, result: SampleResult | Exception) -> None:
        """Gives the result to who waits; nothing where it is done already."""
        if not self.done:
            self.done = True
            self.finish(result)


class _Loaded(NamedTuple):
    """What the devices hold. params: the object that the engine began with."""

    params: Any
    engine: SlotEngine


class Sampler:
    """One engine for each kind of adapters; of all of them one holds a policy and a cache.

    Args:
      config: its `rollout` bounds contexts and sequences.
    """

    def __init__(self, config: Config):
        self._config = config
        self._engines: dict[LoraAdapters | None, SlotEngine] = {}
        self._current: _Loaded | None = None
        self._held = contextlib.ExitStack()
        self._keys = itertools.count()

    def answer(
        self,
        weights: SampledWeights,
        jobs: Iterable[SampleJob],
        more: Callable[[], list[SampleJob]],
    ) -> None:
        """Answers requests to the same weights together.

        Args:
          more: those that came meanwhile and may join.
        """
        engine, tokenizer = self._use(weights), weights.policy.tokenizer
        open_jobs: dict[int, SampleJob] = {}
        waiting = deque(jobs)
        while waiting or open_jobs:
            while waiting:
                self._begin(engine, tokenizer, waiting.popleft(), open_jobs)
            for action in (engine.step(True) or ()) if open_jobs else ():
                self._take(engine, action, open_jobs)
            waiting.extend(more())

    def close(self) -> None:
        """Frees the devices' memory."""
        self._held.close()
        self._current = None

    def _use(self, weights: SampledWeights) -> SlotEngine:
        """The engine, started with these weights; prompts stay cached while they are the same."""
        current = self._current
        if current is not None and current.params is weights.params:
            return current.engine
        engine = self._engines.get(weights.lora)
        if engine is None:
            self.close()
            # No token ends a sequence on the device: a request may go on after end tokens.
            engine = build_engine(self._config, weights.policy, per_turn=True, end_ids=())
            self._engines[weights.lora] = engine
        if self._current is None or self._current.engine is not engine:
            self.close()
            self._held.enter_context(engine.one_policy())
        engine.begin(weights.params, seed=self._config.seed)
        self._current = _Loaded(weights.params, engine)
        return engine

    def _begin(
        self,
        engine: SlotEngine,
        tokenizer: Tokenizer,
        job: SampleJob,
        open_jobs: dict[int, SampleJob],
    ) -> None:
        request, rollout, prompt = job.request, self._config.rollout, job.request.prompt
        room = rollout.max_context - len(prompt)
        if not prompt or room < 1:
            allowed = f"1 to {rollout.max_context - 1}, so that one more has a place"
            return job.end(RequestRefused(f"prompt: got {len(prompt)} tokens; allowed: {allowed}."))
        if wrong := [token for token in prompt if token not in tokenizer.ids]:
            return job.end(
                RequestRefused(f"prompt: got the token {wrong[0]}; allowed: the tokenizer's.")
            )
        limit = min(request.max_tokens or room, rollout.max_action_tokens, room)
        number = zlib.crc32(repr(tuple(prompt[:_ALIKE])).encode())
        shards = engine.plan.shards
        for sample in range(request.samples):
            key = next(self._keys)
            job.listeners[key] = stops = _Stops(request, tokenizer)
            task, member, turn = _stream(key, request.seed, sample)
            open_jobs[key] = job
            engine.submit(
                Turn(
                    key=key,
                    context=prompt,
                    group=number * shards + number % shards,
                    task=task,
                    member=member,
                    turn=turn,
                    limit=limit,
                    listen=stops.listen,
                    sampling=request.sampling,
                    shard=number % shards,
                )
            )

    def _take(self, engine: SlotEngine, action: Action, open_jobs: dict[int, SampleJob]) -> None:
        job = open_jobs.pop(action.key)
        engine.release(action.key)
        job.actions[action.key] = action
        if len(job.actions) < job.request.samples:
            return
        if failure := next((a.failure for a in job.actions.values() if a.failure), None):
            return job.end(RuntimeError(failure))
        job.end(self._result(engine, job))

    def _result(self, engine: SlotEngine, job: SampleJob) -> SampleResult:
        request, sequences = job.request, []
        for key, stops in job.listeners.items():
            action = job.actions[key]
            count = stops.listen(action.tokens)
            tokens = action.tokens[:count]
            top = None if not request.sampling.top_logprobs else (action.top or [])[:count]
            sequences.append(SampledSequence(tokens, action.logp[:count], count is not None, top))
        prompt_logp = prompt_top = None
        if request.prompt_logp or request.prompt_top:
            prompt_logp, prompt_top = _score(engine, request)
        cached = min(action.cached for action in job.actions.values())
        return SampleResult(
            sequences,
            prompt_logp if request.prompt_logp else None,
            prompt_top if request.prompt_top else None,
            cached,
        )


def _score(
    engine: SlotEngine, request: SampleRequest
) -> tuple[list[float], list[Sequence[tuple[int, float]]]]:
    """Log-probabilities of a prompt's tokens, and the likeliest in their places."""
    scores = engine.score(request.prompt, request.prompt_top)
    first = 1 if request.prompt_last is None else len(request.prompt) - request.prompt_last
    logp: list[float] = [math.nan, *scores.logp]
    top: list[Sequence[tuple[int, float]]] = [(), *scores.top]
    return [math.nan] * first + logp[first:], [()] * first + top[first:]


def _stream(key: int, seed: int | None, sample: int) -> tuple[int, int, int]:
    """The numbers (task, member, turn) from which a sample's random numbers derive."""
    if seed is None:
        return key % 2**32, 0, 1
    seed %= 2**64
    return seed % 2**32, _SEEDED + sample, (seed >> 32) ^ 1


class _Stops:
    """Finds where a growing sequence ends; `listen` has the form of `Turn.listen`."""

    def __init__(self, request: SampleRequest, tokenizer: Tokenizer):
        ends = tokenizer.end_ids if request.end_tokens else ()
        self._tokens = request.stop_tokens.union(ends)
        self._text = SampledText(tokenizer, request.stop_texts) if request.stop_texts else None
        self._read = 0
        self._end: int | None = None

    def listen(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens up to the first stop, with it; None: none so far."""
        if self._end is not None:
            return self._end
        new = range(self._read, len(tokens))
        found = [index + 1 for index in new if tokens[index] in self._tokens][:1]
        self._read = len(tokens)
        if self._text is not None and (count := self._text.listen(tokens)) is not None:
            found.append(count)
        self._end = min(found, default=None)
        return self._end


def read_sample(body: dict[str, Any]) -> SampleRequest:
    """A request in JSON.

    Raises:
      RequestRefused: a field that cannot be had, or with another value than is allowed.
    """
    params = body.get("sampling_params")
    params = params if isinstance(params, dict) else {}
    refuse_unknown("asample", body, _FIELDS)
    refuse_unknown("sampling_params", params, _SAMPLING_PARAMS)
    prompt = read_prompt(body.get("prompt"))
    wants_prompt = bool(body.get("prompt_logprobs"))
    last = _number(body, "prompt_logprobs_last_n", 1, max(1, len(prompt) - 1), int, None)
    if last is not None and not wants_prompt:
        raise RequestRefused("prompt_logprobs_last_n: got one; allowed: with prompt_logprobs.")
    top_k = _number(params, "top_k", -1, 2**31 - 1, int, -1)
    sampling = TurnSampling(
        temperature=_number(params, "temperature", 0, 100, float, 1.0),
        top_p=_number(params, "top_p", 1e-6, 1, float, 1.0),
        top_k=max(top_k, 0),
        top_logprobs=_number(body, "topk_sample_logprobs", 0, MOST_TOP, int, 0),
    )
    stop = params.get("stop")
    tokens, texts = _read_stop(stop)
    return SampleRequest(
        prompt=prompt,
        samples=_number(body, "num_samples", 1, _MOST_SAMPLES, int, 1),
        max_tokens=_number(params, "max_tokens", 1, 2**31 - 1, int, None),
        seed=_number(params, "seed", -(2**63), 2**64 - 1, int, None),
        sampling=sampling,
        stop_tokens=tokens,
        stop_texts=texts,
        end_tokens=stop != [],
        prompt_logp=wants_prompt,
        prompt_last=last,
        prompt_top=_number(body, "topk_prompt_logprobs", 0, MOST_TOP, int, 0),
    )


def _read_stop(stop: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    if stop is None or stop == []:
        return frozenset(), ()
    stops: Any = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list):
        if all(isinstance(each, str) and each for each in stops):
            return frozenset(), tuple(stops)
        if all(type(each) is int for each in stops):
            return frozenset(stops), ()
    raise RequestRefused(
        f"stop: got {stop!r:.80}; allowed: text, a list of texts, or a list of tokens."
    )


def _number(
    body: dict[str, Any], name: str, least: float, most: float, kind: type, default: Any
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    fits = type(value) is int or (kind is float and type(value) is float)
    if not fits or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise RequestRefused(f"{name}: got {value!r:.40}; allowed: {what} from {least} to {most}.")
    return kind(value)
