"""FLOPs by formula, by the jaxpr of the program that they are of, and by XLA's count of it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import SegmentBatch, Shapes, batch_shapes
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.refresh_batch import refresh_shapes
from seeupo_jax.learner.step import turn_step
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.planning import flops
from seeupo_jax.planning.flops import Pass
from seeupo_jax.planning.program_flops import count
from seeupo_jax.policy.architecture import (
    Architecture,
    DeltaNet,
    LatentAttention,
    LoraAdapters,
    Moe,
)
from seeupo_jax.policy.kernels import fused, paged, tree_kernels
from seeupo_jax.policy.kernels.paged import PageTable
from seeupo_jax.policy.kernels.tree_mask import TreeMask, visited_blocks
from seeupo_jax.policy.network import abstract_network, split_trainable
from seeupo_jax.types import TrainState

ARCH = Architecture(
    vocab_size=512,
    width=128,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=32,
    mlp_width=384,
    tied=False,
)
DELTA = DeltaNet((0,), key_heads=2, value_heads=4, key_dim=6, value_dim=10, conv=3)
MOE = Moe(experts=8, per_token=2, mlp_width=64, normalize=True)
SHARED = dataclasses.replace(MOE, shared_width=96, shared_gate=True, scores="sigmoid")
LATENT = LatentAttention(q_rank=24, kv_rank=20, nope_dim=20, rope_dim=12, value_dim=16)
OF_LATENTS = {"latent": LATENT, "kv_heads": 8, "qk_norm": False}
OF_ONE = {"latent": dataclasses.replace(LATENT, q_rank=None)}
LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LORA = LoraAdapters(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
OF_EXPERTS = LoraAdapters(4, 8.0, ("q_proj", "gate_proj", "up_proj", "down_proj"))
SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def traced_step(arch, rows, length, action, refresh, share=True):
    """The sweep's step on one turn as it is compiled, for one microbatch."""
    network, shapes = abstract_network(arch)
    params, frozen = split_trainable(network, shapes)
    optimizer = make_optimizer(schema.Optimizer(), total_steps=10)
    state = TrainState(params, jax.eval_shape(optimizer.init, params), SCALAR, SCALAR)
    lengths = Shapes((max(refresh, 1), length), action, rows, rows, share=share)
    empty = SegmentBatch((), (), (), np.zeros(0, np.int32), np.zeros(0, np.int32), 16, 0)
    learner = Learner(network, optimizer, schema.Algorithm(), lengths, 0.9)
    batch = batch_shapes(empty, lengths, learner.per_token, length=length, action=action)
    refresh_batch = refresh_shapes(empty, lengths, length) if refresh else None
    step = functools.partial(turn_step.turn_step, network, optimizer, learner.loss_config, None)
    number_N = jax.ShapeDtypeStruct((16,), jnp.float32)
    one = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.jit(step).trace(frozen, state, batch, refresh_batch, number_N, one)


def changed(**fields):
    return dataclasses.replace(ARCH, **fields)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        pytest.param(ARCH, (4, 64, 16, 16), id="refresh"),
        pytest.param(changed(remat="full", scan_layers=True), (4, 64, 16, 16), id="full-scan"),
        pytest.param(changed(remat="dots"), (4, 64, 16, 0), id="dots"),
        pytest.param(changed(vocab_size=2**19, remat="full"), (4, 64, 16, 0), id="head-in-chunks"),
        pytest.param(changed(heads=64, remat="full"), (16, 512, 4, 0), id="queries-in-chunks"),
        pytest.param(changed(moe=MOE, remat="full"), (4, 64, 16, 0), id="experts"),
        pytest.param(changed(moe=SHARED, remat="full"), (4, 64, 16, 0), id="shared expert"),
        pytest.param(changed(**OF_LATENTS, remat="full"), (4, 64, 16, 16), id="latents"),
    ],
)
def test_a_step_multiplies_what_its_formula_says_exactly(arch, shape):
    *sizes, refresh = shape
    wanted = flops.turn_step_flops(arch, *sizes, refresh=refresh, computed=True)
    assert count(traced_step(arch, *shape).jaxpr).total == wanted


def test_splash_multiplies_its_blocks_and_one_sum_of_each_rows_gradient():
    arch = changed(attention="splash", head_dim=128, remat="full")
    wanted = flops.turn_step_flops(arch, 2, 256, 16, trees=False, computed=True)
    sums = 2 * arch.layers * 2 * 256 * arch.heads * arch.head_dim  # of output times its gradient
    assert count(traced_step(arch, 2, 256, 16, 0, share=False).jaxpr).total == wanted + sums


def test_cudnn_makes_the_scores_once_more_backwards():
    """Backwards 5 products, forwards 2: FlashAttention-2, arXiv:2307.08691 §4.1."""
    arch = changed(attention="cudnn", dtype="bfloat16")
    causal = 4 * arch.layers * 4 * arch.heads * arch.head_dim * 256 * 257 / 2
    whole = 4 * arch.layers * 4 * arch.heads * arch.head_dim * 256**2
    plain = flops.turn_step_flops(changed(), 4, 256, 16, trees=False, computed=True)
    fused = flops.turn_step_flops(arch, 4, 256, 16, trees=False, computed=True)
    assert plain - fused == (1 + 2) * whole - (1 + 2.5) * causal


