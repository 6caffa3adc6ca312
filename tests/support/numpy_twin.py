"""An independent float64 NumPy twin of one iteration's updates, to test against.

Plain loops over trajectories, no batching, no padding; it imports nothing of the package. The
policy is `numpy_model`, its weights a dict of Hugging Face names; advantages are `numpy_credit`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy_covariance import limited
from numpy_credit import clip_scales, grouped, learnable, token_advantages, turn_paths
from numpy_model import (
    Architecture,
    Weights,
    token_divergences,
    token_entropies,
    token_logps,
    token_squares,
)


@dataclass(frozen=True)
class Segment:
    """Tokens, per token the turn that sampled it or -1, and what its sampler said of it."""

    tokens_L: Sequence[int]
    turn_L: Sequence[int]
    logp_L: Sequence[float] = ()  # needed by importance alone


@dataclass(frozen=True)
class Trajectory:
    """One episode; the package's own `Trajectory` has these fields too and may stand in for it."""

    segments: Sequence[Segment]
    reward: float
    group: int
    failed: bool = False
    stop: str = "done"  # max_turns or max_tokens: cut
    turn_rewards: Sequence[float] = ()  # of each turn; empty: `reward` is the last turn's
    # "states": the one that each turn began from; needed by gigpo and hgpo
    info: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name; needed by gdpo and dvao
    named_turn_rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by prorl
    parent: int | None = None  # place in the group of the one that its first `fork` turns are of
    fork: int = 0


@dataclass(frozen=True)
class Options:
    """Choices of the sweep, named as in the package's configuration.

    order: the turns of each step, e.g. [[2], [1], [0]]; several turns in one list are one step.
    actions: the turns of each of a step's actions, e.g. [[0], [1], [2]]; None: a step is one.
    minibatches: per entry of `order`, the trajectories of each of its optimizer steps; None: as
      many steps as there are inner epochs, each on all trajectories.
    estimator: the options of `advantage`.
    longest: tokens of an action at the most; read by loss_aggregation=constant alone.
    """

    order: Sequence[Sequence[int]]
    actions: Sequence[Sequence[int]] | None = None
    minibatches: Sequence[Sequence[Sequence[int]]] | None = None
    cumulative_ratio: bool = True
    advantage: str = "grae"
    estimator: Mapping[str, object] = field(default_factory=lambda: {"baseline": "mean"})
    scale: str = "batch"
    advantage_clip: float | None = 3.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # a name without one: 1
    mask_above: float | None = None
    objective: str = "clipped"
    ratio: str = "geometric"
    old_policy: str = "iteration"
    normalize_by: str = "all"
    loss_aggregation: str = "action"
    longest: int | None = None
    weight_clip: float | None = 0.2
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    clip_dual: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    kl_coef: float = 0.002
    kl_estimate: str = "k3"
    kl_in: str = "loss"
    importance: Mapping[str, object] | None = None
    entropy_coef: float = 0.0
    truncated: str = "keep"
    moments: str = "shared"
    covariance: Mapping[str, object] = field(default_factory=lambda: {"kind": "none"})
    inner_epochs: int = 1
    temperature: float = 1.0
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    max_grad_norm: float | None = None
    teacher_coef: float = 1.0
    teacher_discount: float = 0.0
    teacher_top_k: int | None = None  # then the loss has the term, not the advantage


@dataclass(frozen=True)
class Step:
    """One optimizer step: the negative objective, its gradients, the factors when it was over.

    The factors change with the last of a turn's steps. entropies: of each of its actions, before
    it, the mean over the tokens; none without a bonus. used: by trajectory and turn M of each
    token [A], before limits by covariance.
    """

    turns: tuple[int, ...]
    loss: float
    gradients: Weights
    cumulative_ratio_N: np.ndarray
    entropies: list[float]
    used: dict[tuple[int, int], np.ndarray]


@dataclass(frozen=True)
class Sweep:
    """credit: per trajectory and segment, the advantage of each token [L], 0 at context."""

    credit: list[list[np.ndarray]]
    steps: list[Step]
    weights: Weights

    @property
    def advantage_N(self) -> np.ndarray:
        """Each trajectory's advantage, where all its tokens have the same."""
        return np.array(
            [max((a for a_L in own for a in a_L), key=abs, default=0.0) for own in self.credit]
        )


