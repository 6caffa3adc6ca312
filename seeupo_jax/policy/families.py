"""The families of published models: what distinguishes each, and its names in a model folder.

Every family is a decoder-only transformer of `Architecture`; an entry of `FAMILIES` says which of
its features the family has, and where a config.json states them. `policy/files/model_config.py`
reads and writes config.json by this table, `policy/files/parameter_names.py` the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax.policy.architecture import Architecture

Fields = dict[str, Any]  # of an `Architecture`, by name
# Names of modules in which families differ: of what a layer's two parts write, and of norms.
_GEMMA_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_GLM_NORMS = {
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
_OLMO_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
# Models of texts and images, of which the text model is read: its config is `text_config` in
# theirs. Beginnings of its tensors' names there -> in a folder of the text model alone.
WITH_IMAGES = {
    "gemma3": {"language_model.": ""},
    "mistral3": {"language_model.": ""},
    "qwen3_5": {"model.language_model.": "model.", "lm_head.": "lm_head."},
    "qwen3_5_moe": {"model.language_model.": "model.", "lm_head.": "lm_head."},
}
# The same of families whose folders also hold layers that predict tokens after the next one.
WITH_MORE = dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), {"model.": "model.", "lm_head.": "lm_head."}
)
# Families whose folders number such layers after the model's own.
WITH_MORE_LAYERS = ("deepseek_v3", "glm4_moe")
_GATE_UP = {"mlp.gate_up_proj": ("mlp/gate", "mlp/up")}


@dataclass(frozen=True)
class Family:
    """A family of models.

    fields: what its config.json does not say. read: maps a config with the family's defaults to the
      further fields of its architecture. write: the inverse, keys of config.json.
    windows: `none`; `all`: a config gives every layer the same; `layers`: it says which have one.
    rope_kinds: its config has one rope for layers with a window, another for those without.
    rope_layers: the key of its list of 1 for layers with a rope, 0 for those without.
    interleaved: whether its rope rotates pairs of neighbours, or the key that says so.
    rope_axes: its rope has sections for the axes of images, which are one axis in a text.
    experts: how its config states them (`policy/files/expert_config.py`); empty: it has none.
    delta: layers of its config may be gated DeltaNet: `grouped` as of `DeltaNet`, or `plain`.
    latent: its attention is of latents (`policy/files/latent_config.py`).
    activation, mlp_width: the keys of its activation, and of the width of its dense feed-forwards.
    model_class: of `transformers`, without `ForCausalLM`;
      None: the family's name in camel case.
    names: of modules in a model folder where they are not Llama's.
    packed_experts: all experts of a layer are one tensor (`policy/files/stacked_experts.py`).
    fused: tensors that hold several modules' matrices one below the other.
    """

    fields: Fields = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], Fields] = lambda values: {}
    write: Callable[[Architecture], dict[str, Any]] = lambda arch: {}
    windows: str = "none"
    rope_kinds: bool = False
    rope_layers: str | None = None
    interleaved: bool | str = False
    rope_axes: bool = False
    experts: str = ""
    delta: str = ""
    latent: bool = False
    activation: str = "hidden_act"
    mlp_width: str = "intermediate_size"
    model_class: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    packed_experts: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _read_bias(values: Mapping[str, Any]) -> Fields:
    return {"qkv_bias": values["attention_bias"], "out_bias": values["attention_bias"]}


def _write_bias(arch: Architecture) -> dict[str, Any]:
    return {"attention_bias": arch.out_bias}


def _read_biases(values: Mapping[str, Any]) -> Fields:
    return _read_bias(values) | {"mlp_bias": values["mlp_bias"]}


def _write_biases(arch: Architecture) -> dict[str, Any]:
    return _write_bias(arch) | {"mlp_bias": arch.mlp_bias}


def _read_gemma(values: Mapping[str, Any]) -> Fields:
    return _read_bias(values) | {
        "embedding_scale": values["hidden_size"] ** 0.5,
        "query_scale": values["query_pre_attn_scalar"] ** -0.5,
        "attention_cap": values["attn_logit_softcapping"],
        "logit_cap": values["final_logit_softcapping"],
    }


def _write_gemma(arch: Architecture) -> dict[str, Any]:
    scale = arch.head_dim**-0.5 if arch.query_scale is None else arch.query_scale
    return _write_bias(arch) | {
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": arch.attention_cap,
        "final_logit_softcapping": arch.logit_cap,
        "use_bidirectional_attention": False,
    }


def _read_granite(values: Mapping[str, Any]) -> Fields:
    return _read_biases(values) | {
        "embedding_scale": values["embedding_multiplier"],
        "residual_scale": values["residual_multiplier"],
        "query_scale": values["attention_multiplier"],
        "logit_scale": 1 / values["logits_scaling"],
    }


def _write_granite(arch: Architecture) -> dict[str, Any]:
    return _write_biases(arch) | {
        "embedding_multiplier": arch.embedding_scale,
        "residual_multiplier": arch.residual_scale,
        "attention_multiplier": arch.query_scale,
        "logits_scaling": round(1 / arch.logit_scale, 6),
    }


def _read_glm4_moe(values: Mapping[str, Any]) -> Fields:
    return {"qkv_bias": values["attention_bias"], "qk_norm": values["use_qk_norm"]}


def _write_glm4_moe(arch: Architecture) -> dict[str, Any]:
    return {
        "attention_bias": arch.qkv_bias,
        "use_qk_norm": arch.qk_norm,
        "partial_rotary_factor": arch.rope.partial,  # whose default is not 1 here
    }


_PLAIN = {"qk_norm": False}
_GEMMA = {"norm_offset": 1.0, "output_norms": True, "activation": "gelu_tanh"}
_OLMO = {"input_norms": False, "output_norms": True, "joint_qk_norm": True}
_GATED = {"norm_offset": 1.0, "attention_gate": True}
_BIAS = {"read": _read_bias, "write": _write_bias}

FAMILIES = {
    "llama": Family(_PLAIN, _read_biases, _write_biases),
    "qwen2": Family(_PLAIN | {"qkv_bias": True}, windows="layers"),
    "qwen3": Family(**_BIAS, windows="layers"),
    "qwen3_moe": Family(**_BIAS, windows="all", experts="qwen3"),
    "qwen2_moe": Family(
        _PLAIN,
        lambda values: {"qkv_bias": values["qkv_bias"]},
        lambda arch: {"qkv_bias": arch.qkv_bias},
        windows="layers",
        experts="qwen2",
    ),
    "mixtral": Family(_PLAIN, windows="all", experts="mixtral"),
    "dots1": Family(**_BIAS, windows="layers", experts="deepseek"),
    "deepseek_v2": Family(
        _PLAIN,
        _read_biases,
        _write_biases,
        interleaved=True,
        latent=True,
        experts="deepseek_v2",
    ),
    "deepseek_v3": Family(
        _PLAIN, **_BIAS, interleaved="rope_interleave", latent=True, experts="deepseek"
    ),
    "mistral": Family(_PLAIN, windows="all"),
    "ministral": Family(_PLAIN, windows="layers"),
    "ministral3": Family(_PLAIN, windows="all"),
    "gemma2": Family(
        _PLAIN | _GEMMA,
        _read_gemma,
        _write_gemma,
        windows="layers",
        activation="hidden_activation",
        names=_GEMMA_NORMS,
    ),
    "gemma3_text": Family(
        _GEMMA,
        _read_gemma,
        _write_gemma,
        windows="layers",
        rope_kinds=True,
        activation="hidden_activation",
        model_class="Gemma3",
        names=_GEMMA_NORMS,
    ),
    "smollm3": Family(
        _PLAIN,
        _read_biases,
        _write_biases,
        windows="layers",
        rope_layers="no_rope_layers",
        model_class="SmolLM3",
    ),
    "olmo2": Family(_OLMO, **_BIAS, names=_OLMO_NORMS),
    "olmo3": Family(_OLMO, **_BIAS, windows="layers", rope_kinds=True, names=_OLMO_NORMS),
    "glm4": Family(
        _PLAIN | {"output_norms": True},
        lambda values: {"qkv_bias": values["attention_bias"]},
        lambda arch: {"attention_bias": arch.qkv_bias},
        interleaved=True,
        names=_GLM_NORMS,
        fused=_GATE_UP,
    ),
    "phi3": Family(
        _PLAIN,
        windows="all",
        fused=_GATE_UP | {"self_attn.qkv_proj": ("q", "k", "v")},
    ),
    "granite": Family(_PLAIN, _read_granite, _write_granite),
    "gpt_oss": Family(
        _PLAIN | {"sinks": True},
        **_BIAS,
        windows="layers",
        experts="gpt_oss",
        packed_experts=True,
    ),
    "qwen3_next": Family(
        _GATED, **_BIAS, delta="grouped", experts="qwen2", model_class="Qwen3Next"
    ),
    "qwen3_5_text": Family(_GATED, **_BIAS, delta="plain", rope_axes=True, model_class="Qwen3_5"),
    "qwen3_5_moe_text": Family(
        _GATED,
        **_BIAS,
        delta="plain",
        rope_axes=True,
        experts="qwen3_5",
        mlp_width="moe_intermediate_size",  # it has no dense ones
        model_class="Qwen3_5Moe",
    ),
    "glm4_moe": Family({}, _read_glm4_moe, _write_glm4_moe, experts="deepseek"),
    "olmoe": Family({"joint_qk_norm": True}, **_BIAS, experts="olmoe"),
}
