"""Model folders and files: into a sharded model, and back into a folder for `transformers`."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

import seeupo_jax
from seeupo_jax import config
from seeupo_jax.parallel.mesh import param_shardings, sharding
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.chat_template import gguf_tokenizer
from seeupo_jax.policy.families import config_json, read_architecture
from seeupo_jax.policy.gguf import GgufFile
from seeupo_jax.policy.network import abstract, split
from seeupo_jax.policy.tensors import SafetensorsFolder, Tensors, write_tensors
from seeupo_jax.policy.tokenizer import Tokenizer, load_tokenizer
from seeupo_jax.policy.transformer import Transformer

_LOGGER = logging.getLogger(__name__)
CONFIG_FILE = "config.json"
PACKAGE = "package:"  # a path that begins so names a policy that ships with the package
READ_BYTES = 2**24  # read at once: what a tensor in the making costs beyond itself
MAX_FILE_BYTES = 5 * 10**9

# Our modules of a layer -> Hugging Face's. Their kernels are [out, in], ours [in, out].
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
}
# Our leaf -> Hugging Face's (PEFT's for adapters), and whether it is transposed there.
_LEAF = {
    "kernel": ("weight", True),
    "scale": ("weight", False),
    "bias": ("bias", False),
    "lora_a": ("lora_A.weight", True),
    "lora_b": ("lora_B.weight", True),
}
_EXPERTS = {
    "mlp/router": "mlp.gate.weight",
    "mlp/gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/up": "mlp.experts.{expert}.up_proj.weight",
    "mlp/down": "mlp.experts.{expert}.down_proj.weight",
}
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head": "lm_head.weight",
}
# Written by older versions of `transformers`, and computed or repeated from others.
_REDUNDANT = ("rotary_emb.inv_freq", "lm_head.weight")


@dataclass(frozen=True)
class Stored:
    """Where a parameter, or one layer's part of a stacked one, lies in a model folder.

    path: in our tree. layer: its index in the stacked parameter, or None. names: its tensors.
    grouped: there is a tensor for every entry of its first axis (experts). transposed: its last two
    axes are the other way round there.
    """

    path: tuple[Any, ...]
    layer: int | None
    names: tuple[str, ...]
    grouped: bool
    transposed: bool


def resolve_path(path: str) -> Path:
    """What a model path means; `package:NAME` is a policy that ships with the package.

    Raises:
      ValueError: neither a folder with a config.json nor a GGUF file.
    """
    place = Path(path)
    if path.startswith(PACKAGE):
        place = Path(seeupo_jax.__path__[0]) / "assets" / path.removeprefix(PACKAGE)
    gguf = place.suffix == ".gguf" and place.is_file()
    if not gguf and not (place / CONFIG_FILE).is_file():
        raise ValueError(
            f"model path: got {path!r}; allowed: a folder with a {CONFIG_FILE}, or a .gguf file."
        )
    return place


def inspect(path: str, **layout: Any) -> Architecture:
    """The architecture of a model folder or a GGUF file; no weights are read.

    Args:
      layout: fields of `Architecture` that no config.json has (dtype, scan_layers, ...).

    Raises:
      ValueError: a missing or damaged file, or a setting that is not supported.
    """
    place = resolve_path(path)
    if place.suffix == ".gguf":
        return read_architecture(GgufFile(place).config, str(place), **layout)
    file = place / CONFIG_FILE
    return read_architecture(read_json(file), str(file), **layout)


def from_pretrained(
    path: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: str = "bfloat16",
    chat: config.Chat | None = None,
    **layout: Any,
) -> tuple[Transformer, Tokenizer]:
    """Loads a model folder or a GGUF file.

    Every device's part of a tensor is read on its own and placed at once: the host holds one such
    part at a time.

    Args:
      path: a folder, a `.gguf` file, or `package:NAME`.
      mesh: where the parameters go, by the table in `parallel/mesh.py`; None: the default device.
      dtype: of the activations; parameters are float32 unless `param_dtype` says otherwise.
      chat: how conversations become tokens; None: as the model's own files say.
      layout: further fields of `Architecture`: `scan_layers`, `remat`, `attention`, `param_dtype`.

    Returns: the model, whose call gives logits, and its tokenizer.

    Raises:
      ValueError: a missing or damaged file; a tensor that is missing, extra or of another shape; a
        setting that is not supported.
    """
    place = resolve_path(path)
    arch = inspect(path, dtype=dtype, **layout)
    tensors: Tensors
    if place.suffix == ".gguf":
        tensors = GgufFile(place)
        tokenizer = gguf_tokenizer(tensors.fields, chat)
    else:
        tokenizer = load_tokenizer(place, chat)
        tensors = SafetensorsFolder(place)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ValueError(
            f"{place}: the tokenizer has {tokenizer.vocab_size} tokens; allowed: at most the"
            f" model's {arch.vocab_size}."
        )
    network, shapes = abstract(arch)
    stored = list(stored_tensors(arch, shapes))
    check_tensors(tensors, stored, shapes, place)
    logical_axes = network.logical_axes()
    if mesh is not None:
        param_shardings(mesh, logical_axes, shapes)  # raises where an axis does not divide
    params = load_params(tensors, stored, shapes, logical_axes, mesh, arch.param_dtype)
    return network.bind(params), tokenizer


def save_pretrained(
    model: Transformer,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str = "float32",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a model folder that `transformers` loads; the tokenizer too where one is given.

    Args:
      dtype: of the tensors in the files. max_file_bytes: above it there are several, and an index.

    Raises:
      ValueError: no published family has the model's architecture, or it has adapters that are not
        merged (`policy/lora.py`).
    """
    if model.arch.lora is not None:
        raise ValueError("save_pretrained: got a model with adapters; allowed: merge(model) first.")
    end_ids = () if tokenizer is None else tokenizer.end_ids
    values = config_json(model.arch, end_ids, dtype)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _, params = split(model)
    kind = jnp.dtype(dtype)
    parts = {
        name: (stored, number)
        for stored in stored_tensors(model.arch, params)
        for number, name in enumerate(stored.names)
    }

    def read(name: str) -> np.ndarray:
        stored, number = parts[name]
        leaf = _at(params, stored.path)
        leaf = leaf if stored.layer is None else leaf[stored.layer]
        leaf = leaf[number] if stored.grouped else leaf
        tensor = np.asarray(leaf.astype(kind))
        return np.ascontiguousarray(tensor.T if stored.transposed else tensor)

    sizes = {
        name: math.prod(_shape_in_file(params, stored)) * kind.itemsize
        for name, (stored, _) in parts.items()
    }
    write_tensors(folder, sizes, read, max_file_bytes)
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    if tokenizer is not None:
        tokenizer.save(folder)


