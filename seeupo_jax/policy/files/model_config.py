"""config.json to and from `Architecture`, by the table of families."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from seeupo_jax.configuration.model_schema import MODEL_SIZES
from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.families import FAMILIES, WITH_IMAGES, Family
from seeupo_jax.policy.files.block_scaled import block_size, is_fp8
from seeupo_jax.policy.files.delta_config import delta_json, read_delta
from seeupo_jax.policy.files.expert_config import EXPERT_SETTINGS
from seeupo_jax.policy.files.latent_config import latent_json, read_latent
from seeupo_jax.policy.files.rope_config import (
    KINDS,
    POSITIONS,
    is_positive,
    max_positions,
    read_ropes,
    ropes_json,
)

# Upper bounds of a config's sizes; of experts ten times the largest published (Kimi K2: 384).
_SIZES = {
    "vocab_size": MODEL_SIZES["vocab_size"],
    "hidden_size": MODEL_SIZES["width"],
    "num_hidden_layers": MODEL_SIZES["layers"],
    "num_attention_heads": MODEL_SIZES["heads"],
    "num_key_value_heads": MODEL_SIZES["heads"],
    "head_dim": MODEL_SIZES["head_dim"],
    "intermediate_size": MODEL_SIZES["mlp_width"],
    POSITIONS: MODEL_SIZES["max_positions"],
    "sliding_window": MODEL_SIZES["max_positions"],
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "n_routed_experts": 2**12,
    "n_shared_experts": 2**12,
    "n_group": 2**12,
    "topk_group": 2**12,
    "moe_intermediate_size": MODEL_SIZES["mlp_width"],
    "shared_expert_intermediate_size": MODEL_SIZES["mlp_width"],
    "decoder_sparse_step": MODEL_SIZES["layers"],
    "linear_num_key_heads": MODEL_SIZES["heads"],
    "linear_num_value_heads": MODEL_SIZES["heads"],
    "linear_key_head_dim": MODEL_SIZES["head_dim"],
    "linear_value_head_dim": MODEL_SIZES["head_dim"],
    "linear_conv_kernel_dim": 2**6,
    "full_attention_interval": MODEL_SIZES["layers"],
    "q_lora_rank": MODEL_SIZES["width"],
    "kv_lora_rank": MODEL_SIZES["width"],
    "qk_nope_head_dim": MODEL_SIZES["head_dim"],
    "qk_rope_head_dim": MODEL_SIZES["head_dim"],
    "v_head_dim": MODEL_SIZES["head_dim"],
}
_NUMBERS = (
    "rms_norm_eps",
    "rope_theta",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "routed_scaling_factor",
)
_TRUTHS = (
    "tie_word_embeddings",
    "attention_bias",
    "qkv_bias",
    "mlp_bias",
    "norm_topk_prob",
    "use_qk_norm",
    "use_sliding_window",
    "rope_interleave",
)
_LISTS = {"layer_types": str, "mlp_only_layers": int, "no_rope_layers": int}
# Required in a config: the family's default would be a guess.
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# Settings that would change the computation, and their supported values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0,),
    "embd_pdrop": (0.0,),
    "resid_pdrop": (0.0,),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
    "dual_chunk_attention_config": (None,),  # Qwen2.5-1M; transformers ignores it too
    "use_mrope": (False,),
    "pretraining_tp": (1,),
    "router_jitter_noise": (0.0,),
    "moe_layer_freq": (1,),
    "clip_qkv": (None,),
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def read_architecture(
    values: Mapping[str, Any], source: str, **compute_options: Any
) -> Architecture:
    """The architecture that a config.json describes.

    Args:
      values: its content. source: its name, for errors.
      compute_options: fields of `Architecture` that no config.json has (dtype, scan_layers, ...).

    Raises:
      ValueError: another family, a missing size, or an unsupported setting.
    """
    name, of_text = values.get("model_type"), False
    if isinstance(name, str) and name in WITH_IMAGES:
        # Published ones leave out what is the default of their text model's family.
        values, source, of_text = _text_config(values, source), f"{source}: text_config", True
        name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        names = ", ".join((*FAMILIES, *WITH_IMAGES))
        raise ValueError(f"{source}: model_type is {shown(name)}; allowed: {names}.")
    family = FAMILIES[name]
    required = () if of_text else (*_REQUIRED, family.mlp_width)
    missing = [key for key in required if values.get(key) is None]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} missing; a {name} config has them.")
    _check_values(values, source)
    values = _without_read_quantization(family, values, source)
    full = _with_defaults(name, values, source)
    for key, allowed in _FIXED.items():
        if full.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{source}: {key} is {shown(full[key])}; allowed: {allowed[0]!r}.")
    heads = full["num_attention_heads"]
    head_dim, kv_heads = full.get("head_dim"), full["num_key_value_heads"]
    head_dim = full["hidden_size"] // heads if head_dim is None else head_dim
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_key_value_heads is {kv_heads}; allowed: a divisor of {heads} heads."
        )
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{source}: head_dim is {head_dim}; allowed: an even number >= 2.")
    windows = _read_windows(family, full, source)
    rope, ropes = read_ropes(family, full, windows, source)
    fields = {
        "activation": _read_activation(family, full, source),
        "moe": EXPERT_SETTINGS[family.experts].read(full, source) if family.experts else None,
        "delta": read_delta(family, full, source) if family.delta else None,
        "max_positions": max_positions(rope, full[POSITIONS]),
        "head_dim": head_dim,
        **(read_latent(full, source) if family.latent else {}),
    }
    return Architecture(
        vocab_size=full["vocab_size"],
        width=full["hidden_size"],
        layers=full["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=full[family.mlp_width],
        rope=rope,
        ropes=ropes,
        norm_eps=full["rms_norm_eps"],
        tied=full["tie_word_embeddings"],
        windows=windows,
        family=name,
        **(family.fields | fields | family.read(full) | compute_options),
    )


def _without_read_quantization(
    family: Family, values: Mapping[str, Any], source: str
) -> Mapping[str, Any]:
    """A config without its quantisation where `weights` reads it."""
    quantization = values.get("quantization_config")
    if is_fp8(quantization):
        block_size(quantization, source)
    elif not (family.packed_experts and _is_mxfp4(quantization)):
        return values
    return {key: value for key, value in values.items() if key != "quantization_config"}


def _is_mxfp4(quantization: Any) -> bool:
    """Whether a model's experts are stored in MXFP4, which `stacked_experts` reads."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def _text_config(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config of the text model in one of texts and images."""
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{source}: text_config is {shown(text)}; allowed: a JSON object.")
    key = "tie_word_embeddings"  # which may stand outside
    return dict(text) | ({key: values[key]} if key in values else {})


