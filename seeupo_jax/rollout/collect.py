"""Policy and environments together: tasks in, trajectories out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seeupo_jax.envs.base import Environment, Message, StepResult
from seeupo_jax.envs.pool import Call, EnvPool, Failure, Outcome
from seeupo_jax.policy.tokenizer import Conversation, Tokenizer, Transcript
from seeupo_jax.rollout.engine import Engine, Streams, task_number
from seeupo_jax.types import Trajectory


@dataclass(frozen=True)
class Request:
    """One trajectory to sample: member `member` of group `group`, on one task."""

    task_id: str
    group: int
    member: int


@dataclass
class _Episode:
    """A trajectory in the making."""

    request: Request
    conversation: Conversation | None = None  # none until the environment has begun
    transcript: Transcript = field(default_factory=Transcript)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    score: float = 0.0
    stop: str | None = None
    retries: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    def hear(self, outcome: Outcome) -> Any:
        """What its environment brought; None where it failed, which ends the episode."""
        self.retries += outcome.retries
        result = outcome.result
        if not isinstance(result, Failure):
            return result
        self.stop, self.info = result.stop, self.info | {"failure": result.reason}
        return None

    def finish(self, seed: int) -> Trajectory:
        request = self.request
        own = {"score": self.score, "member": request.member, "retries": self.retries}
        return Trajectory(
            segments=self.transcript.segments(),
            reward=self.reward,
            group=request.group,
            task_id=request.task_id,
            seed=seed,
            stop="done" if self.stop is None else self.stop,
            messages=tuple(self.messages),
            info=self.info | own,
        )


@dataclass(frozen=True)
class Collected:
    """What a collection brought, and what it took. Times in seconds.

    Tokens are counted once each; those of a rewritten context once more in its segment.
    """

    trajectories: tuple[Trajectory, ...]
    wall_s: float
    environment_s: float
    sampled_tokens: int
    context_tokens: int


def group_requests(task_ids: Sequence[str], group_size: int) -> list[Request]:
    """`group_size` requests a task; the group is the task's index."""
    return [
        Request(task_id, group, member)
        for group, task_id in enumerate(task_ids)
        for member in range(group_size)
    ]


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
) -> Collected:
    """Samples one trajectory a request; more requests than engine rows are done batch by batch."""
    parts = [
        _collect_batch(
            engine,
            pool,
            tokenizer,
            params,
            requests[start : start + engine.rows],
            max_turns=max_turns,
            seed=seed,
            iteration=iteration,
        )
        for start in range(0, len(requests), engine.rows)
    ]
    return Collected(
        tuple(trajectory for part in parts for trajectory in part.trajectories),
        sum(part.wall_s for part in parts),
        sum(part.environment_s for part in parts),
        sum(part.sampled_tokens for part in parts),
        sum(part.context_tokens for part in parts),
    )


def _collect_batch(
    engine: Engine,
    pool: EnvPool,
    tokenizer: Tokenizer,
    params: Any,
    requests: Sequence[Request],
    *,
    max_turns: int,
    seed: int,
    iteration: int,
) -> Collected:
    began = time.perf_counter()
    environment_s = 0.0
    episodes = [_Episode(request) for request in requests]
    environment_s += _reset(pool, tokenizer, episodes, seed)
    engine.start()
    streams = _streams(requests, engine.rows, seed, iteration)
    for turn in range(max_turns):
        contexts = [_next_context(engine, row, episode) for row, episode in enumerate(episodes)]
        contexts += [[]] * (engine.rows - len(episodes))
        acting = [row for row, context in enumerate(contexts) if context]
        if not acting:
            break
        sampled = engine.turn(params, contexts, streams._replace(turn=np.int32(turn)))
        actions = []
        for row in acting:
            count = int(sampled.count_N[row])
            tokens = sampled.tokens_NA[row, :count].tolist()
            logp = sampled.logp_NA[row, :count].tolist()
            episodes[row].transcript.act(tokens, turn, logp)
            actions.append((tokens, tokenizer.text(tokens)))
        environment_s += _step(pool, [episodes[row] for row in acting], acting, actions)
    for episode in episodes:
        if episode.stop is None:
            episode.stop = "max_turns"
    trajectories = tuple(episode.finish(seed) for episode in episodes)
    sampled_tokens = sum(int((s.turn_L >= 0).sum()) for t in trajectories for s in t.segments)
    tokens = sum(len(s.turn_L) for t in trajectories for s in t.segments)
    wall_s = time.perf_counter() - began
    return Collected(trajectories, wall_s, environment_s, sampled_tokens, tokens - sampled_tokens)


def _streams(requests: Sequence[Request], rows: int, seed: int, iteration: int) -> Streams:
    idle = rows - len(requests)
    task = [task_number(request.task_id) for request in requests]
    member = [request.member for request in requests]
    return Streams(
        np.uint32(seed),
        np.uint32(iteration),
        np.array(task + [0] * idle, np.uint32),
        np.array(member + [0] * idle, np.uint32),
        np.int32(0),
    )


def _next_context(engine: Engine, row: int, episode: _Episode) -> list[int]:
    """What the row is to read before its next action; nothing once the episode has stopped."""
    if episode.stop is not None:
        return []
    context = episode.conversation.tokens
    known = episode.transcript.shared(context)
    engine.rewind(row, known)  # beyond, a rewritten context says something else
    unread = list(context[known:])
    if not engine.fits(row, unread):
        episode.stop = "max_tokens"
        return []
    episode.transcript.read(context)
    return unread


def _reset(pool: EnvPool, tokenizer: Tokenizer, episodes: Sequence[_Episode], seed: int) -> float:
    """Lets the environments begin; returns the seconds it took."""
    began = time.perf_counter()

    # Tokenised in the worker: a malformed message is the environment's failure, not the run's.
    def begin(_: Environment, answer: Any) -> Any:
        messages, tools = answer
        return messages, tokenizer.begin(messages, tools)

    def start(slot: int, task_id: str) -> Call:
        return Call(slot, lambda env: env.reset(task_id, seed), begin, fresh=True)

    calls = [start(slot, episode.request.task_id) for slot, episode in enumerate(episodes)]
    for episode, outcome in zip(episodes, pool.call(calls), strict=True):
        if (begun := episode.hear(outcome)) is not None:
            messages, episode.conversation = begun
            episode.messages += messages
    return time.perf_counter() - began


def _step(
    pool: EnvPool,
    episodes: Sequence[_Episode],
    slots: Sequence[int],
    actions: Sequence[tuple[list[int], str]],
) -> float:
    """Lets the environments answer actions (tokens and text); returns the seconds it took."""
    began = time.perf_counter()

    def answer(slot: int, conversation: Conversation, tokens: list[int], text: str) -> Call:
        def extend(env: Environment, step: StepResult) -> Any:
            after = None if step.done else conversation.extend(tokens, step.observation)
            return step, float(step.reward), env.score(), after

        return Call(slot, lambda env: env.step(text), extend)

    acted = zip(slots, episodes, actions, strict=True)
    outcomes = pool.call([answer(slot, e.conversation, *action) for slot, e, action in acted])
    for episode, (_, text), outcome in zip(episodes, actions, outcomes, strict=True):
        episode.messages.append({"role": "assistant", "content": text})
        if (answered := episode.hear(outcome)) is None:
            continue
        step, reward, episode.score, episode.conversation = answered
        episode.reward += reward
        episode.messages += step.observation
        episode.info = episode.info | step.info
        if step.done:
            episode.stop = "done"
    return time.perf_counter() - began
