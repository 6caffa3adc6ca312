"""The layers of gated DeltaNet in a config.json, to and from `DeltaNet`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.architecture import Architecture, DeltaNet
from seeupo_jax.policy.families import Family

_KINDS = ("full_attention", "linear_attention")  # of layers: attention, gated DeltaNet


def read_delta(family: Family, values: Mapping[str, Any], source: str) -> DeltaNet:
    """The layers of gated DeltaNet that a config with its family's defaults states.

    Raises:
      ValueError: unknown kinds of layers, or heads that do not divide.
    """
    kinds, layers = values["layer_types"], values["num_hidden_layers"]
    if set(kinds) - set(_KINDS):
        allowed = ", ".join(_KINDS)
        raise ValueError(
            f"{source}: layer_types is {shown(kinds)}; allowed: {layers} of {allowed}."
        )
    if _KINDS[0] not in kinds:
        raise ValueError(
            f"{source}: layer_types is {shown(kinds)}; allowed: at least one {_KINDS[0]}."
        )
    key_heads, value_heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            f"{source}: linear_num_key_heads is {key_heads}; allowed: a divisor of the"
            f" {value_heads} linear_num_value_heads."
        )
    return DeltaNet(
        tuple(i for i, kind in enumerate(kinds) if kind == _KINDS[1]),
        key_heads,
        value_heads,
        values["linear_key_head_dim"],
        values["linear_value_head_dim"],
        values["linear_conv_kernel_dim"],
        grouped=family.delta == "grouped",
    )


def delta_json(arch: Architecture) -> dict[str, Any]:
    """The inverse of `read_delta`: keys of config.json."""
    if arch.delta is None:
        return {}
    return {
        "layer_types": [_KINDS[arch.is_recurrent(i)] for i in range(arch.layers)],
        "linear_num_key_heads": arch.delta.key_heads,
        "linear_num_value_heads": arch.delta.value_heads,
        "linear_key_head_dim": arch.delta.key_dim,
        "linear_value_head_dim": arch.delta.value_dim,
        "linear_conv_kernel_dim": arch.delta.conv,
        "partial_rotary_factor": arch.rope.partial,  # whose default is not 1 in these families
    }
