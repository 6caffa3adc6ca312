"""Which options go with adapters, and with those of turns."""

from __future__ import annotations

from typing import Any

from seeupo_jax.configuration.model_schema import Lora
from seeupo_jax.configuration.schema import Config


def check_adapters(config: Config) -> None:
    """Checks what adapters need, and what does not go with those of turns.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    model, lora = config.model, config.lora
    if model.param_dtype != "float32" and not (lora.rank or lora.path):
        raise ValueError(
            f"config.model.param_dtype: got {model.param_dtype!r}; allowed: 'float32' unless"
            " config.lora.rank > 0, since what trains is float32."
        )
    for name in ("alpha", "rslora", "targets", "merge", "per_turn"):
        value, usual = vars(lora)[name], vars(Lora())[name]
        if value != usual and not (lora.rank or lora.path):
            raise ValueError(
                f"config.lora.{name}: got {value} without adapters, so that nothing reads it;"
                f" allowed: {usual}, unless config.lora.rank > 0 or config.lora.path is set."
            )
    if (lora.rank or lora.path) and (model.path is None or config.warm_start.stages):
        raise ValueError(
            f"config.lora: got rank {lora.rank} and path {lora.path!r}; allowed: 0 and none without"
            " config.model.path and with config.warm_start.stages."
        )
    if lora.turn_adapters:
        _check_per_turn(config)


def _check_per_turn(config: Config) -> None:
    """ValueError: an option that knows one policy for all turns."""
    algorithm, rollout = config.algorithm, config.rollout
    scored = algorithm.scorer is not None or algorithm.estimator.scores_answers
    needed: dict[str, tuple[Any, bool, str]] = {
        "lora.merge": (config.lora.merge, not config.lora.merge, "False, since each turn has one"),
        "algorithm.refresh": (
            algorithm.refresh,
            algorithm.refresh != "fused",
            "auto or separate, since a step computes its context under another adapter",
        ),
        "algorithm.moments": (
            algorithm.moments,
            algorithm.moments == "shared",
            "shared, since each adapter has moments of its own",
        ),
        "algorithm.critic.kind": (
            algorithm.critic.kind,
            algorithm.critic.kind == "none",
            "none, since a value function reads one policy's hidden states",
        ),
        "algorithm.advantage": (
            algorithm.advantage,
            not scored,
            "an estimator that neither trains a scorer nor scores the tasks' answers",
        ),
        "algorithm.router_replay": (
            algorithm.router_replay,
            algorithm.router_replay == "none",
            "none, since each adapter's pass over a context has experts of its own",
        ),
        "algorithm.forks.kind": (algorithm.forks.kind, algorithm.forks.kind == "none", "none"),
        "optimizer.warmup_steps": (
            config.optimizer.warmup_steps,
            not config.optimizer.warmup_steps,
            "0, since each adapter counts its own steps: warmup_iterations is the same for all",
        ),
        "offload.optimizer": (config.offload.optimizer, not config.offload.optimizer, "False"),
        "teacher": ([*config.teacher.places.values()], not config.teacher.given, "none"),
        "roles": (
            [role.name for role in config.roles],
            not config.roles,
            "none, since the turns of an episode are then those of several conversations",
        ),
        "agent": (
            config.agent.label,
            not config.agent.given,
            "none, since an agent's calls are not numbered by turns of one conversation",
        ),
        "rollout.engine": (
            rollout.engine,
            rollout.engine == "built_in",
            "built_in, since servers are given whole models",
        ),
        "rollout.devices": (rollout.devices, not rollout.devices, "0"),
        "rollout.port": (rollout.port, rollout.port is None, "none"),
    }
    for name, (value, fits, allowed) in needed.items():
        if not fits:
            raise ValueError(
                f"config.{name}: got {value!r} with lora.per_turn={config.lora.per_turn};"
                f" allowed: {allowed}."
            )
