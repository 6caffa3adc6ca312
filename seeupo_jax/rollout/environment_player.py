"""Plays episodes in environments, each from the reset of its environment to its end."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.role_schema import role_names
from seeupo_jax.envs.base import Environment
from seeupo_jax.envs.pool import CallOutcome, EnvCall, EnvPool, Failure
from seeupo_jax.envs.snapshot import take_snapshot
from seeupo_jax.envs.validation import (
    OWN_REWARD,
    check_finish,
    check_reset,
    check_role_rewards,
    check_score,
    check_step,
    check_step_lists,
    first_role,
    has_finish,
    reset_episode,
)
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rollout.branching.forking import FORK_FAILURE
from seeupo_jax.rollout.branching.replay import begin_call, step_call
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import task_number
from seeupo_jax.rollout.episode import Episode, EpisodeRequest, ForkPoint
from seeupo_jax.rollout.player import STOP_POLL_S, CollectionOptions, Prefetched, RolloutWorker


@dataclass(frozen=True)
class EnvironmentHost:
    """A pool of environments, one for each conversation that the engine may have open."""

    pool: EnvPool

    def player(self, worker: RolloutWorker, options: CollectionOptions) -> EnvironmentPlayer:
        return EnvironmentPlayer(worker, self.pool, options)

    def prefetch(
        self,
        worker: RolloutWorker,
        requests: Sequence[EpisodeRequest],
        options: CollectionOptions,
        max_idle_s: float,
    ) -> Prefetched:
        """Resets an environment for each request, from the pool's first slot on.

        Nothing else may use the pool until that collection. Environments that it finds after
        `max_idle_s` are reset once more: a server may have given them up.
        """
        for slot, request in enumerate(requests):
            self.pool.submit(_reset_call(slot, request, worker, options))
        return Prefetched(tuple(requests), options, time.monotonic() + max_idle_s)

    def drain(self) -> None:
        self.pool.drain()

    def close(self) -> None:
        self.pool.close()


def _reset_call(
    slot: int, request: EpisodeRequest, worker: RolloutWorker, options: CollectionOptions
) -> EnvCall:
    """The call that resets an episode's environment; its result is for `Episode.on_result`."""
    seed, tokenizer, roles = options.seed, worker.tokenizer, role_names(worker.roles)
    episode_seed = request.episode_seed(seed)

    # Checked and tokenised in the worker: a message that the tokenizer refuses is the environment's
    # failure, not the run's.
    def begin(env: Environment, answer: Any) -> Any:
        messages, tools = check_reset(answer)
        role = first_role(env, roles)
        return messages, tools, tokenizer.begin(messages, tools), has_finish(env), role

    return EnvCall(
        slot,
        lambda env: reset_episode(env, request.task_id, seed, episode_seed),
        begin,
        fresh=True,
    )


