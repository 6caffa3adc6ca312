"""The families of published models: config.json to and from `Architecture`."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers

from seeupo_jax.configuration.model_schema import MODEL_SIZES
from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.architecture import Architecture, Moe
from seeupo_jax.policy.rope import Rope

_POSITIONS = "max_position_embeddings"
# Upper bounds of a config's sizes; of experts ten times the largest published (Kimi K2: 384).
_SIZES = {
    "vocab_size": MODEL_SIZES["vocab_size"],
    "hidden_size": MODEL_SIZES["width"],
    "num_hidden_layers": MODEL_SIZES["layers"],
    "num_attention_heads": MODEL_SIZES["heads"],
    "num_key_value_heads": MODEL_SIZES["heads"],
    "head_dim": MODEL_SIZES["head_dim"],
    "intermediate_size": MODEL_SIZES["mlp_width"],
    _POSITIONS: MODEL_SIZES["max_positions"],
    "sliding_window": MODEL_SIZES["max_positions"],
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": MODEL_SIZES["mlp_width"],
    "decoder_sparse_step": MODEL_SIZES["layers"],
}
_NUMBERS = ("rms_norm_eps", "rope_theta")
_TRUTHS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "use_sliding_window",
)
_LISTS = {"layer_types": str, "mlp_only_layers": int}
# Required in a config: the family's default would be a guess.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# Settings that would change the computation, and their only supported value.
_FIXED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "quantization_config": None,
    "dual_chunk_attention_config": None,  # Qwen2.5-1M; transformers ignores it too
    "use_mrope": False,
    "pretraining_tp": 1,
}
_LARGEST_FACTOR = 10**6  # contexts of millions, of models made for thousands, are published
_ROPE_NAMES = {"default": "none"} | {x: x for x in ("linear", "llama3", "yarn", "dynamic")}
_ROPE_FIELDS = {
    "rope_theta": "theta",
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
# Which of the fields each kind of scaling reads; any other would be ignored.
_ROPE_READS = {
    "none": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "dynamic": ("rope_theta", "factor"),
    "llama3": (
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": tuple(k for k in _ROPE_FIELDS if k not in ("low_freq_factor", "high_freq_factor")),
}


@dataclass(frozen=True)
class Family:
    """A family of models.

    qk_norm: it has norms of queries and keys. bias: maps its config to its biases.
    windows: it can have sliding windows. moe: its feed-forwards are of experts.
    """

    qk_norm: bool
    bias: Callable[[Mapping[str, Any]], dict[str, bool]]
    windows: bool = False
    moe: bool = False


def _attention_bias(values: Mapping[str, Any]) -> dict[str, bool]:
    return {"qkv_bias": values["attention_bias"], "out_bias": values["attention_bias"]}


FAMILIES = {
    "llama": Family(qk_norm=False, bias=lambda v: _attention_bias(v) | {"mlp_bias": v["mlp_bias"]}),
    "qwen2": Family(qk_norm=False, bias=lambda v: {"qkv_bias": True}, windows=True),
    "qwen3": Family(qk_norm=True, bias=_attention_bias, windows=True),
    "qwen3_moe": Family(qk_norm=True, bias=_attention_bias, windows=True, moe=True),
}


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
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{source}: model_type is {shown(name)}; allowed: {', '.join(FAMILIES)}.")
    missing = [key for key in _REQUIRED if values.get(key) is None]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} missing; a {name} config has them.")
    _check_values(values, source)
    full = _with_defaults(name, values, source)
    for key, allowed in _FIXED.items():
        if full.get(key, allowed) != allowed:
            raise ValueError(f"{source}: {key} is {shown(full[key])}; allowed: {allowed!r}.")
    family = FAMILIES[name]
    heads = full["num_attention_heads"]
    head_dim, kv_heads = full.get("head_dim"), full["num_key_value_heads"]
    head_dim = full["hidden_size"] // heads if head_dim is None else head_dim
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_key_value_heads is {kv_heads}; allowed: a divisor of {heads} heads."
        )
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{source}: head_dim is {head_dim}; allowed: an even number >= 2.")
    rope = _read_rope(full, source)
    return Architecture(
        vocab_size=full["vocab_size"],
        width=full["hidden_size"],
        layers=full["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=full["intermediate_size"],
        rope=rope,
        norm_eps=full["rms_norm_eps"],
        qk_norm=family.qk_norm,
        **family.bias(full),
        tied=full["tie_word_embeddings"],
        windows=_read_windows(family, full, source),
        moe=_read_moe(full, source) if family.moe else None,
        max_positions=_max_positions(rope, full[_POSITIONS]),
        **compute_options,
    )


def _check_values(values: Mapping[str, Any], source: str) -> None:
    """Types and bounds of what a config states, before anything is built with it.

    Raises:
      ValueError: one sentence with the first that is wrong.
    """

    def refuse(key: str, allowed: str) -> None:
        raise ValueError(f"{source}: {key} is {shown(values[key])}; allowed: {allowed}.")

    stated = {key: value for key, value in values.items() if value is not None}
    for key in _SIZES.keys() & stated:
        if type(stated[key]) is not int or not 1 <= stated[key] <= _SIZES[key]:
            refuse(key, f"a whole number from 1 to {_SIZES[key]}")
    if stated.get("head_dim", 2) % 2:
        refuse("head_dim", "an even number, whose halves rotate")
    for key in stated.keys() & set(_NUMBERS):
        if not _is_positive(stated[key]):
            refuse(key, "a number > 0")
    for key in stated.keys() & set(_TRUTHS):
        if not isinstance(stated[key], bool):
            refuse(key, "true or false")
    for key in _LISTS.keys() & stated:
        listed = stated[key]
        if not isinstance(listed, list) or not all(type(each) is _LISTS[key] for each in listed):
            refuse(key, "a list of " + ("texts" if _LISTS[key] is str else "whole numbers"))


def _is_positive(value: Any) -> bool:
    """Whether a number is one that float32 holds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 1e-37 < value < 1e38


