"""One sweep over stored trajectories, from a fresh optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from seeupo_jax.configuration.entry_points import find_entry
from seeupo_jax.configuration.reward import reward_weights
from seeupo_jax.configuration.schema import Config, Rollout
from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.credit.advantages import check_rewards
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_state import OptimizerStep
from seeupo_jax.parallel.mesh import make_mesh, row_shards
from seeupo_jax.policy.files.tokenizer import unassigned_ids
from seeupo_jax.policy.files.weights import load_architecture, read_tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.rewards.reward_functions import weighted_sum
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.training.checks import check_experts, check_learner, check_optimizer
from seeupo_jax.trajectories.json_lines import plain
from seeupo_jax.trajectories.rewards_by_name import named_rewards
from seeupo_jax.trajectories.stored import check_trajectories, read_stored
from seeupo_jax.types import CONTEXT, Trajectory, learnable

ITERATION = 1  # of every sweep over stored trajectories


def update_stored(
    config: Config, policy: build.Policy, params: Any, trajectories: Sequence[Trajectory]
) -> tuple[Any, dict[str, Any]]:
    """Runs one sweep from a fresh optimizer state.

    Args:
      config: with room for the trajectories; see `fit_config`.
      params: those of the policy's parameters that train; the reference policy's too.

    Returns: the parameters after it, and plain values for JSON: `steps` in the order in which they
      were taken (each with its turns, loss, kl, grad_norm, clip_fraction, and the weight M of every
      trajectory), `advantages` of the trajectories, `turn_advantages` of their turns, and
      `metrics`. A trajectory that is left out has None, as has a turn without any token to learn
      from; where advantages differ between tokens, it is their mean over those concerned.

    Raises:
      ValueError: teachers of labels, which stored trajectories do not have.
    """
    if config.teacher.by_task:
        raise ValueError(
            f"config.teacher.by_task: got {dict(config.teacher.by_task)}; allowed: {{}}, since"
            " stored trajectories have no labels of tasks."
        )
    learner, state, reference = build_learner(config, policy, params)
    with jax.set_mesh(policy.mesh):
        swept = sweep(learner, state, reference, trajectories, iteration=ITERATION)
    # Of whole trajectories: a shared turn's numbers are those of all that have it.
    without_forks = [replace(each, parent=None, fork=0) for each in trajectories]
    rows = learner.rows(without_forks)
    unknown = [np.full(len(tokens), np.nan) for tokens in rows.tokens]  # of a sweep without a step
    advantage = swept.steps[0].advantage if swept.steps else unknown
    return swept.train.params, {
        "steps": [plain(step_values(rows, step)) for step in swept.steps],
        "advantages": plain(_means(rows, advantage, range(rows.turns))),
        "turn_advantages": _turn_means(rows, advantage, trajectories),
        "metrics": {name: plain(value) for name, value in swept.metrics.items()},
    }


def step_values(rows: SegmentBatch, step: OptimizerStep) -> dict[str, Any]:
    """A step's numbers by their names in the JSON of `update`; `weights` float32 [N], NaN: none."""
    metrics = {name: float(value) for name, value in jax.device_get(step.metrics).items()}
    advantage_N = _means(rows, step.advantage, step.turns)
    advantage_N[rows.trajectory_S[~rows.updated_S]] = np.nan
    return {
        "turns": list(step.turns),
        "loss": metrics["loss"],
        "kl": metrics["kl"] / metrics["actions"],
        "grad_norm": metrics["grad_norm"],
        "clip_fraction": metrics["clipped"] / metrics["actions"],
        "weights": advantage_N * np.asarray(step.cumulative_ratio_N),
    }


