"""The grouped product of experts by the platform's kernel, against `jax.lax.ragged_dot`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.instruments.bench.accelerator.kernel_comparison import (
    Found,
    outputs_apart,
    seconds,
)
from seeupo_jax.instruments.bench.accelerator.runner import Record
from seeupo_jax.policy.kernels.grouped import grouped_product

_PARTS = ("out", "d_x", "d_w")  # the product, and the gradients of its rows and matrices


class Pairs(NamedTuple):
    """Pairs of a token and an expert, sorted by expert; a tenth of them is of no expert here.

    inputs, outputs: widths of an expert's matrix.
    """

    pairs: int
    experts: int
    inputs: int
    outputs: int

    def compare(self, dtype: str, *, timed: bool) -> Found:
        """Distances of the product and its gradients, and seconds of all three."""
        rng = np.random.default_rng(7)
        share = rng.dirichlet(np.ones(self.experts)) * 0.9
        size_E = jnp.asarray(rng.multinomial(self.pairs, [*share, 0.1])[:-1], jnp.int32)
        shapes = (
            (self.pairs, self.inputs),
            (self.experts, self.inputs, self.outputs),
            (self.pairs, self.outputs),
        )
        keys = jax.random.split(jax.random.key(7), 3)
        arrays = tuple(
            jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float32)
            for key, shape in zip(keys, shapes, strict=True)
        )

        def ours(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
            return _differentiated(grouped_product, x, w, dy, size_E)

        def plain(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
            return _differentiated(jax.lax.ragged_dot, x, w, dy, size_E)

        differences = {
            name: outputs_apart(_part(ours, n), _part(plain, n), arrays, dtype)["out"]
            for n, name in enumerate(_PARTS)
        }
        sides = {"kernel_s": ours, "plain_s": plain} if timed else {}
        return differences, {
            name: seconds(jax.jit(side), arrays, dtype) for name, side in sides.items()
        }

    def __str__(self) -> str:
        return f"{self.pairs} pairs, {self.experts} experts of {self.inputs} x {self.outputs}"


def _differentiated(
    product: Callable[..., jax.Array],
    x_SD: jax.Array,
    w_EDF: jax.Array,
    dy_SF: jax.Array,
    size_E: jax.Array,
) -> tuple[jax.Array, ...]:
    """The product of rows of groups, and both gradients."""
    real = (jnp.arange(len(x_SD)) < size_E.sum())[:, None]

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.where(real, product(jnp.where(real, x, 0), w, size_E), 0)

    y, backward = jax.vjp(run, x_SD, w_EDF)
    return y, *backward(dy_SF)


def _part(run: Callable[..., tuple[jax.Array, ...]], number: int) -> Callable[..., jax.Array]:
    return lambda *arrays: run(*arrays)[number]


CASES = (
    Pairs(16384, 128, 2048, 768),  # Qwen3-30B-A3B, 2,048 tokens
    Pairs(256, 128, 2048, 768),  # a decoding step of 32 sequences
    Pairs(8192, 8, 2048, 1408),
    Pairs(4096, 32, 2048, 16),  # adapters of rank 16
)
SMALLEST = (Pairs(40, 5, 24, 16),)


def experts(record: Record, _: BenchSettings, rehearse: bool) -> None:
    """Every case in both types."""
    for dtype in ("float32",) if rehearse else ("bfloat16", "float32"):
        for case in SMALLEST if rehearse else CASES:
            about = {"shape": str(case), "dtype": dtype}
            name = "grouped product of experts"
            try:
                differences, more = case.compare(dtype, timed=not rehearse)
            except Exception as error:
                record.check(name, {}, error=error, **about)
                jnp.zeros(1).block_until_ready()  # a device that is lost ends the piece
            else:
                record.check(name, differences, **about | more)
