"""What may not change when a run resumes in its workdir, and what its stored numbers depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.trajectories.json_lines import plain

# Of config.rollout, what changes no number but its rounding: it may change when a run resumes.
_LAYOUT = (
    "mesh concurrency slots cache_gib page_size decode_steps prefill_tokens deterministic"
    " reset_ahead_s"
).split()
_PROCESSES = ("isolation", "memory_mib")  # of config.env: where environments run, to the same end


def made_by(config: Config) -> str:
    """Names the policies that a run samples with."""
    choices = [_same_fields(config), str(config.model), str(config.chat)]
    choices.append(config.algorithm.dynamic_sampling)
    return hashlib.sha256(json.dumps(plain(choices, finite=False)).encode()).hexdigest()


def check_same_run(config: Config, saved: Mapping[str, Any]) -> None:
    """A resumed run must draw the same random numbers and tasks as the one that was stopped.

    Args:
      saved: the configuration that a checkpoint was made with.

    Raises:
      ValueError: another seed, environment or rollout.
    """
    wanted, defaults = (plain(_same_fields(each), finite=False) for each in (config, Config()))
    for field, value in wanted.items():
        saved_value = saved[field]
        if isinstance(value, dict):  # the saved one's version may not have had all fields
            saved_value = {name: saved_value.get(name, defaults[field][name]) for name in value}
        if saved_value != value:
            raise ValueError(
                f"config.{field}: got {value}; allowed for this workdir, whose checkpoint"
                f" has it: {saved_value}. Choose a new workdir for another run."
            )


def _same_fields(config: Config) -> dict[str, Any]:
    """What decides which trajectories are sampled, but for the policy."""
    values = to_dict(config)
    rollout = {name: v for name, v in values["rollout"].items() if name not in _LAYOUT}
    env = {name: value for name, value in values["env"].items() if name not in _PROCESSES}
    return {"seed": values["seed"], "rollout": rollout, "env": env}
