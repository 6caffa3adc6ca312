"""The loop between an engine and a pool of environments: every episode from reset to its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.configuration import schema
from seeupo_jax.envs import gate
from seeupo_jax.envs.base import Environment
from seeupo_jax.envs.pool import Call, EnvPool
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.rewards.reward_functions import weighted_sum
from seeupo_jax.rewards.scorer import POLL_S, RewardFailure, Scored, Scorer
from seeupo_jax.rollout.engine.protocol import Action, Engine, Turn
from seeupo_jax.rollout.engine.sampling import task_number
from seeupo_jax.rollout.episode import Episode, Request
from seeupo_jax.rollout.watch import Activity, Watch
from seeupo_jax.types import Trajectory

REWARD_FAILURE = "reward_failure"  # of `info`: NAME=CAUSE of the reward that failed
STOP_POLL_S = 0.5  # how long it may take to notice that the run shall stop


@dataclass(frozen=True)
class RolloutWorker:
    """This process's part of a rollout: a sampler, environments, and the rules of an episode.

    tokenizer: the policy's.
    env: what environments may return, and what becomes of what they do not.
    rollout: `max_turns` of an episode; `deterministic`: all environments answer before the engine
      steps again, so that which rows it runs together, and so the last bit of every number, does
      not depend on how long they take.
    rewards: functions of finished episodes, and what each reward weighs.
    stop: whether this process was asked to stop.
    watch: where others can see how far this process is.
    """

    engine: Engine
    pool: EnvPool
    tokenizer: Tokenizer
    env: schema.Env
    rollout: schema.Rollout
    rewards: Scorer = field(default_factory=Scorer)
    stop: Callable[[], bool] = lambda: False
    watch: Watch = field(default_factory=Watch)


@dataclass(frozen=True)
class CollectionOptions:
    """What one collection differs in from the next.

    seed, iteration: what random numbers derive from; no two collections share both.
    temperature: None is the training's.
    policy_version: what the trajectories say of the parameters.
    split: of the tasks.
    """

    seed: int
    iteration: int
    temperature: float | None = None
    policy_version: int | None = None
    split: str = "train"


@dataclass(frozen=True)
class Prefetched:
    """Environments whose episodes begin before their collection does.

    requests: of the pool's slots from 0 on; their resets are open calls of the pool.
    options: of that collection; its policy need not be known yet.
    until: until when they may be left alone, in seconds of the monotonic clock.
    """

    requests: tuple[Request, ...]
    options: CollectionOptions
    until: float


def reset_call(
    slot: int, request: Request, tokenizer: Tokenizer, options: CollectionOptions
) -> Call:
    """Begins an episode; gives what `Episode.on_result` takes."""
    seed = options.seed
    own = request.episode_seed(seed=seed, iteration=options.iteration)

    # Checked and tokenised in the worker: a message that the tokenizer refuses is the environment's
    # failure, not the run's.
    def begin(env: Environment, answer: Any) -> Any:
        messages, tools = gate.check_opening(answer)
        return messages, tools, tokenizer.begin(messages, tools), gate.has_finish(env)

    return Call(slot, lambda env: gate.reset(env, request.task_id, seed, own), begin, fresh=True)


class Collection:
    """The loop between an engine and a pool of environments; keys are indices of requests."""

    def __init__(
        self,
        worker: RolloutWorker,
        requests: Sequence[Request],
        options: CollectionOptions,
        on_finished: Callable[[Request, Trajectory], None],
    ):
        self._engine, self._pool, self._tokenizer = worker.engine, worker.pool, worker.tokenizer
        self._env, self._rollout, self._stop = worker.env, worker.rollout, worker.stop
        self._rewards = worker.rewards
        self._requests, self._options, self._on_finished = requests, options, on_finished
        engine = worker.engine
        owned = (key for key, request in enumerate(requests) if engine.owns(request.group))
        self._queued = deque(owned)
        self._total = len(self._queued)
        self._open: dict[int, Episode] = {}
        self._unscored: dict[int, Episode] = {}  # over, but for the reward functions
        self._slots = list(range(engine.concurrency))[::-1]  # free ones
        self._key_of: dict[int, int] = {}  # whose environment a slot's is
        self._stale: set[int] = set()  # keys whose environments begin once more
        self.finished: dict[int, Trajectory] = {}
        self._failed = self._sampled = 0  # trajectories, and tokens of whole actions
        self.environment_s = self.reset_s = self.reward_s = 0.0

    def adopt(self, prefetched: Prefetched) -> None:
        """Opens the first episodes on environments that have been asked to begin."""
        own, options = tuple(self._requests[key] for key in self._queued), prefetched.options
        numbers = (self._options.seed, self._options.iteration)
        assert (options.seed, options.iteration) == numbers
        assert prefetched.requests == own[: len(prefetched.requests)]
        keys = [self._open_next() for _ in prefetched.requests]
        if time.monotonic() > prefetched.until:
            self._stale.update(keys)

    def run(self) -> None:
        """Plays every episode; an answer is acted on as soon as it is there."""
        while True:
            while self._queued and self._slots:
                episode = self._open[self._open_next()]
                self._pool.submit(
                    reset_call(episode.slot, episode.request, self._tokenizer, self._options)
                )
            self._poll_environments()
            self._poll_rewards()
            unfinished = bool(self._open or self._queued or self._unscored)
            actions = self._engine.step(unfinished, self._stop())
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
            active=len(self._open) + len(self._unscored),
            stepping=self._pool.open,
            finished=len(self.finished),
            failed=self._failed,
            tokens=self._engine.usage().get("decoded_tokens", self._sampled),
            slowest=slowest,
        )

    def _poll_environments(self) -> None:
        idle = not self._engine.busy
        resetting = idle and any(each.conversation is None for each in self._open.values())
        began = time.perf_counter()
        interval_s = self._engine.poll_interval_s
        waits_s = STOP_POLL_S if interval_s is None else min(STOP_POLL_S, interval_s)
        if self._unscored:
            waits_s = min(waits_s, POLL_S)
        answers = self._pool.poll(waits_s if idle else 0.0)
        while self._rollout.deterministic and self._pool.open and not self._stop():
            answers += self._pool.poll(STOP_POLL_S)
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
            episode.on_result(outcome, self._env.timeout_as)
            self._advance(key, episode)

    def _poll_rewards(self) -> None:
        if not self._unscored:
            return
        idle = not (self._engine.busy or self._open or self._queued)
        interval_s = self._engine.poll_interval_s
        waits_s = STOP_POLL_S if interval_s is None else min(STOP_POLL_S, interval_s)
        began = time.perf_counter()
        scored = self._rewards.poll(self._env.max_reward, waits_s if idle else 0.0)
        self.reward_s += time.perf_counter() - began if idle else 0.0
        for key, answer in scored:
            episode = self._unscored.pop(key)
            self._take_scored(episode, answer)
            self._finish(key, episode)

    def _take_scored(self, episode: Episode, scored: Scored) -> None:
        """Gives an episode what its reward functions said, or fails it."""
        failure = scored.failure
        if failure is None:
            try:
                reward = self._weigh(scored.rewards, "rewards by weight", episode.earned)
                return episode.on_scored(scored, reward)
            except gate.ProtocolError as error:
                failure = RewardFailure("sum", "invalid", str(error))
        episode.fail("env_error", failure.reason)
        episode.info[REWARD_FAILURE] = f"{failure.name}={failure.cause}"

    def _weigh(self, rewards: Mapping[str, float], where: str, earned: float) -> float:
        total = weighted_sum(rewards, self._rewards.weights)
        return gate.check_reward(total, where, max_reward=self._env.max_reward, earned=earned)

    def _open_next(self) -> int:
        """A new episode's key: the next request's, with a slot of its own."""
        key, slot = self._queued.popleft(), self._slots.pop()
        self._open[key] = Episode(self._requests[key], slot)
        self._key_of[slot] = key
        return key

    def _act(self, action: Action) -> None:
        """Brings a sampled action to its environment."""
        episode = self._open[action.key]
        if action.failure:
            episode.fail("env_error", action.failure)
            return self._advance(action.key, episode)
        turn, earned = episode.turn, episode.earned
        episode.transcript.act(action.tokens, turn, action.logp)
        episode.rewards.append(0.0)  # until its environment answers
        self._sampled += len(action.tokens)
        text = self._tokenizer.text(action.tokens)
        episode.messages.append({"role": "assistant", "content": text})
        conversation, max_reward = episode.conversation, self._env.max_reward

        def extend(env: Environment, answer: Any) -> Any:
            step = gate.check_step(answer, turn=turn, max_reward=max_reward)
            named = {gate.OWN_REWARD: step.reward, **step.rewards}
            reward = self._weigh(named, "step() reward", earned)
            score = gate.check_score(env.score())
            after = None if step.done else conversation.extend(action.tokens, step.observation)
            return step, reward, score, after

        self._pool.submit(Call(episode.slot, lambda env: env.step(text), extend))

    def _ask_last(self, episode: Episode) -> None:
        """Calls `finish` once, where the trainer ends an episode: the environment's last reward."""
        episode.has_finish = False
        stop, earned, max_reward = episode.stop, episode.earned, self._env.max_reward

        def settle(env: Environment, answer: Any) -> Any:
            paid = gate.check_last_reward(answer, max_reward=max_reward)
            reward = self._weigh({gate.OWN_REWARD: paid}, "finish()", earned)
            return paid, reward, gate.check_score(env.score())

        self._pool.submit(Call(episode.slot, lambda env: env.finish(stop), settle))

    def _advance(self, key: int, episode: Episode) -> None:
        """Asks for the next action, or ends the episode."""
        if episode.stop is None and episode.turn == self._rollout.max_turns:
            episode.stop = "max_turns"
        if episode.stop is None and not self._engine.fits(episode.conversation.tokens):
            episode.stop = "max_tokens"
        if episode.stop in ("max_turns", "max_tokens") and episode.has_finish:
            return self._ask_last(episode)
        if episode.stop is not None:
            del self._open[key]
            self._slots.append(episode.slot)
            self._engine.release(key)
            if self._rewards.functions and not episode.failed:
                self._unscored[key] = episode
                return self._rewards.submit(key, episode.view(self._options.split))
            return self._finish(key, episode)
        context = episode.conversation.tokens
        episode.transcript.read(context)
        request = episode.request
        task = task_number(request.task_id)
        turn = Turn(key, context, request.group, task, request.member, episode.turn, episode.tools)
        self._engine.submit(turn)

    def _finish(self, key: int, episode: Episode) -> None:
        """An episode that is over, with all its rewards."""
        options, weighted = self._options, bool(self._rewards.weights)
        trajectory = episode.finish(options.seed, options.policy_version, weighted=weighted)
        self.finished[key] = trajectory
        self._failed += trajectory.failed
        self._on_finished(self._requests[key], trajectory)
