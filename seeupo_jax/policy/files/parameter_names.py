"""The place of every parameter in a model folder: Hugging Face's names and orientation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from seeupo_jax.policy.architecture import SELECTION_BIAS, Architecture
from seeupo_jax.policy.families import FAMILIES, Family
from seeupo_jax.policy.files.expert_adapters import name_in_layer

# Modules of a layer -> Llama's names, whose kernels are [out, in] instead of [in, out].
_LAYER = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
    "latent/q": "self_attn.q_proj",
    "latent/q_a": "self_attn.q_a_proj",
    "latent/q_a_norm": "self_attn.q_a_layernorm",
    "latent/q_b": "self_attn.q_b_proj",
    "latent/kv_a": "self_attn.kv_a_proj_with_mqa",
    "latent/kv_a_norm": "self_attn.kv_a_layernorm",
    "latent/kv_b": "self_attn.kv_b_proj",
    "delta/qkvz": "linear_attn.in_proj_qkvz",
    "delta/ba": "linear_attn.in_proj_ba",
    "delta/qkv": "linear_attn.in_proj_qkv",
    "delta/z": "linear_attn.in_proj_z",
    "delta/b": "linear_attn.in_proj_b",
    "delta/a": "linear_attn.in_proj_a",
    "delta/out": "linear_attn.out_proj",
}
# Parameters of a layer that are not a module's weight or bias, stored as they are.
_TENSORS = {
    "sinks": "self_attn.sinks",
    "delta/conv1d": "linear_attn.conv1d.weight",
    "delta/a_log": "linear_attn.A_log",
    "delta/dt_bias": "linear_attn.dt_bias",
    "delta/norm_scale": "linear_attn.norm.weight",
}
# Leaf -> Hugging Face's (PEFT's for adapters), and whether it is transposed there.
_LEAF = {
    "kernel": ("weight", True),
    "scale": ("weight", False),
    "bias": ("bias", False),
    "lora_a": ("lora_A.weight", True),
    "lora_b": ("lora_B.weight", True),
}
_SHARED = {
    "mlp/shared/gate": "gate_proj",
    "mlp/shared/up": "up_proj",
    "mlp/shared/down": "down_proj",
}
_QWEN_EXPERTS = {
    "mlp/router": "mlp.gate.weight",
    "mlp/gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/up": "mlp.experts.{expert}.up_proj.weight",
    "mlp/down": "mlp.experts.{expert}.down_proj.weight",
    "mlp/shared_gate": "mlp.shared_expert_gate.weight",
}
# Of `Moe.names`: the parameters of a layer of experts, and the module of the expert of all tokens.
EXPERTS = {
    "qwen": (_QWEN_EXPERTS, "mlp.shared_expert"),
    "deepseek": (
        _QWEN_EXPERTS | {f"mlp/{SELECTION_BIAS}": "mlp.gate.e_score_correction_bias"},
        "mlp.shared_experts",
    ),
    "mixtral": (
        {
            "mlp/router": "block_sparse_moe.gate.weight",
            "mlp/gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "mlp/up": "block_sparse_moe.experts.{expert}.w3.weight",
            "mlp/down": "block_sparse_moe.experts.{expert}.w2.weight",
        },
        "",
    ),
    "gpt_oss": (
        {
            "mlp/router": "mlp.router.weight",
            "mlp/router_bias": "mlp.router.bias",
            **{
                f"mlp/{name}{kind}": f"mlp.experts.{{expert}}.{name}_proj.{leaf}"
                for name in ("gate", "up", "down")
                for kind, leaf in (("", "weight"), ("_bias", "bias"))
            },
        },
        "",
    ),
}
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
}

_UNNAMED = Family()  # of a policy that no file has described: Llama's names


@dataclass(frozen=True)
class StoredParameter:
    """The place of a parameter, or of one layer of a stacked one, in a model folder.

    path: in the tree of parameters. layer: its index in the stacked parameter, or None. names: its
    tensors. grouped: a tensor for every entry of its first axis (experts). transposed: its last two
    axes are swapped there. first_row: of its tensor, which other parameters share; None: it has one
    of its own.
    """

    path: tuple[Any, ...]
    layer: int | None
    names: tuple[str, ...]
    grouped: bool
    transposed: bool
    first_row: int | None = None


def stored_parameters(arch: Architecture, params: Any) -> Iterator[StoredParameter]:
    """Every parameter's place in a model folder; a stacked one yields its layers one by one.

    Args:
      params: the tree of parameters or of their shapes, or a part of it.
    """
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        keys = tuple(key.key for key in path)
        if keys[0] != "layers":
            yield StoredParameter(keys, None, (_TOP["/".join(keys)],), False, False)
            continue
        inside = keys[1:] if arch.scan_layers else keys[2:]
        for layer in range(arch.layers) if arch.scan_layers else (None,):
            number = keys[1] if layer is None else layer
            yield _stored_in_layer(arch, keys, inside, layer, f"model.layers.{number}.")


def _stored_in_layer(
    arch: Architecture, keys: tuple[Any, ...], inside: Sequence[str], layer: int | None, prefix: str
) -> StoredParameter:
    path = "/".join(inside)
    if path in _TENSORS:
        return StoredParameter(keys, layer, (prefix + _TENSORS[path],), False, False)
    of_experts = {} if arch.moe is None else EXPERTS[arch.moe.names][0]
    if arch.moe is not None and path in of_experts:
        grouped = "{expert}" in of_experts[path]
        count = arch.moe.experts if grouped else 1
        names = tuple(prefix + of_experts[path].format(expert=number) for number in range(count))
        return StoredParameter(keys, layer, names, grouped, inside[-1] != SELECTION_BIAS)
    *modules, leaf = inside
    if leaf not in _LEAF:  # an adapter of experts
        return StoredParameter(keys, layer, (prefix + name_in_layer(leaf),), False, False)
    file_leaf, transposed = _LEAF[leaf]
    family, module = FAMILIES.get(arch.family or "", _UNNAMED), "/".join(modules)
    name, first_row = _module_name(arch, family, module)
    if leaf == "lora_a" and first_row is not None:  # of `fused_adapters.py`
        (parts,) = (parts for parts in family.fused.values() if module in parts)
        first_row = parts.index(module) * arch.lora.rank
    return StoredParameter(
        keys, layer, (f"{prefix}{name}.{file_leaf}",), False, transposed, first_row
    )


def _module_name(arch: Architecture, family: Family, module: str) -> tuple[str, int | None]:
    """A module's name in files, and its first row in the tensor that it shares with others."""
    if arch.moe is not None and module in _SHARED:
        return f"{EXPERTS[arch.moe.names][1]}.{_SHARED[module]}", None
    for name, parts in family.fused.items():
        if module in parts:
            sizes = _outputs(arch)
            return name, sum(sizes[part] for part in parts[: parts.index(module)])
    return family.names.get(module) or _LAYER[module], None


def _outputs(arch: Architecture) -> Mapping[str, int]:
    """How many outputs the modules have that families store in one tensor."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    return {"q": q, "k": kv, "v": kv, "mlp/gate": arch.mlp_width, "mlp/up": arch.mlp_width}


def shapes_in_file(params: Any, stored: Iterable[StoredParameter]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, by name, in Hugging Face's orientation."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in stored:
        shape = shape_in_file(params, each)
        for name in each.names:
            above = shapes.get(name, (0,))[0]
            shapes[name] = (above + shape[0], *shape[1:])
    return shapes


def shape_in_file(params: Any, stored: StoredParameter) -> tuple[int, ...]:
    """The shape of each of a parameter's tensors, or of its rows of one."""
    shape = leaf_at(params, stored.path).shape
    shape = shape if stored.layer is None else shape[1:]
    shape = shape[1:] if stored.grouped else shape
    return shape[::-1] if stored.transposed else shape


def leaf_at(tree: Any, path: Sequence[Any]) -> Any:
    """The value at a path of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree
