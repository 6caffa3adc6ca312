"""Policy and environments together: tasks in, trajectories out."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.envs.base import Environment, Message, StepResult, Tool
from seeupo_jax.envs.pool import Call, EnvPool
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.policy.tokenizer import Conversation, Tokenizer
from seeupo_jax.rollout.engine import Action, Engine, Turn
from seeupo_jax.rollout.episode import Episode, Request
from seeupo_jax.rollout.sampling import task_number
from seeupo_jax.types import Trajectory
from seeupo_jax.watch import Activity, Watch

HEAR_S = 0.5  # how long it may take to hear that the run shall stop


@dataclass(frozen=True)
class Collected:
    """What a collection brought, and what it took.

    wall_s: seconds. environment_s: those in which all that was left to do was to wait for
      environments; reset_s: of these, while an environment had yet to begin.
    sampled_tokens, context_tokens: counted once each; those of a rewritten context once more in
      its segment.
    usage: the engine's counts.
    rounds: how often tasks were sampled for it, all of which the counts are of.
    seconds: what the devices spent, by name, where the engine says so.
    left_out: what these rounds brought besides; groups are numbered as in their round.
    """

    trajectories: tuple[Trajectory, ...]
    wall_s: float
    environment_s: float
    sampled_tokens: int
    context_tokens: int
    usage: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 1
    left_out: tuple[Trajectory, ...] = ()
    reset_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def sampled(self) -> tuple[Trajectory, ...]:
        """The trajectories of all rounds."""
        return self.trajectories + self.left_out


def group_requests(task_ids: Sequence[str], group_size: int) -> list[Request]:
    """`group_size` requests a task; the group is the task's index."""
    return [
        Request(task_id, group, member)
        for group, task_id in enumerate(task_ids)
        for member in range(group_size)
    ]


@dataclass(frozen=True)
class Begun:
    """Environments that begin before their collection does.

    requests: of the pool's slots from 0 on; their resets are open calls of the pool.
    seed: that they begin with.
    until: until when they may be left alone, in seconds of the monotonic clock.
    """

    requests: tuple[Request, ...]
    seed: int
    until: float


def begin_ahead(
    engine: Engine,
    pool: EnvPool,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    *,
    seed: int,
    patience_s: float,
) -> Begun:
    """Lets environments begin for the next collection, while nobody else uses the pool.

    These are the ones that `collect` of the same requests would have begin first: one a slot, so no
    more environments are open than in a collection. Nothing waits for them here.

    Args:
      patience_s: environments that a collection finds after longer begin once more, to the same
        episode: what holds them (a server, say) may have given them up meanwhile.
    """
    own = [request for request in requests if engine.owns(request.group)][: engine.concurrency]
    for slot, request in enumerate(own):
        pool.submit(_reset(slot, request, tokenizer, seed))
    return Begun(tuple(own), seed, time.monotonic() + patience_s)


def _reset(slot: int, request: Request, tokenizer: Tokenizer, seed: int) -> Call:
    """Begins an episode; gives its first messages, its tools and the conversation they begin."""

    # Tokenised in the worker: a malformed message is the environment's failure, not the run's.
    def begin(_: Environment, answer: Any) -> Any:
        messages, tools = answer
        return messages, tools, tokenizer.begin(messages, tools)

    return Call(slot, lambda env: env.reset(request.task_id, seed), begin, fresh=True)