def _check_values(values: Mapping[str, Any], source: str) -> None:
    """Types and bounds of what a config states, before anything is built with it.

    Raises:
      ValueError: one sentence with the first that is wrong.
    """

    def refuse(key: str, allowed: str) -> None:
        raise ValueError(f"{source}: {key} is {shown(values[key])}; allowed: {allowed}.")

    stated = {key: value for key, value in values.items() if value is not None}
    sizes = dict(stated)
    if sizes.get("sliding_window") == 0 and sizes.get("use_sliding_window") is False:
        del sizes["sliding_window"]  # as transformers writes it for Qwen2-MoE
    for key in _SIZES.keys() & sizes:
        if type(stated[key]) is not int or not 1 <= stated[key] <= _SIZES[key]:
            refuse(key, f"a whole number from 1 to {_SIZES[key]}")
    for key in ("head_dim", "qk_rope_head_dim"):
        if stated.get(key, 2) % 2:
            refuse(key, "an even number, whose halves rotate")
    for key in stated.keys() & set(_NUMBERS):
        if not is_positive(stated[key]):
            refuse(key, "a number > 0")
    for key in stated.keys() & set(_TRUTHS):
        if not isinstance(stated[key], bool):
            refuse(key, "true or false")
    for key in _LISTS.keys() & stated:
        listed = stated[key]
        if not isinstance(listed, list) or not all(type(each) is _LISTS[key] for each in listed):
            refuse(key, "a list of " + ("texts" if _LISTS[key] is str else "whole numbers"))


