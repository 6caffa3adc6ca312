"""A kernel of attention against plain attention: how far apart they are, and how fast."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Against the largest number of the exact result. A product in tf32, which float32 must not use
# here, is 5e-4 away.
FLOAT32 = 1e-4
# Times plain attention's own distance in bfloat16; the greatest of many rounding errors is chance.
AS_PLAIN = 2.0

Arrays = tuple[jax.Array, ...]
Attend = Callable[..., jax.Array]  # of queries, keys, values, and where they stand
# Greatest differences with their bounds, by name; and a description of the comparison.
Found = tuple[dict[str, tuple[float, float]], dict[str, Any]]


class Heads(NamedTuple):
    """Numbers of heads of queries, and of keys and values, and the channels of each."""

    queries: int
    keys: int
    channels: int

    def __str__(self) -> str:
        return f"{self.queries} heads over {self.keys} of {self.channels}"


def compare(
    fused: Attend,
    plain: Attend,
    arrays: Arrays,
    places: Any,
    real_NL: jax.Array,
    dtype: str,
    timed: bool,
) -> Found:
    """Distances of outputs and gradients from the exact ones, with bounds; and seconds.

    Args:
      arrays: as `random_arrays`. places: further arguments of both, after queries, keys and values.
      real_NL: which queries count.
    """
    *qkv, weight = arrays

    def trained(attend: Attend) -> Callable[..., Arrays]:
        """Outputs, and gradients of their weighted sum."""

        # Constants would be folded by the compiler, for seconds each.
        def run(q: Any, k: Any, v: Any, weight: Any, real: Any, places: Any) -> Arrays:
            def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
                out = attend(*qkv, places)
                return jnp.sum(out.astype(jnp.float32) * weight * real), out * real

            (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
            return out, *gradients

        return jax.jit(run)

    kernel, reference = trained(fused), trained(plain)
    others = (weight, real_NL[:, :, None, None], places)
    exact, differences = _run(reference, qkv, "float32", *others), {}
    usual = exact if dtype == "float32" else _run(reference, qkv, dtype, *others)
    names = ("out", "d_q", "d_k", "d_v")
    for name, x, y, z in zip(names, _run(kernel, qkv, dtype, *others), usual, exact, strict=True):
        bound = FLOAT32 if dtype == "float32" else AS_PLAIN * _distance(y, z)
        differences[name] = (_distance(x, z), bound)
    if not timed:
        return differences, {}
    sides = {"kernel_s": kernel, "plain_s": reference}
    return differences, {name: seconds(side, qkv, dtype, *others) for name, side in sides.items()}


def outputs_apart(
    fused: Attend, plain: Attend, arrays: Arrays, dtype: str
) -> dict[str, tuple[float, float]]:
    """The distance of outputs alone from the exact ones, with its bound.

    Args:
      arrays: queries, keys and values.
    """
    kernel, reference = jax.jit(fused), jax.jit(plain)
    exact = _run(reference, arrays, "float32")
    off, near = _distance(_run(kernel, arrays, dtype), exact), FLOAT32
    if dtype != "float32":
        near = AS_PLAIN * _distance(_run(reference, arrays, dtype), exact)
    return {"out": (off, near)}


def _run(f: Callable[..., Any], arrays: Any, dtype: str, *others: Any) -> Any:
    """`f` of arrays of type `dtype`, and of others as they are."""
    with _precision(dtype):
        return jax.block_until_ready(f(*(x.astype(dtype) for x in arrays), *others))


def seconds(f: Callable[..., Any], arrays: Any, dtype: str, *others: Any) -> float:
    """Seconds of one such call, the median of nine."""
    each, arrays = [], [x.astype(dtype) for x in arrays]
    with _precision(dtype):
        for _ in range(11):
            began = time.perf_counter()
            jax.block_until_ready(f(*arrays, *others))
            each.append(time.perf_counter() - began)
    return statistics.median(each[2:])


def _precision(dtype: str) -> contextlib.AbstractContextManager[None]:
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")


def random_arrays(N: int, L: int, C: int, heads: Heads) -> Arrays:
    """Queries, keys, values, and weights of the outputs; numbers that bfloat16 has."""
    keys = jax.random.split(jax.random.key(7), 4)
    shapes = ((L, heads.queries), (C, heads.keys), (C, heads.keys), (L, heads.queries))
    return tuple(
        jax.random.normal(key, (N, *shape, heads.channels), jnp.bfloat16).astype(jnp.float32)
        for key, shape in zip(keys, shapes, strict=True)
    )


def _distance(x: jax.Array, exact: jax.Array) -> float:
    """The greatest difference, against the largest number of the exact result."""
    x, y = (np.asarray(a, np.float64) for a in (x, exact))
    return float(np.abs(x - y).max() / np.abs(y).max())
