"""The products of `grouped.py` as Pallas kernels for GPU (Triton).

A program computes one block of a result, in a loop over blocks of what is summed; no two programs
write to one number. Axes as in `grouped.py`, and T blocks of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from seeupo_jax.policy.kernels.derivatives import dot, dot_t
from seeupo_jax.policy.kernels.row_blocks import list_row_blocks, rows_of_block

_LEAST = 16  # rows and columns of a product that Triton takes
_PARAMS = pltriton.CompilerParams(num_warps=4, num_stages=3)


class _Blocks(NamedTuple):
    """The most rows, outputs and inputs of a block."""

    rows: int
    outputs: int
    inputs: int


# By bytes of a number. In three stages a block is read while the one before is used: 72 KiB of
# shared memory in bfloat16, 48 KiB in float32, of the 99 KiB that smaller GPUs have.
_BLOCKS = {2: _Blocks(64, 128, 64), 4: _Blocks(64, 64, 32)}


def product(
    x_SD: jax.Array,
    w: jax.Array,
    size_E: jax.Array,
    *,
    transposed: bool,
    interpret: bool = False,
) -> jax.Array:
    """Each row times the matrix of its group, or times its transpose; 0 for rows of no group."""
    S, outputs = len(x_SD), w.shape[1 if transposed else 2]
    rest = S - size_E.sum(keepdims=True)  # as a group of its own, for which nothing is summed
    most = _BLOCKS[x_SD.dtype.itemsize]
    block = rows_of_block(S, len(w), most.rows, _LEAST)
    size = jnp.concatenate([size_E, rest.astype(size_E.dtype)])
    blocks = list_row_blocks(size, S, block)
    across = min(most.outputs, _whole(outputs))
    along = min(most.inputs, _whole(x_SD.shape[1]))
    x = _padded(x_SD, (1, along))
    w = _padded(w, *((1, across), (2, along)) if transposed else ((1, along), (2, across)))
    run = functools.partial(
        _multiply, block=block, across=across, along=along, transposed=transposed
    )
    y = _call(
        run,
        (*blocks[:3], x, w),
        jax.ShapeDtypeStruct((S, w.shape[1 if transposed else 2]), x.dtype),
        (w.shape[1 if transposed else 2] // across, len(blocks.start_T)),
        interpret,
    )
    return y[:, :outputs]


def _multiply(
    start_ref: jax.Array,
    stop_ref: jax.Array,
    group_ref: jax.Array,
    x_ref: jax.Array,
    w_ref: jax.Array,
    y_ref: jax.Array,
    *,
    block: int,
    across: int,
    along: int,
    transposed: bool,
) -> None:
    column, t = pl.program_id(0), pl.program_id(1)
    start, stop, group = start_ref[t], stop_ref[t], group_ref[t]
    rows, columns = pl.ds(start, block), pl.ds(column * across, across)
    inside = start + jnp.arange(block) < stop

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        inputs = pl.ds(step * along, along)
        x = pltriton.load(x_ref.at[rows, inputs], mask=inside[:, None], other=0.0)
        if transposed:
            return sums + dot_t(x, w_ref[group, columns, inputs])
        return sums + dot(x, w_ref[group, inputs, columns])

    steps = jnp.where(group < w_ref.shape[0], x_ref.shape[1] // along, 0)
    zeros = jnp.zeros((block, across), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, add, zeros)
    pltriton.store(y_ref.at[rows, columns], sums.astype(y_ref.dtype), mask=inside[:, None])


def matrix_gradients(
    x_SD: jax.Array, dy_SF: jax.Array, size_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The gradients of the groups' matrices, [E, D, F]."""
    (S, D), F = x_SD.shape, dy_SF.shape[1]
    most = _BLOCKS[x_SD.dtype.itemsize]
    down, across = min(most.inputs, _whole(D)), min(most.outputs, _whole(F))
    x, dy = _padded(x_SD, (1, down)), _padded(dy_SF, (1, across))
    end_E = jnp.cumsum(size_E.astype(jnp.int32))
    block = rows_of_block(S, len(size_E), most.inputs, _LEAST)
    dw_EDF = _call(
        functools.partial(_sum_outer, block=block, down=down, across=across),
        (end_E - size_E, end_E, x, dy),
        jax.ShapeDtypeStruct((len(size_E), x.shape[1], dy.shape[1]), x.dtype),
        (dy.shape[1] // across, x.shape[1] // down, len(size_E)),
        interpret,
    )
    return dw_EDF[:, :D, :F]


def _sum_outer(
    start_ref: jax.Array,
    stop_ref: jax.Array,
    x_ref: jax.Array,
    dy_ref: jax.Array,
    dw_ref: jax.Array,
    *,
    block: int,
    down: int,
    across: int,
) -> None:
    column, row, group = (pl.program_id(axis) for axis in range(3))
    start, stop = start_ref[group], stop_ref[group]
    inputs, outputs = pl.ds(row * down, down), pl.ds(column * across, across)

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        first = start + step * block
        rows, inside = pl.ds(first, block), (first + jnp.arange(block) < stop)[:, None]
        x = pltriton.load(x_ref.at[rows, inputs], mask=inside, other=0.0)
        dy = pltriton.load(dy_ref.at[rows, outputs], mask=inside, other=0.0)
        return sums + dot(x.T, dy)

    zeros = jnp.zeros((down, across), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(stop - start, block), add, zeros)
    dw_ref[group, inputs, outputs] = sums.astype(dw_ref.dtype)


def _call(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    result: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    interpret: bool,
) -> jax.Array:
    """Runs a kernel, which reads and writes arrays in the GPU's memory."""

    def whole(x: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    return pl.pallas_call(
        kernel,
        out_shape=result,
        grid=grid,
        in_specs=[whole(x) for x in arrays],
        out_specs=whole(result),
        compiler_params=_PARAMS,
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),
    )(*arrays)


def _whole(size: int) -> int:
    """The smallest block that holds an axis."""
    return max(_LEAST, pl.next_power_of_2(size))


def _padded(x: jax.Array, *blocks: tuple[int, int]) -> jax.Array:
    """With zeros up to whole blocks; `blocks`: an axis and a block's size each."""
    pads: list[Any] = [(0, 0)] * x.ndim
    for axis, block in blocks:
        pads[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, pads)