def stored_tensors(arch: Architecture, params: Any) -> Iterator[Stored]:
    """Every parameter's place in a model folder; a stacked one yields its layers one by one.

    Args:
      params: the tree of parameters or of their shapes, or a part of it.
    """
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        keys = tuple(key.key for key in path)
        if keys[0] != "layers":
            yield Stored(keys, None, (_TOP["/".join(keys)],), False, False)
            continue
        inside = keys[1:] if arch.scan_layers else keys[2:]
        for layer in range(arch.layers) if arch.scan_layers else (None,):
            number = keys[1] if layer is None else layer
            yield _stored_in_layer(arch, keys, inside, layer, f"model.layers.{number}.")


def _stored_in_layer(
    arch: Architecture, keys: tuple[Any, ...], inside: Sequence[str], layer: int | None, prefix: str
) -> Stored:
    whole = "/".join(inside)
    if whole in _EXPERTS:
        grouped = "{expert}" in _EXPERTS[whole]
        count = arch.moe.experts if grouped else 1
        names = tuple(prefix + _EXPERTS[whole].format(expert=number) for number in range(count))
        return Stored(keys, layer, names, grouped, True)
    *module, leaf = inside
    theirs, transposed = _LEAF[leaf]
    name = f"{prefix}{_LAYER['/'.join(module)]}.{theirs}"
    return Stored(keys, layer, (name,), False, transposed)


