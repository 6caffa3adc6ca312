"""What the backward pass keeps, estimated by shapes, against what XLA gives its programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from seeupo_jax.planning.activation_memory import microbatch_bytes, remats, share_of
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, LatentAttention, LoraAdapters, Moe
from seeupo_jax.policy.kernels.attention import Tree

SMALL = Architecture(
    vocab_size=256,
    width=64,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_width=192,
    scan_layers=True,  # XLA for CPU undoes recomputation elsewhere
)
WIDE = dataclasses.replace(SMALL, layers=3, width=128, heads=2, mlp_width=512, qk_norm=False)
LATENTS = dataclasses.replace(
    WIDE, kv_heads=2, head_dim=48, latent=LatentAttention(48, 32, 32, 16, 32)
)
STREAM = dataclasses.replace(SMALL, layers=1, width=1024, heads=1, kv_heads=1, mlp_width=16)


def compiled_bytes(arch, rows, length):
    """Of a compiled microbatch, what is there beside its arguments and the gradients."""
    network, params = policy.abstract_network(arch)
    index = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def loss(params, tokens, depth, end, target):
        hidden, keys = policy.hidden(network, params, tokens, tree=Tree(depth, end))
        logp = policy.token_logp(network, params, hidden, target, temperature=1.0)
        return logp.sum(), keys

    step = jax.jit(jax.grad(loss, has_aux=True))
    memory = step.lower(params, *[index] * 4).compile().memory_analysis()
    grads = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - grads


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arch, rows, length, names",
    [
        (WIDE, 2, 384, remats(WIDE, "cpu")),
        (SMALL, 4, 256, ("dots",)),
        (LATENTS, 2, 384, ("none", "full")),
        (STREAM, 2, 1024, ("full",)),  # which hardly has more than the residual stream
    ],
)
@pytest.mark.usefixtures("optimized")
def test_the_estimate_is_what_xla_gives_the_program_within_a_quarter(arch, rows, length, names):
    for remat in names:
        arch = dataclasses.replace(arch, remat=remat)
        estimate = microbatch_bytes(arch, remat, rows=rows, length=length, platform="cpu")
        assert estimate == pytest.approx(compiled_bytes(arch, rows, length), rel=0.25)


def layer_bytes(arch, remat, rows=2, length=16, platform="cpu", expert=1):
    """What one more layer adds."""
    more = dataclasses.replace(arch, layers=arch.layers + 1)
    sizes = {"rows": rows, "length": length, "platform": platform, "expert": expert}
    return microbatch_bytes(more, remat, **sizes) - microbatch_bytes(arch, remat, **sizes)


def test_what_a_layer_keeps_is_counted_by_hand():
    D, Q, K, F, H = 64, 64, 32, 192, 4
    # The input; and keys and values, which stand by for the refresh whatever is kept.
    assert layer_bytes(SMALL, "full") == 32 * 4 * (D + 2 * K)
    assert layer_bytes(SMALL, "attention") == layer_bytes(SMALL, "full")
    # Of a kernel its result, in heads of 16 numbers, and a number a head.
    fused = dataclasses.replace(SMALL, attention="splash")
    assert layer_bytes(fused, "attention") == 32 * 4 * (D + 2 * K + Q + H)
    # Besides the products of all matrices but the last.
    weights = H * 16  # of attention to so few keys
    assert layer_bytes(SMALL, "dots") == 32 * 4 * (D + Q + 2 * K + D + 2 * F + 2 * K + weights)
    # Inputs of both norms and what they give; both heads' norms' inputs; what attention keeps, and
    # gives; six of the feed-forward's width, as JAX derives silu(gate) * up and its product with a
    # matrix; a number a norm; and the rotation's cosines and sines.
    kept = 4 * D + (Q + K) + (2 * Q + 2 * K + H + Q) + 6 * F + (2 + H + K // 16) + 4 * 8
    assert layer_bytes(SMALL, "none") == 32 * 4 * (kept + 2 * K + weights)


def test_what_changes_nothing_on_a_platform_is_no_choice_there():
    fused, looped = (dataclasses.replace(SMALL, attention=name) for name in ("splash", "xla"))
    assert remats(fused, "tpu") == ("none", "dots", "attention", "full")
    assert remats(looped, "gpu") == remats(looped, "cpu") == ("none", "dots", "full")
    assert remats(dataclasses.replace(looped, scan_layers=False), "cpu") == ("none",)


def test_half_the_width_of_numbers_takes_half_the_memory_and_a_copy_of_the_weights():
    arch = dataclasses.replace(SMALL, dtype="bfloat16", qk_norm=False)
    exact = dataclasses.replace(arch, dtype="float32")
    weights = 64 * (64 + 2 * 32 + 64 + 3 * 192) * 2
    half = layer_bytes(arch, "none", length=2048) - weights
    assert half == pytest.approx(layer_bytes(exact, "none", length=2048) / 2, rel=0.02)
    assert layer_bytes(arch, "full") == pytest.approx(layer_bytes(exact, "full") / 2, rel=0.01)


def test_frozen_weights_need_no_input_kept():
    lora = dataclasses.replace(SMALL, lora=LoraAdapters(4, 8.0, ("q_proj",)))
    assert layer_bytes(lora, "none") < layer_bytes(SMALL, "none")


def test_a_frozen_head_has_no_gradient():
    """One more word: of its row of the head a copy in float32, and where it trains a gradient."""
    sizes = {"rows": 2, "length": 16, "platform": "cpu"}
    logits = 3 * 32 * 4  # of all 32 tokens, at once
    lora = dataclasses.replace(SMALL, lora=LoraAdapters(4, 8.0, ("q_proj",)))
    for arch, copies in ((SMALL, 2), (lora, 1)):
        more = dataclasses.replace(arch, vocab_size=arch.vocab_size + 1)
        before, after = (microbatch_bytes(each, "none", **sizes) for each in (arch, more))
        assert after - before == logits + copies * 64 * 4


def test_experts_are_counted_in_the_layers_that_have_them():
    moe = Moe(8, 2, 96, True, dense_layers=(0,))
    arch = dataclasses.replace(SMALL, layers=1, moe=moe, scan_layers=False)
    dense = dataclasses.replace(SMALL, layers=1, scan_layers=False)
    sizes = {"rows": 2, "length": 16, "platform": "cpu"}
    assert microbatch_bytes(arch, "none", **sizes) == microbatch_bytes(dense, "none", **sizes)
    assert layer_bytes(arch, "none") != layer_bytes(dense, "none")


def test_devices_that_share_experts_keep_each_others_tokens_there():
    arch = dataclasses.replace(SMALL, moe=Moe(8, 2, 96, True))
    D, E, P, F, S = 64, 8, 2, 96, 2 * 32  # S: pairs of a token and an expert, of all tokens
    one, four = (layer_bytes(arch, "none", expert=expert) / 1.3 for expert in (1, 4))
    # 1.3 times, as XLA takes with experts: at least a pair's input of its expert, gate, up and
    # their product, and what comes out.
    assert four - one >= 3 * S * 4 * (2 * D + 3 * F)
    # At most all that a token has without sharing, and the router's.
    assert four - one <= 3 * S * 4 * (6 * D + 8 * F + 4 * E + 16 * P)
    assert layer_bytes(arch, "full", expert=4) == layer_bytes(arch, "full")
    half = dataclasses.replace(arch, dtype="bfloat16", moe=Moe(64, 2, 96, True))
    weights = [layer_bytes(half, "none", length=8, expert=expert) for expert in (1, 4)]
    assert weights[1] < weights[0] / 2  # of the copies of its experts it has a quarter


def test_without_a_kernel_for_trees_attention_keeps_its_weights_until_they_come_in_chunks():
    short, long = {"rows": 1, "length": 1024}, {"rows": 1, "length": 4096}
    weights = 4 * 1024**2 * 4
    for remat, more in (("none", weights), ("dots", weights), ("full", 0)):
        both = [layer_bytes(SMALL, remat, **short, platform=p) for p in ("gpu", "cpu")]
        assert both[0] - both[1] == more
        both = [layer_bytes(SMALL, remat, **long, platform=p) for p in ("gpu", "cpu")]
        assert both[0] == both[1]
    splash = dataclasses.replace(SMALL, attention="splash")
    both = [layer_bytes(splash, "none", **short, platform=p) for p in ("tpu", "cpu")]
    assert both[0] == both[1]


def test_devices_that_share_heads_and_widths_have_their_part_of_them():
    share = share_of(SMALL, 2)
    assert (share.heads, share.kv_heads, share.mlp_width, share.vocab_size) == (2, 1, 96, 128)
    assert (share.width, share_of(SMALL, 1)) == (64, SMALL)
    assert share_of(SMALL, 4).kv_heads == 1  # of two, a copy on two devices each
    three = dataclasses.replace(SMALL, heads=12, kv_heads=3)
    assert share_of(three, 4).kv_heads == 3  # which four cannot share: each has all
    assert layer_bytes(share, "none") < 0.7 * layer_bytes(SMALL, "none")
    assert layer_bytes(share, "full") < layer_bytes(SMALL, "full")  # but the stream is whole
