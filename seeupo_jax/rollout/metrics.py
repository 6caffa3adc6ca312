"""What a collection says about the policy, the sampler and the environments."""

from __future__ import annotations

import textwrap
from collections import Counter

import numpy as np

from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.resample import groups_of, has_signal
from seeupo_jax.types import learnable


def rollout_metrics(collected: Collected) -> dict[str, float]:
    """What a collection says about the policy and about the sampler."""
    good = [t for t in collected.sampled if not t.failed]
    stops = [t.stop for t in collected.sampled]
    trajectories = collected.trajectories
    groups = groups_of(trajectories)
    kept = {trajectories[i].group for i in np.flatnonzero(learnable(trajectories))}
    idle = sum(not has_signal(group) for group in groups.values())
    mean = lambda values: float(np.mean(values)) if good else float("nan")  # noqa: E731
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
        "rollout/failed": len(stops) - len(good),
        "rollout/groups_dropped": len(groups) - len(kept),
        "rollout/no_signal_fraction": idle / len(groups),
        "rollout/rounds": collected.rounds,
        "rollout/retries": sum(t.info["retries"] for t in collected.sampled),
        "time/environment_s": collected.environment_s,
        "time/reset_s": collected.reset_s,
        **counts,
        **usage,
    }


def most_frequent_failure(collected: Collected) -> str | None:
    """Why environments failed, in a sentence; None where none did."""
    reasons = Counter(t.info["failure"] for t in collected.sampled if t.failed)
    if not reasons:
        return None
    (reason, times), total = reasons.most_common(1)[0], sum(reasons.values())
    return f"{total} environments failed, {times} of them so: {textwrap.shorten(reason, 200)}"
