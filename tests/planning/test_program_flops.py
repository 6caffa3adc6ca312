"""FLOPs of programs whose loops are as long as the data say, worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from seeupo_jax.planning.program_flops import ONCE, Flops, Passes, Trips, count

ONE = 2 * 4**3  # FLOPs of `square`


def square(x):
    return x @ x


def heads(x):
    return jnp.einsum("hqd,hkd->hqk", x[None], x[None])[0]


def some(n, body, x):
    return jax.lax.fori_loop(0, n, lambda _, x: body(x), x)


def counted(f, *, given=ONCE, platform=None):
    x, n = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    return count(jax.jit(f).trace(x, n).jaxpr, given, platform)


def test_heads_are_attention_and_parameters_are_not():
    assert counted(lambda x, n: square(heads(x))) == Flops(weights=ONE, attention=ONE)


def test_microbatches_continued_chunks_and_pairs_of_blocks_count_each_by_its_own_number():
    def attend(n, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: some(n, heads, x), x)  # 3 blocks of queries

    def step(x, n):
        def microbatch(x):
            x = attend(n, square(x))
            with jax.named_scope("sweep/refresh"):
                return some(n, lambda x: attend(n, square(square(x))), x)

        with jax.named_scope("sweep/turn"):
            return some(n, microbatch, x)

    given = Trips(5, Passes(visits=1.5), chunks=2.0, continued=Passes(visits=4.0))
    found = counted(step, given=given)
    assert found == Flops(
        weights=5 * (1 + 2.0 * 2) * ONE, attention=5 * (3 * 1.5 + 2.0 * 3 * 4.0) * ONE
    )
    assert found.total == found.weights + found.attention


def test_chunks_without_a_prediction_are_not_counted():
    def chunks(x, n):
        idle = jax.checkpoint(lambda x: jax.lax.cond(n > 0, square, jnp.zeros_like, x))
        return jax.lax.map(idle, jnp.stack([x] * 4))

    assert counted(chunks, given=Trips(1, Passes(predicting=0.25))).weights == ONE


def test_what_is_computed_again_is_told_from_its_derivatives():
    def f(x, n):
        with jax.named_scope("again"):
            _, back = jax.vjp(lambda x, y: heads(x) @ y, x, x)
        return back(x)[0]

    # The product of heads and the one after it; of each the derivatives, of heads by both sides.
    assert counted(f) == Flops(weights=3 * ONE, attention=3 * ONE, recomputed=2 * ONE)


def test_the_branch_of_the_platform_counts():
    def f(x, n):
        def twice(x):
            return square(square(x))

        return jax.lax.platform_dependent(x, cpu=twice, default=square)

    assert counted(f, platform="cpu").weights == 2 * ONE
    assert counted(f, platform="gpu").weights == ONE
    assert counted(f).weights == 2 * ONE


def test_a_kernel_meets_the_pairs_of_blocks_of_what_its_programs_hold():
    def kernel(name):
        def run(x_ref, out_ref):
            out_ref[...] = square(x_ref[...])

        like = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        return pl.pallas_call(run, out_shape=like, grid=(2, 3), name=name)

    def both(x, n):
        return kernel("keys_gradient")(kernel("queries_gradient")(x))

    assert counted(both).attention == 2 * (2 * 3) * ONE
    given = Trips(1, Passes(pairs=5.0, key_pairs=7.0))  # of each of two heads
    assert counted(both, given=given) == Flops(attention=2 * (5 + 7) * ONE)


def test_without_data_loops_run_once_and_the_most_expensive_branch_counts():
    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, x: square(x), x)

    assert counted(lambda x, n: loop(x)).weights == 5 * ONE  # its length is in the program
    assert counted(lambda x, n: some(n, loop, x)).weights == 5 * ONE
    assert counted(lambda x, n: some(n, loop, x), given=Trips(3)).weights == 15 * ONE

    def branch(x, n):
        return jax.lax.cond(n > 0, lambda: square(square(x)), lambda: square(x))

    assert counted(branch).weights == 2 * ONE


def test_shards_count_on_each_device():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    f = jax.shard_map(square, mesh=mesh, in_specs=P(None), out_specs=P(None), check_vma=False)
    assert counted(lambda x, n: f(x)).weights == 8 * ONE


def test_a_derivative_counts_what_a_checkpoint_computes_again():
    def f(x):
        return jax.checkpoint(lambda x: jnp.sin(square(jnp.sin(square(x)))))(x).sum()

    # Two forwards, the same again for the sines, two for the gradient of each.
    assert counted(lambda x, n: jax.grad(f)(x)).weights == 8 * ONE
