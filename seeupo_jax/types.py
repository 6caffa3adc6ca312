"""The data that flows through training, and the legend of array axes.

Axes, as suffixes of array names:
  N  trajectories of one iteration (tasks x group_size)
  S  segments: append-only token sequences; one a trajectory unless its context is rewritten
  K  turns
  Q  named rewards
  L  tokens of a sequence, or of a row, in which token trees may lie
  X  tokens of a row that a step predicts
  R  rows of one microbatch          M  microbatches
  P  spans: what each segment contributes to a step; an action may lie in several
  A  tokens of the action, or the actions, of a span
  J  actions of a span
  V  vocabulary    D  model width    H  attention heads    C  slots of a KV cache
  G  experts of a token in all layers, one layer after the other
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

CONTEXT = -1  # the value of `turn_L` at tokens that no turn sampled
UNCHOSEN = "unchosen"  # the stop of a candidate that another one was preferred to
HISTORY = "history"  # a key of an assistant's message that the policy has not sampled
UNKNOWN_VERSION = -1  # of a token's policy; at context, too
NO_TARGET = -1  # the value of `target_MRX` where nothing is predicted


@dataclass(frozen=True)
class Segment:
    """An append-only token sequence: every action in it was sampled from exactly what precedes it.

    tokens_L: int32 token ids, as sampled or as tokenised once; never re-tokenised.
    turn_L: int32, `CONTEXT` or the turn that sampled the token: loss mask, turn mask, turn count.
    logp_L: float32, the sampler's log-probability of each sampled token, NaN where it was not
      recorded; 0 at context.
    expert_LG: experts that the sampler's routers chose for each token, of `Routing.dtype`; its
      `unknown` for tokens that it did not compute, after the last action. None: not recorded.
    role: whose conversation it is; "": of the only one.
    version_L: int32, sweeps that the policy which sampled the token had behind it, and
      `UNKNOWN_VERSION` at context. None: all as `policy_version` of the trajectory says.
    """

    tokens_L: np.ndarray
    turn_L: np.ndarray
    logp_L: np.ndarray
    expert_LG: np.ndarray | None = None
    role: str = ""
    version_L: np.ndarray | None = None

    def until(self, end: int) -> Segment:
        """The segment up to so many tokens."""
        arrays = self.tokens_L[:end], self.turn_L[:end], self.logp_L[:end]
        expert_LG = None if self.expert_LG is None else self.expert_LG[:end]
        version_L = None if self.version_L is None else self.version_L[:end]
        return Segment(*arrays, expert_LG, self.role, version_L)

    def versions(self, policy_version: int | None) -> np.ndarray:
        """`version_L`, by default of a trajectory of this version; None: unknown. int32 [L]."""
        if self.version_L is not None:
            return self.version_L
        version = UNKNOWN_VERSION if policy_version is None else policy_version
        return np.where(self.turn_L == CONTEXT, UNKNOWN_VERSION, version).astype(np.int32)


class RewardRow(NamedTuple):
    """One reward of an episode. turns: its part of each turn, in order; None: not known by turn."""

    episode: float
    turns: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RewardTable:
    """All rewards of an episode: by name, of the episode and of each turn.

    total: the reward that an update reads, the weighted sum of the named ones; without `turns` all
      of it came with the last turn. Each turn's weighted sum is rounded as it is recorded, so
      `total` does not follow from `named` to the bit and is stored.
    named: before their weights: `env`, those that the environment names, and those of
      config.rewards; empty: the environment's own reward was the only one.
    roles: what a role earned beside `total`, which is every role's.
    """

    total: RewardRow
    named: Mapping[str, RewardRow] = field(default_factory=dict[str, RewardRow])
    roles: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(
        cls,
        reward: float,
        turn_rewards: Sequence[float] = (),
        rewards: Mapping[str, float] | None = None,
        named_turn_rewards: Mapping[str, Sequence[float]] | None = None,
        role_rewards: Mapping[str, float] | None = None,
    ) -> RewardTable:
        """The table of the fields of a stored line; see `Trajectory` for their meaning.

        Raises:
          ValueError: `named_turn_rewards` has a name that `rewards` lacks.
        """
        rewards, turns = rewards or {}, named_turn_rewards or {}
        missing = [name for name in turns if name not in rewards]
        if missing:
            raise ValueError(
                f"named_turn_rewards: got {missing[0]!r}, which rewards lacks; allowed: names of"
                " rewards."
            )
        named = {
            name: RewardRow(episode, tuple(turns[name]) if name in turns else None)
            for name, episode in rewards.items()
        }
        return cls(RewardRow(reward, tuple(turn_rewards)), named, role_rewards or {})

    def with_reward(self, reward: float) -> RewardTable:
        """The table with another total of the episode; the turns keep theirs."""
        return replace(self, total=self.total._replace(episode=reward))

    def plus(self, amount: float) -> RewardTable:
        """The table with an amount added to the totals of the episode and of its last turn."""
        turns = self.total.turns
        if turns:
            turns = (*turns[:-1], turns[-1] + amount)
        return replace(self, total=RewardRow(self.total.episode + amount, turns))


@dataclass(frozen=True)
class Trajectory:
    """One episode: its tokens, its rewards and why it stopped.

    segments: one, unless the context was rewritten between turns; each turn lies in exactly one.
    reward_table: its rewards; `reward`, `turn_rewards`, `rewards`, `named_turn_rewards` and
      `role_rewards` read it.
    group: index of the task within the iteration; members of a group start from the same state.
    stop: done | max_turns | max_tokens | env_error | timeout | unchosen (a candidate of a turn that
      another one was preferred to: its last action was not executed).
    policy_version: sweeps that the policy which began to sample it had behind it; None: unknown.
      `Segment.version_L` has that of every token.
    timeout_counts: it stopped with `timeout` and counts all the same (env.timeout_as=zero_reward).
    parent: place in its group, from 0, of an earlier trajectory that it continues; None: of none.
    fork: how many of its first turns are its parent's; it has their tokens, too.
    """

    segments: tuple[Segment, ...]
    reward_table: RewardTable
    group: int
    task_id: str = ""
    seed: int = 0
    stop: str = "done"
    messages: tuple[dict[str, str], ...] = ()
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    policy_version: int | None = None
    timeout_counts: bool = False
    parent: int | None = None
    fork: int = 0

    @classmethod
    def of(
        cls,
        segments: tuple[Segment, ...],
        reward: float,
        group: int,
        task_id: str = "",
        *,
        turn_rewards: Sequence[float] = (),
        rewards: Mapping[str, float] | None = None,
        named_turn_rewards: Mapping[str, Sequence[float]] | None = None,
        role_rewards: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> Trajectory:
        """A trajectory of its stored fields, which have the rewards in five of them."""
        table = RewardTable.of(reward, turn_rewards, rewards, named_turn_rewards, role_rewards)
        return cls(segments, table, group, task_id, **fields)

    def stored_fields(self) -> dict[str, Any]:
        """Its fields by the names and in the order in which files have them; `of` reads them."""
        return {name: getattr(self, name) for name in _STORED_FIELDS}

    @property
    def reward(self) -> float:
        """The reward of the episode that an update reads."""
        return self.reward_table.total.episode

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """`reward` of each turn, in order; empty: all of it came with the last one."""
        return self.reward_table.total.turns or ()

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the episode by name, before their weights; empty: none has a name."""
        return {name: row.episode for name, row in self.reward_table.named.items()}

    @property
    def named_turn_rewards(self) -> dict[str, tuple[float, ...]]:
        """`rewards` of each turn, in order, of the names that are known by turn."""
        rows = self.reward_table.named.items()
        return {name: row.turns for name, row in rows if row.turns is not None}

    @property
    def role_rewards(self) -> dict[str, float]:
        """Rewards of single roles beside `reward`, by role; empty: there are none."""
        return dict(self.reward_table.roles)

    @property
    def turns(self) -> int:
        """How many turns were sampled."""
        return 1 + max((int(s.turn_L.max(initial=CONTEXT)) for s in self.segments), default=CONTEXT)

    @property
    def truncated(self) -> bool:
        """It was cut: by the number of turns or the end of the context, not by the environment."""
        return self.stop in ("max_turns", "max_tokens")

    @property
    def played(self) -> bool:
        """It did not fail, and all of its actions were executed: it says how well tasks go."""
        return not self.failed and self.stop != UNCHOSEN

    @property
    def failed(self) -> bool:
        """The environment failed: left out of every statistic and of every update."""
        return self.stop == "env_error" or (self.stop == "timeout" and not self.timeout_counts)