def config_json(arch: Architecture, end_ids: Sequence[int] = (), dtype: str = "float32") -> Any:
    """The config.json of an architecture, complete with the defaults of its family.

    Raises:
      ValueError: no family has this combination of norms, biases and windows.
    """
    common = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.mlp_width,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied,
        POSITIONS: arch.max_positions,
        "bos_token_id": None,
        "pad_token_id": None,  # a family's default may lie outside of a small vocabulary
        "eos_token_id": list(end_ids) if end_ids else None,
        "dtype": dtype,
    }
    names = [arch.family] if arch.family in FAMILIES else []
    for name in [*names, *(name for name in FAMILIES if name not in names)]:
        family = FAMILIES[name]
        if bool(family.experts) != (arch.moe is not None):
            continue
        own = _own_json(family, arch)
        try:
            full = _with_defaults(name, common | own, "save_pretrained")
            same = read_architecture({**full, "model_type": name}, "save_pretrained")
        except ValueError:
            continue
        if _computes(same) == _computes(arch):
            prefix = family.model_class or "".join(map(str.capitalize, name.split("_")))
            names = {"model_type": name, "architectures": [f"{prefix}ForCausalLM"]}
            # Also what this version of transformers reads under another name.
            return full | names | own
    raise ValueError(
        f"save_pretrained: got qk_norm={arch.qk_norm}, qkv_bias={arch.qkv_bias},"
        f" out_bias={arch.out_bias}, mlp_bias={arch.mlp_bias}, windows={arch.windows},"
        f" moe={arch.moe}, delta={arch.delta}, latent={arch.latent}; allowed: a combination"
        f" that one of {', '.join(FAMILIES)} has."
    )


def _own_json(family: Family, arch: Architecture) -> dict[str, Any]:
    """The keys of a config.json in which families differ."""
    (activation,) = (name for name, ours in _ACTIVATIONS.items() if ours == arch.activation)
    return {
        family.activation: activation,
        **family.write(arch),
        **_windows_json(family, arch),
        **({} if arch.moe is None else EXPERT_SETTINGS[family.experts].write(arch.moe)),
        **(delta_json(arch) if family.delta else {}),
        **(latent_json(arch) if family.latent else {}),
        **ropes_json(family, arch),
    }


def _read_activation(family: Family, values: Mapping[str, Any], source: str) -> str:
    name = values[family.activation]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{source}: {family.activation} is {shown(name)}; allowed: {allowed}.")
    return _ACTIVATIONS[name]


def _computes(arch: Architecture) -> dict[str, Any]:
    """The fields that determine the results, without those of the implementation."""
    how = ("lora", "dtype", "param_dtype", "scan_layers", "remat", "attention", "longest")
    how += ("unassigned", "family")  # the first is the tokenizer's
    return {key: value for key, value in vars(arch).items() if key not in how}


def _with_defaults(name: str, values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The config with its family's defaults and today's names, as `transformers` reads it."""
    given = {key: value for key, value in values.items() if key != "model_type"}
    try:
        given = copy.deepcopy(given)  # transformers writes into what it is given
        return transformers.AutoConfig.for_model(name, **given).to_dict()
    except Exception as error:  # of any class, for a config that it refuses
        reason = textwrap.shorten(str(error), 400, placeholder=" ...")
        raise ValueError(f"{source}: not a {name} config: {reason}") from None


def _read_windows(family: Family, values: Mapping[str, Any], source: str) -> tuple[int | None, ...]:
    window, layers = values.get("sliding_window"), values["num_hidden_layers"]
    if not window:  # 0 is what Qwen2-MoE has without one
        return ()
    if family.windows == "none":
        raise ValueError(f"{source}: sliding_window is {window}; allowed for this family: null.")
    by_layer = values.get("layer_types") if family.windows == "layers" else None
    kinds = by_layer or ["sliding_attention"] * layers
    window_of = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != layers or set(kinds) - window_of.keys():
        raise ValueError(
            f"{source}: layer_types is {shown(kinds)}; allowed: {layers} of {', '.join(window_of)}."
        )
    windows = tuple(window_of[kind] for kind in kinds)
    return windows if any(windows) else ()


def _windows_json(family: Family, arch: Architecture) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    sizes = [window for window in arch.windows if window is not None]
    values: dict[str, Any] = {"use_sliding_window": bool(sizes)}
    if sizes or family.windows == "all":
        values["sliding_window"] = sizes[0] if sizes else None
    if family.windows == "layers":
        windows = arch.windows or (None,) * arch.layers
        values["layer_types"] = [KINDS[window is not None] for window in windows]
    return values
