"""The rotary embeddings of a config.json: `rope_parameters` to and from `Rope`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seeupo_jax.configuration.model_schema import MODEL_SIZES
from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.families import Family
from seeupo_jax.policy.rope import Rope

POSITIONS = "max_position_embeddings"
KINDS = ("full_attention", "sliding_attention")  # of layers: without a window, with one
_LARGEST_FACTOR = 10**6  # contexts of millions, of models made for thousands, are published
_NAMES = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "dynamic": "dynamic",
}
_FIELDS = {
    "rope_theta": "theta",
    "partial_rotary_factor": "partial",
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
    "short_factor": "short_factor",
    "long_factor": "long_factor",
    "llama_4_scaling_beta": "query_growth",
}
_LISTS = ("short_factor", "long_factor")
_PLAIN = ("rope_theta", "partial_rotary_factor")
_STRETCHED = (*_PLAIN, "factor")
_FROM = (*_STRETCHED, "original_max_position_embeddings")
# Which of the fields each kind of scaling reads; any other would be ignored.
_READS = {
    "none": _PLAIN,
    "linear": _STRETCHED,
    "dynamic": _STRETCHED,
    "llama3": (*_FROM, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *_FROM,
        *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "llama_4_scaling_beta",
    ),
    "longrope": (*_FROM, "attention_factor", *_LISTS),
}
_OPTIONAL = ("yarn", "longrope")  # whose fields are written only where they are not defaults


def read_ropes(
    family: Family, values: Mapping[str, Any], windows: tuple[int | None, ...], source: str
) -> tuple[Rope, tuple[Rope | None, ...]]:
    """The rope of a config, and that of every layer where layers differ, else none.

    Args:
      values: the config with its family's defaults. windows: of its layers.

    Raises:
      ValueError: a kind of scaling, or a field of one, that is not supported.
    """
    layers, stated = values["num_hidden_layers"], values["rope_parameters"]
    if not isinstance(stated, Mapping):
        got = shown(stated)
        raise ValueError(f"{source}: rope_parameters is {got}; allowed: a JSON object.")
    if family.rope_kinds:
        full, sliding = (_read_rope(family, stated.get(kind), values, source) for kind in KINDS)
        each = tuple(sliding if window else full for window in windows or (None,) * layers)
        return full, () if set(each) == {full} else each
    rope = _read_rope(family, stated, values, source)
    if family.rope_layers is None:
        return rope, ()
    has = values[family.rope_layers]
    if len(has) != layers or set(has) - {0, 1}:
        raise ValueError(
            f"{source}: {family.rope_layers} is {shown(has)}; allowed: {layers} of 0 and 1."
        )
    return rope, () if all(has) else tuple(rope if one else None for one in has)


def _read_rope(family: Family, stated: Any, values: Mapping[str, Any], source: str) -> Rope:
    if not isinstance(stated, Mapping):
        got = shown(stated)
        raise ValueError(f"{source}: rope_parameters is {got}; allowed: a JSON object.")
    given = {k: v for k, v in stated.items() if v is not None}
    for key in ("mscale", "mscale_all_dim"):  # a zero is how a config says that there is none
        if given.get(key) == 0:
            del given[key]
    kind = given.pop("rope_type", "default")
    if not isinstance(kind, str) or kind not in _NAMES:
        names = ", ".join(_NAMES)
        raise ValueError(f"{source}: rope scaling is {shown(kind)}; allowed: {names}.")
    scaling = _NAMES[kind]
    if "original_max_position_embeddings" in _READS[scaling]:
        original = values.get("original_max_position_embeddings") or values[POSITIONS]
        given.setdefault("original_max_position_embeddings", original)
    given.pop("type", None)  # the old name of rope_type
    given.pop(POSITIONS, None)  # Ministral 3 repeats it
    for key in ("mrope_section", "mrope_interleaved") if family.rope_axes else ():
        given.pop(key, None)
    reads = _READS[scaling]
    unknown = [key for key in given if key not in reads]
    if unknown:
        raise ValueError(
            f"{source}: rope scaling {kind!r} with {', '.join(unknown)}; allowed:"
            f" {', '.join(reads)}."
        )
    if scaling == "longrope" and is_positive(given["original_max_position_embeddings"]):
        given.setdefault("factor", values[POSITIONS] / given["original_max_position_embeddings"])
    if scaling != "none" and "factor" not in given:
        raise ValueError(f"{source}: rope scaling {kind!r} without a factor; allowed: one >= 1.")
    for key, value in given.items():
        _check_value(key, value, source)
    fields = {_FIELDS[k]: tuple(v) if k in _LISTS else v for k, v in given.items()}
    pairs = family.interleaved
    pairs = bool(values[pairs]) if isinstance(pairs, str) else pairs
    rope = Rope(scaling=scaling, interleaved=pairs, **fields)
    _check_rope(rope, _head_dim(values), source)
    return rope


def _head_dim(values: Mapping[str, Any]) -> int:
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def _check_value(key: str, value: Any, source: str) -> None:
    if key == "truncate":
        fits, allowed = isinstance(value, bool), "true or false"
    elif key in _LISTS:
        fits = isinstance(value, list | tuple) and all(map(is_positive, value))
        allowed = "a list of numbers > 0"
    else:
        fits, allowed = is_positive(value), "a number > 0"
    if not fits:
        raise ValueError(f"{source}: rope's {key} is {shown(value)}; allowed: {allowed}.")


def is_positive(value: Any) -> bool:
    """Whether a number is one that float32 holds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 1e-37 < value < 1e38


