"""What a trajectory, a turn or a token is worth: the part of the twin before any gradient.

float64, plain loops; it imports nothing of the package. Tokens J of a trajectory are those that it
sampled, in the order of their turns, wherever the segments are that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, order=True)
class Token:
    """A sampled token: its turn, its segment among its trajectory's, where it stands there.

    penalty: what the reward of sampling it is less. value: the critic's, of the state before it.
    odds: log-probability by the scorer less that of the old policy.
    entropy: of what it was drawn from. progress: what the progress estimator says at it.
    logp: of it by the old policy. collision: the sum of the squares of what it was drawn from.
    """

    turn: int
    place: int
    position: int
    penalty: float = field(default=0.0, compare=False)
    value: float = field(default=0.0, compare=False)
    odds: float = field(default=0.0, compare=False)
    entropy: float = field(default=0.0, compare=False)
    progress: float = field(default=0.0, compare=False)
    logp: float = field(default=0.0, compare=False)
    collision: float = field(default=0.0, compare=False)


def grouped(options: Any) -> bool:
    """Whether an advantage is a comparison within a group."""
    if options.advantage in ("grae", "istar"):
        return options.estimator["baseline"] in ("mean", "leave_one_out")
    return options.advantage not in ("returns", "gae", "spa", "zero", "rae")


def learnable(trajectories: Sequence[Any], grouped: bool = True) -> list[bool]:
    """Whether each is learned from: it did not fail, nor, in groups, did all others of its own."""
    kept = []
    for i, one in enumerate(trajectories):
        others = [t for j, t in enumerate(trajectories) if j != i and t.group == one.group]
        alone = all(other.failed for other in others)
        kept.append(not one.failed and not (grouped and alone))
    return kept


def group_relative_advantages(
    rewards: Sequence[float],
    groups: Sequence[int],
    valid: Sequence[bool],
    *,
    baseline: str,
    scale: str,
    clip: float | None,
) -> np.ndarray:
    """Advantages [N]; 0 for invalid trajectories and for groups with one valid member."""
    advantage_N, group_std_N = np.zeros(len(rewards)), np.zeros(len(rewards))
    kept = [i for i in range(len(rewards)) if valid[i]]
    for i in kept:
        members = [rewards[j] for j in kept if groups[j] == groups[i]]
        others = [rewards[j] for j in kept if groups[j] == groups[i] and j != i]
        if baseline == "batch":
            others = members = [rewards[j] for j in kept]
        if not others:
            continue
        advantage_N[i] = rewards[i] - np.mean(others if baseline == "leave_one_out" else members)
        group_std_N[i] = np.std(members, ddof=1)
    if scale == "group":
        return advantage_N / (group_std_N + 1e-6)
    if scale == "none" or not kept:
        return advantage_N
    assert scale == "batch", scale
    advantage_N[kept] = standardized(advantage_N[kept], clip)
    return advantage_N


def standardized(values: np.ndarray, clip: float | None) -> np.ndarray:
    """Less the mean, by the standard deviation (n - 1) unless it is nearly 0, then bounded."""
    values = values - values.mean()
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    if std > 1e-6:
        values = values / std
    return values if clip is None else np.clip(values, -clip, clip)


def all_standardized(
    values: Sequence[np.ndarray], *, scale: str, clip: float | None
) -> list[np.ndarray]:
    """`standardized` over several arrays as if they were one; `none` leaves them as they are."""
    flat = np.concatenate([*values, np.zeros(0)])
    if scale == "none" or not len(flat):
        return list(values)
    assert scale == "batch", scale
    ends = np.cumsum([len(v) for v in values])
    return np.split(standardized(flat, clip), ends[:-1])


def rewards_to_go(reward_J: np.ndarray, discount: float) -> np.ndarray:
    """At each token the rewards from it on, discounted a token at a time."""
    return np.array(
        [
            sum(discount ** (later - j) * reward_J[later] for later in range(j, len(reward_J)))
            for j in range(len(reward_J))
        ]
    )


def generalized_advantages(
    reward_J: np.ndarray, value_J: np.ndarray, *, discount: float, trace: float, after: float = 0.0
) -> np.ndarray:
    """Sums of (discount x trace)^l x the temporal differences from each token on.

    Args:
      after: the value of what comes after the last token.
    """
    next_J = np.append(value_J[1:], after)[: len(value_J)]
    return rewards_to_go(reward_J + discount * next_J - value_J, discount * trace)


def turn_rewards(trajectory: Any) -> list[float]:
    """Of each turn; where they are not given the last one has all of it."""
    if trajectory.turn_rewards:
        return list(trajectory.turn_rewards)
    turns = 1 + max((max(s.turn_L, default=-1) for s in trajectory.segments), default=-1)
    return [trajectory.reward if turn == turns - 1 else 0.0 for turn in range(turns)]


def turn_paths(trajectories: Sequence[Any]) -> list[list[tuple[int, int]]]:
    """Each turn by the trajectory that it was sampled in and its index; a list a trajectory."""
    paths: list[list[tuple[int, int]]] = []
    for i, one in enumerate(trajectories):
        turns = 1 + max((max(s.turn_L, default=-1) for s in one.segments), default=-1)
        own = [(i, turn) for turn in range(turns)]
        if one.fork:
            others = [j for j, other in enumerate(trajectories) if other.group == one.group]
            own[: one.fork] = paths[others[one.parent]][: one.fork]
        paths.append(own)
    return paths


def token_rewards(trajectory: Any, tokens: Sequence[Token]) -> np.ndarray:
    """A turn's reward at its last token, less every token's penalty: [J]."""
    rewards = turn_rewards(trajectory)
    reward_J = np.array([-token.penalty for token in tokens])
    for j, token in enumerate(tokens):
        if j + 1 == len(tokens) or tokens[j + 1].turn != token.turn:
            reward_J[j] += rewards[token.turn]
    return reward_J


def token_advantages(
    trajectories: Sequence[Any],
    pieces: Sequence[Any],
    penalty: Sequence[np.ndarray],
    options: Any,
    values: Sequence[Sequence[np.ndarray]] | None = None,
    odds: Sequence[np.ndarray] | None = None,
    entropies: Sequence[Sequence[np.ndarray]] | None = None,
    progress: Sequence[np.ndarray] | None = None,
    drawn: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]] | None = None,
) -> list[list[np.ndarray]]:
    """Per trajectory and segment, the advantage of each token [L], 0 at context.

    Args:
      pieces: every sampled token of what is learned from, a piece a segment.
      penalty: per piece, what of these tokens [A] the reward is less by.
      values: per trajectory and segment, the critic's value of each token [L], for gae.
      entropies: as the values, the entropy of what each token was drawn from, for canon.
      odds, progress: per piece, log(scorer / old policy) of these tokens [A], for istar, and what
        the progress estimator says at them, for spa; None: all 0.
      drawn: per trajectory and segment, log-probability of each token [L] by the old policy and the
        sum of the squares of what it was drawn from, for otb.
    """
    tokens: list[list[Token]] = [[] for _ in trajectories]
    for number, (piece, penalty_A) in enumerate(zip(pieces, penalty, strict=True)):
        for j, (position, less) in enumerate(zip(piece.position_A, penalty_A, strict=True)):
            turn, place = int(piece.segment.turn_L[position]), piece.place
            value, entropy = (
                0.0 if numbers is None else numbers[piece.trajectory][place][position]
                for numbers in (values, entropies)
            )
            own, said = (0.0 if x is None else x[number][j] for x in (odds, progress))
            logp, squares = (
                (0.0, 0.0)
                if drawn is None
                else (float(x_L[position]) for x_L in drawn[piece.trajectory][place])
            )
            token = Token(turn, place, position, less, value, own, entropy, said, logp, squares)
            tokens[piece.trajectory].append(token)
    estimate = ESTIMATORS[options.advantage]
    credit = [[np.zeros(len(s.tokens_L)) for s in t.segments] for t in trajectories]
    in_order = [sorted(own) for own in tokens]  # of turns: segments need not be
    for i, advantage_J in enumerate(estimate(trajectories, in_order, options)):
        for token, advantage in zip(in_order[i], advantage_J, strict=True):
            credit[i][token.place][token.position] = advantage
    return credit


# Estimators: trajectories, their tokens and the options -> advantages [J] of each trajectory.


def group_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """GRAE of the reward less all penalties: one number a trajectory."""
    advantage_N = group_relative_advantages(
        [
            t.reward - sum(x.penalty for x in own)
            for t, own in zip(trajectories, tokens, strict=True)
        ],
        [t.group for t in trajectories],
        learnable(trajectories, grouped(options)),
        baseline=options.estimator["baseline"],
        scale=options.scale,
        clip=options.advantage_clip,
    )
    return [np.full(len(own), advantage_N[i]) for i, own in enumerate(tokens)]


def zero_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """On-policy distillation: rewards say nothing."""
    return [np.zeros(len(own)) for own in tokens]


def rae_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """Rewards less the moving average of those before; one role, whose average begins at 0."""
    valid = np.array(learnable(trajectories, False))
    rewards = [t.reward for t, keep in zip(trajectories, valid, strict=True) if keep]
    advantage_N = np.zeros(len(trajectories))
    advantage_N[valid] = moving_average_advantages(rewards, options.estimator["decay"])
    return _of_trajectories(advantage_N, valid, tokens, options)


def moving_average_advantages(rewards: Sequence[float], decay: float) -> np.ndarray:
    """R_n - b_n, with b_n = (1 - decay) sum of decay^(n - 1 - m) R_m over the m before n."""
    return np.array(
        [
            reward - sum((1 - decay) * decay ** (n - 1 - m) * rewards[m] for m in range(n))
            for n, reward in enumerate(rewards)
        ]
    )


def returns_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """REINFORCE++: rewards to go, standardized over all tokens of the batch."""
    returns = [
        rewards_to_go(token_rewards(t, own), options.estimator["discount"])
        for t, own in zip(trajectories, tokens, strict=True)
    ]
    return all_standardized(returns, scale=options.scale, clip=options.advantage_clip)


def gae_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """Generalized advantages, standardized over all tokens of the batch."""
    advantages = [
        generalized_advantages(
            token_rewards(t, own),
            np.array([token.value for token in own]),
            discount=options.estimator["discount"],
            trace=options.estimator["lam"],
            after=own[-1].value
            if own and options.estimator["bootstrap_truncated"] and cut(t)
            else 0.0,
        )
        for t, own in zip(trajectories, tokens, strict=True)
    ]
    return all_standardized(advantages, scale=options.scale, clip=options.advantage_clip)


def cut(trajectory: Any) -> bool:
    """Whether a limit ended it."""
    return trajectory.stop in ("max_turns", "max_tokens")


def asymmetric_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """A-GRAE: GRAE's advantage times what the group's and the batch's mean rewards say."""
    kept = learnable(trajectories)
    groups = [t.group for t in trajectories]
    members: dict[int, list[float]] = {}
    for i in np.flatnonzero(kept):
        members.setdefault(groups[i], []).append(trajectories[i].reward)
    success = np.mean([np.mean(rewards) for rewards in members.values()])
    advantage_N = group_relative_advantages(
        [t.reward for t in trajectories],
        groups,
        kept,
        baseline="mean",
        scale=options.scale,
        clip=options.advantage_clip,
    )
    for i, group in enumerate(groups):
        if kept[i]:
            root = np.mean(members[group]) ** 0.5
            easy, hard = 0.5 / (1 - root + 1e-6), 0.5 / (root + 1e-6)
            advantage_N[i] *= (1 - success) * easy + success * hard
            if advantage_N[i] > 0:
                advantage_N[i] *= min(1, success / options.estimator["alpha"])
    return [np.full(len(own), advantage_N[i]) for i, own in enumerate(tokens)]