_STORED_FIELDS = (
    *("segments", "reward", "group", "task_id", "seed", "stop", "messages", "info"),
    *("policy_version", "turn_rewards", "timeout_counts", "rewards", "named_turn_rewards"),
    *("parent", "fork", "role_rewards"),
)


@dataclass(frozen=True)
class TrajectoryStats:
    """Statistics of one trajectory that a sweep learned from.

    advantage: the mean over its action tokens.
    weight_K: float32, M of the action that each turn is of, with ratio=token the mean over the
      turn's tokens; NaN where no step was taken on the turn.
    logp, entropy: float32 arrays aligned with the tokens, one a segment: under the policy as the
      sweep began, at the temperature; nats; NaN at context, and where it was not computed.
    """

    advantage: float
    weight_K: np.ndarray
    logp: tuple[np.ndarray, ...]
    entropy: tuple[np.ndarray, ...]


def rewards_of(trajectory: Trajectory) -> list[float]:
    """The reward of each turn, in order.

    Raises:
      ValueError: `turn_rewards` is of another number of turns.
    """
    turns, given = trajectory.turns, trajectory.turn_rewards
    if given and len(given) != turns:
        raise ValueError(
            f"turn_rewards of task {trajectory.task_id!r}: got {len(given)}; allowed: none, or one"
            f" for each of its {turns} turns."
        )
    return list(given) if given else [0.0] * (turns - 1) + [trajectory.reward] * (turns > 0)


