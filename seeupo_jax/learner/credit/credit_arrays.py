"""The inputs of estimators, computed from trajectories and fields of their tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.role_baselines import Baselines, baselines_before
from seeupo_jax.learner.credit.running_rewards import Moments, Statistics, running_statistics
from seeupo_jax.learner.credit.sampled_tokens import Ragged, SampledTokens
from seeupo_jax.trajectories.forks import node_numbers
from seeupo_jax.trajectories.rewards_by_name import (
    OWN_REWARD,
    named_rewards,
    named_turn_rewards,
)
from seeupo_jax.trajectories.states import executed_turns, turn_states
from seeupo_jax.types import CONTEXT, Trajectory, learnable, rewards_of

_REWARDS = 4  # named rewards are padded to a multiple of it: one program, whatever names there are


class CreditArrays:
    """The inputs of estimators by the names of `algorithms/estimators`; computed on first use.

    algorithm: whose estimator they are for.
    reward_weights: weights of named rewards; any other reward weighs 1.
    gains: of turns, in the probability of the task's answer; None: the gain is the reward.
    statistics: of the run's rewards; None: of these trajectories.
    baselines: of roles before these trajectories; None: 0.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        shapes: Shapes,
        rows: SegmentBatch,
        trajectories: Sequence[Trajectory],
        per_token: Mapping[str, Ragged],
        reward_weights: Mapping[str, float] | None = None,
        gains: Sequence[np.ndarray] | None = None,
        statistics: Statistics | None = None,
        baselines: Baselines | None = None,
    ):
        self.algorithm, self.rows, self._gains = algorithm, rows, gains
        self.trajectories, self._per_token, self._shapes = trajectories, per_token, shapes
        self._weights = {} if reward_weights is None else reward_weights
        self._statistics, self._baselines = statistics, baselines
        self._kl_coef = algorithm.kl_coef if algorithm.kl_in == "reward" else None
        self.group_N = np.array([t.group for t in trajectories], np.int32)
        self.valid_N = learnable(trajectories, grouped=algorithm.grouped)

    @property
    def sampled_turn(self) -> Ragged:
        """The turn of every sampled token, including tokens that are not learned from."""
        owners = self.rows.trajectory_S.tolist()
        segments = {i: iter(self.trajectories[i].segments) for i in owners}
        return [next(segments[i]).turn_L for i in owners]

    @property
    def reward_N(self) -> np.ndarray:
        reward_N = np.array([t.reward for t in self.trajectories], np.float32)
        if self._kl_coef is not None:
            rows = zip(self.rows.trajectory_S, self.rows.turn, self._kl(), strict=True)
            for owner, turn_L, kl_L in rows:
                reward_N[owner] -= self._kl_coef * kl_L[turn_L >= 0].sum()
        return np.where(self.valid_N, reward_N, np.float32(0))

    @property
    def baseline_N(self) -> np.ndarray:
        decay = self.algorithm.estimator.decay
        return np.float32(baselines_before(self.trajectories, self._baselines, decay)[0])

    @property
    def rewards_NQ(self) -> np.ndarray:
        alone = [np.array([t.reward for t in self.trajectories])]
        named_NQ = np.stack([*self.named.values()] if self.named else alone, axis=1)
        rewards_NQ = np.where(self.valid_N[:, None], named_NQ, 0.0).astype(np.float32)
        return np.pad(rewards_NQ, ((0, 0), (0, -rewards_NQ.shape[1] % _REWARDS)))

    @property
    def reward_weight_Q(self) -> np.ndarray:
        weights = [self._weights.get(name, 1.0) for name in self.named] if self.named else [1.0]
        return _padded(weights)

    @functools.cached_property
    def named(self) -> dict[str, np.ndarray]:
        """Rewards by name, float64 [N], before their weights; empty where none has a name."""
        return named_rewards(self.trajectories, self._weights)

    @property
    def rewards_NKQ(self) -> np.ndarray:
        columns = [*self._turn_columns.values()]
        rewards_NKQ = np.zeros((*self.mask_NK.shape, len(columns) + -len(columns) % _REWARDS))
        for column, each in enumerate(columns):
            for row in np.flatnonzero(self.valid_N):
                rewards_NKQ[row, : len(each[row]), column] = each[row]
        return rewards_NKQ.astype(np.float32)

    @property
    def turn_weight_Q(self) -> np.ndarray:
        return _padded([self._weights.get(name, 1.0) for name in self.turn_named] or [1.0])

    @property
    def running_mean_Q(self) -> np.ndarray:
        return _padded([each.mean for each in self._running])

    @property
    def running_std_Q(self) -> np.ndarray:
        return _padded([each.std for each in self._running])

    @functools.cached_property
    def turn_named(self) -> dict[str, list[list[float]]]:
        """Named rewards of turns: a list per trajectory, empty for one that failed; 0 of a name
        that only earlier iterations of the run knew, which centring makes less than its mean."""
        return named_turn_rewards(self.trajectories, self._weights, self._statistics or ())

    @functools.cached_property
    def _turn_columns(self) -> dict[str, list[list[float]]]:
        """`turn_named`; where nothing has a name, all of a turn's reward."""
        alone = [[] if t.failed else rewards_of(t) for t in self.trajectories]
        return self.turn_named if self.turn_named else {OWN_REWARD: alone}

    @functools.cached_property
    def _running(self) -> list[Moments]:
        statistics = self._statistics
        if statistics is None:
            statistics = running_statistics(self.trajectories)
        return [statistics.get(name, Moments(0, 0.0, 0.0)) for name in self._turn_columns]

    @functools.cached_property
    def _turn_rewards(self) -> np.ndarray:
        """The reward of each turn, float64 [N, K]."""
        reward_NK = np.zeros(self.mask_NK.shape)
        for row in np.flatnonzero(self.valid_N):
            rewards = rewards_of(self.trajectories[row])
            reward_NK[row, : len(rewards)] = rewards
        return reward_NK

    @property
    def reward_NK(self) -> np.ndarray:
        return self._turn_rewards.astype(np.float32)

    @property
    def reward_rest_NK(self) -> np.ndarray:
        return np.float32(self._turn_rewards - self.reward_NK)

    @property
    def gain_NK(self) -> np.ndarray:
        last_NK = np.cumsum(self.mask_NK[:, ::-1], axis=1)[:, ::-1] == 1
        gain_NK = self.reward_NK.copy()
        for row, gain_K in enumerate([] if self._gains is None else self._gains):
            gain_NK[row, : len(gain_K)] = gain_K
        return np.where(self.mask_NK & ~last_NK, gain_NK, np.float32(np.nan))

    @property
    def state_NK(self) -> np.ndarray:
        anchor = self.algorithm.estimator.anchor
        if anchor == "state":
            state_NK = turn_states(self.trajectories)
            missing = self.mask_NK.shape[1] - state_NK.shape[1]
            return np.pad(state_NK, ((0, 0), (0, missing)), constant_values=-1)
        turn_K = np.arange(self.mask_NK.shape[1], dtype=np.int32)
        return np.where(self.mask_NK, turn_K if anchor == "turn" else np.int32(0), -1)

    @property
    def node_NK(self) -> np.ndarray:
        return np.where(self.mask_NK, node_numbers(self.trajectories, self.mask_NK.shape[1]), -1)

    @functools.cached_property
    def mask_NK(self) -> np.ndarray:
        turns_N = np.array([t.turns for t in self.trajectories], np.int32)
        # One program, whatever turns there are.
        turns = max(self._shapes.turns, int(turns_N.max(initial=0)))
        return (np.arange(turns) < turns_N[:, None]) & self.valid_N[:, None]

    @functools.cached_property
    def implicit_NK(self) -> np.ndarray:
        ratio_NK = np.zeros(self.mask_NK.shape)
        logps = zip(self._per_token["scorer_logp"], self._per_token["old_logp"], strict=True)
        # Of all that was sampled, as the scorer's own loss: at forced tokens both are 0.
        rows = zip(self.rows.trajectory_S, self.sampled_turn, logps, strict=True)
        for owner, turn_L, (own_L, old_L) in rows:
            acted_L = turn_L != CONTEXT
            np.add.at(ratio_NK[owner], turn_L[acted_L], (own_L - old_L)[acted_L])
        return np.float32(self.algorithm.estimator.implicit_coef * ratio_NK)

    @functools.cached_property
    def time(self) -> SampledTokens:
        return SampledTokens(self.rows, self._shapes.lengths[-1])

    @property
    def reward_NL(self) -> np.ndarray:
        rewards = [
            rewards_of(t) if valid else []
            for t, valid in zip(self.trajectories, self.valid_N, strict=True)
        ]
        reward_NL = self.time.at_turn_ends(rewards)
        if self._kl_coef is not None:
            reward_NL -= self._kl_coef * self.time.pad(self._kl())
        return reward_NL

    @property
    def truncated_N(self) -> np.ndarray:
        return self.valid_N & np.array([t.truncated for t in self.trajectories], bool)

    @property
    def metric_N(self) -> np.ndarray:
        metric = self.algorithm.estimator.metric
        if metric == "turns":
            return self.mask_NK.sum(axis=1, dtype=np.float32)
        # Of an action as it was sampled, whether or not all of it is learned from.
        total_N, count_N = np.zeros((2, len(self.trajectories)))
        owners, entropies = self.rows.trajectory_S, self._per_token["entropy"]
        for owner, turn_L, entropy_L in zip(owners, self.sampled_turn, entropies, strict=True):
            counted_L = turn_L != CONTEXT
            if metric == "entropy":
                counted_L = counted_L & ~np.isnan(entropy_L)  # none was computed of forced tokens
                total_N[owner] += entropy_L[counted_L].sum()
            count_N[owner] += counted_L.sum()
        return np.float32(count_N if metric == "tokens" else total_N / np.maximum(count_N, 1))

    @property
    def progress_NL(self) -> np.ndarray:
        # That of a token that is not learned from is the last choice's before it, as a reward is.
        moved = [np.zeros(t.turns) for t in self.trajectories]
        progress = self._per_token["progress"]
        numbers = zip(
            self.rows.trajectory_S, self.sampled_turn, self.rows.turn, progress, strict=True
        )
        for owner, sampled_L, turn_L, progress_L in numbers:
            left_L = (sampled_L != CONTEXT) & (turn_L == CONTEXT)
            np.add.at(moved[owner], sampled_L[left_L], progress_L[left_L])
        return self.time.pad(progress) + self.time.at_turn_ends(moved)

    @property
    def executed_NL(self) -> np.ndarray:
        executed = [
            executed_turns(t) if valid else []  # one that failed may not know of its last step
            for t, valid in zip(self.trajectories, self.valid_N, strict=True)
        ]
        return self.time.at_turn_ends(executed)

    @property
    def turn_NL(self) -> np.ndarray:
        turn_NL = self.time.pad(self.rows.turn).astype(np.int32)
        return np.where(self.mask_NL, turn_NL, CONTEXT)

    @property
    def mask_NL(self) -> np.ndarray:
        return self.time.mask_NL

    @property
    def value_NL(self) -> np.ndarray:
        return self.time.pad(self._per_token["value"])

    @property
    def old_logp_NL(self) -> np.ndarray:
        return self.time.pad(self._per_token["old_logp"])

    @property
    def ref_logp_NL(self) -> np.ndarray:
        return self.time.pad(self._per_token["ref_logp"])

    @property
    def collision_NL(self) -> np.ndarray:
        return self.time.pad(self._per_token["collision"])

    def _kl(self) -> Ragged:
        """log(old / reference) of every token; undefined at context."""
        pairs = zip(self._per_token["old_logp"], self._per_token["ref_logp"], strict=True)
        return [old_L - ref_L for old_L, ref_L in pairs]


def _padded(numbers: Sequence[float]) -> np.ndarray:
    """Named rewards, with 0 for those that are missing."""
    return np.float32([*numbers] + [0.0] * (-len(numbers) % _REWARDS))