def conditional_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """CANON: the reward less the other half's mean, and less that of its own half."""
    metrics = {
        "turns": lambda own: len({token.turn for token in own}),
        "tokens": len,
        "entropy": lambda own: np.mean([token.entropy for token in own]),
    }
    kept, mu = np.flatnonzero(learnable(trajectories)), options.estimator["mu"]
    rewards = [
        t.reward - sum(x.penalty for x in own) for t, own in zip(trajectories, tokens, strict=True)
    ]
    values = {}
    for group in {trajectories[i].group for i in kept}:
        members = [i for i in kept if trajectories[i].group == group]
        by_metric = sorted(members, key=lambda i: metrics[options.estimator["metric"]](tokens[i]))
        halves = by_metric[: len(members) // 2], by_metric[len(members) // 2 :]
        for half, other in (halves, halves[::-1]):
            own_mean, other_mean = (np.mean([rewards[i] for i in each]) for each in (half, other))
            for i in half:
                values[i] = mu * (rewards[i] - other_mean) + (1 - mu) * (rewards[i] - own_mean)
    scaled = all_standardized(
        [np.array([values[i] for i in kept])], scale=options.scale, clip=options.advantage_clip
    )[0]
    advantages = dict(zip(kept, scaled, strict=True))
    return [np.full(len(own), advantages.get(i, 0.0)) for i, own in enumerate(tokens)]


def turn_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """GiGPO, HGPO or MatchTIR: one number a turn, which all its tokens have."""
    kept = learnable(trajectories)
    rewards = [turn_rewards(t) if keep else [] for t, keep in zip(trajectories, kept, strict=True)]
    anchors = {
        "state": lambda t, count: t.info["states"],
        "turn": lambda t, count: [f"turn {k}" for k in range(count)],
        "task": lambda t, count: ["alike"] * count,
    }
    anchor = "turn" if options.advantage == "matchtir" else options.estimator["anchor"]
    advantages = {"gigpo": gigpo, "hgpo": hgpo, "matchtir": matchtir}[options.advantage](
        rewards,
        [t.group for t in trajectories],
        [
            anchors[anchor](t, len(own)) if own else []
            for t, own in zip(trajectories, rewards, strict=True)
        ],
        options,
    )
    pairs = zip(advantages, tokens, strict=True)
    return [np.array([advantage_K[x.turn] for x in own]) for advantage_K, own in pairs]


def gigpo(rewards: Any, groups: Any, states: Any, options: Any) -> list[np.ndarray]:
    """The episode's advantage plus step_coef x that among turns of the group from the same state.

    arXiv:2505.10978, Eq. 3 and 6 to 8; the deviation is that of n - 1.

    Args:
      rewards: per trajectory, of each turn; empty where it is left out.
      states: per trajectory, the state that each turn began from.
    """
    each = "none" if options.scale == "batch" else options.scale
    valid = [len(reward_K) > 0 for reward_K in rewards]
    kept = {"baseline": "mean", "scale": each, "clip": None}
    totals = [float(np.sum(reward_K)) for reward_K in rewards]
    episode_N = group_relative_advantages(totals, groups, valid, **kept)
    to_go = [
        rewards_to_go(np.array(reward_K), options.estimator["discount"]) for reward_K in rewards
    ]
    turns = [(i, k) for i, reward_K in enumerate(rewards) for k in range(len(reward_K))]
    anchors = [(groups[i], states[i][k]) for i, k in turns]
    step_M = group_relative_advantages(
        [to_go[i][k] for i, k in turns], anchors, [True for _ in turns], **kept
    )
    sums = [np.full(len(reward_K), episode_N[i]) for i, reward_K in enumerate(rewards)]
    for (i, k), step in zip(turns, step_M, strict=True):
        sums[i][k] += options.estimator["step_coef"] * step
    return _scaled(sums, options)


def matchtir(rewards: Any, groups: Any, indices: Any, options: Any) -> list[np.ndarray]:
    """Half of the trajectory's z-score and of its turn's among the group's turns of that index.

    arXiv:2601.10712; the scores' deviation is that of n - 1, plus 1e-6; a score alone is 0.
    """

    def score(value: float, likes: Sequence[float]) -> float:
        if len(likes) == 1:
            return 0.0
        deviation = np.std(likes, ddof=1) + 1e-6 if options.scale == "group" else 1.0
        return (value - np.mean(likes)) / deviation

    to_go = [
        rewards_to_go(np.array(reward_K), options.estimator["discount"]) for reward_K in rewards
    ]
    result = []
    for i, group in enumerate(groups):
        members = [j for j, other in enumerate(groups) if other == group and len(rewards[j])]
        own = score(sum(rewards[i]), [sum(rewards[j]) for j in members]) if rewards[i] else 0.0
        result.append(
            np.array(
                [
                    (own + score(value, [to_go[j][k] for j in members if len(to_go[j]) > k])) / 2
                    for k, value in enumerate(to_go[i])
                ]
            )
        )
    return _scaled(result, options)


def hgpo(rewards: Any, groups: Any, states: Any, options: Any) -> list[np.ndarray]:
    """A weighted mean over how many earlier states a turn's group shares, deepest weighing most.

    arXiv:2602.22817, Eq. 3 to 6; groups of equal rewards to go are left out of the mean, and the
    deviation is that of n - 1. The weight is that of verl-agent's recipe/hgpo/core_hgpo.py: a key
    of k states, the turn's own among them, weighs (k + 1)^power.

    Args:
      rewards, states: as for `gigpo`.
    """
    to_go = [
        rewards_to_go(np.array(reward_K), options.estimator["discount"]) for reward_K in rewards
    ]
    turns = [(i, k) for i, reward_K in enumerate(rewards) for k in range(len(reward_K))]

    def past(i: int, k: int, depth: int) -> tuple[Any, ...]:
        return (groups[i], *(states[i][k - back] for back in range(depth + 1)))

    result = [np.zeros(len(reward_K)) for reward_K in rewards]
    for i, k in turns:
        total = weights = 0.0
        for depth in range(min(options.estimator["history"], k) + 1):
            alike = [
                (n, m) for n, m in turns if m >= depth and past(n, m, depth) == past(i, k, depth)
            ]
            returns = np.array([to_go[n][m] for n, m in alike])
            if np.ptp(returns) == 0:
                continue
            deviation = np.std(returns, ddof=1) + 1e-6 if options.scale == "group" else 1.0
            states_in_key = depth + 1
            weight = (states_in_key + 1) ** options.estimator["power"]
            total += weight * (to_go[i][k] - returns.mean()) / deviation
            weights += weight
        result[i][k] = total / weights if weights else 0.0
    return _scaled(result, options)


def spa_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """SPA-RL, arXiv:2505.20732: generalized advantages of alpha c, and beta g at a turn's end."""
    advantages = []
    for trajectory, own in zip(trajectories, tokens, strict=True):
        executed = trajectory.info.get("executed", [True] * len(turn_rewards(trajectory)))
        reward_J = np.array([options.estimator["progress_coef"] * token.progress for token in own])
        for j, token in enumerate(own):
            if j + 1 == len(own) or own[j + 1].turn != token.turn:
                reward_J[j] += options.estimator["grounding_coef"] * executed[token.turn]
        value_J = np.array([token.value for token in own])
        trace = {"discount": options.estimator["discount"], "trace": options.estimator["lam"]}
        advantages.append(generalized_advantages(reward_J, value_J, **trace))
    return all_standardized(advantages, scale=options.scale, clip=options.advantage_clip)


def tree_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """SPO's tree: mean reward of the leaves below, less that below where the branch began."""
    kept, paths = learnable(trajectories), turn_paths(trajectories)
    group = [t.group for t in trajectories]

    def leaves(i: int, turns: int) -> tuple[int, ...]:
        """The trajectories that begin with the first so many turns of one; 0: its group."""
        return tuple(
            j
            for j in range(len(trajectories))
            if kept[j] and group[j] == group[i] and paths[j][:turns] == paths[i][:turns]
        )

    def value(members: tuple[int, ...]) -> float:
        return float(np.mean([trajectories[j].reward for j in members]))

    siblings = options.estimator["baseline"] == "siblings"
    nodes: dict[tuple[int, int], float] = {}
    if siblings:
        nodes = sibling_advantages(trajectories, kept, paths, options.scale)
    for i in range(0 if siblings else len(trajectories)):
        for turn in range(len(paths[i]) if kept[i] else 0):
            below, parent = leaves(i, turn + 1), leaves(i, 0)
            for turns in range(1, turn + 1):
                if options.estimator["baseline"] == "parent" and len(leaves(i, turns)) > len(below):
                    parent = leaves(i, turns)
            advantage = value(below) - value(parent)
            if options.scale == "group":
                rewards = [trajectories[j].reward for j in leaves(i, 0)]
                advantage /= np.std(rewards, ddof=1) + 1e-6
            nodes[paths[i][turn]] = advantage
    values = np.array(list(nodes.values()))
    if options.scale == "batch":
        values = standardized(values, options.advantage_clip)
    scaled = dict(zip(nodes, values, strict=True))
    return [np.array([scaled[paths[i][x.turn]] for x in own]) for i, own in enumerate(tokens)]


def sibling_advantages(
    trajectories: Sequence[Any], kept: Sequence[bool], paths: Any, scale: str
) -> dict[tuple[int, int], float]:
    """SLATE: each turn's reward among those of the turns that follow the same turns."""
    rewards: dict[Any, dict[tuple[int, int], float]] = {}
    for i, one in enumerate(trajectories):
        for turn, reward in enumerate(turn_rewards(one)):
            before = paths[i][turn - 1] if turn else ("group", one.group)
            if kept[i]:
                rewards.setdefault(before, {}).setdefault(paths[i][turn], reward)
    advantages = {}
    for siblings in rewards.values():
        values = [*siblings.values()]
        deviation = np.std(values, ddof=1) + 1e-6 if len(values) > 1 else 1.0
        for node, reward in siblings.items():
            over = reward - np.mean(values)
            advantages[node] = over / deviation if scale == "group" else over
    return advantages


def implicit_rewards(trajectory: Any, tokens: Sequence[Token], coef: float) -> np.ndarray:
    """Of each turn, the coefficient times what the scorer finds its tokens likelier by: [K]."""
    reward_K = np.zeros(len(turn_rewards(trajectory)))
    for token in tokens:
        reward_K[token.turn] += coef * token.odds
    return reward_K


def istar_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """iStar, arXiv:2509.19199: the episode's advantage plus the turn's among its group's turns."""
    each = "none" if options.scale == "batch" else options.scale
    part = {"baseline": options.estimator["baseline"], "scale": each, "clip": None}
    kept, groups = learnable(trajectories, grouped(options)), [t.group for t in trajectories]
    pairs = [*zip(trajectories, tokens, strict=True)]
    totals = [t.reward - sum(token.penalty for token in own) for t, own in pairs]
    episode_N = group_relative_advantages(totals, groups, kept, **part)
    implicit = [implicit_rewards(t, own, options.estimator["implicit_coef"]) for t, own in pairs]
    turns = [(i, k) for i, own in enumerate(implicit) if kept[i] for k in range(len(own))]
    if options.estimator["norm"] == "batch_max":  # CharacterRL-iStar/istar/dp_rm.py, istar_norm
        largest = max(abs(implicit[i][k]) for i, k in turns)
        implicit = [own / (largest + 1e-6) for own in implicit]
    turn_M = group_relative_advantages(
        [implicit[i][k] for i, k in turns],
        [groups[i] for i, _ in turns],
        [True] * len(turns),
        **part,
    )
    sums = [np.full(len(own) if kept[i] else 0, episode_N[i]) for i, own in enumerate(implicit)]
    for (i, k), turn in zip(turns, turn_M, strict=True):
        sums[i][k] += options.estimator["step_coef"] * turn
    scaled = _scaled(sums, options)
    return [np.array([scaled[i][x.turn] for x in own]) for i, own in enumerate(tokens)]


def gain_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """A²TGPO: the outcome's advantage, plus the scaled gains from each turn on over sqrt(count).

    arXiv:2605.06200; the gain of a turn is its reward, and the last turn has none.
    """
    gains, outcomes = _turn_gains(trajectories), []
    for trajectory, own in zip(trajectories, tokens, strict=True):
        outcomes.append([trajectory.reward - sum(x.penalty for x in own)])
    kept = learnable(trajectories)
    outcomes = [outcome if keep else [] for outcome, keep in zip(outcomes, kept, strict=True)]
    groups = [t.group for t in trajectories]
    scaled_gains, scaled_outcomes = (
        _at_their_index(values, groups, options.scale == "group") for values in (gains, outcomes)
    )
    advantages = []
    for z_K, outcome, trajectory in zip(scaled_gains, scaled_outcomes, trajectories, strict=True):
        turns = len(turn_rewards(trajectory)) if outcome else 0
        own = []
        for k in range(turns):
            later = [options.estimator["discount"] ** (j - k) * z_K[j] for j in range(k, len(z_K))]
            ahead = sum(later) / np.sqrt(len(later)) if later else 0.0
            own.append(options.estimator["step_coef"] * ahead + outcome[0])
        advantages.append(np.array(own))
    advantages = _scaled(advantages, options)
    pairs = zip(advantages, tokens, strict=True)
    return [np.array([advantage_K[x.turn] for x in own]) for advantage_K, own in pairs]


def clip_scales(trajectories: Sequence[Any], options: Any) -> list[np.ndarray]:
    """Per trajectory, what the clip range of each turn is multiplied by, [K]."""
    turns = [len(turn_rewards(t)) for t in trajectories]
    scales = [np.ones(count) for count in turns]
    if options.advantage == "a2tgpo":
        groups = [t.group for t in trajectories]
        for i, z_K in enumerate(_at_their_index(_turn_gains(trajectories), groups, True)):
            for k, z in enumerate(z_K):
                scales[i][k] += options.estimator["adaptation"] * (2 / (1 + np.exp(-z)) - 1)
    return scales


def _turn_gains(trajectories: Sequence[Any]) -> list[list[float]]:
    """Of each turn but the last; none of what is left out."""
    kept = learnable(trajectories)
    return [
        turn_rewards(t)[:-1] if keep else [] for t, keep in zip(trajectories, kept, strict=True)
    ]


def _at_their_index(values: Any, groups: Any, scaled: bool) -> list[list[float]]:
    """Numbers less the mean of those at their index in their group, maybe over their deviation."""
    result = []
    for i, own in enumerate(values):
        row = []
        for k, value in enumerate(own):
            alike = (other for other, g in zip(values, groups, strict=True) if g == groups[i])
            peers = [other[k] for other in alike if k < len(other)]
            deviation = np.std(peers) + 1e-6 if scaled and len(peers) > 1 else 1.0
            row.append((value - np.mean(peers)) / deviation)
        result.append(row)
    return result


def named_rewards(trajectories: Sequence[Any]) -> dict[str, list[float]]:
    """Each named reward of all trajectories, 0 where one lacks it; `env` where none has any."""
    names = {name for t in trajectories for name in t.rewards}
    if not names:
        return {"env": [t.reward for t in trajectories]}
    each = [dict(t.rewards) or {"env": t.reward} for t in trajectories]
    return {name: [own.get(name, 0.0) for own in each] for name in names}


def gdpo_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """GDPO: every reward over its group's deviation, then their weighted sum over the batch."""
    groups, valid = [t.group for t in trajectories], np.array(learnable(trajectories))
    total_N = np.zeros(len(trajectories))
    for name, rewards in named_rewards(trajectories).items():
        kept = {"baseline": "mean", "scale": "group", "clip": None}
        own_N = group_relative_advantages(rewards, groups, valid, **kept)
        total_N += options.reward_weights.get(name, 1.0) * own_N
    return _of_trajectories(total_N, valid, tokens, options)


def dvao_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """DVAO: the weighted sum of centred rewards over that of their population deviations."""
    groups, valid = [t.group for t in trajectories], np.array(learnable(trajectories))
    total_N = np.zeros(len(trajectories))
    for i in np.flatnonzero(valid):
        members = [j for j in np.flatnonzero(valid) if groups[j] == groups[i]]
        above = below = 0.0
        for name, rewards in named_rewards(trajectories).items():
            weight, own = options.reward_weights.get(name, 1.0), np.array(rewards)[members]
            above += weight * (rewards[i] - own.mean())
            below += weight * (np.std(own) if np.ptp(own) else 0.0)
        total_N[i] = above / below if below > 1e-6 else 0.0
    return _of_trajectories(total_N, valid, tokens, options)


def prorl_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """ProRL, of the batch's own statistics: centred rewards to go, less the group's at the turn."""
    kept = learnable(trajectories)
    names = {name for t in trajectories if not t.failed for name in t.named_turn_rewards}
    sums = [
        np.zeros(len(turn_rewards(t)) if keep else 0)
        for t, keep in zip(trajectories, kept, strict=True)
    ]
    for name in names or {"env"}:
        weight = options.reward_weights.get(name, 1.0) if names else 1.0
        own = [
            np.array(_turns_of(t, name)) if keep else np.zeros(0)
            for t, keep in zip(trajectories, kept, strict=True)
        ]
        every = np.concatenate(own)
        scale = weight / max(every.std(ddof=1), options.estimator["std_floor"])
        for i, reward_K in enumerate(own):
            sums[i] += rewards_to_go(
                scale * (reward_K - every.mean()), options.estimator["discount"]
            )
    advantages = [own.copy() for own in sums]
    for i, own in enumerate(advantages):
        for k in range(len(own)):
            alike = [j for j, t in enumerate(trajectories) if t.group == trajectories[i].group]
            own[k] -= np.mean([sums[j][k] for j in alike if k < len(sums[j])])
    pairs = zip(_scaled(advantages, options), tokens, strict=True)
    return [np.array([advantage_K[x.turn] for x in own]) for advantage_K, own in pairs]


def _turns_of(trajectory: Any, name: str) -> Sequence[float]:
    """A named reward of each turn, 0 where it has none; all of it is `env` without names."""
    given, named = turn_rewards(trajectory), trajectory.named_turn_rewards
    if not named:
        return given if name == "env" else [0.0] * len(given)
    return named.get(name, [0.0] * len(given))


def _of_trajectories(
    advantage_N: np.ndarray, valid: np.ndarray, tokens: Any, options: Any
) -> list[np.ndarray]:
    """The advantage of each token [J], of which trajectories have one; scaled as one batch."""
    scaled_N = np.zeros(len(advantage_N))
    scaled_N[valid] = _scaled([advantage_N[valid]], options)[0]
    return [np.full(len(own), scaled_N[i]) for i, own in enumerate(tokens)]


def maxrl_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """MaxRL: how far a reward is from its group's mean, as a multiple of that."""
    groups, valid = [t.group for t in trajectories], np.array(learnable(trajectories))
    total_N = np.zeros(len(trajectories))
    for i in np.flatnonzero(valid):
        members = [j for j in np.flatnonzero(valid) if groups[j] == groups[i]]
        mean = np.mean([trajectories[j].reward for j in members])
        total_N[i] = (trajectories[i].reward - mean) / (mean + 1e-6)
    return _of_trajectories(total_N, valid, tokens, options)


def otb_credit(trajectories: Sequence[Any], tokens: Any, options: Any) -> list[np.ndarray]:
    """OTB: the reward to go less the group's at the same token, each by its energy so far."""
    to_go, energies, advantages = [], [], []
    for one, own in zip(trajectories, tokens, strict=True):
        to_go.append(rewards_to_go(token_rewards(one, own), 1.0))
        each = [1 - 2 * np.exp(token.logp) + token.collision for token in own]
        energies.append(np.cumsum(np.maximum(each, 0.0)))
    for i, one in enumerate(trajectories):
        own = to_go[i].copy()
        for j in range(len(own)):
            alike = [
                k
                for k, other in enumerate(trajectories)
                if other.group == one.group and j < len(to_go[k])
            ]
            if len(alike) == 1 and options.estimator["zero_tail"]:
                continue
            above = sum(to_go[k][j] * energies[k][j] for k in alike)
            own[j] -= above / (sum(energies[k][j] for k in alike) + 1e-8)
        advantages.append(own)
    return all_standardized(advantages, scale=options.scale, clip=options.advantage_clip)


ESTIMATORS = {
    "maxrl": maxrl_credit,
    "otb": otb_credit,
    "a2tgpo": gain_credit,
    "istar": istar_credit,
    "spa": spa_credit,
    "tree": tree_credit,
    "grae": group_credit,
    "zero": zero_credit,
    "returns": returns_credit,
    "gae": gae_credit,
    "gigpo": turn_credit,
    "hgpo": turn_credit,
    "gdpo": gdpo_credit,
    "dvao": dvao_credit,
    "matchtir": turn_credit,
    "a_grae": asymmetric_credit,
    "canon": conditional_credit,
    "prorl": prorl_credit,
    "rae": rae_credit,
}


def _scaled(values: list[np.ndarray], options: Any) -> list[np.ndarray]:
    if options.scale != "batch":
        return values
    return all_standardized(values, scale="batch", clip=options.advantage_clip)