def config_json(arch: Architecture, end_ids: Sequence[int] = (), dtype: str = "float32") -> Any:
    """The config.json of an architecture, complete with the defaults of its family.

    Raises:
      ValueError: no family has this combination of norms, biases and windows.
    """
    values = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.mlp_width,
        "rope_parameters": _rope_json(arch.rope),
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied,
        _POSITIONS: arch.max_positions,
        "attention_bias": arch.out_bias,
        "mlp_bias": arch.mlp_bias,
        "bos_token_id": None,
        "eos_token_id": list(end_ids) if end_ids else None,
        "dtype": dtype,
        **_windows_json(arch),
        **_moe_json(arch),
    }
    for name in FAMILIES:
        try:
            full = _with_defaults(name, values, "save_pretrained")
            same = read_architecture({**full, "model_type": name}, "save_pretrained")
        except ValueError:
            continue
        if _computes(same) == _computes(arch):
            classes = "".join(part.capitalize() for part in name.split("_"))
            names = {"model_type": name, "architectures": [f"{classes}ForCausalLM"]}
            return full | names | _rope_of_transformers_4(arch.rope)
    raise ValueError(
        f"save_pretrained: got qk_norm={arch.qk_norm}, qkv_bias={arch.qkv_bias},"
        f" out_bias={arch.out_bias}, mlp_bias={arch.mlp_bias}, windows={arch.windows},"
        f" moe={arch.moe}; allowed: a combination that one of {', '.join(FAMILIES)} has."
    )


def _computes(arch: Architecture) -> dict[str, Any]:
    """The fields that determine the results, without those of the implementation."""
    how = ("lora", "dtype", "param_dtype", "scan_layers", "remat", "attention", "longest")
    how += ("unassigned",)  # which the tokenizer says
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


def _read_rope(values: Mapping[str, Any], source: str) -> Rope:
    if not isinstance(values["rope_parameters"], Mapping):
        got = shown(values["rope_parameters"])
        raise ValueError(f"{source}: rope_parameters is {got}; allowed: a JSON object.")
    given = {k: v for k, v in values["rope_parameters"].items() if v is not None}
    for key in ("mscale", "mscale_all_dim"):  # a zero is how a config says that there is none
        if given.get(key) == 0:
            del given[key]
    kind = given.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_NAMES:
        names = ", ".join(_ROPE_NAMES)
        raise ValueError(f"{source}: rope scaling is {shown(kind)}; allowed: {names}.")
    scaling = _ROPE_NAMES[kind]
    positions = {"llama3", "yarn"} & {scaling}
    if positions:
        given.setdefault("original_max_position_embeddings", values[_POSITIONS])
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{source}: partial_rotary_factor is {shown(given['partial_rotary_factor'])}; allowed:"
            " 1.0."
        )
    given.pop("partial_rotary_factor", None)
    given.pop("type", None)  # the old name of rope_type
    reads = _ROPE_READS[scaling]
    unknown = [key for key in given if key not in reads]
    if unknown:
        raise ValueError(
            f"{source}: rope scaling {kind!r} with {', '.join(unknown)}; allowed:"
            f" {', '.join(reads)}."
        )
    if scaling != "none" and "factor" not in given:
        raise ValueError(f"{source}: rope scaling {kind!r} without a factor; allowed: one >= 1.")
    for key, value in given.items():
        bad = not isinstance(value, bool) if key == "truncate" else not _is_positive(value)
        if bad:
            allowed = "true or false" if key == "truncate" else "a number > 0"
            raise ValueError(f"{source}: rope's {key} is {shown(value)}; allowed: {allowed}.")
    rope = Rope(scaling=scaling, **{_ROPE_FIELDS[key]: value for key, value in given.items()})
    above_low = scaling != "llama3" or rope.high_freq_factor > rope.low_freq_factor
    for key, fits, allowed in (
        ("factor", 1 <= rope.factor <= _LARGEST_FACTOR, f"a number from 1 to {_LARGEST_FACTOR}"),
        ("rope_theta", scaling != "yarn" or rope.theta > 1, "a number > 1 with yarn"),
        ("high_freq_factor", above_low, f"a number > low_freq_factor={rope.low_freq_factor}"),
    ):
        if not fits:
            got = vars(rope)[_ROPE_FIELDS[key]]
            raise ValueError(f"{source}: rope's {key} is {got}; allowed: {allowed}.")
    return rope