@dataclass(frozen=True)
class Piece:
    """A step's part of one segment: an action, or as much of it as lies there."""

    trajectory: int
    place: int  # of the segment among its trajectory's
    segment: Segment
    position_A: np.ndarray

    @property
    def tokens_L(self) -> np.ndarray:
        return np.asarray(self.segment.tokens_L)


# An action: the pieces of one trajectory whose tokens, one piece's after the other's, it is.
Action = list[Piece]


def sweep(
    weights: Weights,
    trajectories: Sequence[Trajectory],
    options: Options,
    arch: Architecture,
    *,
    ref_weights: Weights | None = None,
    values: Sequence[Sequence[np.ndarray]] | None = None,
    scorer: Weights | None = None,
    teachers: Sequence[Weights | None] = (),
) -> Sweep:
    """One iteration: advantages, then a step per entry of `options.order`, then new weights.

    Args:
      weights: the parameters that sampled; not changed.
      ref_weights: of the reference policy; None: `weights`.
      values: per trajectory and segment, the critic's value of each token [L], for gae.
      scorer: weights of the implicit process reward model, for istar; None: `weights`.
      teachers: weights of each trajectory's teacher, or None.
    """
    start, reference = (
        {name: np.asarray(value, np.float64) for name, value in w.items()}
        for w in (weights, weights if ref_weights is None else ref_weights)
    )
    compared = grouped(options)
    credit = _credit(start, reference, trajectories, values, scorer, arch, options)
    for owner, teacher in enumerate(teachers):
        if teacher is not None and credit[owner] and options.teacher_top_k is None:
            add_teaching(credit[owner], start, teacher, trajectories[owner], arch, options)
    clips = clip_scales(trajectories, options)
    sampled = learned_from(start, trajectories, arch, options)
    marks = importances(start, sampled, arch, options)
    trajectories = without_rejected(sampled, marks)
    valid = sum(learnable(trajectories, compared))
    cumulative_ratio_N = np.ones(len(trajectories))
    current, optimizers, steps = start, {}, []
    for number, turns in enumerate(options.order):
        acts = [
            act
            for act in step_actions(trajectories, turns, options.actions, grouped=compared)
            if stepped_on(trajectories[act[0].trajectory], options)
        ]
        if not acts:
            continue
        old = action_logps(current if options.old_policy == "turn" else start, acts, arch, options)
        ref = action_logps(reference, acts, arch, options)
        importance = [
            joined(marks[piece.trajectory][piece.place][0][piece.position_A] for piece in act)
            for act in acts
        ]
        if options.ratio != "token":
            importance = [weight_A.mean() for weight_A in importance]
        before = step_actions(sampled, turns, options.actions, grouped=compared)
        whole = {a[0].trajectory for a in before if stepped_on(sampled[a[0].trajectory], options)}
        counted = valid - len(whole - {act[0].trajectory for act in acts})
        advantage = [
            joined(credit[piece.trajectory][piece.place][piece.position_A] for piece in act)
            for act in acts
        ]
        weight = [
            cumulative_ratio_N[act[0].trajectory] * importance_A * advantage_A
            for act, importance_A, advantage_A in zip(acts, importance, advantage, strict=True)
        ]
        scale = [
            joined(clips[p.trajectory][np.asarray(p.segment.turn_L)[p.position_A]] for p in act)
            for act in acts
        ]
        everyone, losses = [range(len(trajectories))] * options.inner_epochs, []
        own = tuple(turns) if options.moments == "turn" else "all turns"
        optimizer = optimizers.setdefault(own, Optimizer(options))
        for part in everyone if options.minibatches is None else options.minibatches[number]:
            kept = [k for k, act in enumerate(acts) if act[0].trajectory in part]
            share = shares(acts, kept, counted, options)
            columns = ([x[k] for k in kept] for x in (acts, old, ref, weight, scale, advantage))
            loss, grads, act_entropies = _of_minibatch(current, *columns, share, arch, options)
            if teachers and options.teacher_top_k is not None:
                own = [teachers[acts[k][0].trajectory] for k in kept]
                parts = [acts[k] for k in kept], own, share
                loss += teacher_loss(current, *parts, grads, arch, options)
            current = optimizer.step(current, grads)
            losses.append((loss, grads, act_entropies))
        used = used_weights(acts, advantage, cumulative_ratio_N, options)
        before_N, cumulative_ratio_N = cumulative_ratio_N, cumulative_ratio_N.copy()
        if options.cumulative_ratio:
            new = action_logps(current, acts, arch, options)
            _refresh(cumulative_ratio_N, acts, old, new, options)
        for step, (loss, grads, act_entropies) in enumerate(losses, start=1):
            after_N = cumulative_ratio_N if step == len(losses) else before_N
            steps.append(Step(tuple(turns), loss, grads, after_N, act_entropies, used))
    return Sweep(credit, steps, current)


