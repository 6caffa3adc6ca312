"""GGUF files (llama.cpp's format) as a Hugging Face config and named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.files.gguf_families import (
    ARCHITECTURES,
    EXPERT,
    GgufFamily,
    Settings,
    find_family,
    rope_scaling,
)
from seeupo_jax.policy.files.gguf_header import StoredTensor, read_header
from seeupo_jax.policy.files.gguf_parts import part_files

_BLOCK = 1 << 16  # weights dequantised at a time: bounds the temporaries to about 1 MiB

# Settings of an architecture that are read, and those with one supported value.
_SETTINGS = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # metadata without effect on the computation
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
_FIXED = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",
}

# Names of tensors: llama.cpp's -> Hugging Face's; a layer's follow `blk.N.` and `model.layers.N.`.
_EMBEDDING, _OUTPUT, _ROPE_FREQS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TOP = {_EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_HEAD = {_OUTPUT: "lm_head.weight"}
# Phi 3's factors of contexts up to its original one, and beyond.
_LONGROPE = {f"rope_factors_{x}.weight": f"{x}_factor" for x in ("short", "long")}
_ROPES = (_ROPE_FREQS, *_LONGROPE)
# The kernels that llama.cpp permutes in some families, and the heads of their rows.
_HEADS = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}

# Of Llama 3's scaling, a file holds only the resulting divisor of each frequency. These fields are
# the same in every Llama 3.1, 3.2 and 3.3; the factor is the largest divisor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufFile:
    """A GGUF file of a family of `gguf_families.py`, or the first of several that it is cut into.

    config: the model's Hugging Face config.json.
    shapes: of every tensor, by Hugging Face name; kernels are [out, in].
    fields: the file's metadata by key, `tokenizer.ggml.tokens` and so on.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    fields: dict[str, Any]

    def __init__(self, path: str | Path):
        """Reads the header; tensors are read by `read`.

        Raises:
          ValueError: no such file, another format, a damaged or truncated file; an unsupported
            architecture, setting, tensor or quantisation; a missing tensor or part.
        """
        self.path = Path(path)
        self.fields, stored = _read_parts(self.path)
        family, settings = _read_settings(self.path, self.fields)
        self.config = _config(family, settings, stored)
        names = _tensor_names(self.path, family, self.config, stored)
        for name in (*names, *(stored.keys() & set(_ROPES))):
            stored[name].check(name, axes=3 if EXPERT in names.get(name, "") else 2)
        self._read_rope_tensors(stored)
        self._tensors = {
            name: _in_order(self.path, family, self.config, name, tensor)
            for name, tensor in _split_experts(self.path, self.config, names, stored)
        }
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor or a part of it, as Hugging Face stores it.

        Only the rows asked for are read and dequantised, a block of them at a time.

        Args:
          name: a key of `shapes`.
          index: a slice for each of the leading axes.

        Returns: float32.
        """
        tensor = self._tensors[name]
        first, *others = *index, *[slice(None)] * (len(tensor.shape) - len(index))
        rows = np.arange(tensor.shape[0])[first]
        if tensor.head_dim:
            rows = _rows_in_file(rows, tensor.head_dim)
        if not others:
            return self._dequantized(tensor, np.arange(1))[0, rows] - tensor.added
        (columns,), width = others, tensor.shape[1]
        out = np.empty((len(rows), len(range(width)[columns])), np.float32)
        step = max(1, _BLOCK // width)
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            out[block] = self._dequantized(tensor, rows[block])[:, columns]
        return out

    def _read_rope_tensors(self, stored: Mapping[str, StoredTensor]) -> None:
        """Adds to the config what tensors say of its rope."""
        factors = {
            name: self._dequantized(stored[name], np.arange(1))[0]
            for name in _ROPES
            if name in stored
        }
        if _ROPE_FREQS in factors:
            scaling = _llama3_scaling(self.path, self.config, factors[_ROPE_FREQS])
            self.config["rope_scaling"] = scaling
        if _LONGROPE.keys() & factors.keys():
            self.config["rope_scaling"] = _longrope(self.path, self.config, factors, self.fields)

    def _dequantized(self, tensor: StoredTensor, rows: np.ndarray) -> np.ndarray:
        # Mapped for each read: mapped pages would count as memory of this process.
        # By its name as text: of a Path, NumPy resolves every link anew.
        table = np.memmap(str(tensor.file), np.uint8, "r", tensor.offset, tensor.table)
        return dequantize(np.asarray(table[rows]), tensor.kind)


def _read_parts(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The metadata of the first file, and the tensors of all."""
    files = part_files(path)
    fields, stored = read_header(path)
    number, count = fields.get("split.no", 0), fields.get("split.count", 1)
    if count not in (0, 1, len(files)) or number != 0:
        raise ValueError(
            f"{path} is part {shown(number)} of {shown(count)}, counted from 0; allowed: a whole"
            " model, or its first part with the name that gguf-split gives it, such as"
            " NAME-00001-of-00003.gguf."
        )
    for number, file in enumerate(files[1:], 1):
        own, more = read_header(file)
        place = own.get("split.no"), own.get("split.count")
        if place != (number, len(files)) or count != len(files):
            raise ValueError(
                f"{file} is part {shown(place[0])} of {shown(place[1])}, counted from 0; allowed by"
                f" its name: part {number} of {len(files)}."
            )
        if twice := stored.keys() & more.keys():
            raise ValueError(
                f"{file} has {', '.join(sorted(twice)[:5])}, as an earlier part has; allowed: parts"
                " of one model."
            )
        stored |= more
    tensors = fields.get("split.tensors.count", len(stored))
    if tensors != len(stored):
        raise ValueError(
            f"{path} and its other parts have {len(stored)} tensors; allowed: the {shown(tensors)}"
            " of split.tensors.count."
        )
    return fields, stored