def _max_positions(rope: Rope, stated: int) -> int:
    """The longest context of a model.

    The model cards of Qwen add YaRN to a config.json and leave its `max_position_embeddings`.
    """
    if rope.scaling != "yarn":
        return stated
    return max(stated, min(int(rope.factor * rope.original_positions), _SIZES[_POSITIONS]))


def _read_windows(family: Family, values: Mapping[str, Any], source: str) -> tuple[int | None, ...]:
    window, layers = values.get("sliding_window"), values["num_hidden_layers"]
    if window is None:
        return ()
    if not family.windows:
        raise ValueError(f"{source}: sliding_window is {window}; allowed for this family: null.")
    # A family that does not say it layer by layer has the window in all of them.
    kinds = values.get("layer_types") or ["sliding_attention"] * layers
    window_of = {"full_attention": None, "sliding_attention": window}
    if len(kinds) != layers or set(kinds) - window_of.keys():
        raise ValueError(
            f"{source}: layer_types is {shown(kinds)}; allowed: {layers} of {', '.join(window_of)}."
        )
    windows = tuple(window_of[kind] for kind in kinds)
    return windows if any(windows) else ()


def _read_moe(values: Mapping[str, Any], source: str) -> Moe:
    experts = values["num_local_experts"]
    layers, step = range(values["num_hidden_layers"]), values["decoder_sparse_step"]
    dense = tuple(i for i in layers if i in values["mlp_only_layers"] or (i + 1) % step)
    if not 0 < values["num_experts_per_tok"] <= experts:
        raise ValueError(
            f"{source}: num_experts_per_tok is {values['num_experts_per_tok']}; allowed: from 1 to"
            f" the {experts} experts."
        )
    return Moe(
        experts,
        values["num_experts_per_tok"],
        values["moe_intermediate_size"],
        values["norm_topk_prob"],
        dense,
    )


def _rope_json(rope: Rope) -> dict[str, Any]:
    """The inverse of `_read_rope`; optional fields of yarn only where they are not defaults."""
    (kind,) = [kind for kind, scaling in _ROPE_NAMES.items() if scaling == rope.scaling]
    values: dict[str, Any] = {"rope_type": kind}
    for key in _ROPE_READS[rope.scaling]:
        value, usual = (vars(each)[_ROPE_FIELDS[key]] for each in (rope, Rope()))
        if rope.scaling != "yarn" or value != usual or key in _ROPE_READS["linear"]:
            values[key] = value
    return values


def _rope_of_transformers_4(rope: Rope) -> dict[str, Any]:
    """The same under the names that transformers read before version 5, and still does."""
    scaling = _rope_json(rope)
    theta = scaling.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rope.scaling == "none" else scaling}


def _windows_json(arch: Architecture) -> dict[str, Any]:
    sizes = {window for window in arch.windows if window is not None}
    if len(sizes) != 1:  # none; or several, which no family has
        return {}
    (window,) = sizes
    kinds = ["full_attention" if w is None else "sliding_attention" for w in arch.windows]
    values: dict[str, Any] = {"sliding_window": window, "use_sliding_window": True}
    return values if arch.moe is not None else values | {"layer_types": kinds}


def _moe_json(arch: Architecture) -> dict[str, Any]:
    if arch.moe is None:
        return {}
    return {
        "num_experts": arch.moe.experts,
        "num_experts_per_tok": arch.moe.per_token,
        "moe_intermediate_size": arch.moe.mlp_width,
        "norm_topk_prob": arch.moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(arch.moe.dense_layers),
    }
