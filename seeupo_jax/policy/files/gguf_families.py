"""The families that llama.cpp writes into GGUF files: names of tensors, and settings of a config.

Names and settings are those of `convert_hf_to_gguf.py`; what its files leave out, such as which
layers have a window, is what llama.cpp computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seeupo_jax.policy.files.parameter_names import EXPERTS

EXPERT = "{expert}"  # stands for the number of an expert in a name
_SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True)
class Settings:
    """The settings of an architecture, by key without its prefix."""

    path: Path
    architecture: str
    values: Mapping[str, Any]

    def integer(self, key: str, *default: int) -> int:
        value = self.values.get(key, *default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, "a whole number >= 1")
        return value

    def real(self, key: str, *default: float) -> float:
        value = self.values.get(key, *default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise self.refusal(key, "a number > 0")
        return value

    def optional_real(self, key: str) -> float | None:
        return self.real(key) if key in self.values else None

    def refusal(self, key: str, allowed: Any) -> ValueError:
        return ValueError(
            f"{self.path}: {self.architecture}.{key} is {self.values.get(key)!r}; allowed:"
            f" {allowed}."
        )


# Names of a layer's tensors: llama.cpp's after `blk.N.` -> Hugging Face's after `model.layers.N.`;
# every expert's matrix is a part of one tensor there.
_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_GEMMA_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GLM_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_mlp_layernorm.weight",
}
_OLMO_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GPT_OSS_NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
}
_OUT = {"attn_output.weight": "self_attn.o_proj.weight"}
_ATTENTION = {f"attn_{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkv"} | _OUT
_JOINT_ATTENTION = {"attn_qkv.weight": "self_attn.qkv_proj.weight"} | _OUT
_QKV_BIAS = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_ALL_BIAS = _QKV_BIAS | {"attn_output.bias": "self_attn.o_proj.bias"}
_QK_NORM = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
_SINKS = {"attn_sinks.weight": "self_attn.sinks"}
_DOWN = {"ffn_down.weight": "mlp.down_proj.weight"}
_MLP = {f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up")} | _DOWN
_JOINT_MLP = {"ffn_up.weight": "mlp.gate_up_proj.weight"} | _DOWN


def _experts(kind: str, *, shared: bool = False, bias: bool = False) -> dict[str, str]:
    """Of a layer of experts. shared: one of all tokens; bias: a selection bias of every expert."""
    names, module = EXPERTS[kind]
    matrices = ("gate", "up", "down")
    found = {f"ffn_{x}_exps.weight": names[f"mlp/{x}"] for x in matrices}
    found["ffn_gate_inp.weight"] = names["mlp/router"]
    if kind == "gpt_oss":
        found |= {f"ffn_{x}_exps.bias": names[f"mlp/{x}_bias"] for x in matrices}
        found["ffn_gate_inp.bias"] = names["mlp/router_bias"]
    if shared:
        found |= {f"ffn_{x}_shexp.weight": f"{module}.{x}_proj.weight" for x in matrices}
    if bias:
        found["exp_probs_b.bias"] = names["mlp/selection_bias"]
    return found


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of llama.cpp.

    model_type: of its config.json.
    layer: names of the tensors of each of its layers but for the feed-forward; `dense` and
      `experts` are those of either kind of feed-forward, of which `experts` may be missing.
    biases: further names, of files that have them in the first layer.
    settings: keys that it has beside those of every architecture; `read` maps them to its config.
    head_part: its rope rotates a part of each head where `rope.dimension_count` says so.
    permuted: llama.cpp interleaves the two halves of every head of its queries and keys.
    norm_offset: what llama.cpp has added to the scales of its norms.
    """

    model_type: str
    layer: Mapping[str, str]
    dense: Mapping[str, str] = field(default_factory=lambda: _MLP)
    experts: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    read: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    head_part: bool = False
    permuted: bool = False
    norm_offset: float = 0.0


_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_WINDOW_BASE, _LOGIT_CAP = "rope.freq_base_swa", "final_logit_softcapping"
_SCORE_CAP = "attn_logit_softcapping"
_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_DOTS1 = (
    *("expert_shared_count", "expert_group_count", "expert_group_used_count"),
    *("leading_dense_block_count", "expert_weights_scale", "expert_weights_norm"),
    "expert_gating_func",
)
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LAYERS = 1 << 16  # a damaged file may state 2**32
_SIGMOID = 2  # of llama.cpp's ways to score experts


def _windows(settings: Settings, period: int) -> dict[str, Any]:
    """Of every `period` layers the last has no window, where the file does not say which."""
    layers = settings.integer("block_count")
    pattern = settings.values.get(_PATTERN, period)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        every = pattern
        pattern = [(i + 1) % every != 0 for i in range(min(layers, _LAYERS))]
    if not isinstance(pattern, list) or {type(each) for each in pattern} != {bool}:
        raise settings.refusal(_PATTERN, "a whole number >= 1, or true or false of every layer")
    kinds = ["sliding_attention" if window else "full_attention" for window in pattern]
    return {"layer_types": kinds, "sliding_window": settings.integer(_WINDOW)}


def _ropes(settings: Settings, window_base: float | None = None) -> dict[str, Any]:
    """The scaled rope of layers without a window, and that of the others.

    window_base: of those where the file does not state it; None: the same.
    """
    base = settings.real("rope.freq_base", 10_000.0)
    window_base = settings.real(_WINDOW_BASE, base if window_base is None else window_base)
    full: dict[str, Any] = {"rope_type": "default"} | (rope_scaling(settings) or {})
    if "rope.scaling.yarn_attn_factor" in settings.values:
        full["attention_factor"] = settings.real("rope.scaling.yarn_attn_factor")
    sliding = {"rope_type": "default", "rope_theta": window_base}
    ropes = {"full_attention": full | {"rope_theta": base}, "sliding_attention": sliding}
    return {"rope_parameters": ropes, "rope_theta": None, "rope_scaling": None}


def _gemma_scale(settings: Settings, layers: int) -> dict[str, Any]:
    """What scores are divided by the root of: heads' sizes, but for the model of so many layers."""
    width, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    each = settings.integer("attention.key_length", width // heads)
    scalar = width // heads if settings.integer("block_count") == layers else each
    return {
        "query_pre_attn_scalar": scalar,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": settings.optional_real(_LOGIT_CAP),
        "attn_logit_softcapping": settings.optional_real(_SCORE_CAP),
    }


def _read_gemma2(settings: Settings) -> dict[str, Any]:
    return _gemma_scale(settings, layers=46) | _windows(settings, period=2)


def _read_gemma3(settings: Settings) -> dict[str, Any]:
    ropes = _ropes(settings, window_base=10_000.0)  # llama.cpp's default, whatever the other is
    return _gemma_scale(settings, layers=62) | _windows(settings, period=6) | ropes


def _read_phi3(settings: Settings) -> dict[str, Any]:
    window = settings.values.get(_WINDOW)
    config = {"sliding_window": settings.integer(_WINDOW) if window else None}
    original = "rope.scaling.original_context_length"
    if original in settings.values:
        config["original_max_position_embeddings"] = settings.integer(original)
    return config


def _read_experts(settings: Settings, count: str) -> dict[str, Any]:
    return {
        count: settings.integer("expert_count"),
        "num_experts_per_tok": settings.integer("expert_used_count"),
    }


def _read_qwen_experts(settings: Settings) -> dict[str, Any]:
    # Qwen3's weights of a token's experts sum to 1 in llama.cpp, and Qwen2's do not.
    config = _read_experts(settings, "num_experts") | {
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "norm_topk_prob": settings.architecture == "qwen3moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if settings.architecture == "qwen2moe":
        shared = settings.integer("expert_shared_feed_forward_length")
        config["shared_expert_intermediate_size"] = shared
    return config


def _read_dots1(settings: Settings) -> dict[str, Any]:
    normalize = settings.values.get("expert_weights_norm", False)
    if not isinstance(normalize, bool):
        raise settings.refusal("expert_weights_norm", "true or false")
    if settings.values.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise settings.refusal("expert_gating_func", f"{_SIGMOID}, a sigmoid")
    dense = settings.values.get("leading_dense_block_count", 0)
    return _read_experts(settings, "n_routed_experts") | {
        "n_shared_experts": settings.integer("expert_shared_count"),
        "n_group": settings.integer("expert_group_count", 1),
        "topk_group": settings.integer("expert_group_used_count", 1),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length"),
        "norm_topk_prob": normalize,
        "routed_scaling_factor": settings.real("expert_weights_scale", 1.0),
        "first_k_dense_replace": settings.integer("leading_dense_block_count") if dense else 0,
    }


def _read_gpt_oss(settings: Settings) -> dict[str, Any]:
    config = _read_experts(settings, "num_local_experts") | _windows(settings, period=2)
    scaling = rope_scaling(settings)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    return config | {
        "intermediate_size": settings.integer("expert_feed_forward_length"),
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_scaling": scaling,
    }


def _read_ministral3(settings: Settings) -> dict[str, Any]:
    both = settings.real("rope.scaling.yarn_log_multiplier")
    rope = {
        "rope_theta": settings.real("rope.freq_base"),
        "mscale": both,
        "mscale_all_dim": both,
        "llama_4_scaling_beta": settings.real("attention.temperature_scale"),
    }
    rope |= rope_scaling(settings) or {}
    return {"rope_parameters": rope, "rope_theta": None, "rope_scaling": None}


def _read_granite(settings: Settings) -> dict[str, Any]:
    finetuned = "rope.scaling.finetuned"
    if settings.values.get(finetuned) is False:  # how llama.cpp has a Granite without rope
        raise settings.refusal(finetuned, "True")
    return {name: settings.real(key) for key, name in _GRANITE.items()}


def _read_smollm3(settings: Settings) -> dict[str, Any]:
    layers = min(settings.integer("block_count"), _LAYERS)
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)]}