def _rows_in_file(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The rows' places in llama.cpp, which interleaves the two halves of every head."""
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return head * head_dim + 2 * pair + half


def _in_order(
    path: Path, family: GgufFamily, config: Mapping[str, Any], name: str, tensor: StoredTensor
) -> StoredTensor:
    """A tensor with what llama.cpp has changed in it: the order of its rows, the zero of a norm."""
    if name.endswith("norm.weight"):
        return replace(tensor, added=family.norm_offset)
    heads = [config[key] for part, key in _HEADS.items() if part in name]
    if not family.permuted or not heads:
        return tensor
    if tensor.shape[0] != heads[0] * config["head_dim"]:
        raise ValueError(
            f"{path}: {name} has {tensor.shape[0]} rows; allowed: {heads[0]} heads x"
            f" {config['head_dim']}."
        )
    return replace(tensor, head_dim=config["head_dim"])


def _split_experts(
    path: Path,
    config: Mapping[str, Any],
    names: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor by its Hugging Face name, and of those of all experts every expert's part."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[key] for key in counts if key in config), 0)
    for gguf_name, name in names.items():
        tensor = stored[gguf_name]
        if EXPERT not in name:
            yield name, tensor
            continue
        if tensor.shape[0] != experts:
            raise ValueError(
                f"{path}: {gguf_name} is of {tensor.shape[0]} experts; allowed: {experts}."
            )
        for expert in range(experts):
            yield name.replace(EXPERT, str(expert)), tensor.part(expert)


def _read_settings(path: Path, fields: Mapping[str, Any]) -> tuple[GgufFamily, Settings]:
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{path}: general.architecture is {name!r}; allowed: {', '.join(ARCHITECTURES)}."
        )
    prefix = f"{name}."
    values = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    settings, family = Settings(path, name, values), find_family(name, values)
    known = (*_SETTINGS, *family.settings)
    for key, value in values.items():
        if key in known:
            continue
        if key not in _FIXED:
            allowed = ", ".join(dict.fromkeys((*known, *_FIXED)))
            raise ValueError(f"{path}: unknown setting {prefix}{key}; allowed: {allowed}.")
        if value != _FIXED[key]:
            raise settings.refusal(key, repr(_FIXED[key]))
    return family, settings


def _config(
    family: GgufFamily, settings: Settings, stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    if _EMBEDDING not in stored:
        raise ValueError(f"{settings.path} lacks {_EMBEDDING}; allowed: a file that has it.")
    width, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", width // heads)
    whole = () if family.head_part else ("rope.dimension_count",)
    for key in ("attention.value_length", *whole):
        if settings.integer(key, head_dim) != head_dim:
            raise settings.refusal(key, f"{head_dim}, the size of a head")
    config = {
        "model_type": family.model_type,
        "vocab_size": settings.integer("vocab_size", stored[_EMBEDDING].shape[0]),
        "hidden_size": width,
        "num_hidden_layers": settings.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": settings.integer("feed_forward_length"),
        "rms_norm_eps": settings.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.real("rope.freq_base", 10_000.0),  # llama.cpp's default
        "rope_scaling": rope_scaling(settings),
        "max_position_embeddings": settings.integer("context_length"),
        "tie_word_embeddings": _OUTPUT not in stored,
        "hidden_act": "silu",
    }
    if family.biases:
        config["attention_bias"] = any(f"blk.0.{name}" in stored for name in family.biases)
    if family.head_part:
        rotated = settings.integer("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated / head_dim
    return config | family.read(settings)


def _llama3_scaling(path: Path, config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """The rope_scaling from which `rope_freqs.weight` was computed."""
    if config["model_type"] != "llama" or config["rope_scaling"] is not None:
        raise ValueError(
            f"{path}: {_ROPE_FREQS} in a {config['model_type']} model with rope_scaling"
            f" {config['rope_scaling']}; allowed: in a llama model without one."
        )
    low, high, original = _LLAMA3.values()
    factor, pairs = float(factors.max()), np.arange(0, config["head_dim"], 2)
    turns = original * config["rope_theta"] ** (-pairs / config["head_dim"]) / math.tau
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    # 1e-4: the file's were computed in float32.
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise ValueError(
            f"{path}: {_ROPE_FREQS} is {np.round(factors, 3).tolist()}; allowed: the divisors of a"
            f" factor and {_LLAMA3}."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _longrope(
    path: Path,
    config: Mapping[str, Any],
    factors: Mapping[str, np.ndarray],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """The rope_scaling of Phi 3's factors."""
    if config["model_type"] != "phi3" or factors.keys() != _LONGROPE.keys():
        raise ValueError(
            f"{path}: {', '.join(factors)} in a {config['model_type']} model; allowed:"
            f" {' and '.join(_LONGROPE)} in a phi3 model."
        )
    scaling: dict[str, Any] = {key: factors[name].tolist() for name, key in _LONGROPE.items()}
    attention = fields.get("phi3.rope.scaling.attn_factor")
    return {"rope_type": "longrope", "attention_factor": attention} | scaling


def _tensor_names(
    path: Path,
    family: GgufFamily,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
) -> dict[str, str]:
    """llama.cpp's name -> Hugging Face's, of every tensor of the config."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    layer = {**family.layer, **(family.biases if config.get("attention_bias") else {})}
    names = _TOP if config["tie_word_embeddings"] else _TOP | _HEAD
    # A damaged count of layers, up to 2**32, is refused below without a loop over it.
    names = names | {
        f"blk.{i}.{gguf_name}": f"model.layers.{i}.{name}"
        for i in range(min(layers, len(stored)))
        for part in (layer, family.experts if family.experts and i >= dense else family.dense)
        for gguf_name, name in part.items()
    }
    for problem, wrong in (
        ("lacks", [name for name in names if name not in stored]),
        ("has unknown", [name for name in stored if name not in names and name not in _ROPES]),
    ):
        if wrong:
            raise ValueError(
                f"{path} {problem} {', '.join(wrong[:5])}; allowed: exactly the tensors of a"
                f" {family.model_type} model of {layers} layers."
            )
    return names
