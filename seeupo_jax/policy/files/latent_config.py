"""Multi-head latent attention in a config.json, to and from `LatentAttention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seeupo_jax.policy.architecture import Architecture, LatentAttention
from seeupo_jax.policy.families import Fields

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_latent(values: Mapping[str, Any], source: str) -> Fields:
    """The fields of an architecture with latent attention, from a config with its defaults.

    Raises:
      ValueError: a size that is missing, or heads that are not supported.
    """
    missing = [key for key in _SIZES if values.get(key) is None]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} missing; latent attention has them.")
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads != heads:
        raise ValueError(
            f"{source}: num_key_value_heads is {kv_heads}; allowed with latent attention: all"
            f" {heads} heads."
        )
    latent = LatentAttention(values["q_lora_rank"], *(values[key] for key in _SIZES))
    if latent.value_dim > latent.head_dim:
        raise ValueError(
            f"{source}: v_head_dim is {latent.value_dim}; allowed: at most {latent.head_dim}, the"
            " sum of qk_nope_head_dim and qk_rope_head_dim."
        )
    scale = _growth(values["rope_parameters"])
    query_scale = None if scale == 1 else latent.head_dim**-0.5 * scale
    return {"latent": latent, "head_dim": latent.head_dim, "query_scale": query_scale}


def _growth(rope: Mapping[str, Any]) -> float:
    """What yarn multiplies scores by, beside what it multiplies the parts with a rope by."""
    weight, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    return (1 + 0.1 * weight * math.log(max(factor, 1))) ** 2


def latent_json(arch: Architecture) -> dict[str, Any]:
    """The inverse of `read_latent`: keys of config.json."""
    latent = arch.latent
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,  # as transformers has it: of what rotates
        "rope_interleave": arch.rope.interleaved,
        "num_nextn_predict_layers": 0,
    }