def _means(rows: SegmentBatch, advantage: Sequence[np.ndarray], turns: Sequence[int]) -> np.ndarray:
    """Mean advantage of each trajectory's tokens of some turns, float32 [N]; NaN without tokens.

    Without such turns it is that of all its action tokens, and without actions of all its tokens.
    """
    owner = np.repeat(rows.trajectory_S, [len(tokens) for tokens in rows.tokens])
    turn, value = np.concatenate(rows.turn), np.concatenate(advantage).astype(np.float64)
    mean_N = np.full(rows.trajectories, np.nan)
    for mask in (turn == turn, turn != CONTEXT, np.isin(turn, turns)):
        count_N = np.bincount(owner[mask], minlength=rows.trajectories)
        total_N = np.bincount(owner[mask], value[mask], minlength=rows.trajectories)
        mean_N = np.where(count_N > 0, total_N / np.maximum(count_N, 1), mean_N)
    return mean_N.astype(np.float32)


def _turn_means(
    rows: SegmentBatch, advantage: Sequence[np.ndarray], trajectories: Sequence[Trajectory]
) -> list[list[float | None] | None]:
    """Mean advantage of each turn's tokens, a list a trajectory; None for those left out."""
    owner = np.repeat(rows.trajectory_S, [len(tokens) for tokens in rows.tokens])
    turn, value = np.concatenate(rows.turn), np.concatenate(advantage).astype(np.float64)
    turns_N, acted = [t.turns for t in trajectories], turn != CONTEXT
    sum_NK, count_NK = np.zeros((2, len(turns_N), max(turns_N)))
    np.add.at(sum_NK, (owner[acted], turn[acted]), value[acted])
    np.add.at(count_NK, (owner[acted], turn[acted]), 1)
    mean_NK = np.where(count_NK > 0, sum_NK / np.maximum(count_NK, 1), np.nan).astype(np.float32)
    return [
        plain(mean_K[:turns]) if row in rows.trajectory_S else None
        for row, (turns, mean_K) in enumerate(zip(turns_N, mean_NK, strict=True))
    ]