def _shape_in_file(params: Any, stored: Stored) -> tuple[int, ...]:
    """The shape of each of the stored tensors, in Hugging Face's orientation."""
    shape = _at(params, stored.path).shape
    shape = shape if stored.layer is None else shape[1:]
    shape = shape[1:] if stored.grouped else shape
    return shape[::-1] if stored.transposed else shape


def check_tensors(tensors: Tensors, stored: Sequence[Stored], shapes: Any, place: Path) -> None:
    """Raises ValueError where tensors are missing, unknown or of other shapes than wanted."""
    wanted = {name: _shape_in_file(shapes, each) for each in stored for name in each.names}
    known = {name for name in tensors.shapes if name not in wanted and name.endswith(_REDUNDANT)}
    for problem, wrong in (
        ("lacks", wanted.keys() - tensors.shapes.keys()),
        ("has unknown", tensors.shapes.keys() - wanted.keys() - known),
    ):
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(f"{place} {problem} {', '.join(sorted(wrong)[:5])}{more}.")
    for name, shape in wanted.items():
        if tensors.shapes[name] != shape:
            raise ValueError(f"{place}: {name} is {tensors.shapes[name]}; allowed: {shape}.")
    if known:
        _LOGGER.info("%s: not read, since the model computes it: %s", place, sorted(known))


def load_params(
    tensors: Tensors,
    stored: Sequence[Stored],
    shapes: Any,
    logical_axes: Any,
    mesh: jax.sharding.Mesh | None,
    dtype: str,
) -> Any:
    """Reads the stored tensors into a tree like `shapes`, each device's part placed at once."""
    params = jax.tree.map(lambda leaf: leaf, shapes)
    for each in stored:
        shape, logical = _at(shapes, each.path).shape, _at(logical_axes, each.path)
        stacked = each.layer is not None
        where = None if mesh is None else sharding(mesh, logical[stacked:])
        part = _place(tensors, each, shape[stacked:], where, dtype)
        *parents, last = each.path
        node = _at(params, parents)
        if stacked:
            if each.layer == 0:
                stack_where = None if mesh is None else sharding(mesh, logical)
                node[last] = jnp.zeros(shape, dtype, device=stack_where)
            part = _put_layer(node[last], part, each.layer)
        node[last] = part
    return params


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, part: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)


def _place(
    tensors: Tensors, stored: Stored, shape: tuple[int, ...], where: Sharding | None, dtype: str
) -> jax.Array:
    """Reads each device's part of a parameter and puts it there, one part after the other."""
    if where is None:
        return jnp.asarray(_read_part(tensors, stored, (slice(None),) * len(shape), shape, dtype))
    devices_of: dict[Any, list[jax.Device]] = {}
    for device, index in where.addressable_devices_indices_map(shape).items():
        spans = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices_of.setdefault(spans, []).append(device)
    arrays = []
    for spans, devices in devices_of.items():
        index = tuple(slice(*span) for span in spans)
        part = _read_part(tensors, stored, index, shape, dtype)
        arrays += jax.block_until_ready([jax.device_put(part, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, where, arrays)


def _read_part(
    tensors: Tensors,
    stored: Stored,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
    dtype: str,
) -> np.ndarray:
    """A part of a parameter, in our orientation and type, read some rows of the file at a time."""
    spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    whole = _aligned([stop - start for start, stop in spans], jnp.dtype(dtype))
    groups, views = stored.names, [whole]
    if stored.grouped:
        groups, views, spans = stored.names[slice(*spans[0])], list(whole), spans[1:]
    for name, view in zip(groups, views, strict=True):
        view, stretch = (view.T, spans[::-1]) if stored.transposed else (view, spans)
        first, last = stretch[0]
        step = max(1, READ_BYTES // (4 * max(1, view[:1].size)))
        rest = tuple(slice(*span) for span in stretch[1:])
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            view[start - first : rows.stop - first] = tensors.read(name, (rows, *rest))
    return whole


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that a CPU device takes over as it is, where others copy from it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def read_json(file: Path) -> Mapping[str, Any]:
    """A file's JSON object. Raises ValueError where it is something else."""
    try:
        values = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: got a {type(values).__name__}; allowed: a JSON object.")
    return values