_PLAIN = _NORMS | _ATTENTION
_LLAMA = GgufFamily("llama", _PLAIN, biases=_ALL_BIAS, permuted=True)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": GgufFamily("qwen2", _PLAIN | _QKV_BIAS),
    "qwen3": GgufFamily("qwen3", _PLAIN | _QK_NORM),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        _PLAIN | _QKV_BIAS,
        experts=_experts("qwen", shared=True)
        | {"ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight"},
        settings=(*_EXPERTS, "expert_shared_feed_forward_length"),
        read=_read_qwen_experts,
    ),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        _PLAIN | _QK_NORM,
        experts=_experts("qwen"),
        settings=_EXPERTS,
        read=_read_qwen_experts,
    ),
    "dots1": GgufFamily(
        "dots1",
        _PLAIN | _QK_NORM,
        experts=_experts("deepseek", shared=True, bias=True),
        settings=(*_EXPERTS, *_DOTS1),
        read=_read_dots1,
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        _ATTENTION | _ALL_BIAS | _SINKS | _GPT_OSS_NORMS,
        experts=_experts("gpt_oss"),
        settings=(*_EXPERTS, _WINDOW, _PATTERN),
        read=_read_gpt_oss,
    ),
    "mistral3": GgufFamily(
        "ministral3",
        _PLAIN,
        settings=("rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
        read=_read_ministral3,
        permuted=True,
    ),
    "gemma2": GgufFamily(
        "gemma2",
        _ATTENTION | _GEMMA_NORMS,
        settings=(_WINDOW, _PATTERN, _SCORE_CAP, _LOGIT_CAP),
        read=_read_gemma2,
        norm_offset=1.0,
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        _ATTENTION | _QK_NORM | _GEMMA_NORMS,
        settings=(_WINDOW, _PATTERN, _LOGIT_CAP, _WINDOW_BASE),
        read=_read_gemma3,
        norm_offset=1.0,
    ),
    "smollm3": GgufFamily("smollm3", _PLAIN, biases=_ALL_BIAS, read=_read_smollm3, permuted=True),
    "granite": GgufFamily(
        "granite",
        _PLAIN,
        biases=_ALL_BIAS,
        settings=tuple(_GRANITE),
        read=_read_granite,
        permuted=True,
    ),
    "olmo2": GgufFamily("olmo2", _ATTENTION | _QK_NORM | _OLMO_NORMS),
    "glm4": GgufFamily(
        "glm4", _ATTENTION | _GLM_NORMS, dense=_JOINT_MLP, biases=_QKV_BIAS, head_part=True
    ),
    "phi3": GgufFamily(
        "phi3",
        _JOINT_ATTENTION | _NORMS,
        dense=_JOINT_MLP,
        settings=(_WINDOW, "rope.scaling.attn_factor"),
        read=_read_phi3,
        head_part=True,
    ),
}
# Families that share an architecture with another, and the setting that only they have.
_VARIANTS = {
    "llama": (
        "expert_count",
        GgufFamily(
            "mixtral",
            _PLAIN,
            experts=_experts("mixtral"),
            settings=_EXPERTS,
            read=lambda settings: _read_experts(settings, "num_local_experts"),
            permuted=True,
        ),
    ),
    "olmo2": (
        _WINDOW,
        GgufFamily(
            "olmo3",
            _ATTENTION | _QK_NORM | _OLMO_NORMS,
            settings=(_WINDOW, _PATTERN, _WINDOW_BASE, "rope.scaling.yarn_attn_factor"),
            read=lambda settings: _windows(settings, period=4) | _ropes(settings),
        ),
    ),
}


def find_family(architecture: str, values: Mapping[str, Any]) -> GgufFamily:
    """The family of a file with these settings."""
    if architecture in _VARIANTS:
        setting, variant = _VARIANTS[architecture]
        if values.get(setting):
            return variant
    return ARCHITECTURES[architecture]


def rope_scaling(settings: Settings) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json."""
    kind = settings.values.get("rope.scaling.type", "linear")  # llama.cpp's default
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise settings.refusal("rope.scaling.type", ", ".join(_SCALINGS))
    factor = settings.real("rope.scaling.factor", 1.0)
    if factor == 1.0 or kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = settings.integer("context_length")  # the default of llama.cpp too
        original = settings.integer("rope.scaling.original_context_length", context)
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in settings.values:
                scaling[name] = settings.real(f"rope.scaling.yarn_{name}")
    return scaling
