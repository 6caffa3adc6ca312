"""Metrics of a collection: of the policy, the sampler and the environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from seeupo_jax.configuration.reward import Reward
from seeupo_jax.configuration.role_schema import POLICY
from seeupo_jax.configuration.user_code import in_one_line
from seeupo_jax.envs.base import ENVIRONMENT, TURNS
from seeupo_jax.policy.files.rewritten import RewrittenEpisodes
from seeupo_jax.rewards.scorer import REWARD_FAILURE
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.resample import groups_of, has_signal
from seeupo_jax.trajectories.rewards_by_name import named_rewards
from seeupo_jax.trajectories.roles import rewards_by_role, turn_roles
from seeupo_jax.trajectories.states import EXECUTED
from seeupo_jax.types import CONTEXT, Trajectory, learnable

# Of `info`, of agents: why one came to nothing, its sampling parameters without effect, its calls
# that were refused, and its conversations side by side.
AGENT_FAILURE, IGNORED = "agent_failure", "ignored_sampling"
REFUSED, LINEAGES = "refused_calls", "lineages"
_CAUSES = 5  # of failures that have a metric of their own
_CAUSE = 80  # characters of it
TRUNCATED = 0.1  # share of trajectories that the limit on context may stop without a warning


def rollout_metrics(
    collected: Collected,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    *,
    grouped: bool = True,
    weights: Mapping[str, float] | None = None,
    by_turn: bool = False,
    centred: bool = False,
) -> dict[str, float]:
    """Metrics of a collection: of the policy and of the sampler.

    Args:
      labels: by task; None: there are none.
      grouped: as for `learnable`.
      weights, by_turn, centred: as for `has_signal`.
    """
    good = [t for t in collected.sampled if t.played]
    stops = [t.stop for t in collected.sampled]
    trajectories = collected.trajectories
    groups = groups_of(trajectories)
    trained = np.flatnonzero(learnable(trajectories, grouped=grouped))
    trained_groups = {trajectories[i].group for i in trained}
    compared = {"by_turn": by_turn, "centred": centred}
    idle = sum(not has_signal(group, weights, **compared) for group in groups.values())

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if good else float("nan")

    counts = {f"rollout/stop_{name}": stops.count(name) for name in sorted(set(stops))}
    usage = {f"rollout/{name}": count for name, count in collected.usage.items()}
    return {
        "rollout/success_rate": mean([t.info["score"] >= 1 for t in good]),
        "rollout/reward_mean": mean([t.reward for t in good]),
        "rollout/turns_mean": mean([t.turns for t in good]),
        "rollout/segments_mean": mean([len(t.segments) for t in good]),
        "rollout/action_tokens": collected.sampled_tokens,
        "rollout/context_tokens": collected.context_tokens,
        "rollout/tokens_per_second": collected.sampled_tokens / collected.wall_s,
        "rollout/failed": sum(t.failed for t in collected.sampled),
        "rollout/timeouts": stops.count("timeout"),
        "rollout/timeouts_counted": sum(t.timeout_counts for t in collected.sampled),
        "rollout/groups_dropped": len(groups) - len(trained_groups),
        "rollout/no_signal_fraction": idle / len(groups),
        "rollout/repeated_tasks": len(groups) - len({t.task_id for t in trajectories}),
        "rollout/rounds": collected.rounds,
        "rollout/retries": sum(t.info["retries"] for t in collected.sampled),
        "time/environment_s": collected.environment_s,
        "time/reset_s": collected.reset_s,
        **counts,
        **usage,
        **{f"time/{name}": seconds for name, seconds in collected.seconds.items()},
        **_lengths(good),
        **_by_kind(good, {} if labels is None else labels),
        **_causes(collected),
        **_by_name(collected, good),
        **_executed(good),
        **_of_agents(collected, good),
        **_by_role(good),
    }


def _by_role(good: Sequence[Trajectory]) -> dict[str, float]:
    """For each role its reward and its turns; empty where no conversation is of a role."""
    rewards: dict[str, list[float]] = {}
    turns = Counter[str]()
    if not any(segment.role for t in good for segment in t.segments):
        return {}
    for trajectory in good:
        turns.update(turn_roles(trajectory))
        for role, reward in rewards_by_role(trajectory).items():
            rewards.setdefault(role or POLICY, []).append(reward)
    means = {f"rollout/role_reward/{role}": float(np.mean(rewards[role])) for role in rewards}
    return means | {f"rollout/role_turns/{role or POLICY}": n for role, n in turns.items()}


def _by_name(collected: Collected, good: Sequence[Trajectory]) -> dict[str, float]:
    """For each named reward how many episodes lack it, for which cause; and the wait."""
    named = named_rewards(good)
    means = {f"rollout/reward/{name}": float(each_N.mean()) for name, each_N in named.items()}
    means |= {f"rollout/reward_std/{name}": float(each_N.std()) for name, each_N in named.items()}
    causes = (t.info[REWARD_FAILURE] for t in collected.sampled if REWARD_FAILURE in t.info)
    failed = {f"rollout/reward_failed/{cause}": n for cause, n in sorted(Counter(causes).items())}
    if means or failed:
        failed["time/reward_s"] = collected.reward_s
    return means | failed


def _executed(good: Sequence[Trajectory]) -> dict[str, float]:
    """The share of turns whose action was executed, of the episodes that report it."""
    executed = [each for t in good for each in t.info.get(EXECUTED, ())]
    return {"rollout/executed_fraction": float(np.mean(executed))} if executed else {}


def _of_agents(collected: Collected, good: Sequence[Trajectory]) -> dict[str, float]:
    """Causes of agents' failures, and counts of their refused and ignored calls."""
    infos = [t.info for t in collected.sampled if LINEAGES in t.info]
    if not infos:
        return {}
    causes = Counter(info[AGENT_FAILURE] for info in infos if AGENT_FAILURE in info)
    lineages = [t.info[LINEAGES] for t in good]
    return {f"rollout/agent_failed/{cause}": n for cause, n in sorted(causes.items())} | {
        "rollout/ignored_sampling": sum(info.get(IGNORED, 0) for info in infos),
        "rollout/refused_calls": sum(info[REFUSED] for info in infos),
        "rollout/lineages_mean": float(np.mean(lineages)) if lineages else float("nan"),
    }


