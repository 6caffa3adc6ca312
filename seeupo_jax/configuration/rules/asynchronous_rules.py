"""Which options go with collection beside training, and with trajectories of earlier policies."""

from __future__ import annotations

from seeupo_jax.configuration.entry_points import entries_with
from seeupo_jax.configuration.schema import Config


def check_asynchronous(config: Config) -> None:
    """Checks the fields of asynchronous collection against the others.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    rollout = config.rollout
    if rollout.devices and rollout.port is not None:
        raise ValueError(
            f"config.rollout.port: got {rollout.port} with rollout.devices={rollout.devices};"
            " allowed: none, since the devices of this process sample."
        )
    if rollout.asynchronous:
        _check_collected(config)
    elif rollout.max_lag:
        raise ValueError(
            f"config.rollout.max_lag: got {rollout.max_lag} without samplers of its own; allowed:"
            " 0, unless rollout.devices, rollout.port or rollout.engine=openai is set."
        )
    if rollout.max_lag:
        _check_stale(config)


def lag_note(config: Config) -> str | None:
    """A sentence where SeeUPO's guarantee is lost by earlier policies' data; None: where not."""
    lag = config.rollout.max_lag
    if not (lag and config.algorithm.weighs):
        return None
    return (
        f"config.rollout.max_lag={lag}: SeeUPO's guarantee needs on-policy data, which these are"
        " not; rollout/policy_lag_mean says by how much, and algorithm.importance corrects for it"
    )


def _check_collected(config: Config) -> None:
    """ValueError: an option that samples in rounds, or in trees."""
    algorithm, rollout = config.algorithm, config.rollout
    by = f"rollout.devices={rollout.devices}" if rollout.devices else f"rollout.port={rollout.port}"
    if rollout.engine != "built_in":
        by = f"rollout.engine={rollout.engine} and rollout.max_lag={rollout.max_lag}"
    if algorithm.forks.kind != "none":
        raise ValueError(
            f"config.algorithm.forks.kind: got {algorithm.forks.kind} with {by}; allowed: none,"
            " since samplers of their own play conversations that do not branch."
        )
    if algorithm.dynamic_sampling:
        raise ValueError(
            f"config.algorithm.dynamic_sampling: got {algorithm.dynamic_sampling} with {by};"
            " allowed: 0, since samplers of their own play each iteration's tasks once."
        )
    if rollout.deterministic and rollout.max_lag:
        raise ValueError(
            f"config.rollout.deterministic: got True with rollout.max_lag={rollout.max_lag};"
            " allowed: False, since the moment at which samplers take a policy depends on time."
        )


def _check_stale(config: Config) -> None:
    """Checks that trajectories which earlier policies sampled can be corrected for.

    Importance weights do it for every algorithm. Without them ratios do, in which the sampler's
    log-probability is the old policy's. It must be of the whole softmax, as the trainer's is: else
    a ratio is not 1 where no parameter has changed.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.importance is not None:
        return
    ratios = entries_with("objective", lambda objective: objective.has_ratio)
    needed = {
        "algorithm.old_policy": (
            algorithm.old_policy,
            algorithm.old_policy == "iteration",
            "iteration",
        ),
        "algorithm.objective": (
            algorithm.objective,
            algorithm.objective_entry.has_ratio,
            " or ".join(each.partition("=")[2] for each in ratios),
        ),
        "rollout.top_k": (rollout.top_k, rollout.top_k is None, "none"),
        "rollout.top_p": (rollout.top_p, rollout.top_p in (None, 1), "none"),
        "rollout.grammar": (rollout.grammar, rollout.grammar is None, "none"),
    }
    for name, (value, fits, allowed) in needed.items():
        if not fits:
            raise ValueError(
                f"config.rollout.max_lag: got {rollout.max_lag} with {name}={value!r}; allowed: 0"
                f" unless it is {allowed} or algorithm.importance is set, since what an earlier"
                " policy sampled is corrected by importance weights or by ratios of whole softmaxes"
                " to the policy that sampled."
            )
    if config.agent.constraints:
        raise ValueError(
            f"config.agent.constraints: got True with rollout.max_lag={rollout.max_lag}; allowed:"
            " False unless algorithm.importance is set, since ratios would mix distributions with"
            " and without a mask."
        )