def fit_config(config: Config, trajectories: Sequence[Trajectory]) -> Config:
    """The configuration with room for trajectories, and for nothing that it samples itself.

    Raises:
      ValueError: more turns than `algorithm.custom_order` orders.
    """
    rows = SegmentBatch.of(trajectories, grouped=config.algorithm.grouped)
    rollout, mesh = config.rollout, make_mesh(config.mesh)
    if config.algorithm.order == "custom" and rows.turns > rollout.max_turns:
        raise ValueError(
            f"config.rollout.max_turns: got {rollout.max_turns}; allowed with order=custom: at"
            f" least the {rows.turns} turns of the trajectories."
        )
    acted = (np.bincount(turn_L[turn_L != CONTEXT]) for turn_L in rows.turn)
    action = max(int(count.max(initial=0)) for count in acted)
    length = max(map(len, rows.tokens))
    if (
        config.algorithm.loss_aggregation == "constant"
    ):  # whose constant is the length allowed, not used
        action = max(action, rollout.max_action_tokens)
        length = max(length, rollout.max_context)
    row_devices = row_shards(mesh)
    rollout = Rollout(
        tasks=row_devices * -(-len(trajectories) // row_devices),
        group_size=1,
        max_turns=max(rows.turns, rollout.max_turns),
        max_action_tokens=action,
        max_context=length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        grammar=rollout.grammar,
    )
    buckets = config.batching.buckets
    if buckets and buckets[-1] < length:
        parts = mesh.shape["context"]  # that a row is cut into
        buckets = (*buckets, parts * -(-length // parts))
    return replace(
        config,
        rollout=rollout,
        batching=replace(config.batching, buckets=buckets),
        telemetry=replace(config.telemetry, entropy=False),  # not reported
    )


def prepare_update(
    config: Config, path: str, log: Callable[[str], None]
) -> tuple[Config, list[Trajectory]]:
    """Reads the trajectories at `path`, for the model at `config.model.path`.

    Args:
      log: takes a sentence on what is not read, and how many trajectories are left out.

    Returns: the configuration that fits them, and the trajectories.

    Raises:
      ValueError: one sentence with what was got and what is allowed.
    """
    if config.optimizer.ema is not None:
        log("config.optimizer.ema does not count: the weights after the sweep are written.")
        config = replace(config, optimizer=replace(config.optimizer, ema=None))
    arch, tokenizer = (
        load_architecture(config.model.path),
        read_tokenizer(config.model.path, config.chat),
    )
    arch = replace(arch, unassigned=unassigned_ids(tokenizer, arch.vocab_size))
    algorithm, grouped = config.algorithm, config.algorithm.grouped
    trajectories = read_stored(
        path,
        log=log,
        grouped=grouped,
        forks=algorithm.reads_forks,
        timeouts_count=config.env.timeout_as == "zero_reward",
    )
    trajectories = _weigh(config, trajectories, log)
    check_trajectories(
        trajectories,
        vocab_size=arch.vocab_size,
        max_positions=arch.max_positions,
        unassigned_V=arch.unassigned_V() if arch.unassigned else None,
        max_reward=config.env.max_reward,
        recorded=config.algorithm.importance is not None,
    )
    check_rewards(config.algorithm, trajectories)
    check_experts(config, arch)
    if config.algorithm.router_replay == "rollout":
        raise ValueError(
            "config.algorithm.router_replay: got 'rollout' with stored trajectories, which have no"
            " record of the sampler's experts; allowed: none or old."
        )
    config = fit_config(config, trajectories)
    mesh = make_mesh(config.mesh)
    check_learner(config, mesh)
    build.check_layout(config, mesh)
    check_optimizer(config, mesh, build.total_steps(config))
    if algorithm.estimator.scores_answers:
        given = sum(bool(t.turn_rewards) for t in trajectories)
        log(
            "the gain of a turn is its reward, since stored trajectories have no reference answers;"
            f" {given} of {len(trajectories)} lines have turn_rewards."
        )
    learned_N = learnable(trajectories, grouped=grouped)
    cut_N = np.array([t.truncated for t in trajectories], bool) & learned_N
    if algorithm.truncated == "mask" and cut_N.any():
        if (cut_N == learned_N).all():
            raise ValueError(
                "config.algorithm.truncated: got 'mask' with trajectories that were all cut"
                " (stop max_turns or max_tokens); allowed: keep."
            )
        log(f"{int(cut_N.sum())} of {len(trajectories)} trajectories were cut and are masked.")
    excluded = int(np.sum(~learned_N))
    if excluded:
        why = "they failed, or all the others of their group did" if grouped else "they failed"
        log(f"{excluded} of {len(trajectories)} trajectories are left out: {why}.")
    return config, trajectories


def _weigh(
    config: Config, trajectories: list[Trajectory], log: Callable[[str], None]
) -> list[Trajectory]:
    """Trajectories whose `reward` is the sum of their named rewards by `config.rewards`, if given.

    Raises:
      ValueError: a weight of a name that no trajectory has.
    """
    names = [*named_rewards([t for t in trajectories if not t.failed])]
    if not config.rewards:
        return trajectories
    if not names:
        log("config.rewards does not count: no trajectory has `rewards`.")
        return trajectories
    for number, reward in enumerate(config.rewards):
        if reward.label not in names:
            raise ValueError(
                f"config.rewards[{number}].name: got {reward.label}, which no trajectory has;"
                f" allowed: {', '.join(names)}."
            )
    algorithm, given = config.algorithm, sum(bool(t.turn_rewards) for t in trajectories)
    needs = find_entry("advantage", algorithm.advantage).needs
    if given and (algorithm.by_turn or "reward_NL" in needs):
        log(
            f"config.rewards does not count in the turn_rewards of {given} of {len(trajectories)}"
            f" lines, which advantage={algorithm.advantage} reads as they stand."
        )
    weights = reward_weights(config.rewards)
    return [
        replace(t, reward_table=t.reward_table.with_reward(weighted_sum(t.rewards, weights)))
        if t.rewards
        else t
        for t in trajectories
    ]
