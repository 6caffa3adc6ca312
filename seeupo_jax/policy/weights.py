"""Model folders: config.json, safetensors and tokenizer, in the layout of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

import seeupo_jax
from seeupo_jax.parallel.mesh import param_shardings
from seeupo_jax.policy.network import split
from seeupo_jax.policy.tokenizer import SentencePieceTokenizer, load_tokenizer
from seeupo_jax.policy.transformer import Architecture, Transformer

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
PACKAGE = "package:"  # a path that begins so names a policy that ships with the package

# model_type -> the two switches in which the families differ.
FAMILIES = {
    "llama": {"qk_norm": False, "qkv_bias": False},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "qwen3": {"qk_norm": True, "qkv_bias": False},
}
# Settings of other models in these families, and the value that our network computes.
_FIXED = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
# Hugging Face's names of a layer's tensors -> ours. Kernels are stored as [out, in] there.
_LAYER = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "out",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def resolve_folder(path: str) -> Path:
    """The folder that a model path means; `package:NAME` is one that ships with the package.

    Raises:
      ValueError: no such folder.
    """
    if path.startswith(PACKAGE):
        folder = Path(seeupo_jax.__path__[0]) / "assets" / path.removeprefix(PACKAGE)
    else:
        folder = Path(path)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"model path: got {path!r}; allowed: a folder with a {CONFIG_FILE}.")
    return folder


def from_pretrained(
    path: str, *, mesh: jax.sharding.Mesh | None = None, dtype: str = "bfloat16", **layout: Any
) -> tuple[Transformer, SentencePieceTokenizer]:
    """Loads a model folder.

    Args:
      path: a folder, or `package:NAME`.
      mesh: where the parameters go, by the table in `parallel/mesh.py`; None: the default device.
      dtype: of the activations; parameters are float32.
      layout: `scan_layers` and `remat` of `Architecture`.

    Returns: the model, whose call gives logits, and its tokenizer.

    Raises:
      ValueError: a missing or damaged file; a tensor that is missing, extra or of another shape.
    """
    folder = resolve_folder(path)
    arch = _read_architecture(folder / CONFIG_FILE, dtype=dtype, **layout)
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens; allowed: at most the"
            f" model's {arch.vocab_size}."
        )
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    params = _to_params(tensors, arch, folder / WEIGHTS_FILE)
    network, _ = split(nnx.eval_shape(lambda: Transformer(arch, nnx.Rngs(0))))
    if mesh is not None:
        params = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    return network.bind(jax.tree.map(jnp.asarray, params)), tokenizer


def save_pretrained(
    model: Transformer, path: str | Path, tokenizer: SentencePieceTokenizer | None = None
) -> None:
    """Writes a model folder that `transformers` loads; the tokenizer too where one is given."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    arch = model.arch
    (folder / CONFIG_FILE).write_text(json.dumps(_config_json(arch), indent=2) + "\n")
    _, params = split(model)
    tensors = _to_tensors(jax.device_get(params), arch)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if tokenizer is not None:
        tokenizer.save(folder)


def _config_json(arch: Architecture) -> dict[str, Any]:
    switches = {"qk_norm": arch.qk_norm, "qkv_bias": arch.qkv_bias}
    families = [name for name, family in FAMILIES.items() if family == switches]
    if not families:
        raise ValueError(f"save_pretrained: got {switches}; allowed: {FAMILIES}.")
    return {
        "model_type": families[0],
        "architectures": [f"{families[0].capitalize()}ForCausalLM"],
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.mlp_width,
        "rope_theta": arch.rope_theta,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
    }


def _read_architecture(file: Path, **layout: Any) -> Architecture:
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}.") from None
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{file}: model_type is {family!r}; allowed: {', '.join(FAMILIES)}.")
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "mlp_width",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied",
    }
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"{file}: {', '.join(missing)} missing; a {family} config has them.")
    for name, allowed in _FIXED.items():
        if values.get(name, allowed) != allowed:
            raise ValueError(f"{file}: {name} is {values[name]!r}; allowed: {allowed!r}.")
    sizes = {ours: values[theirs] for theirs, ours in names.items()}
    return Architecture(**sizes, **FAMILIES[family], **layout)


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise ValueError(f"no file {file}; a model folder has one.")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}.") from None


def _expected(arch: Architecture) -> Any:
    """The parameter tree's shapes, with layers unstacked."""
    plain = Architecture(**{**vars(arch), "scan_layers": False})
    _, shapes = split(nnx.eval_shape(lambda: Transformer(plain, nnx.Rngs(0))))
    return shapes


def _tensor_names(shapes: Mapping[str, Any]) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """Hugging Face name -> (path in our tree, whether it is transposed there)."""
    names: dict[str, tuple[tuple[Any, ...], bool]] = {
        "model.embed_tokens.weight": (("embedding",), False),
        "model.norm.weight": (("norm", "scale"), False),
    }
    if "head" in shapes:
        names["lm_head.weight"] = (("head",), False)
    for index, layer in shapes["layers"].items():
        for theirs, ours in _LAYER.items():
            for leaf in layer.get(ours, {}):
                kind = "bias" if leaf == "bias" else "weight"
                path = ("layers", index, ours, leaf)
                names[f"model.layers.{index}.{theirs}.{kind}"] = (path, leaf == "kernel")
    return names


def _to_params(tensors: Mapping[str, np.ndarray], arch: Architecture, file: Path) -> Any:
    shapes = _expected(arch)
    names = _tensor_names(shapes)
    for problem, wrong in (
        ("lacks", names.keys() - tensors.keys()),
        ("has unknown", tensors.keys() - names.keys()),
    ):
        if wrong:
            raise ValueError(f"{file} {problem} {', '.join(sorted(wrong)[:5])}.")
    params: dict[str, Any] = jax.tree.map(lambda leaf: leaf, shapes)
    for name, (path, transposed) in names.items():
        tensor = tensors[name].T if transposed else tensors[name]
        *parents, leaf = path
        node = params
        for parent in parents:
            node = node[parent]
        if tensor.shape != node[leaf].shape:
            want = node[leaf].shape[::-1] if transposed else node[leaf].shape
            raise ValueError(f"{file}: {name} is {tensors[name].shape}; allowed: {want}.")
        node[leaf] = np.ascontiguousarray(tensor, np.float32)
    return _each_stacked(params, lambda *layers: np.stack(layers)) if arch.scan_layers else params


def _each_stacked(params: dict[str, Any], stack: Callable[..., Any]) -> dict[str, Any]:
    layers = [params["layers"][index] for index in sorted(params["layers"])]
    return params | {"layers": jax.tree.map(stack, *layers)}


def _to_tensors(params: dict[str, Any], arch: Architecture) -> dict[str, np.ndarray]:
    if arch.scan_layers:
        stacked = params["layers"]
        layers = {i: jax.tree.map(lambda y, i=i: y[i], stacked) for i in range(arch.layers)}
        params = params | {"layers": layers}
    tensors = {}
    for name, (path, transposed) in _tensor_names(params).items():
        node: Any = params
        for key in path:
            node = node[key]
        tensors[name] = np.ascontiguousarray(node.T if transposed else node)
    return tensors
