"""Tensors from files onto devices: every device's part is read on its own and placed at once."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from seeupo_jax.parallel.mesh import sharding
from seeupo_jax.policy.architecture import SELECTION_BIAS
from seeupo_jax.policy.files.parameter_names import StoredParameter, leaf_at, shapes_in_file
from seeupo_jax.policy.files.safetensors_files import Tensors

_LOGGER = logging.getLogger(__name__)
READ_BYTES = 2**24  # read at once: the memory beyond the tensor itself
# Written by older versions of `transformers`, and computed or repeated from others.
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_REDUNDANT = ("rotary_emb.inv_freq", _HEAD)


def check_tensors(
    tensors: Tensors, stored: Sequence[StoredParameter], shapes: Any, place: Path
) -> None:
    """Raises ValueError where tensors are missing, unknown or of other shapes."""
    wanted = shapes_in_file(shapes, stored)
    redundant = {
        name for name in tensors.shapes if name not in wanted and name.endswith(_REDUNDANT)
    }
    for problem, wrong in (
        ("lacks", wanted.keys() - tensors.shapes.keys()),
        ("has unknown", tensors.shapes.keys() - wanted.keys() - redundant),
    ):
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ValueError(f"{place} {problem} {', '.join(sorted(wrong)[:5])}{more}.")
    for name, shape in wanted.items():
        if tensors.shapes[name] != shape:
            raise ValueError(f"{place}: {name} is {tensors.shapes[name]}; allowed: {shape}.")
    for name in redundant:
        if name.endswith(_HEAD) and not _repeats_embedding(tensors, name, wanted):
            raise ValueError(
                f"{place}: {name} is another matrix than the embedding, though config.json has"
                " tie_word_embeddings=true; allowed: false, or the same matrix."
            )
    if redundant:
        _LOGGER.warning("%s: not read, since the model computes it: %s", place, sorted(redundant))


def _repeats_embedding(tensors: Tensors, head: str, wanted: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a head is the embedding once more; both are read in parts."""
    embedding = next((name for name in wanted if name.endswith(_EMBEDDING)), None)
    if embedding is None or tensors.shapes[head] != wanted[embedding]:
        return False
    rows, width = wanted[embedding]
    step = max(1, READ_BYTES // (4 * width))
    parts = ((slice(first, min(first + step, rows)), slice(None)) for first in range(0, rows, step))
    return all(
        np.array_equal(tensors.read(head, part), tensors.read(embedding, part)) for part in parts
    )


def load_params(
    tensors: Tensors,
    stored: Sequence[StoredParameter],
    shapes: Any,
    logical_axes: Any,
    mesh: jax.sharding.Mesh | None,
    dtype: str,
) -> Any:
    """Reads the stored tensors into a tree like `shapes`, each device's part placed at once.

    Args:
      dtype: of the parameters; selection biases are float32.
    """
    params = jax.tree.map(lambda leaf: leaf, shapes)
    for each in stored:
        shape, logical = leaf_at(shapes, each.path).shape, leaf_at(logical_axes, each.path)
        stacked = each.layer is not None
        where = None if mesh is None else sharding(mesh, logical[stacked:])
        *parents, last = each.path
        kind = "float32" if last == SELECTION_BIAS else dtype
        part = _place(tensors, each, shape[stacked:], where, kind)
        node = leaf_at(params, parents)
        if stacked:
            if each.layer == 0:
                stack_where = None if mesh is None else sharding(mesh, logical)
                node[last] = jnp.zeros(shape, kind, device=stack_where)
            part = _put_layer(node[last], part, each.layer)
        node[last] = part
    return params


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, part: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, part, layer, 0)


def _place(
    tensors: Tensors,
    stored: StoredParameter,
    shape: tuple[int, ...],
    where: Sharding | None,
    dtype: str,
) -> jax.Array:
    """Reads each device's part of a parameter and places it, one part after the other."""
    if where is None:
        everything = (slice(None),) * len(shape)
        return jax.device_put(_read_part(tensors, stored, everything, shape, dtype))
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
    stored: StoredParameter,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
    dtype: str,
) -> np.ndarray:
    """A part of a parameter, transposed and cast, read some rows of the file at a time."""
    spans = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    buffer = _aligned([stop - start for start, stop in spans], jnp.dtype(dtype))
    groups, views = stored.names, [buffer]
    if stored.grouped:
        groups, views, spans = stored.names[slice(*spans[0])], list(buffer), spans[1:]
    for name, view in zip(groups, views, strict=True):
        view, stretch = (view.T, spans[::-1]) if stored.transposed else (view, spans)
        first, last = stretch[0]
        above = stored.first_row or 0
        step = max(1, READ_BYTES // (4 * max(1, view[:1].size)))
        rest = tuple(slice(*span) for span in stretch[1:])
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            in_file = slice(above + rows.start, above + rows.stop)
            view[start - first : rows.stop - first] = tensors.read(name, (in_file, *rest))
    return buffer


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that a CPU device uses without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
