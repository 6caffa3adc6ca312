"""Products of rows, sorted by group, with the matrix of each row's group: a layer's experts.

On TPU it is `jax.lax.ragged_dot`, an instruction there. Elsewhere XLA would multiply a masked copy
of all rows by the matrix of every group. On CUDA kernels of Pallas (`grouped_gpu.py`), on CPU a
loop multiplies blocks of rows of one group: the FLOPs grow with the rows, not with the groups.

Axes beyond the legend in `types.py`: S rows, E groups, B rows of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal

from seeupo_jax.policy.kernels import grouped_gpu
from seeupo_jax.policy.kernels.row_blocks import list_row_blocks, rows_of_block

# Around each product: the first argument of a choice by platform there is [S, D] and what comes
# out is [..., F] of 2·S·D·F FLOPs, which `planning/program_flops.py` counts.
GROUPED = "grouped product"
_MOST = 64  # rows of a block on CPU, where blocks of 32 and 128 were slower


@jax.custom_vjp
def grouped_product(x_SD: jax.Array, w_EDF: jax.Array, size_E: jax.Array) -> jax.Array:
    """Each row times the matrix of its group, [S, F] of the dtype of `x_SD`, summed in float32.

    Rows of no group may hold anything: their results and gradients are 0.

    Args:
      w_EDF: of the dtype of `x_SD`.
      size_E: int, rows of each group, in order; the rows beyond their sum are of no group.
    """
    return _product(x_SD, w_EDF, size_E)


def _forward(
    x_SD: CustomVJPPrimal, w_EDF: CustomVJPPrimal, size_E: CustomVJPPrimal
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    # A frozen matrix (one with an adapter) has no gradient, and nothing is kept for it. Not None:
    # JAX mixes up residuals of two structures where a jitted layer is applied twice.
    nothing = jnp.zeros(0)
    kept_x = x_SD.value if w_EDF.perturbed else nothing
    kept_w = w_EDF.value if x_SD.perturbed else nothing
    return _product(x_SD.value, w_EDF.value, size_E.value), (kept_x, kept_w, size_E.value)


def _backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], dy_SF: jax.Array
) -> tuple[jax.Array | None, jax.Array | None, None]:
    x_SD, w_EDF, size_E = residuals
    dx_SD = _product(dy_SF, w_EDF, size_E, transposed=True) if w_EDF.ndim == 3 else None
    dw_EDF = _matrix_gradients(x_SD, dy_SF, size_E) if x_SD.ndim == 2 else None
    return dx_SD, dw_EDF, None


grouped_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(
    x_SD: jax.Array, w: jax.Array, size_E: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Each row times the matrix of its group, or times its transpose."""
    return _by_platform(
        functools.partial(_product_by_instruction, transposed=transposed),
        functools.partial(_product_by_loop, transposed=transposed),
        functools.partial(grouped_gpu.product, transposed=transposed),
    )(x_SD, w, size_E)


def _matrix_gradients(x_SD: jax.Array, dy_SF: jax.Array, size_E: jax.Array) -> jax.Array:
    """The gradients of the groups' matrices, [E, D, F]."""
    return _by_platform(
        _gradients_by_instruction, _gradients_by_loop, grouped_gpu.matrix_gradients
    )(x_SD, dy_SF, size_E)


def _by_platform(
    instruction: Callable[..., jax.Array],
    loop: Callable[..., jax.Array],
    kernel: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
    def run(*arrays: jax.Array) -> jax.Array:
        with jax.named_scope(GROUPED):
            return jax.lax.platform_dependent(*arrays, cpu=loop, cuda=kernel, default=instruction)

    return run


def _rows_of_groups(x: jax.Array, size_E: jax.Array) -> jax.Array:
    """The rows, 0 where they are of no group: the instruction leaves those undefined."""
    return jnp.where((jnp.arange(len(x)) < size_E.sum())[:, None], x, 0)


def _product_by_instruction(
    x_SD: jax.Array, w: jax.Array, size_E: jax.Array, *, transposed: bool
) -> jax.Array:
    axes = (((1,), (2 if transposed else 1,)), ((), ()))
    numbers = jax.lax.RaggedDotDimensionNumbers(axes, [0], [0])
    return _rows_of_groups(jax.lax.ragged_dot_general(x_SD, w, size_E, numbers), size_E)


def _gradients_by_instruction(x_SD: jax.Array, dy_SF: jax.Array, size_E: jax.Array) -> jax.Array:
    x_SD, dy_SF = (_rows_of_groups(x, size_E) for x in (x_SD, dy_SF))
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(x_SD, dy_SF, size_E, numbers)


def _product_by_loop(
    x_SD: jax.Array, w: jax.Array, size_E: jax.Array, *, transposed: bool
) -> jax.Array:
    rows, groups = len(x_SD), len(w)
    block = rows_of_block(rows, groups, _MOST)
    blocks = list_row_blocks(size_E, rows, block)
    x = _padded(x_SD, block)
    axes = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(t: jax.Array, y: jax.Array) -> jax.Array:
        x_BD = _rows_of_block(x, blocks.start_T[t], blocks.stop_T[t], block)
        matrix = jax.lax.dynamic_index_in_dim(w, blocks.group_T[t], keepdims=False)
        y_BF = jax.lax.dot_general(x_BD, matrix, axes, preferred_element_type=jnp.float32)
        # The zeros behind a group's last row are overwritten by the next group's block.
        return jax.lax.dynamic_update_slice(y, y_BF.astype(y.dtype), (blocks.start_T[t], 0))

    y = jnp.zeros((len(x), w.shape[1 if transposed else 2]), x_SD.dtype)
    return jax.lax.fori_loop(0, blocks.count, multiply, y)[:rows]


def _gradients_by_loop(x_SD: jax.Array, dy_SF: jax.Array, size_E: jax.Array) -> jax.Array:
    rows, groups = len(x_SD), len(size_E)
    block = rows_of_block(rows, groups, _MOST)
    blocks = list_row_blocks(size_E, rows, block)
    x, dy = (_padded(each, block) for each in (x_SD, dy_SF))

    def add(t: jax.Array, dw_EDF: jax.Array) -> jax.Array:
        x_BD, dy_BF = (
            _rows_of_block(each, blocks.start_T[t], blocks.stop_T[t], block) for each in (x, dy)
        )
        axes = (((0,), (0,)), ((), ()))
        more_DF = jax.lax.dot_general(x_BD, dy_BF, axes, preferred_element_type=jnp.float32)
        old_DF = jax.lax.dynamic_index_in_dim(dw_EDF, blocks.group_T[t], keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, old_DF + more_DF, blocks.group_T[t], 0)

    zeros_EDF = jnp.zeros((groups, x_SD.shape[1], dy_SF.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, blocks.count, add, zeros_EDF).astype(x_SD.dtype)


def _padded(x: jax.Array, block: int) -> jax.Array:
    """With rows for a block that begins at the last one."""
    return jnp.pad(x, ((0, block), (0, 0)))


def _rows_of_block(x: jax.Array, start: jax.Array, stop: jax.Array, block: int) -> jax.Array:
    """A block's rows, 0 from `stop` on."""
    rows = jax.lax.dynamic_slice(x, (start, 0), (block, x.shape[1]))
    return jnp.where((start + jnp.arange(block) < stop)[:, None], rows, 0)
