"""Matrices in 8-bit floating point with a scale for each block (DeepSeek-V3, Qwen3-*-FP8).

Beside `X.weight` of type float8_e4m3fn stands `X.weight_scale_inv`, a number for each block of rows
and columns, by which the block is multiplied. Folders hold both kinds of matrices, with scales and
without: embeddings, norms, routers and heads are usually not in 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.files.safetensors_files import FP8, SafetensorsFolder

_SCALES = "_scale_inv"
_LARGEST = 2**16  # rows or columns of a block


def is_fp8(quantization: Any) -> bool:
    """Whether a config's `quantization_config` is of 8-bit floating point."""
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"


def block_size(quantization: Mapping[str, Any], source: str) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
      ValueError: blocks or numbers of another kind.
    """
    block, kind = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    if kind != "e4m3":
        raise ValueError(f"{source}: quantization_config.fmt is {shown(kind)}; allowed: e4m3.")
    sizes = block if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(type(x) is int and 1 <= x <= _LARGEST for x in sizes):
        raise ValueError(
            f"{source}: quantization_config.weight_block_size is {shown(block)}; allowed: two whole"
            f" numbers from 1 to {_LARGEST}, of rows and columns."
        )
    return sizes[0], sizes[1]


class BlockScaledTensors:
    """Tensors of a folder, those in 8 bits multiplied by their scales: float32.

    Raises:
      ValueError: a matrix without its scales, or with scales of another shape.
    """

    def __init__(self, files: SafetensorsFolder, block: tuple[int, int]):
        self._files, self._block = files, block
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in files.shapes.items():
            if not name.endswith(_SCALES):
                self.shapes[name] = shape
                self._check(name, shape)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        scales = self._files.shapes.get(name + _SCALES)
        if scales is None:
            if self._files.dtypes[name] != FP8:
                return
            raise ValueError(f"a model in FP8 lacks {name}{_SCALES}, beside {name}.")
        blocks = tuple(-(-n // size) for n, size in zip(shape, self._block, strict=False))
        if len(shape) != 2 or scales != blocks:
            rows, columns = self._block
            raise ValueError(
                f"{name}{_SCALES} is {scales} for a matrix of {shape}; allowed: a number for each"
                f" block of {rows} x {columns}."
            )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor; `index` is of its rows, or of rows and columns."""
        part = self._files.read(name, index)
        if name + _SCALES not in self._files.shapes:
            return part
        spans = [each.indices(n)[:2] for each, n in zip(index, self.shapes[name], strict=False)]
        spans += [(0, n) for n in self.shapes[name][len(spans) :]]
        blocks = [
            slice(start // size, -(-stop // size))
            for (start, stop), size in zip(spans, self._block, strict=True)
        ]
        scales = self._files.read(name + _SCALES, tuple(blocks)).astype(np.float32)
        for axis, ((start, stop), size) in enumerate(zip(spans, self._block, strict=True)):
            scales = np.repeat(scales, size, axis=axis)
            first = start % size
            scales = np.take(scales, range(first, first + stop - start), axis=axis)
        return part.astype(np.float32) * scales
