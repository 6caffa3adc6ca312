"""Each row meets the matrix of its group and no other, by every way that a platform has."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from seeupo_jax.parallel.mesh import AXES
from seeupo_jax.policy.kernels import grouped, grouped_gpu
from seeupo_jax.policy.kernels.grouped import grouped_product
from seeupo_jax.policy.kernels.row_blocks import list_row_blocks, rows_of_block

# Rows, inputs, outputs, rows of each group: empty groups, rows of none, groups of several blocks.
CASES = {
    "few": (3, 40, 8, [0, 1, 0, 0, 0, 1]),
    "empty": (40, 12, 20, [0, 13, 0, 20, 2]),
    "large": (300, 150, 70, [100, 0, 133, 67]),
    "none": (5, 8, 8, [0, 0]),
}
WAYS = {
    "loop": (grouped._product_by_loop, grouped._gradients_by_loop),
    "instruction": (grouped._product_by_instruction, grouped._gradients_by_instruction),
    "kernel": (
        functools.partial(grouped_gpu.product, interpret=True),
        functools.partial(grouped_gpu.matrix_gradients, interpret=True),
    ),
}


def drawn(name, dtype=np.float32):
    """Rows, matrices, gradients of the results, sizes; rows of no group are NaN."""
    rows, inputs, outputs, sizes = CASES[name]
    rng = np.random.default_rng(0)
    shapes = (rows, inputs), (len(sizes), inputs, outputs), (rows, outputs)
    x, w, dy = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan
    return x, w, dy, np.int32(sizes)


def twin(x, w, dy, sizes):
    """Results and both gradients in float64, group by group."""
    x, w, dy = (np.asarray(each, np.float64) for each in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    stop = 0
    for group, size in enumerate(sizes):
        at = slice(stop, stop := stop + size)
        y[at], dx[at], dw[group] = x[at] @ w[group], dy[at] @ w[group].T, x[at].T @ dy[at]
    return y, dx, dw


@jax.jit
def differentiated(x, w, dy, size_E):
    y, backward = jax.vjp(lambda x, w: grouped_product(x, w, size_E), x, w)
    return y, *backward(dy)


def by_way(way, x, w, dy, size_E):
    product, gradients = WAYS[way]

    def run(x, w, dy, size_E):
        y = product(x, w, size_E, transposed=False)
        return y, product(dy, w, size_E, transposed=True), gradients(x, dy, size_E)

    return jax.jit(run)(x, w, dy, size_E)


@pytest.mark.parametrize("name", CASES)
def test_rows_meet_the_matrix_of_their_group_forwards_and_backwards(name):
    arrays = drawn(name)
    for got, wanted in zip(differentiated(*arrays), twin(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("way, name", [("instruction", "empty"), ("kernel", "empty")])
def test_the_ways_of_other_platforms_compute_the_same(way, name):
    arrays = drawn(name)
    for got, wanted in zip(by_way(way, *arrays), twin(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_computes_the_same_in_every_type(way, name, dtype):
    arrays = drawn(name, jnp.dtype(dtype))
    near = 2e-5 if dtype == "float32" else 1e-2
    for got, wanted in zip(by_way(way, *arrays), twin(*arrays), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.float64(got), wanted, rtol=near, atol=near)


def test_gradients_are_those_of_torch():
    x, w, dy, sizes = drawn("large")
    ours = [torch.tensor(each, requires_grad=True) for each in (x, w)]
    parts = torch.split(ours[0], [int(size) for size in sizes])
    y = torch.cat([part @ matrix for part, matrix in zip(parts, ours[1], strict=True)])
    y.backward(torch.tensor(dy))
    wanted = [y.detach(), *(each.grad for each in ours)]
    for got, each in zip(differentiated(x, w, dy, sizes), wanted, strict=True):
        np.testing.assert_allclose(got, each, rtol=2e-5, atol=2e-5)


def test_sums_of_bfloat16_are_float32():
    """256 ones, as many of 2**-9, then minus 256: bfloat16 cannot tell 256.5 from 256."""
    rows = 512
    ones = jnp.where(jnp.arange(rows) % 2, 2.0**-9, 1.0).astype(jnp.bfloat16)[:, None]
    dy = jnp.concatenate([jnp.ones_like(ones), -jnp.ones_like(ones)])
    x = jnp.concatenate([ones, jnp.where(ones == 1, ones, 0)])
    for way in WAYS:
        dw = by_way(way, x, jnp.ones((1, 1, 1), jnp.bfloat16), dy, jnp.array([2 * rows]))[2]
        assert float(dw[0, 0, 0]) == 0.5, way


def test_rows_that_the_instruction_leaves_undefined_reach_nothing(monkeypatch):
    real = jax.lax.ragged_dot_general

    def undefined(x, w, size_E, numbers):
        y = real(x, w, size_E, numbers)
        rest = (jnp.arange(len(y)) >= size_E.sum())[:, None]
        return jnp.where(rest, jnp.nan, y) if y.ndim == 2 else y

    monkeypatch.setattr(jax.lax, "ragged_dot_general", undefined)
    arrays = drawn("empty")
    for got, wanted in zip(by_way("instruction", *arrays), twin(*arrays), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_rows_of_other_groups_do_not_change_a_row():
    x, w, dy, sizes = drawn("large")
    wanted = differentiated(x, w, dy, sizes)
    x[sizes[0] :] = 1e3
    got = differentiated(x, w, dy, sizes)
    np.testing.assert_array_equal(got[0][: sizes[0]], wanted[0][: sizes[0]])
    np.testing.assert_array_equal(got[2][0], wanted[2][0])


def test_a_frozen_matrix_has_no_gradient_and_frozen_rows_have_none():
    x, w, _, sizes = drawn("empty")

    def products(of):
        def loss(each):
            return grouped_product(*((each, w) if of == "x" else (x, each)), sizes).sum()

        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(jnp.asarray(x if of == "x" else w)))
        return jaxpr.count("branches_platforms") or jaxpr.count("platform_index")

    both = str(jax.make_jaxpr(differentiated)(*drawn("empty")))
    assert products("x") == products("w") == 2
    assert (both.count("branches_platforms") or both.count("platform_index")) == 3


def test_blocks_cover_the_rows_of_every_group_once():
    rng = np.random.default_rng(0)
    for rows, groups, block in ((1, 3, 8), (64, 5, 8), (37, 37, 16), (100, 200, 8)):
        sizes = rng.multinomial(rows, rng.dirichlet(np.full(groups + 1, 0.3)))[:-1]
        listed = list_row_blocks(jnp.array(sizes), rows, block)
        start_T, stop_T, group_T, count = jax.device_get(listed)
        seen = [
            (group, row)
            for start, stop, group in zip(start_T, stop_T, group_T, strict=True)
            for row in range(start, stop)
        ]
        assert seen == [*zip(np.repeat(np.arange(groups), sizes), range(sizes.sum()), strict=True)]
        assert count == sum(-(-sizes // block)) <= len(start_T)
        assert (stop_T - start_T).max() <= block


def test_blocks_are_about_as_large_as_groups():
    assert [rows_of_block(rows, 128, 64) for rows in (1, 256, 2048, 16384)] == [8, 8, 16, 64]


# Of jax 0.11.2.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype, across", [(jnp.bfloat16, 128), (jnp.float32, 64)])
def test_the_kernels_lower_for_cuda_from_a_machine_without_a_gpu(dtype, across):
    S, E, D, F, like = 4096, 128, 2048, 768, jax.ShapeDtypeStruct
    arrays = like((S, D), dtype), like((E, D, F), dtype), like((S, F), dtype)
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    kinds = (AxisType.Auto,) * len(AXES)
    with use_abstract_mesh(AbstractMesh((1,) * len(AXES), AXES, kinds, abstract_device=gpu)):
        traced = differentiated.trace(*arrays, like((E,), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton(" in line]
    grids = [
        (re.search(r' name = "(\w+)"', call)[1], *map(int, re.findall(r"grid_. = (\d+)", call)))
        for call in calls
    ]
    # Blocks of 32 rows, of which each group and the rest begin at most one that is not full.
    blocks, inputs = (E + 1) + (S - E - 1) // 32, 64 if dtype == jnp.bfloat16 else 32
    assert grids == [
        ("multiply", F // across, blocks, 1),
        ("multiply", D // across, blocks, 1),
        ("sum_outer", F // across, D // inputs, E),
    ]
    assert f"{E}x{S}" not in text and "ragged_dot" not in text  # no rows times groups


def test_tpu_has_an_instruction():
    like = jax.ShapeDtypeStruct
    arrays = like((64, 32), "float32"), like((4, 32, 16), "float32"), like((64, 16), "float32")
    traced = differentiated.trace(*arrays, like((4,), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert (
        text.count('"chlo.ragged_dot"(') + text.count(" = chlo.ragged_dot ") == 3
        and "while" not in text
    )