class EnvironmentPlayer:
    """A `Player` of episodes in a pool of environments; handles each answer when it arrives."""

    def __init__(self, worker: RolloutWorker, pool: EnvPool, options: CollectionOptions):
        self._worker, self._pool, self._options = worker, pool, options
        self._engine, self._tokenizer = worker.engine, worker.tokenizer
        self._slots = list(range(worker.engine.concurrency))[::-1]  # free ones
        self._roles = role_names(worker.roles)
        self._open: dict[int, Episode] = {}
        self._role_keys: dict[int, dict[str, int]] = {}  # the engine's, by episode
        self._owner: dict[int, int] = {}  # by the engine's key, the key of the episode
        self._more_keys = itertools.count(-1, -1)  # episodes have the others
        self._key_of: dict[int, int] = {}  # the episode of a slot's environment
        self._stale: set[int] = set()  # keys of environments that are reset once more
        self._over: list[tuple[int, Episode]] = []

    @property
    def room(self) -> int:
        return len(self._slots)

    @property
    def beginning(self) -> bool:
        return any(each.conversation is None for each in self._open.values())

    @property
    def stepping(self) -> int:
        return self._pool.open

    @property
    def slowest(self) -> tuple[str, float] | None:
        oldest = self._pool.oldest
        if oldest is None or oldest[0] not in self._key_of:
            return None
        slot, seconds = oldest
        episode = self._open.get(self._key_of[slot])
        return None if episode is None else (episode.request.task_id, seconds)

    def adopt(self, keys: Sequence[int], prefetched: Prefetched) -> None:
        for key, request in zip(keys, prefetched.requests, strict=True):
            self._seat(key, request)
        if time.monotonic() > prefetched.until:
            self._stale.update(keys)

    def open(self, key: int, request: EpisodeRequest) -> None:
        episode, options = self._seat(key, request), self._options
        if request.fork is None:
            call = _reset_call(episode.slot, request, self._worker, options)
        else:
            call = begin_call(episode, options.seed, request.episode_seed(options.seed))
        self._pool.submit(call)

    def poll(self, wait_s: float) -> list[tuple[int, Episode]]:
        answers, stop = self._pool.poll(wait_s), self._worker.stop
        while self._worker.rollout.deterministic and self._pool.open and not stop():
            answers += self._pool.poll(STOP_POLL_S)
        for call, outcome in sorted(answers, key=lambda answer: answer[0].slot):
            key = self._key_of[call.slot]
            if key in self._stale:
                self._stale.remove(key)
                self._pool.submit(call)
                continue
            episode = self._open[key]
            if episode.replayed is not None:
                self._replay(key, episode, outcome)
                continue
            episode.on_result(outcome, self._worker.env.timeout_as)
            self._advance(key, episode)
        over, self._over = self._over, []
        return over

    def act(self, action: Action) -> None:
        """Sends a sampled action to its environment."""
        key = self._owner[action.key]
        episode = self._open[key]
        if action.failure:
            episode.fail("env_error", action.failure)
            return self._advance(key, episode)
        if action.too_long:
            episode.stop = "max_tokens"
            return self._advance(key, episode)
        turn, earned, worker = episode.turn, episode.ledger.earned, self._worker
        episode.act(action)
        text = self._tokenizer.text(action.tokens)
        episode.action_message_indices.append(len(episode.messages))
        episode.say([{"role": "assistant", "content": text}])
        bounds = {"max_reward": worker.env.max_reward, "roles": self._roles}
        earlier = dict.fromkeys(episode.info)  # a list of steps that ends too soon is refused
        may_fork = self._may_fork(episode)

        def extend(env: Environment, answer: Any) -> Any:
            step = check_step(answer, turn=turn, **bounds)
            check_step_lists(earlier | step.info, "step() info", turn + 1)
            where, by_role = "step() role_rewards", episode.ledger.roles
            check_role_rewards(step.role_rewards, where, earned=by_role, **bounds)
            named = {OWN_REWARD: step.reward, **step.rewards}
            weighted_sums = worker.weigh(named, "step() reward", earned)
            score = check_score(env.score())
            after = None if step.done else episode.after(step, self._tokenizer)
            fork_point = None
            if may_fork and not step.done:
                fork_point = ForkPoint(take_snapshot(env))
            return step, weighted_sums, score, after, fork_point

        self._pool.submit(EnvCall(episode.slot, lambda env: env.step(text), extend))

    def close(self) -> None:
        """Leaves the environments as they are: the next collection resets them."""

    def _seat(self, key: int, request: EpisodeRequest) -> Episode:
        """A new episode with a slot of its own."""
        slot = self._slots.pop()
        self._open[key] = Episode.begin(request, slot)
        self._key_of[slot], self._role_keys[key] = key, {}
        return self._open[key]

    def _may_fork(self, episode: Episode) -> bool:
        """Whether others may continue it after the turn that was just sampled."""
        options, request = self._options, episode.request
        if options.forks is None:
            return False
        chance = request.chance(episode.turn, seed=options.seed)
        return options.forks.may_fork(episode.turn, episode.entropy, chance)

    def _replay(self, key: int, episode: Episode, outcome: CallOutcome) -> None:
        """Continues the replay that brings a branch's environment to its first state."""
        fork, result = episode.request.fork, outcome.result
        episode.retries += outcome.retries
        if isinstance(result, Failure):
            episode.fail(result.stop, f"fork: {result.reason}")
            episode.info[FORK_FAILURE] = True
            episode.replayed = None
            return self._advance(key, episode)
        if episode.replayed == fork.replayed_turns:
            episode.replayed = None
            return self._advance(key, episode)
        self._pool.submit(step_call(episode, episode.replayed))
        episode.replayed += 1

    def _ask_last(self, episode: Episode) -> None:
        """Calls `finish` once when the trainer ends an episode, for the last reward."""
        episode.has_finish = False
        stop, earned, worker = episode.stop, episode.ledger.earned, self._worker

        def settle(env: Environment, answer: Any) -> Any:
            last_reward = check_finish(answer, max_reward=worker.env.max_reward)
            weighted_sums = worker.weigh({OWN_REWARD: last_reward}, "finish()", earned)
            return last_reward, weighted_sums, check_score(env.score())

        self._pool.submit(EnvCall(episode.slot, lambda env: env.finish(stop), settle))

    def _advance(self, key: int, episode: Episode) -> None:
        """Asks for the next action, or ends the episode."""
        if episode.stop is None and episode.turn == self._worker.rollout.max_turns:
            episode.stop = "max_turns"
        if episode.stop is None and not self._engine.fits(episode.conversation.tokens):
            episode.stop = "max_tokens"
        if episode.stop in ("max_turns", "max_tokens") and episode.has_finish:
            return self._ask_last(episode)
        if episode.stop is not None:
            del self._open[key]
            self._slots.append(episode.slot)
            for role_key in self._role_keys.pop(key).values():
                self._engine.release(role_key)
                del self._owner[role_key]
            return self._over.append((key, episode))
        context = episode.conversation.tokens
        episode.transcript.read(context)
        request = episode.request
        task = task_number(request.task_id)
        self._engine.submit(
            Turn(
                self._role_key(key, episode.role),
                context,
                request.group,
                task,
                request.member,
                episode.turn,
                episode.tools,
                view=functools.partial(self._view, episode),
                role=episode.role,
                shard=request.shard,
                iteration=request.iteration,
                action=episode.turn,
            )
        )

    def _role_key(self, key: int, role: str) -> int:
        """The engine's key of a role's conversation: of the first role the episode's own."""
        keys = self._role_keys[key]
        if role not in keys:
            keys[role] = next(self._more_keys) if keys else key
            self._owner[keys[role]] = key
        return keys[role]

    def _view(self, episode: Episode, tokens: Sequence[int]) -> FinishedEpisode:
        return episode.view(self._options.split, self._tokenizer.text(tokens))