def learnable(trajectories: Sequence[Trajectory], *, grouped: bool = True) -> np.ndarray:
    """Returns which trajectories an update learns from: bool [N]. Failed ones are ignored.

    Args:
      grouped: rewards are compared within groups only (`Algorithm.grouped`): then the only survivor
        of a group is ignored too, since it cannot be compared.
    """
    members = Counter(t.group for t in trajectories if not t.failed)
    least = 2 if grouped else 1
    return np.array([not t.failed and members[t.group] >= least for t in trajectories], bool)


class TurnBatch(NamedTuple):
    """The padded batch of one step; a pytree of device arrays.

    Rows hold the segments of the step, each cut at its last action token, as token trees: a token
    sees those k before it whose subtree it lies in, k <= q < end_k. Rows are grouped into
    microbatches [M, R]; only the first `microbatches` of them hold any, so one compiled program
    serves every number of rows.

    tokens_MRL: int32, every tree in pre-order; 0 after the row's end.
    depth_MRL: int32, of each token in its sequence.
    end_MRL: int32, one past the last index of the token's subtree; padding is a tree of its own.
    segment_MRL: int32, rising along a row, a number a sequence, where trees are nothing but
      sequences; None where tokens are shared.
    counted_MRL: bool, where a token is counted: once in all rows that share it, and no padding.
      None: nothing is counted.
    expert_MRLG: experts that the routers are given, as `Architecture.routing` says; None: they
      choose.
    adapter_MRL: int32, the adapter of each token, where adapters are per turn; their number at
      padding. None: they are not.
    parent_MRX: int32, index of the token that predicts, in the order of the spans, which need not
      rise along a row; 0 beyond.
    target_MRX: int32, the token that is predicted; `NO_TARGET` beyond.
    teacher_top_MRXK, teacher_top_logp_MRXJ: int32, a teacher's K likeliest tokens in its place, and
      float32, their log-probabilities and as the last that of all other tokens: J = K + 1; beyond,
      and without a teacher, `UNTAUGHT`. None where the program does not read them.

    slot_PA: int32, where in the flattened [M, R, X] each action token is predicted.
    mask_PA: float32, 1 at real action tokens.
    trajectory_P: int32 index into [N]; N (one past the end) marks no span.
    microbatches: int32 scalar, how many microbatches hold rows.

    Fields of every action token, each None where the program does not read it:
    old_logp_PA, ref_logp_PA: float32, log-probabilities under the old and the reference policy.
    advantage_PA: float32.
    logp_PA: float32, log-probabilities under the parameters that the step begins from, with actions
      of several turns; right only where it matters: at actions that lie in several spans.
    importance_PA: float32, the weight against the token's sampler; with importance weights.
    action_PA: int32, which of the span's actions it belongs to; with order=parallel.
    drift_sign_PA: float32, 1, -1 or 0, times log s the penalty; with KL-Cov.
    clip_scale_PA: float32, what the clip range of its turn is multiplied by; with an estimator that
      adapts it.
    value_PA, returns_PA: float32, the critic's estimate when the sweep began, and what it is to be;
      with a critic.
    kl_coef: float32 scalar, of the KL penalty in the loss where it is adapted.
    score_grad_PA: float32, derivative of a scorer's loss by its score of the token.
    """

    tokens_MRL: jax.Array
    depth_MRL: jax.Array
    end_MRL: jax.Array
    parent_MRX: jax.Array
    target_MRX: jax.Array
    slot_PA: jax.Array
    mask_PA: jax.Array
    trajectory_P: jax.Array
    microbatches: jax.Array
    segment_MRL: jax.Array | None = None
    counted_MRL: jax.Array | None = None
    expert_MRLG: jax.Array | None = None
    adapter_MRL: jax.Array | None = None
    old_logp_PA: jax.Array | None = None
    ref_logp_PA: jax.Array | None = None
    logp_PA: jax.Array | None = None
    advantage_PA: jax.Array | None = None
    importance_PA: jax.Array | None = None
    action_PA: jax.Array | None = None
    value_PA: jax.Array | None = None
    returns_PA: jax.Array | None = None
    drift_sign_PA: jax.Array | None = None
    kl_coef: jax.Array | None = None
    score_grad_PA: jax.Array | None = None
    clip_scale_PA: jax.Array | None = None
    teacher_top_MRXK: jax.Array | None = None
    teacher_top_logp_MRXJ: jax.Array | None = None


class CriticState(NamedTuple):
    """Parameters of a value function or a scorer, and the optax state of what steps them."""

    params: Any
    opt_state: Any


class TrainState(NamedTuple):
    """All that training changes; a pytree of device arrays, donated from step to step.

    params: the policy's parameters.
    opt_state: the optax state; with moments=turn the `TurnMoments` of all turns.
    step: int32 scalar, optimizer steps applied.
    skipped: int32 scalar, steps skipped because a gradient was not finite.
    critic: the value function; None, which has no leaves, where there is none.
    ema: float32, the moving average of `params` over the iterations; None where there is none.
    scorer: the model that scores turns, stepped once an iteration; None where there is none.
    reference: parameters of a reference policy that moves; None where it stays.
    kl_coef: float32 scalar, the coefficient of the KL penalty; None where it is constant.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    critic: CriticState | None = None
    ema: Any = None
    scorer: CriticState | None = None
    reference: Any = None
    kl_coef: jax.Array | None = None