def _check_rope(rope: Rope, head_dim: int, source: str) -> None:
    """Values that do not fit together, or the model."""
    above_low = rope.scaling != "llama3" or rope.high_freq_factor > rope.low_freq_factor
    pairs, long = rope.dimensions(head_dim) // 2, rope.scaling == "longrope"
    lists = {key: not long or len(vars(rope)[key]) == pairs for key in _LISTS}
    rotates = rope.partial <= 1 and pairs > 0 and rope.dimensions(head_dim) % 2 == 0
    for key, fits, allowed in (
        ("factor", 1 <= rope.factor <= _LARGEST_FACTOR, f"a number from 1 to {_LARGEST_FACTOR}"),
        ("rope_theta", rope.scaling != "yarn" or rope.theta > 1, "a number > 1 with yarn"),
        ("high_freq_factor", above_low, f"a number > low_freq_factor={rope.low_freq_factor}"),
        ("partial_rotary_factor", rotates, f"an even part of a head's {head_dim} dimensions"),
        *((key, fits, f"a list of {pairs} numbers, one a pair") for key, fits in lists.items()),
    ):
        if not fits:
            got = shown(vars(rope)[_FIELDS[key]])
            raise ValueError(f"{source}: rope's {key} is {got}; allowed: {allowed}.")


def max_positions(rope: Rope, stated: int) -> int:
    """The longest context of a model.

    The model cards of Qwen add YaRN to a config.json and leave its `max_position_embeddings`. Of
    longrope the factors for contexts beyond the original one are not computed (`policy/rope.py`).
    """
    if rope.scaling == "longrope":
        return rope.original_positions
    if rope.scaling != "yarn":
        return stated
    longest = MODEL_SIZES["max_positions"]
    return max(stated, min(int(rope.factor * rope.original_positions), longest))


def ropes_json(family: Family, arch: Architecture) -> dict[str, Any]:
    """The inverse of `read_ropes`: keys of config.json, for versions 4 and 5 of transformers."""
    values, ropes = _version_4(arch.rope), [arch.layer_rope(i) for i in range(arch.layers)]
    if family.rope_layers is not None:
        values[family.rope_layers] = [int(rope is not None) for rope in ropes]
    if not family.rope_kinds:
        return values | {"rope_parameters": _rope_json(arch.rope)}
    in_windows = [rope for i, rope in enumerate(ropes) if arch.window(i) and rope is not None]
    sliding = in_windows[0] if in_windows else arch.rope
    parameters = dict(zip(KINDS, map(_rope_json, (arch.rope, sliding)), strict=True))
    return values | {"rope_parameters": parameters, "rope_local_base_freq": sliding.theta}


def _rope_json(rope: Rope) -> dict[str, Any]:
    (kind,) = [kind for kind, scaling in _NAMES.items() if scaling == rope.scaling]
    values: dict[str, Any] = {"rope_type": kind}
    usual = Rope()
    for key in _READS[rope.scaling]:
        value, default = (vars(each)[_FIELDS[key]] for each in (rope, usual))
        optional = key == "partial_rotary_factor" or rope.scaling in _OPTIONAL
        if not optional or value != default or key in ("rope_theta", "factor"):
            values[key] = list(value) if key in _LISTS else value
    return values


def _version_4(rope: Rope) -> dict[str, Any]:
    """Names that transformers read before version 5, and still does."""
    scaling = _rope_json(rope)
    theta, partial = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", None)
    values = {"rope_theta": theta, "rope_scaling": None if rope.scaling == "none" else scaling}
    if partial is not None:
        values["partial_rotary_factor"] = partial
    if rope.scaling == "longrope":
        values["original_max_position_embeddings"] = rope.original_positions
        values[POSITIONS] = round(rope.factor * rope.original_positions)
    return values