def used_weights(
    acts: Sequence[Action],
    advantage: Sequence[np.ndarray],
    cumulative_ratio_N: np.ndarray,
    options: Options,
) -> dict[tuple[int, int], np.ndarray]:
    """`Step.used`: one number an action, repeated for its tokens, unless ratios are per token."""
    used = {}
    for act, advantage_A in zip(acts, advantage, strict=True):
        owner = act[0].trajectory
        turn_A = joined(np.asarray(p.segment.turn_L)[p.position_A] for p in act)
        if options.ratio != "token":
            advantage_A = np.full(len(turn_A), advantage_A.mean())
        for turn in {*turn_A.tolist()}:
            used[owner, turn] = cumulative_ratio_N[owner] * advantage_A[turn_A == turn]
    return used


def _credit(
    start: Weights,
    reference: Weights,
    trajectories: Sequence[Trajectory],
    values: Sequence[Sequence[np.ndarray]] | None,
    scorer: Weights | None,
    arch: Architecture,
    options: Options,
) -> list[list[np.ndarray]]:
    """Per trajectory and segment, the advantage of each token [L], as `sweep` begins with it."""
    whole = step_pieces(trajectories, range(100), grouped=grouped(options))
    penalty = [np.zeros(len(piece.position_A)) for piece in whole]
    if options.kl_in == "reward":
        logps = (piece_logps(w, whole, arch, options) for w in (start, reference))
        penalty = [options.kl_coef * (old - ref) for old, ref in zip(*logps, strict=True)]
    odds = None if scorer is None else token_odds(start, scorer, whole, arch, options)
    entropies = None
    if options.advantage == "canon":
        entropies = [
            [token_entropies(start, s.tokens_L, arch, options.temperature)[0] for s in t.segments]
            for t in trajectories
        ]
    drawn = None
    if options.advantage == "otb":
        drawn = [
            [
                token_squares(start, s.tokens_L, arch, options.temperature)
                for s in trajectory.segments
            ]
            for trajectory in trajectories
        ]
    known = values, odds, entropies
    return token_advantages(trajectories, whole, penalty, options, *known, drawn=drawn)


def add_teaching(
    credit: list[np.ndarray],
    start: Weights,
    teacher: Weights,
    trajectory: Trajectory,
    arch: Architecture,
    options: Options,
) -> None:
    """Adds coef (log teacher - log policy) of each token to its advantage, later ones' discounted.

    Args:
      credit: of one trajectory, per segment [L]; written to.
    """
    gaps = {}
    for place, segment in enumerate(trajectory.segments):
        own_L, teacher_L = (
            token_logps(weights, segment.tokens_L, arch, options.temperature)[0]
            for weights in (start, teacher)
        )
        for position, turn in enumerate(segment.turn_L):
            if turn >= 0:
                gaps[int(turn), place, position] = teacher_L[position] - own_L[position]
    later = 0.0
    for turn, place, position in sorted(gaps, reverse=True):
        later = gaps[turn, place, position] + options.teacher_discount * later
        credit[place][position] += options.teacher_coef * later


def teacher_loss(
    weights: Weights,
    acts: Sequence[Action],
    teachers: Sequence[Weights | None],
    share: Sequence[float],
    grads: Weights,
    arch: Architecture,
    options: Options,
) -> float:
    """coef times each action's mean divergence from its teacher; its gradient goes to `grads`.

    Args:
      share: per action, what its objective counts in the mean.
    """
    loss = 0.0
    for act, teacher, part in zip(acts, teachers, share, strict=True):
        each = options.teacher_coef * part / sum(len(piece.position_A) for piece in act)
        for piece in act if teacher is not None else ():
            given = piece.tokens_L, arch, options.temperature, options.teacher_top_k
            kl_L, backward = token_divergences(weights, teacher, *given)
            slope_L = np.zeros_like(kl_L)
            slope_L[piece.position_A] = each
            backward(slope_L, grads)
            loss += each * kl_L[piece.position_A].sum()
    return loss