def test_a_scorer_that_is_a_policy_has_logits_of_every_token_forwards_and_backwards():
    step = functools.partial(flops.scorer_step_flops, ARCH, rows=4, length=64)
    logits = 2 * 4 * 64 * ARCH.vocab_size * ARCH.width
    assert step("policy") - step("model") == 3 * logits
    # Backwards they are computed again, in chunks.
    assert step("policy", computed=True) - step("model", computed=True) == 4 * logits
    assert step("head") == flops.forward_flops(ARCH, Pass(4, 64))


@pytest.mark.parametrize("moe, share", [(None, 0.75), (MOE, 0.8)], ids=["dense", "experts"])
def test_adapters_spare_the_gradients_of_frozen_matrices(moe, share):
    arch = changed(lora=LORA if moe is None else OF_EXPERTS, layers=6, moe=moe)
    wanted = flops.turn_step_flops(arch, 4, 64, 16, computed=True)
    counted = count(traced_step(arch, 4, 64, 16, 0).jaxpr).total
    assert 0.97 * wanted < counted < wanted
    whole = flops.turn_step_flops(changed(layers=6, moe=moe), 4, 64, 16, computed=True)
    assert wanted < share * whole


def test_xla_counts_a_few_percent_more_for_all_that_is_no_product():
    """The rest is softmax, norms, activations and some 15 FLOPs a parameter of AdamW."""
    arch = changed(layers=1)
    step = traced_step(arch, 2, 64, 16, 0)
    actual = flops.turn_step_flops(arch, 2, 64, 16, computed=True)
    compiled = step.lower().compile(compiler_options={"xla_backend_optimization_level": 0})
    rest = compiled.cost_analysis()["flops"] - actual
    assert 15 * flops.parameters(arch) < rest < 0.05 * actual


def page_table(rows, width):
    return PageTable(jnp.zeros((rows, width), jnp.int32), jnp.zeros(rows, jnp.int32))


@pytest.mark.parametrize(
    "arch",
    [ARCH, changed(**OF_LATENTS), changed(**OF_LATENTS | OF_ONE)],
    ids=["", "latents", "queries of one matrix"],
)
def test_prefill_and_decode_multiply_what_their_formulas_say(arch):
    network, params = abstract_network(arch)
    pages = jax.eval_shape(lambda: paged.new_pages(arch, 16, 4))

    def extend(params, pages, tokens_RL, with_head):
        model = network.bind(params)
        hidden, *_ = model.extend(tokens_RL, tokens_RL, pages, page_table(3, 10))
        return hidden @ model.head_VD(hidden.dtype).T if with_head else hidden

    def counted(tokens, with_head):
        tokens_RL = jax.ShapeDtypeStruct((3, tokens), jnp.int32)
        traced = jax.jit(extend, static_argnums=3).trace(params, pages, tokens_RL, with_head)
        return count(traced.jaxpr).total

    # The tables have 40 places: what a row has before its own tokens, and these.
    cached = functools.partial(Pass, cached=True)
    assert counted(8, False) == flops.forward_flops(arch, cached(3, 8, 32), computed=True)
    assert counted(1, True) == flops.forward_flops(arch, cached(3, 1, 39, head=1), computed=True)


def test_a_pass_by_hand():
    arch = changed(layers=1, width=2, heads=2, kv_heads=1, head_dim=3, mlp_width=5, vocab_size=7)
    # A token: q 2x6, k and v 2x3 each, out 6x2, three of 2x5: 66 parameters. Rows of 2 after 3 see
    # 4 + 5 keys, 2 heads of 3 channels, each for scores and for values. The head: 7x2 at one place.
    assert flops.forward_flops(arch, Pass(10, new=2, past=3, head=1)) == 10 * 2 * (
        2 * 66 + 9 * 6 * 2 + 14
    )
    assert flops.forward_flops(arch, Pass(1, 2, 3), computed=True) == 2 * (2 * 66 + 10 * 6 * 2)


def test_a_window_hides_keys():
    arch = changed(layers=2, windows=(None, 3))
    both = flops.forward_flops(arch, Pass(1, 4, 1)) - flops.forward_flops(arch, Pass(1, 0))
    whole = flops.forward_flops(ARCH, Pass(1, 4, 1))
    # Without it the queries see 2, 3, 4 and 5 keys; with it 2, 3, 3 and 3.
    assert whole - both == (14 - 11) * 4 * arch.heads * arch.head_dim


def test_splash_skips_blocks_that_nobody_sees():
    arch = changed(attention="splash", head_dim=128, layers=1)
    near = dataclasses.replace(arch, windows=(512,))
    a_block = 4 * arch.heads * arch.head_dim * 512**2
    rest = flops.forward_flops(arch, Pass(1, 2048)) - a_block * (4 * 2049 * 512 / 2) / 512**2
    assert flops.forward_flops(arch, Pass(1, 2048), computed=True) - rest == 10 * a_block
    assert flops.forward_flops(near, Pass(1, 2048), computed=True) - rest == 7 * a_block


