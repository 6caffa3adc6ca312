"""What every sampled token is credited with: from trajectories to advantages of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from seeupo_jax.algorithms.advantage import group_relative_advantage
from seeupo_jax.algorithms.credit import gigpo_advantage, hgpo_advantage
from seeupo_jax.algorithms.value import generalized_advantage, reward_to_go, standardize
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.learner.batching import Rows, Shapes
from seeupo_jax.learner.states import turn_states
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
      per_token: `old_logp` and `ref_logp`, for `kl_in=reward`, and with a critic `value`.

    Returns: `advantage` and, with a critic, `returns`: what the value is to be.
    """
    return _ESTIMATORS[algorithm.advantage](algorithm, shapes, rows, trajectories, per_token)


def compile_credit(algorithm: Algorithm, shapes: Shapes, trajectories: int) -> None:
    """Compiles what crediting so many trajectories runs, by crediting as many of one token."""
    nothing = np.zeros(2, np.float32)
    segment = Segment(np.zeros(2, np.int32), np.array([CONTEXT, 0], np.int32), nothing)
    alike = [Trajectory((segment,), 0.0, 0)] * trajectories
    rows = Rows.of(alike, grouped=algorithm.grouped)
    per_token = {name: [nothing] * len(rows.tokens) for name in ("old_logp", "ref_logp", "value")}
    assign_credit(algorithm, shapes, rows, alike, per_token)


def credit_programs(algorithm: Algorithm) -> list[str]:
    """Names of what `compile_credit` compiles."""
    names = [_PROGRAMS[algorithm.advantage]]
    if algorithm.advantage in ("gae", "returns") and algorithm.scale == "batch":
        names.append("standardize")
    return names


def _of_trajectories(algorithm, shapes, rows, trajectories, per_token):
    """One number a trajectory (GRAE)."""
    reward_N = np.array([t.reward for t in trajectories], np.float32)
    if algorithm.kl_in == "reward":
        for owner, turn_L, kl_L in zip(rows.trajectory_S, rows.turn, _kl(per_token), strict=True):
            reward_N[owner] -= algorithm.kl_coef * kl_L[turn_L >= 0].sum()
    advantage_N = group_relative_advantage(
        reward_N,
        _groups(trajectories),
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        clip=algorithm.advantage_clip,
        valid_N=learnable(trajectories, grouped=algorithm.grouped),
    )
    own_S = np.asarray(advantage_N)[rows.trajectory_S]
    pairs = zip(rows.turn, own_S, strict=True)
    return {"advantage": [np.full(len(turn_L), own, np.float32) for turn_L, own in pairs]}


def _of_turns(algorithm, shapes, rows, trajectories, per_token):
    """One number a turn, among the turns that began from its state (GiGPO, HGPO)."""
    state_NK = turn_states(trajectories)
    reward_NK = np.zeros(state_NK.shape, np.float32)
    for row in np.flatnonzero(learnable(trajectories)):
        reward_NK[row, : trajectories[row].turns] = rewards_of(trajectories[row])
    missing = max(0, shapes.turns - state_NK.shape[1])  # one program whatever turns there are
    estimate, choices = {
        "gigpo": (gigpo_advantage, {"step_coef": algorithm.step_coef}),
        "hgpo": (
            hgpo_advantage,
            {"history": algorithm.history, "power": algorithm.history_power},
        ),
    }[algorithm.advantage]
    advantage_NK = estimate(
        np.pad(reward_NK, ((0, 0), (0, missing))),
        _groups(trajectories),
        np.pad(state_NK, ((0, 0), (0, missing)), constant_values=-1),
        discount=algorithm.discount,
        scale=algorithm.scale,
        clip=algorithm.advantage_clip,
        valid_N=learnable(trajectories, grouped=algorithm.grouped),
        **choices,
    )
    own = np.asarray(advantage_NK)
    pairs = zip(rows.trajectory_S, rows.turn, strict=True)
    return {"advantage": [own[owner][turn_L] for owner, turn_L in pairs]}


def _of_tokens(algorithm, shapes, rows, trajectories, per_token):
    """One number a token, out of the rewards after it and, with a critic, its values."""
    time = _Time(rows, shapes.lengths[-1])
    reward_NL = time.rewards(trajectories)
    if algorithm.kl_in == "reward":
        reward_NL -= algorithm.kl_coef * time.pad(_kl(per_token))
    credit: dict[str, Ragged] = {}
    if algorithm.advantage == "gae":
        advantage_NL, returns_NL = generalized_advantage(
            time.pad(per_token["value"]),
            reward_NL,
            time.mask_NL,
            discount=algorithm.discount,
            lam=algorithm.gae_lambda,
        )
        credit["returns"] = time.unpad(returns_NL)
    else:
        advantage_NL = reward_to_go(reward_NL, time.mask_NL, discount=algorithm.discount)
    if algorithm.scale == "batch":
        advantage_NL = standardize(advantage_NL, time.mask_NL, clip=algorithm.advantage_clip)
    return credit | {"advantage": time.unpad(advantage_NL)}


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


def _kl(per_token: Mapping[str, Ragged]) -> Ragged:
    """log(old / reference) of every token; it says nothing at context."""
    pairs = zip(per_token["old_logp"], per_token["ref_logp"], strict=True)
    return [old_L - ref_L for old_L, ref_L in pairs]


def _groups(trajectories: Sequence[Trajectory]) -> np.ndarray:
    return np.array([t.group for t in trajectories], np.int32)


_ESTIMATORS = {
    "grae": _of_trajectories,
    "gigpo": _of_turns,
    "hgpo": _of_turns,
    "returns": _of_tokens,
    "gae": _of_tokens,
}
_PROGRAMS = {
    "grae": "group_relative_advantage",
    "gigpo": "gigpo_advantage",
    "hgpo": "hgpo_advantage",
    "returns": "reward_to_go",
    "gae": "generalized_advantage",
}