def _of_minibatch(
    weights: Weights,
    acts: Sequence[Action],
    old: Sequence[np.ndarray],
    ref: Sequence[np.ndarray],
    weight: Sequence[np.ndarray],
    scale: Sequence[np.ndarray],
    advantage: Sequence[np.ndarray],
    share: Sequence[float],
    arch: Architecture,
    options: Options,
) -> tuple[float, Weights, list[float]]:
    """`turn_loss` and the actions' entropies, their weights limited by covariance where asked."""
    drift = None
    if options.covariance["kind"] != "none":
        now = action_logps(weights, acts, arch, options)
        weight, drift = limited(now, old, advantage, weight, options)
    entropies = action_entropies(weights, acts, arch, options)
    loss, grads = turn_loss(weights, acts, old, ref, weight, share, arch, options, drift, scale)
    return loss, grads, entropies


def token_odds(
    old: Weights, scorer: Weights, pieces: Sequence[Piece], arch: Architecture, options: Options
) -> list[np.ndarray]:
    """Per piece, log-probabilities [A] of its tokens by the scorer less those of the old policy."""
    logps = [piece_logps(w, pieces, arch, options) for w in (scorer, old)]
    return [own_A - old_A for own_A, old_A in zip(*logps, strict=True)]


@dataclass(frozen=True)
class ScorerStep:
    """The step of an implicit process reward model; the loss and accuracy are from before it."""

    loss: float
    accuracy: float
    pairs: int
    gradients: Weights
    weights: Weights


def scorer_step(
    weights: Weights,
    scorer: Weights,
    trajectories: Sequence[Trajectory],
    options: Options,
    arch: Architecture,
) -> ScorerStep:
    """One step on -log sigmoid(v_i - v_j) over pairs of a success i and a failure j of a group.

    Args:
      weights: of the old policy.
    """
    pieces = step_pieces(trajectories, range(100))
    odds = token_odds(weights, scorer, pieces, arch, options)
    score, share = {}, {}
    for piece, odds_A in zip(pieces, odds, strict=True):
        turns = 1 + max(max(s.turn_L) for s in trajectories[piece.trajectory].segments)
        share[piece.trajectory] = 1.0 if options.estimator["pair_score"] == "sum" else 1.0 / turns
        own = options.estimator["implicit_coef"] * share[piece.trajectory] * odds_A.sum()
        score[piece.trajectory] = score.get(piece.trajectory, 0.0) + own
    won = {i: trajectories[i].reward > options.estimator["success_above"] for i in score}

    def same(i, j):
        return trajectories[i].group == trajectories[j].group

    pairs = [(i, j) for i in score for j in score if won[i] and not won[j] and same(i, j)]
    loss, right, slope = 0.0, 0.0, dict.fromkeys(score, 0.0)
    for i, j in pairs:
        gap = score[i] - score[j]
        loss += np.log1p(np.exp(-gap)) / len(pairs)
        right += (0.5 if gap == 0 else float(gap > 0)) / len(pairs)
        pull = -1 / (1 + np.exp(gap)) / len(pairs)
        slope[i] += pull
        slope[j] -= pull
    grads: Weights = {}
    for piece in pieces:
        logp_L, backward = token_logps(scorer, piece.tokens_L, arch, options.temperature)
        dlogp_L = np.zeros_like(logp_L)
        each = (
            options.estimator["implicit_coef"] * share[piece.trajectory] * slope[piece.trajectory]
        )
        dlogp_L[piece.position_A] = each
        backward(dlogp_L, grads)
    return ScorerStep(loss, right, len(pairs), grads, Optimizer(options).step(scorer, grads))


def stepped_on(trajectory: Trajectory, options: Options) -> bool:
    """Whether it is not one that was cut and is left out for it."""
    return options.truncated == "keep" or trajectory.stop not in ("max_turns", "max_tokens")


