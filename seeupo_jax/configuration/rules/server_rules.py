"""Which options go with servers that sample in training."""

from __future__ import annotations

from typing import Any

from seeupo_jax.configuration.schema import Config

ENGINE = "openai"


def check_servers(config: Config) -> None:
    """Checks what servers that sample need, and what they have not.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    rollout = config.rollout
    if rollout.engine != ENGINE:
        if rollout.servers:
            raise ValueError(
                f"config.rollout.servers: got {', '.join(rollout.servers)} with"
                f" rollout.engine={rollout.engine}; allowed: none, or rollout.engine={ENGINE}."
            )
        return
    if not rollout.servers:
        raise ValueError(
            f"config.rollout.servers: got none with rollout.engine={ENGINE}; allowed: at least one"
            " address such as http://HOST:PORT."
        )
    adapters = config.lora.rank > 0 or config.lora.path is not None
    needed: dict[str, tuple[Any, bool, str]] = {
        "rollout.temperature": (
            rollout.temperature,
            rollout.temperature == 1,
            "1, since some servers return log-probabilities before and some after temperature",
        ),
        "rollout.grammar": (rollout.grammar, rollout.grammar is None, "none"),
        "rollout.quantize": (rollout.quantize, rollout.quantize == "none", "none"),
        "rollout.mesh": (rollout.mesh, rollout.mesh is None, "none"),
        "rollout.deterministic": (
            rollout.deterministic,
            not rollout.deterministic,
            "False, since servers choose their batches",
        ),
        "rollout.on_swap": (
            rollout.on_swap,
            rollout.on_swap == "keep",
            "keep, as the servers are asked to when their weights change",
        ),
        "rollout.devices": (rollout.devices, not rollout.devices, "0"),
        "rollout.port": (rollout.port, rollout.port is None, "none"),
        "agent.constraints": (config.agent.constraints, not config.agent.constraints, "False"),
        "algorithm.forks.kind": (
            config.algorithm.forks.kind,
            config.algorithm.forks.kind == "none",
            "none",
        ),
        "algorithm.router_replay": (
            config.algorithm.router_replay,
            config.algorithm.router_replay != "rollout",
            "another value, since servers return no experts",
        ),
        "lora.merge": (
            config.lora.merge,
            config.lora.merge or not adapters,
            "True, since servers are given whole models",
        ),
    }
    for name, (value, fits, allowed) in needed.items():
        if not fits:
            raise ValueError(
                f"config.{name}: got {value!r} with rollout.engine={ENGINE}; allowed: {allowed}."
            )
    if rollout.max_lag:
        _check_roles(config)


def _check_roles(config: Config) -> None:
    """ValueError: a frozen role would be sampled by the devices that train meanwhile."""
    for number, role in enumerate(config.roles):
        if role.path is not None:
            raise ValueError(
                f"config.roles[{number}].path: got {role.path!r} with rollout.engine={ENGINE} and"
                f" rollout.max_lag={config.rollout.max_lag}; allowed: a server, since the devices"
                " here train while episodes are played."
            )
