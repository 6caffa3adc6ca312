"""What every sampled token is credited with: from trajectories to advantages of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.learner.batching import Rows, Shapes
from seeupo_jax.trajectories.states import turn_states
from seeupo_jax.types import CONTEXT, Segment, Trajectory, learnable, rewards_of

Ragged = list[np.ndarray]  # one array a segment, aligned with its tokens


def assign_credit(
    algorithm: Algorithm,
    shapes: Shapes,
    rows: Rows,
    trajectories: Sequence[Trajectory],
    per_token: Mapping[str, Ragged],
) -> dict[str, Ragged]:
    """The advantage of every token, by `algorithm.advantage`; its value at context says nothing.

    Args:
      per_token: `old_logp` and `ref_logp`, and with a critic `value`.

    Returns: `advantage` and, with a critic, `returns`: what the value is to be.
    """
    estimator, choices = find_entry("advantage", algorithm.advantage), vars(algorithm)
    batch = _Batch(algorithm, shapes, rows, trajectories, per_token)
    arrays = {name: getattr(batch, name) for name in estimator.inputs(choices)}
    found = estimator.credit(arrays, choices)
    credit = {"advantage": _OF_TOKENS[estimator.level](batch, np.asarray(found.advantage))}
    if found.returns is not None:
        credit["returns"] = batch.time.unpad(found.returns)
    return credit


def compile_credit(algorithm: Algorithm, shapes: Shapes, trajectories: int) -> None:
    """Compiles what crediting so many trajectories runs, by crediting as many of one token."""
    zeros_L = np.zeros(2, np.float32)
    segment = Segment(np.zeros(2, np.int32), np.array([CONTEXT, 0], np.int32), zeros_L)
    alike = [Trajectory((segment,), 0.0, 0)] * trajectories
    rows = Rows.of(alike, grouped=algorithm.grouped)
    per_token = {name: [zeros_L] * len(rows.tokens) for name in ("old_logp", "ref_logp", "value")}
    assign_credit(algorithm, shapes, rows, alike, per_token)


def credit_programs(algorithm: Algorithm) -> list[str]:
    """Names of what `compile_credit` compiles."""
    return find_entry("advantage", algorithm.advantage).programs(vars(algorithm))


class _Batch:
    """What an estimator may ask for, by the names of `algorithms/estimators`; made when asked."""

    def __init__(
        self,
        algorithm: Algorithm,
        shapes: Shapes,
        rows: Rows,
        trajectories: Sequence[Trajectory],
        per_token: Mapping[str, Ragged],
    ):
        self.rows = rows
        self._trajectories, self._per_token, self._shapes = trajectories, per_token, shapes
        self._kl_coef = algorithm.kl_coef if algorithm.kl_in == "reward" else None
        self.group_N = np.array([t.group for t in trajectories], np.int32)
        self.valid_N = learnable(trajectories, grouped=algorithm.grouped)

    @property
    def reward_N(self) -> np.ndarray:
        reward_N = np.array([t.reward for t in self._trajectories], np.float32)
        if self._kl_coef is not None:
            rows = zip(self.rows.trajectory_S, self.rows.turn, self._kl(), strict=True)
            for owner, turn_L, kl_L in rows:
                reward_N[owner] -= self._kl_coef * kl_L[turn_L >= 0].sum()
        return np.where(self.valid_N, reward_N, np.float32(0))

    @property
    def reward_NK(self) -> np.ndarray:
        reward_NK = np.zeros(self.mask_NK.shape, np.float32)
        for row in np.flatnonzero(self.valid_N):
            rewards = rewards_of(self._trajectories[row])
            reward_NK[row, : len(rewards)] = rewards
        return reward_NK

    @property
    def state_NK(self) -> np.ndarray:
        state_NK = turn_states(self._trajectories)
        missing = self.mask_NK.shape[1] - state_NK.shape[1]
        return np.pad(state_NK, ((0, 0), (0, missing)), constant_values=-1)

    @functools.cached_property
    def mask_NK(self) -> np.ndarray:
        turns_N = np.array([t.turns for t in self._trajectories], np.int32)
        # One program, whatever turns there are.
        turns = max(self._shapes.turns, int(turns_N.max(initial=0)))
        return (np.arange(turns) < turns_N[:, None]) & self.valid_N[:, None]

    @functools.cached_property
    def time(self) -> _Time:
        return _Time(self.rows, self._shapes.lengths[-1])

    @property
    def reward_NL(self) -> np.ndarray:
        reward_NL = self.time.rewards(self._trajectories)
        if self._kl_coef is not None:
            reward_NL -= self._kl_coef * self.time.pad(self._kl())
        return reward_NL

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

    def _kl(self) -> Ragged:
        """log(old / reference) of every token; it says nothing at context."""
        pairs = zip(self._per_token["old_logp"], self._per_token["ref_logp"], strict=True)
        return [old_L - ref_L for old_L, ref_L in pairs]


def _from_trajectories(batch: _Batch, advantage_N: np.ndarray) -> Ragged:
    pairs = zip(batch.rows.turn, advantage_N[batch.rows.trajectory_S], strict=True)
    return [np.full(len(turn_L), own, np.float32) for turn_L, own in pairs]


def _from_turns(batch: _Batch, advantage_NK: np.ndarray) -> Ragged:
    pairs = zip(batch.rows.trajectory_S, batch.rows.turn, strict=True)
    return [advantage_NK[owner][turn_L] for owner, turn_L in pairs]


def _from_tokens(batch: _Batch, advantage_NL: np.ndarray) -> Ragged:
    return batch.time.unpad(advantage_NL)


class _Time:
    """The action tokens of every trajectory in the order in which they were sampled.

    Their segments may hold them in another one. `mask_NL` is True where a padded row has a token.
    """

    def __init__(self, rows: Rows, multiple: int):
        self._sizes, self._forced = [len(tokens) for tokens in rows.tokens], rows.forced > 0
        turn, owner = np.concatenate(rows.turn), np.repeat(rows.trajectory_S, self._sizes)
        acted = np.flatnonzero(turn != CONTEXT)
        self._place = acted[np.lexsort((acted, turn[acted], owner[acted]))]
        self._turn, self._owner = turn[self._place], owner[self._place]
        count_N = np.bincount(self._owner, minlength=rows.trajectories)
        first_N = np.cumsum(count_N) - count_N
        self._column = np.arange(len(self._place)) - first_N[self._owner]
        width = multiple * -(-int(count_N.max()) // multiple)
        self.mask_NL = np.zeros((rows.trajectories, width), bool)
        self.mask_NL[self._owner, self._column] = True

    def pad(self, ragged: Ragged) -> np.ndarray:
        """Rows [N, L] of the tokens' numbers, 0 after the last."""
        padded_NL = np.zeros(self.mask_NL.shape, np.float32)
        padded_NL[self._owner, self._column] = np.concatenate(ragged)[self._place]
        return padded_NL

    def unpad(self, padded_NL: np.ndarray) -> Ragged:
        """The numbers of such rows at their tokens, 0 at context."""
        flat = np.zeros(sum(self._sizes), np.float32)
        flat[self._place] = np.asarray(padded_NL)[self._owner, self._column]
        return np.split(flat, np.cumsum(self._sizes)[:-1])

    def rewards(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Rows [N, L] with the reward of each turn at its last token.

        Where tokens were forced, that of a turn without any other is at the last one before it.
        """
        reward_NL = np.zeros(self.mask_NL.shape, np.float32)
        turns = np.stack([self._owner, self._turn], axis=1)
        last = np.flatnonzero(np.append(np.any(turns[1:] != turns[:-1], axis=1), True))
        for place, after in zip(last, [*last[1:], None], strict=True):
            owner, turn = self._owner[place], self._turn[place]
            until = turn + 1
            if self._forced:
                same = after is not None and self._owner[after] == owner
                until = self._turn[after] if same else None
            reward_NL[owner, self._column[place]] = sum(rewards_of(trajectories[owner])[turn:until])
        return reward_NL


# Level of an estimator -> from its advantages to those of every token.
_OF_TOKENS: dict[str, Callable[[_Batch, np.ndarray], Ragged]] = {
    "trajectory": _from_trajectories,
    "turn": _from_turns,
    "token": _from_tokens,
}