def learned_from(
    weights: Weights, trajectories: Sequence[Trajectory], arch: Architecture, options: Options
) -> list[Trajectory]:
    """Trajectories with what is not learned from as context.

    That is turns that an earlier one has which is stepped on, and tokens that are too likely.
    """
    kept = learnable(trajectories, grouped(options))
    paths, seen, left = turn_paths(trajectories), set(), []
    for i, one in enumerate(trajectories):
        segments = []
        for segment in one.segments:
            turn_L = np.array(segment.turn_L)
            for turn, origin in enumerate(paths[i]):
                if origin in seen:
                    turn_L[turn_L == turn] = -1
            if options.mask_above is not None and kept[i]:
                logp_L, _ = token_logps(weights, segment.tokens_L, arch, options.temperature)
                turn_L[np.exp(logp_L) > options.mask_above] = -1
            segments.append(replace(segment, turn_L=turn_L))
        seen |= set(paths[i]) if kept[i] and stepped_on(one, options) else set()
        left.append(replace(one, segments=segments))
    return left


def _refresh(
    cumulative_ratio_N: np.ndarray,
    actions: Sequence[Action],
    old: Sequence[np.ndarray],
    new: Sequence[np.ndarray],
    options: Options,
) -> None:
    """Multiplies the ratios of the actions just updated into their trajectories' factors."""
    ratios: dict[int, float] = {}
    for action, new_A, old_A in zip(actions, new, old, strict=True):
        ratio, owner = _action_ratio(new_A - old_A, options), action[0].trajectory
        ratios[owner] = ratios.get(owner, 1.0) * ratio
    for i, ratio in ratios.items():
        cumulative_ratio_N[i] = _updated_factor(cumulative_ratio_N[i], ratio, options.weight_clip)


def turn_loss(
    weights: Weights,
    actions: Sequence[Action],
    old: Sequence[np.ndarray],
    ref: Sequence[np.ndarray],
    weight: Sequence[np.ndarray],
    share: Sequence[float],
    arch: Architecture,
    options: Options,
    drift: Sequence[np.ndarray] | None = None,
    scale: Sequence[np.ndarray] | None = None,
) -> tuple[float, Weights]:
    """The negative objective of one step, and its gradients.

    Args:
      old, ref: per action, log-probabilities [A] under the old and the reference policy.
      weight: per action, M of each token [A].
      share: per action, what its objective counts in the mean.
      drift: per action, 1 at tokens with a penalty on |log s| [A]; None: nowhere.
      scale: per action, of each token's clip range [A]; None: 1.
    """
    loss, grads = 0.0, {}
    drift = [np.zeros(len(old_A)) for old_A in old] if drift is None else drift
    scale = [np.ones(len(old_A)) for old_A in old] if scale is None else scale
    columns = zip(actions, old, ref, weight, share, drift, scale, strict=True)
    for action, old_A, ref_A, weight_A, part, drift_A, scale_A in columns:
        passes = [token_logps(weights, p.tokens_L, arch, options.temperature) for p in action]
        pairs = list(zip(action, passes, strict=True))
        logp_A = joined(logp_L[piece.position_A] for piece, (logp_L, _) in pairs)
        value, slope_A = piece_objective(logp_A, old_A, ref_A, weight_A, options, scale_A)
        penalty = options.covariance.get("coef", 0.0) * drift_A / len(old_A)
        value -= penalty @ np.abs(logp_A - old_A)
        slope_A = slope_A - penalty * np.sign(logp_A - old_A)
        value += _entropy_bonus(weights, action, part, grads, arch, options)
        loss -= value * part
        ends = np.cumsum([len(piece.position_A) for piece in action])[:-1]
        for (piece, (logp_L, backward)), own_A in zip(pairs, np.split(slope_A, ends), strict=True):
            dlogp_L = np.zeros_like(logp_L)
            dlogp_L[piece.position_A] = -own_A * part
            backward(dlogp_L, grads)
    return loss, grads


def _entropy_bonus(
    weights: Weights,
    action: Action,
    part: float,
    grads: Weights,
    arch: Architecture,
    options: Options,
) -> float:
    """An action's entropy bonus; its gradient, times what the action counts, goes to `grads`."""
    count, total = sum(len(piece.position_A) for piece in action), 0.0
    for piece in action if options.entropy_coef else ():
        entropy_L, backward = token_entropies(weights, piece.tokens_L, arch, options.temperature)
        slope_L = np.zeros_like(entropy_L)
        slope_L[piece.position_A] = -options.entropy_coef * part / count
        backward(slope_L, grads)
        total += entropy_L[piece.position_A].sum()
    return options.entropy_coef * total / count


