"""Tree attention for GPU equals the other ways to compute it, and lowers for CUDA without one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from tree_cases import CASES, assert_equal, attend, random_arrays, trained, wanted

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import AXES, make_mesh, sharding
from seeupo_jax.policy.kernels.attention import FEWEST_QUERIES, KeyValues, attend_trees
from seeupo_jax.policy.kernels.fused import select_kernel
from seeupo_jax.policy.kernels.tree_mask import TreeMask

SHAPE = {"length": 256, "head_dim": 64, "kv_heads": 2, "heads": 4, "dtype": "bfloat16"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "block, name, window",
    [
        (16, "trees", None),
        (16, "continued", 20),
        (None, "continued", 20),
    ],
)
def test_every_path_is_attended_as_if_it_were_alone(block, name, window):
    case = CASES[name]
    options = {"window": window, "implementation": "triton", "block": block}
    assert_equal(trained(*random_arrays(case), case.tree_mask, **options), wanted(name, window))


@pytest.mark.exhaustive
@pytest.mark.parametrize("H, kv_heads, d", [(7, 1, 40), (2, 2, 8)])
def test_heads_of_any_number_and_width_are_attended(H, kv_heads, d):
    case = CASES["trees"]
    arrays = random_arrays(case, H=H, kv_heads=kv_heads, d=d)
    ways = ({"implementation": "triton", "block": 32}, {"implementation": "all_pairs"})
    assert_equal(*(trained(*arrays, case.tree_mask, window=None, **way) for way in ways))


@pytest.mark.exhaustive
def test_gradients_in_bfloat16_are_as_near_to_the_exact_ones_as_all_scores_at_once():
    case = CASES["trees"]
    run = functools.partial(trained, tree_mask=case.tree_mask, window=None)
    arrays = random_arrays(case, dtype=jnp.bfloat16)
    exact = run(*(x.astype(jnp.float32) for x in arrays), implementation="all_pairs")
    actual, all_pairs = (run(*arrays, implementation=name) for name in ("triton", "all_pairs"))
    for x, y, z in zip(actual, all_pairs, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        off, allowed = (np.abs(np.asarray(a, np.float32) - z).max() for a in (x, y))
        assert off <= 1.5 * allowed


# Of jax 0.11.2, which an H200 ran them with.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "H, kv_heads, d, dtype, window, cap",
    [
        (14, 2, 64, jnp.bfloat16, None, None),  # as models of 0.5b and 1.5b
        (12, 2, 128, jnp.bfloat16, 512, 50.0),
        (12, 2, 128, jnp.float32, None, None),
    ],
)
def test_the_kernels_lower_for_cuda_from_a_machine_without_a_gpu(
    H, kv_heads, d, dtype, window, cap
):
    L, like = 4000, jax.ShapeDtypeStruct
    numbers = like((1, L), jnp.int32)
    q, k = like((1, L, H, d), dtype), like((1, L, kv_heads, d), dtype)

    def loss(q, k, v, *tree_mask):
        options = {"window": window, "cap": cap, "implementation": "triton"}
        out = attend(q, k, v, tree_mask=TreeMask(*tree_mask), **options)
        return out.astype(jnp.float32).sum()

    # Newer versions of JAX ask which GPU a kernel is for.
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    kinds = (AxisType.Auto,) * len(AXES)
    with use_abstract_mesh(AbstractMesh((1,) * len(AXES), AXES, kinds, abstract_device=gpu)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, *[numbers] * 5)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton(" in line]
    names = [re.search(r' name = "(\w+)"', call)[1] for call in calls]
    assert names == ["attend", "queries_gradient", "keys_gradient"]
    # A program for each head and block of 128, or in float32 of 32.
    blocks = -(-L // (128 if dtype == jnp.bfloat16 else 32))
    for call in calls:
        assert f"grid_x = {H} : i32, grid_y = 1 : i32, grid_z = {blocks} : i32" in call
    assert not re.search(r"x4\d\d\dx4\d\d\dx", text)  # no scores of all pairs


def through_trees(tree_mask):
    return jax.jit(lambda q, k, v: attend_trees(q, KeyValues(k, v), tree_mask, kernel="cudnn"))


def test_devices_with_their_own_rows_heads_and_queries_give_what_one_device_gives():
    case = CASES["trees"]
    qkv = random_arrays(case)[:3]
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, context=2, tensor=2))
    with jax.set_mesh(mesh):
        out = through_trees(case.tree_mask)(*qkv)
    np.testing.assert_allclose(out, wanted("trees", None)[0], atol=1e-5)
    by_device = sharding(mesh, ("rows", "length", "heads", "head_dim"))
    assert out.sharding.is_equivalent_to(by_device, 4)


def test_few_queries_need_no_kernel():
    case = CASES["causal"]

    def calls(length):
        few = case.tree_mask._replace(
            order_NL=case.tree_mask.order_NL[:, :length],
            depth_NL=case.tree_mask.depth_NL[:, :length],
        )
        q, k, v, _ = random_arrays(case)
        traced = through_trees(few).trace(q[:, :length], k, v)
        return str(traced.jaxpr).count("pallas_call[")

    assert calls(FEWEST_QUERIES - 1) == 0
    assert calls(FEWEST_QUERIES) > 0


@pytest.mark.parametrize(
    "changes, kernel, reason",
    [
        ({"dtype": "float32", "length": 255}, "cudnn", "as wanted"),
        ({"head_dim": 36}, "cudnn", "as wanted"),
        ({"head_dim": 256}, "xla", "token trees on GPU need a head_dim up to 128: got 256"),
        (
            {"dtype": "float64"},
            "xla",
            "token trees on GPU need bfloat16, float16 or float32: got float64",
        ),
    ],
)
def test_which_shapes_of_trees_the_kernel_takes(changes, kernel, reason):
    assert select_kernel("cudnn", **SHAPE | changes, trees=True) == (kernel, reason)


def test_heads_wider_than_the_kernels_sums_are_refused():
    case = CASES["causal"]
    q, k, v, _ = random_arrays(case, d=136)
    with pytest.raises(ValueError, match="got head_dim=136; allowed by triton: up to 128"):
        attend(q, k, v, tree_mask=case.tree_mask, implementation="triton")
