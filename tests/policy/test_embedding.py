"""The look-up of token vectors on a mesh, and sums of gradients in bfloat16, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, sharding
from seeupo_jax.policy.embedding import embed

V, D = 32, 8


def gradient(table_VD, tokens_NL, d_NLD, dtype):
    """Vectors, and the table's gradient where theirs is `d_NLD`."""

    def run(table_VD, tokens_NL, d_NLD):
        vectors = lambda table_VD: embed(table_VD.astype(dtype), tokens_NL)  # noqa: E731
        x, back = jax.vjp(vectors, table_VD)
        return x, *back(d_NLD.astype(dtype))

    return jax.jit(run)(table_VD, tokens_NL, d_NLD)


def inputs(N, L):
    rng = np.random.default_rng([N, L])
    table_VD = rng.normal(size=(V, D)).astype(np.float32)
    tokens_NL = rng.integers(0, V, (N, L)).astype(np.int32)
    return table_VD, tokens_NL, rng.normal(size=(N, L, D)).astype(np.float32)


# 3 rows of 5 tokens: neither is divided evenly.
@pytest.mark.parametrize("N, L", [(4, 6), (3, 5)])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 4}, {"fsdp": 2, "context": 2, "tensor": 2}]
)
def test_devices_look_up_their_own_tokens_in_their_own_words(sizes, N, L):
    table_VD, tokens_NL, d_NLD = inputs(N, L)
    wanted_VD = np.zeros((V, D), np.float32)
    np.add.at(wanted_VD, tokens_NL, d_NLD)
    mesh = make_mesh(schema.Mesh(data=1, **sizes))
    with jax.set_mesh(mesh):
        placed = jax.device_put(table_VD, sharding(mesh, ("vocab", "embed")))
        x, d_VD = gradient(placed, tokens_NL, d_NLD, jnp.float32)
    np.testing.assert_array_equal(x, table_VD[tokens_NL])
    np.testing.assert_allclose(d_VD, wanted_VD, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_frequent_token_do_not_vanish_in_bfloat16():
    table_VD, _, _ = inputs(1, 1)
    tokens_NL = np.full((1, 4096), 3, np.int32)
    d_NLD = np.ones((1, 4096, D), np.float32)  # summed in bfloat16 it stays at 256
    _, d_VD = gradient(table_VD, tokens_NL, d_NLD, jnp.bfloat16)
    np.testing.assert_array_equal(d_VD[3], np.full(D, 4096.0))
    assert not np.any(np.delete(d_VD, 3, axis=0))