def action_entropies(
    weights: Weights, actions: Sequence[Action], arch: Architecture, options: Options
) -> list[float]:
    """Per action, the mean entropy of what its tokens are drawn from; none without a bonus."""

    def entropy_A(piece: Piece) -> np.ndarray:
        entropy_L, _ = token_entropies(weights, piece.tokens_L, arch, options.temperature)
        return entropy_L[piece.position_A]

    return [joined(map(entropy_A, act)).mean() for act in actions if options.entropy_coef]


def shares(
    actions: Sequence[Action], part: Sequence[int], valid: int, options: Options
) -> list[float]:
    """What the objective of some of a step's actions (a mean over tokens) counts in their mean.

    Args:
      actions: of the whole step. part: the numbers of those that are stepped on.
      valid: trajectories that are learned from, those without the step's turns included.
    """
    active, own = (
        len({actions[k][0].trajectory for k in some}) for some in (range(len(actions)), part)
    )
    # A part counts for as many trajectories as it has of those with the step's turns.
    counted = {"all": valid, "active": active}[options.normalize_by] * own / active
    sizes = [sum(len(piece.position_A) for piece in actions[k]) for k in part]
    if options.loss_aggregation == "action":
        return [1 / counted for _ in part]
    if options.loss_aggregation == "token":
        return [size / sum(sizes) for size in sizes]
    assert options.loss_aggregation == "constant", options.loss_aggregation
    return [size / (counted * options.longest) for size in sizes]


def step_pieces(
    trajectories: Sequence[Trajectory],
    turns: Sequence[int],
    within: Sequence[int] | None = None,
    *,
    grouped: bool = True,
) -> list[Piece]:
    """The tokens that a step on `turns` updates: a piece for each segment that has any of them.

    Args:
      within: the turns of one action; None: all are.
      grouped: as for `learnable`.
    """
    pieces = []
    kept = learnable(trajectories, grouped)
    wanted = [turn for turn in turns if within is None or turn in within]
    for i, trajectory in enumerate(trajectories):
        for place, segment in enumerate(trajectory.segments if kept[i] else ()):
            position_A = np.flatnonzero(np.isin(segment.turn_L, wanted))
            if len(position_A):
                pieces.append(Piece(i, place, segment, position_A))
    return pieces


def step_actions(
    trajectories: Sequence[Trajectory],
    turns: Sequence[int],
    actions: Sequence[Sequence[int]] | None = None,
    *,
    grouped: bool = True,
) -> list[Action]:
    """The actions that a step on `turns` updates, in whatever segments their tokens lie.

    Args:
      actions: as for `Options`. grouped: as for `learnable`.
    """
    found: list[Action] = []
    for within in [None] if actions is None else actions:
        pieces = step_pieces(trajectories, turns, within, grouped=grouped)
        found += [[p for p in pieces if p.trajectory == i] for i in range(len(trajectories))]
    return sorted((action for action in found if action), key=lambda action: action[0].trajectory)


def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """What an action's pieces have of its tokens, as one array [A]."""
    return np.concatenate(list(parts))


def importance_of(odds_A: np.ndarray, options: Mapping[str, object]) -> tuple[float, bool]:
    """The weight of tokens that have one quotient, and whether they are learned from.

    Args:
      odds_A: of each, how much likelier the trainer finds it than its sampler did.
      options: of `importance`.
    """
    root = {"sequence": 1, "geometric": len(odds_A)}[options.get("level", "sequence")]
    odds, clip, low = np.prod(odds_A) ** (1 / root), options["clip"], options.get("low") or 0
    method = options.get("method", "truncate")
    if method == "truncate":
        return min(odds, clip), True
    inside = low <= odds <= clip
    return inside * {"mask": odds, "reject": 1.0}[method], inside


