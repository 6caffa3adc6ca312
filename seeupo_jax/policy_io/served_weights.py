"""Other weights of a policy that is served, from a folder in Hugging Face's format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from seeupo_jax.configuration.schema import Config, WarmStart
from seeupo_jax.policy.files.weights import base_model_folder
from seeupo_jax.policy_io import build


def load_weights(config: Config, served: build.Policy, folder: Path) -> Any:
    """All parameters of a folder, on the policy's mesh.

    A policy with adapters (`config.lora`) takes a folder of adapters, with its own base model. Any
    other takes a model's, or a folder of adapters whose base model is merged with them.

    Args:
      config: with which the policy was loaded.

    Raises:
      ValueError: a missing or damaged file, or a network that is not the policy's.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: got no folder; allowed: a folder that is there.")
    of_adapters = base_model_folder(folder) != folder
    if served.network.arch.lora is None:
        config = dataclasses.replace(config, warm_start=WarmStart())
        made, params = build.load_policy(config, str(folder))
    elif of_adapters:
        per_turn = served.network.arch.turn_adapters
        lora = dataclasses.replace(config.lora, path=str(folder), per_turn=per_turn)
        made, params = build.load_policy(dataclasses.replace(config, lora=lora), str(served.source))
    else:
        raise ValueError(
            f"{folder}: got a whole model; allowed: a folder of adapters, since config.lora's are"
            " served."
        )
    ours, theirs = vars(served.network.arch), vars(made.network.arch)
    other = [name for name in ours if name != "family" and ours[name] != theirs[name]]
    if other:
        raise ValueError(
            f"{folder}: got a model whose {', '.join(other)} differ; allowed: the network that is"
            " served."
        )
    return jax.block_until_ready(made.merged(params))
