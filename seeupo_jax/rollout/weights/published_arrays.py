"""The arrays of a published policy: their names, their types and their parts.

Stacked layers are published one by one, by the names that they have unstacked: trainer and worker
may stack them or not. An array that is larger than a file may be is published in parts of rows.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from seeupo_jax.parallel.distributed import to_host
from seeupo_jax.policy.files.parameter_names import StoredParameter
from seeupo_jax.policy.files.safetensors_files import Tensors
from seeupo_jax.policy.network import Network
from seeupo_jax.rollout.engine.sampler_layout import sampler_dtype

FILE_BYTES = 2**29  # of one file at most, whose arrays the host holds at a time
_PART = re.compile(r"(.+)\[(\d+):(\d+)\]")  # a name, and some of its rows


class Part(NamedTuple):
    """Rows of an array, or of one layer of a stack of them: what one tensor of a file holds.

    name: of the tensor. path: of the parameter. layer: None: it is no stack.
    first: row of the array. shape: of the part.
    """

    name: str
    path: tuple[Any, ...]
    layer: int | None
    first: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        """That it takes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def described(self) -> str:
        """Its type and shape."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def parts(network: Network, params: Any, *, int8: bool, file_bytes: int) -> Iterator[Part]:
    """What is published of parameters, in the order of files.

    Args:
      params: those that train, as the trainer has them: arrays or shape structs.
      int8: whether samplers round matrices to 8 bits, which they do from the trainer's type.
      file_bytes: that a part may have at most, unless one row has more.
    """
    for path, x in flatten_dict(params).items():
        dtype = published_dtype(network, path, x, int8=int8)
        for stored in stored_arrays(network, path):
            shape = x.shape if stored.layer is None else x.shape[1:]
            (name,) = stored.names
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            most = max(1, file_bytes // max(1, row_bytes))
            for first in range(0, shape[0], most):
                rows = min(most, shape[0] - first)
                whole = rows == shape[0]
                part = name if whole else f"{name}[{first}:{first + rows}]"
                yield Part(part, path, stored.layer, first, (rows, *shape[1:]), dtype)


def published_dtype(network: Network, path: Sequence[Any], x: Any, *, int8: bool) -> np.dtype:
    """The smallest type from which a sampler computes what it computes from the trainer's.

    Matrices that it rounds to 8 bits keep the trainer's type.
    """
    used = sampler_dtype(network.arch, path, x, int8=int8)
    kept = jnp.dtype(x.dtype)
    return used if jnp.issubdtype(used, jnp.floating) and used.itemsize < kept.itemsize else kept


def stored_arrays(network: Network, path: tuple[Any, ...]) -> Iterator[StoredParameter]:
    """The arrays that are published of a parameter: one, or one a layer of a stack."""
    if not (network.arch.scan_layers and path[0] == "layers"):
        yield StoredParameter(path, None, (_name(path),), False, False)
        return
    for layer in range(network.arch.layers):
        name = _name(("layers", layer, *path[1:]))
        yield StoredParameter(path, layer, (name,), False, False)


def fetch(params: Mapping[tuple[Any, ...], jax.Array], part: Part) -> np.ndarray:
    """A part on the host; where processes hold pieces of the array, all of them must call.

    The array itself keeps no copy on the host.

    Args:
      params: by path.
    """
    rows = _rows(params[part.path], part.layer, part.first, part.shape[0], part.dtype)
    return np.ascontiguousarray(to_host(rows))


@functools.partial(jax.jit, static_argnames=("rows", "dtype"))
def _rows(x: jax.Array, layer: int | None, first: int, rows: int, dtype: np.dtype) -> jax.Array:
    x = x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
    x = x if rows == x.shape[0] else jax.lax.dynamic_slice_in_dim(x, first, rows)
    return x.astype(dtype)


class JoinedParts:
    """Tensors whose parts are joined: named rows of an array are read as the array."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        # Of each name: first row and name of its parts, in order.
        self._parts: dict[str, list[tuple[int, str]]] = {}
        for part in tensors.shapes:
            found = _PART.fullmatch(part)
            name, first = (part, 0) if found is None else (found[1], int(found[2]))
            self._parts.setdefault(name, []).append((first, part))
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in self._parts.items():
            rows.sort()
            shapes = [tensors.shapes[part] for _, part in rows]
            self.shapes[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def part_of(self, name: str) -> str:
        """The first tensor of an array's parts."""
        return self._parts[name][0][1]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, *rest = index
        first, last, _ = rows.indices(self.shapes[name][0])
        pieces = []
        for start, part in self._parts[name]:
            count = self._tensors.shapes[part][0]
            here = slice(max(first - start, 0), min(last - start, count))
            if here.start < here.stop:
                pieces.append(self._tensors.read(part, (here, *rest)))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _name(path: Sequence[Any]) -> str:
    return "/".join(map(str, path))