def importances(
    start: Weights, trajectories: Sequence[Trajectory], arch: Architecture, options: Options
) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Per trajectory and segment, each token's weight [L] and whether it is rejected [L].

    Args:
      start: weights under which the trainer finds the tokens, those before the sweep.
    """
    marks = [
        [(np.ones(len(s.tokens_L)), np.zeros(len(s.tokens_L), bool)) for s in t.segments]
        for t in trajectories
    ]
    if options.importance is None:
        return marks
    per = options.importance.get("per", "action")
    if (per, options.ratio) == ("action", "token"):
        per = "token"
    own, turns = {"grouped": grouped(options)}, range(100)
    units = {
        "trajectory": lambda: step_actions(trajectories, turns, **own),
        "turn": lambda: [a for t in turns for a in step_actions(trajectories, [t], **own)],
        "action": lambda: [
            act
            for of_step in options.order
            for act in step_actions(trajectories, of_step, options.actions, **own)
        ],
        "token": lambda: [
            [replace(piece, position_A=piece.position_A[k : k + 1])]
            for piece in step_pieces(trajectories, turns, **own)
            for k in range(len(piece.position_A))
        ],
    }[per]()
    for unit in units:
        said_A = joined(np.asarray(p.segment.logp_L, float)[p.position_A] for p in unit)
        found_A = joined(piece_logps(start, unit, arch, options))
        weight, kept = importance_of(np.exp(found_A) / np.exp(said_A), options.importance)
        for piece in unit:
            weight_L, rejected_L = marks[piece.trajectory][piece.place]
            weight_L[piece.position_A], rejected_L[piece.position_A] = weight, not kept
    return marks


def without_rejected(
    trajectories: Sequence[Trajectory], marks: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]
) -> list[Trajectory]:
    """Trajectories with rejected tokens as context; marks: of `importances`."""
    return [
        replace(
            one,
            segments=[
                replace(segment, turn_L=np.where(rejected_L, -1, segment.turn_L))
                for segment, (_, rejected_L) in zip(one.segments, of_segments, strict=True)
            ],
        )
        for one, of_segments in zip(trajectories, marks, strict=True)
    ]


def action_logps(
    weights: Weights, actions: Sequence[Action], arch: Architecture, options: Options
) -> list[np.ndarray]:
    """Per action, log-probabilities [A] of its tokens."""
    return [joined(piece_logps(weights, action, arch, options)) for action in actions]


def piece_logps(
    weights: Weights, pieces: Sequence[Piece], arch: Architecture, options: Options
) -> list[np.ndarray]:
    """Per piece, log-probabilities [A] of its tokens."""
    return [
        token_logps(weights, p.tokens_L, arch, options.temperature)[0][p.position_A] for p in pieces
    ]


def piece_objective(
    logp_A: np.ndarray,
    old_A: np.ndarray,
    ref_A: np.ndarray,
    weight_A: np.ndarray,
    options: Options,
    scale_A: np.ndarray | float = 1.0,
) -> tuple[float, np.ndarray]:
    """One action's objective, to maximise, and its derivative by each token's log-probability.

    Args:
      weight_A: M of each token, or one for all of them. Unless ratios are per token, the action's
        is their mean.
      scale_A: of the clip range; likewise.
    """
    count = len(logp_A)
    weight_A, scale_A = (np.broadcast_to(x, count) for x in (weight_A, scale_A))
    value, slope_A = 0.0, np.zeros(count)
    if options.kl_in == "loss":
        to_ref_A = np.clip(ref_A - logp_A, -20, 20)  # the bounds are verl's
        k3_A = np.exp(to_ref_A) - to_ref_A - 1
        value -= options.kl_coef * np.mean(np.minimum(k3_A, 10))
        slope_of = {
            "k3": np.where(k3_A > 10, 0, 1 - np.exp(to_ref_A)),
            "k3+": logp_A - ref_A,
        }
        slope_A -= options.kl_coef * slope_of[options.kl_estimate] / count
    if options.ratio == "token":
        for j in range(count):
            term, slope = _term(logp_A[j], logp_A[j] - old_A[j], weight_A[j], options, scale_A[j])
            value += term / count
            slope_A[j] += slope / count
        return value, slope_A
    each = {"geometric": 1 / count, "product": 1.0}[options.ratio]
    difference_A, free_A = logp_A - old_A, np.ones(count)
    if options.objective == "gmpo":
        difference_A, free_A = _limited(difference_A, weight_A.mean(), options, scale_A.mean())
    logp, difference = (x_A.sum() * each for x_A in (logp_A, difference_A))
    term, slope = _term(logp, difference, weight_A.mean(), options, scale_A.mean())
    return value + term, slope_A + slope * each * free_A


def _limited(
    difference_A: np.ndarray, weight: float, options: Options, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """GMPO: log-ratios no further on the side where the term rises, and 0 where it bounds one."""
    low = -np.inf if options.clip_low is None or weight >= 0 else -scale * options.clip_low
    high = np.inf if options.clip_high is None or weight <= 0 else scale * options.clip_high
    inside_A = (difference_A >= low) & (difference_A <= high)
    return np.clip(difference_A, low, high), inside_A.astype(float)


def _term(
    logp: float, difference: float, weight: float, options: Options, scale: float
) -> tuple[float, float]:
    """What is maximised of a token or an action, and its derivative by log pi.

    Args:
      difference: log pi - log of the old policy, at the level of the ratio, as `logp`.
      scale: of the clip range.
    """
    ratio = np.exp(difference)
    low = -np.inf if options.clip_low is None else 1 - scale * options.clip_low
    high = np.inf if options.clip_high is None else 1 + scale * options.clip_high
    bounded = min(max(ratio, low), high)
    if options.objective == "logp":
        return weight * logp, weight
    if options.objective == "cispo":
        return bounded * weight * logp, bounded * weight
    if options.objective == "gmpo":
        return ratio * weight, ratio * weight
    if options.objective == "sapo":
        tau = options.tau_pos if weight > 0 else options.tau_neg
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return 4 / tau * gate * weight, 4 * gate * (1 - gate) * ratio * weight
    if options.objective in ("dppo_tv", "dppo_kl"):
        now, before = np.exp(logp), np.exp(logp - difference)
        away = abs(now - before)
        if options.objective == "dppo_kl":
            others = np.log((1 - before + 1e-8) / (1 - now + 1e-8))
            away = -before * difference + (1 - before) * others
        bound = options.clip_high if weight > 0 else options.clip_low
        leaves = now > before if weight > 0 else now < before
        if bound is not None and leaves and away > scale * bound:
            return 0.0, 0.0
        held = ratio if options.clip_dual is None else min(ratio, options.clip_dual)
        return held * weight * logp, held * weight
    assert options.objective == "clipped", options.objective
    plain, clipped = ratio * weight, bounded * weight
    if options.clip_dual is not None and weight < 0 and ratio > options.clip_dual:
        return options.clip_dual * weight, 0.0
    # At a tie the derivative is that of s W.
    return (plain, plain) if plain <= clipped else (clipped, 0.0)


def _action_ratio(difference_A: np.ndarray, options: Options) -> float:
    """An action's ratio: of all its tokens for `product`, else their geometric mean."""
    return np.exp(difference_A.sum() if options.ratio == "product" else difference_A.mean())