def unpaid_rewards(collected: Collected, rewards: Sequence[Reward]) -> str | None:
    """A sentence on configured names that no reward of these trajectories has."""
    present = named_rewards([t for t in collected.sampled if not t.failed])
    missing = [each.label for each in rewards if each.label not in present]
    if not present or not missing:
        return None
    return (
        f"config.rewards weighs {', '.join(missing)}, which no trajectory has; they have"
        f" {', '.join(present)}."
    )


def _lengths(good: Sequence[Trajectory]) -> dict[str, float]:
    """Tokens a trajectory, by who wrote them; those of a rewritten context once more."""
    turns = [np.concatenate([s.turn_L for s in t.segments]) for t in good if t.segments]
    acted = [int((turn_L != CONTEXT).sum()) for turn_L in turns]
    read = [int((turn_L == CONTEXT).sum()) for turn_L in turns]
    return {
        f"rollout/{name}_tokens_{kind}": float(find(counts))
        for name, counts in (("action", acted), ("context", read))
        for kind, find in (("mean", np.mean), ("p90", lambda x: np.percentile(x, 90)))
        if counts
    }


def _by_kind(
    good: Sequence[Trajectory], labels: Mapping[str, Mapping[str, str]]
) -> dict[str, float]:
    """Success by number of turns and by each label of the tasks, and the rewards of each
    environment of a mixture."""
    kinds: dict[str, list[bool]] = {}
    rewards: dict[str, list[float]] = {}
    for trajectory in good:
        episode_kinds = [f"{TURNS}={trajectory.turns}"]
        episode_kinds += [f"{label}={v}" for label, v in labels.get(trajectory.task_id, {}).items()]
        for kind in episode_kinds:
            kinds.setdefault(kind, []).append(trajectory.info["score"] >= 1)
            if kind.startswith(f"{ENVIRONMENT}="):
                rewards.setdefault(kind, []).append(trajectory.reward)
    counts = {
        f"rollout/trajectories/{kind}": len(won)
        for kind, won in kinds.items()
        if kind.startswith((f"{TURNS}=", f"{ENVIRONMENT}="))
    }
    rates = {f"rollout/success_rate/{kind}": float(np.mean(won)) for kind, won in kinds.items()}
    means = {
        f"rollout/reward_mean/{kind}": float(np.mean(rewards[kind])) for kind in sorted(rewards)
    }
    return dict(sorted(rates.items())) | dict(sorted(counts.items())) | means


def _causes(collected: Collected) -> dict[str, float]:
    """How many environments failed for each of the most frequent reasons."""
    reasons = (str(t.info["failure"]) for t in collected.sampled if t.failed)
    counts = Counter(in_one_line(reason, _CAUSE) for reason in reasons)
    return {f"rollout/failed/cause={cause}": n for cause, n in counts.most_common(_CAUSES)}


def most_frequent_failure(collected: Collected) -> str | None:
    """Why environments or agents failed, in a sentence; None where none did."""
    reasons = Counter(t.info["failure"] for t in collected.sampled if t.failed)
    if not reasons:
        return None
    (reason, times), total = reasons.most_common(1)[0], sum(reasons.values())
    who = "agents" if any(LINEAGES in t.info for t in collected.sampled) else "environments"
    return f"{total} {who} failed, {times} of them so: {in_one_line(reason, 200)}"


def rewritten_episodes(collected: Collected) -> RewrittenEpisodes:
    """Counts of episodes; without those of agents that had several conversations side by side."""
    counts = RewrittenEpisodes()
    for trajectory in collected.sampled:
        if trajectory.played and trajectory.info.get(LINEAGES, 1) == 1:
            for role in dict.fromkeys(segment.role for segment in trajectory.segments):
                counts.add([each for each in trajectory.segments if each.role == role])
    return counts


def truncation(collected: Collected, max_context: int) -> str | None:
    """How many trajectories the limit on context stopped, in a sentence, if more than a tenth."""
    cut = [t for t in collected.sampled if t.stop == "max_tokens"]
    if len(cut) <= TRUNCATED * len(collected.sampled):
        return None
    early = sum(t.turns == 0 for t in cut)
    return (
        f"{len(cut)} of {len(collected.sampled)} trajectories were stopped by max_tokens, {early}"
        f" of them before their first action: rollout.max_context={max_context} leaves no room for"
        " one more action; raise it, or shorten what the environment shows."
    )