@pytest.mark.parametrize("length", [128, 384, 640, 2048])
def test_blocks_are_those_of_the_kernel(length):
    block = fused._blocks(length).block_q
    count = length // block
    assert flops._of_splash(length, 0, None) == block**2 * count * (count + 1) // 2


@pytest.mark.parametrize(("length", "window"), [(256, None), (1000, None), (2048, 300)])
def test_blocks_are_those_that_the_kernel_of_trees_visits(length, window):
    at, end = jnp.arange(length)[None], jnp.full((1, length), length)
    tree_mask, block = TreeMask(at, at, at, end, at), tree_kernels.BLOCK
    visited = visited_blocks(tree_mask, window=window, block=block)
    assert flops._of_trees(length, 0, window) == block**2 * visited.sum()


def test_a_step_on_trees_is_counted_by_the_kernel_of_its_platform():
    executed = {
        name: flops.turn_step_flops(changed(attention=name), 1, 4096, 16, computed=True)
        for name in ("xla", "splash")
    }
    a_square = 4 * ARCH.layers * ARCH.heads * ARCH.head_dim * 4096**2
    again = 3.5  # of XLA: forwards, backwards and a half of the scores again, in chunks
    seen = (1 + 3.5) * (1 + 1 / 16) / 2  # a causal half of 16 x 16 blocks
    assert executed["xla"] - executed["splash"] == (again - seen) * a_square


def test_attention_that_is_kept_is_not_computed_again():
    def executed(remat):
        arch = changed(attention="splash", remat=remat)
        return flops.turn_step_flops(arch, 1, 4096, 16, computed=True)

    forwards = 4 * ARCH.layers * ARCH.heads * ARCH.head_dim * 4096**2 * (1 + 1 / 16) / 2
    assert executed("full") - executed("attention") == forwards
    assert executed("none") == executed("dots") < executed("attention")


@pytest.mark.parametrize(
    "arch",
    [
        ARCH,
        changed(tied=True, qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True),
        changed(moe=dataclasses.replace(MOE, dense_layers=(1,))),
        changed(lora=LORA),
        changed(delta=DELTA, attention_gate=True),
        changed(delta=dataclasses.replace(DELTA, grouped=True), lora=LORA),
        changed(moe=dataclasses.replace(SHARED, selection_bias=True, biases=True, groups=2)),
        changed(moe=dataclasses.replace(MOE, dense_layers=(1,)), lora=OF_EXPERTS),
        changed(**OF_LATENTS, qkv_bias=True, out_bias=True, lora=LoraAdapters(3, 6.0, LATENTS)),
        changed(**OF_LATENTS | OF_ONE, qkv_bias=True),
    ],
)
def test_parameters_are_those_of_the_network(arch):
    _, shapes = abstract_network(arch)
    assert flops.parameters(arch) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("latents", [{}, OF_LATENTS], ids=["", "latents"])
@pytest.mark.parametrize("expert, tensor", [(1, 2), (4, 1), (4, 2)])
def test_a_device_multiplies_by_its_part_of_the_experts_and_of_all_that_tensor_cuts(
    expert, tensor, latents
):
    """As it has them on a mesh without `fsdp`: on `expert` lie the experts, and nothing else."""
    arch = changed(moe=dataclasses.replace(MOE, dense_layers=(1,)), **latents)
    sizes = schema.Mesh(data=1, fsdp=1, expert=expert, tensor=tensor)
    mesh = make_mesh(sizes, jax.devices()[: expert * tensor])
    network, shapes = abstract_network(arch)
    where = param_shardings(mesh, network.logical_axes(), shapes)
    held = [
        math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(where), strict=True)
    ]
    found = flops.gathered_parameters(arch, mesh.shape)
    assert found == pytest.approx(sum(held), rel=0.01)  # norms and the router are whole everywhere


def test_a_recurrent_layer_reads_its_state_instead_of_keys():
    arch = changed(layers=1, delta=DELTA)
    # A token: queries, keys and values 128x(2x6 + 2x6 + 4x10), gates 128x40, strengths and decays
    # 128x8, out 40x128; the feed-forward 3x128x256; 64 channels of 3 taps; 4 heads of a state 6x10.
    matrices = 128 * (64 + 40 + 8 + 40) + 3 * 128 * arch.mlp_width
    of_token = 2 * matrices + 2 * 64 * 3 + 4 * 6 * 6 * 10
    assert flops.forward_flops(arch, Pass(5, 30)) == 150 * of_token
    assert flops.forward_flops(arch, Pass(5, 30, 70)) == 150 * of_token


def test_a_token_goes_through_some_experts_only():
    arch = changed(moe=MOE)
    idle = arch.layers * (MOE.experts - MOE.per_token) * 3 * arch.width * MOE.mlp_width
    assert flops.parameters(arch, active=True) == flops.parameters(arch) - idle
    assert flops.six_nd(arch, 10) == 60 * flops.parameters(arch, active=True)