def _updated_factor(factor: float, ratio: float, clip: float | None) -> float:
    if clip is None:
        return min(factor * ratio, np.exp(30))
    low, high = 1 - clip, 1 + clip
    return min(max(factor * min(max(ratio, low), high), low), high)


class Optimizer:
    """Plain gradient descent or Adam, after an optional bound on the gradients' global norm."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._count = 0
        self._mean: Weights = {}
        self._square: Weights = {}

    def step(self, weights: Weights, grads: Weights) -> Weights:
        bound = self._options.max_grad_norm
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        if bound is not None and norm >= bound:
            grads = {name: g / norm * bound for name, g in grads.items()}
        direction = {"sgd": self._sgd, "adam": self._adam}[self._options.optimizer](grads)
        rate = self._options.learning_rate
        return {name: value - rate * direction[name] for name, value in weights.items()}

    def _sgd(self, grads: Weights) -> Weights:
        return grads

    def _adam(self, grads: Weights) -> Weights:
        self._count += 1
        direction = {}
        for name, g in grads.items():
            self._mean[name] = 0.9 * self._mean.get(name, 0.0) + 0.1 * g
            self._square[name] = 0.999 * self._square.get(name, 0.0) + 0.001 * g**2
            mean = self._mean[name] / (1 - 0.9**self._count)
            square = self._square[name] / (1 - 0.999**self._count)
            direction[name] = mean / (np.sqrt(square) + 1e-8)
        return direction