def collect(
    engine: Engine,
    pool: EnvPool,
    tokenizer: Tokenizer,
    params: Any,
    requests: Sequence[Request],
    *,
    max_turns: int,
    seed: int,
    iteration: int,
    temperature: float | None = None,
    policy_version: int | None = None,
    deterministic: bool = False,
    on_finished: Callable[[Request, Trajectory], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    begun: Begun | None = None,
    watch: Watch | None = None,
) -> Collected:
    """Samples one trajectory a request, as many at a time as the engine and the pool have room for.

    With several processes each plays the groups that its engine owns; all get all trajectories.

    Args:
      max_turns: of an episode.
      seed, iteration: what random numbers derive from; no two collections share both.
      temperature: None is the training's.
      policy_version: what the trajectories say of the parameters.
      deterministic: all environments answer before the engine goes on, so that which rows it runs
        together, and so the last bit of every number, does not depend on how long they take.
      on_finished: hears of every trajectory of this process as soon as it is over.
      stop: whether this process was asked to stop.
      begun: what `begin_ahead` gave for these requests and this seed, if it was called.
      watch: where others can see how far this process is.

    Raises:
      Stopped: a process was asked to.
    """
    began = time.perf_counter()
    engine.begin(params, seed=seed, iteration=iteration, temperature=temperature)
    collection = _Collection(
        engine,
        pool,
        tokenizer,
        requests,
        max_turns=max_turns,
        seed=seed,
        policy_version=policy_version,
        deterministic=deterministic,
        on_finished=on_finished,
        stop=stop,
    )
    if begun is not None:
        collection.adopt(begun)
    with (Watch() if watch is None else watch).on(collection.activity):
        collection.run()
    finished: dict[int, Trajectory] = {}
    usage: Counter[str] = Counter()
    waits, waited = [], (collection.environment_s, collection.reset_s)
    own = (collection.finished, waited, Counter(engine.usage()))
    for trajectories, seconds, counts in gather(own):
        finished |= trajectories
        usage.update(counts)
        waits.append(seconds)
    ordered = tuple(finished[key] for key in range(len(requests)))
    turns = [s.turn_L for trajectory in ordered for s in trajectory.segments]
    sampled = sum(int((turn_L >= 0).sum()) for turn_L in turns)
    context = sum(len(turn_L) for turn_L in turns) - sampled
    wall_s = time.perf_counter() - began
    environment_s, reset_s = map(max, zip(*waits, strict=True))
    return Collected(ordered, wall_s, environment_s, sampled, context, usage, reset_s=reset_s)


class _Collection:
    """The loop between an engine and a pool of environments; keys are indices of requests."""

    def __init__(
        self,
        engine: Engine,
        pool: EnvPool,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        *,
        max_turns: int,
        seed: int,
        policy_version: int | None,
        deterministic: bool,
        on_finished: Callable[[Request, Trajectory], None] | None,
        stop: Callable[[], bool],
    ):
        self._engine, self._pool, self._tokenizer = engine, pool, tokenizer
        self._requests, self._max_turns, self._seed = requests, max_turns, seed
        self._policy_version, self._deterministic = policy_version, deterministic
        self._on_finished, self._stop = on_finished, stop
        owned = (key for key, request in enumerate(requests) if engine.owns(request.group))
        self._queued = deque(owned)
        self._total = len(self._queued)
        self._open: dict[int, Episode] = {}
        self._slots = list(range(engine.concurrency))[::-1]  # free ones
        self._key_of: dict[int, int] = {}  # whose environment a slot's is
        self._stale: set[int] = set()  # keys whose environments begin once more
        self.finished: dict[int, Trajectory] = {}
        self._failed = self._sampled = 0  # trajectories, and tokens of whole actions
        self.environment_s = self.reset_s = 0.0

    def adopt(self, begun: Begun) -> None:
        """Opens the first episodes on environments that have been asked to begin."""
        own = tuple(self._requests[key] for key in self._queued)
        assert begun.seed == self._seed and begun.requests == own[: len(begun.requests)]
        keys = [self._open_next() for _ in begun.requests]
        if time.monotonic() > begun.until:
            self._stale.update(keys)

    def run(self) -> None:
        """Plays every episode; an answer is acted on as soon as it is there."""
        while True:
            while self._queued and self._slots:
                episode = self._open[self._open_next()]
                self._pool.submit(
                    _reset(episode.slot, episode.request, self._tokenizer, self._seed)
                )
            self._hear_environments()
            actions = self._engine.step(bool(self._open or self._queued), self._stop())
            if actions is None:
                return
            for action in actions:
                self._act(action)

    def activity(self) -> Activity:
        """How far it is; any thread may ask."""
        oldest = self._pool.oldest
        slowest = None
        if oldest is not None and oldest[0] in self._key_of:
            slot, seconds = oldest
            slowest = self._requests[self._key_of[slot]].task_id, seconds
        return Activity(
            total=self._total,
            active=len(self._open),
            stepping=self._pool.open,
            finished=len(self.finished),
            failed=self._failed,
            tokens=self._engine.usage().get("decoded_tokens", self._sampled),
            slowest=slowest,
        )

    def _hear_environments(self) -> None:
        idle = not self._engine.busy
        resetting = idle and any(each.conversation is None for each in self._open.values())
        began = time.perf_counter()
        patience_s = self._engine.patience_s
        waits_s = HEAR_S if patience_s is None else min(HEAR_S, patience_s)
        answers = self._pool.poll(waits_s if idle else 0.0)
        while self._deterministic and self._pool.open and not self._stop():
            answers += self._pool.poll(HEAR_S)
        waited = time.perf_counter() - began if idle else 0.0
        self.environment_s += waited
        self.reset_s += waited if resetting else 0.0
        for call, outcome in sorted(answers, key=lambda answer: answer[0].slot):
            key = self._key_of[call.slot]
            if key in self._stale:
                self._stale.remove(key)
                self._pool.submit(call)
                continue
            episode = self._open[key]
            if (heard := episode.hear(outcome)) is not None:
                (self._begin if episode.conversation is None else self._answer)(episode, *heard)
            self._go_on(key, episode)

    def _open_next(self) -> int:
        """A new episode's key: the next request's, with a slot of its own."""
        key, slot = self._queued.popleft(), self._slots.pop()
        self._open[key] = Episode(self._requests[key], slot)
        self._key_of[slot] = key
        return key

    def _begin(
        self,
        episode: Episode,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        conversation: Conversation,
    ) -> None:
        episode.messages += messages
        episode.tools, episode.conversation = tools, conversation

    def _act(self, action: Action) -> None:
        """Brings a sampled action to its environment."""
        episode = self._open[action.key]
        if action.failure:
            episode.fail("env_error", action.failure)
            return self._go_on(action.key, episode)
        episode.transcript.act(action.tokens, episode.turn, action.logp)
        episode.rewards.append(0.0)  # until its environment answers
        self._sampled += len(action.tokens)
        text = self._tokenizer.text(action.tokens)
        episode.messages.append({"role": "assistant", "content": text})
        conversation = episode.conversation

        def extend(env: Environment, step: StepResult) -> Any:
            after = None if step.done else conversation.extend(action.tokens, step.observation)
            return step, float(step.reward), env.score(), after

        self._pool.submit(Call(episode.slot, lambda env: env.step(text), extend))

    def _answer(
        self,
        episode: Episode,
        step: StepResult,
        reward: float,
        score: float,
        conversation: Conversation | None,
    ) -> None:
        episode.rewards[-1] = reward
        episode.score, episode.conversation = score, conversation
        episode.messages += step.observation
        episode.info = episode.info | step.info
        if step.done:
            episode.stop = "done"

    def _go_on(self, key: int, episode: Episode) -> None:
        """Asks for the next action, or ends the episode."""
        if episode.stop is None and episode.turn == self._max_turns:
            episode.stop = "max_turns"
        if episode.stop is None and not self._engine.fits(episode.conversation.tokens):
            episode.stop = "max_tokens"
        if episode.stop is not None:
            del self._open[key]
            self._slots.append(episode.slot)
            self._engine.retire(key)
            self.finished[key] = episode.finish(self._seed, self._policy_version)
            self._failed += self.finished[key].failed
            if self._on_finished is not None:
                self._on_finished(self._requests[key], self.finished[key])
            return
        context = episode.conversation.tokens
        episode.transcript.read(context)
        request = episode.request
        task = task_number(request.task_id)
        turn = Turn(key, context, request.group, task, request.member, episode.turn, episode.tools)
        self._engine.submit(turn)
