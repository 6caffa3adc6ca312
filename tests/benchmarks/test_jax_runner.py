"""FLOPs of a sweep, counted in its programs, are those worked by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_cases import SETTINGS, SMALL, small  # noqa: F401

from seeupo_jax.benchmarks import comparison, machine
from seeupo_jax.benchmarks.jax_runner import JaxSweeps, ProgramCall, trips
from seeupo_jax.benchmarks.settings import MODELS
from seeupo_jax.benchmarks.workloads import prepared
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.planning.program_flops import Flops, Passes, Trips, count
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import (
    FEW_KEYS,
    KeyValues,
    Tree,
    attend_trees,
    tree_mask_of,
)
from seeupo_jax.policy.kernels.tree_attention import block_for
from seeupo_jax.types import NO_TARGET, TurnBatch

ARCH = Architecture(vocab_size=512, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=8)


@pytest.fixture(scope="module")
def sweeps():
    """Of trajectories of one turn: no refresh goes on from a step."""
    with prepared(dataclasses.replace(SETTINGS, turns=1), "float32") as inputs:
        return JaxSweeps(inputs)


def by_hand(call, arch):
    """A call's products with parameters, those of attention, and what of both is done again."""
    _, R, L = call.batch.tokens_MRL.shape
    found, step = trips(call, arch), call.name == "turn_step"
    tokens = found.microbatches * R * L
    # q 16x16, k and v 16x8, out 16x16, three of 16x24; forwards, and twice as much backwards.
    projections = (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) * (3 if step else 1)
    head = 64 * 16 * found.rows.predicting * (4 if step else 1)  # the logits again, backwards
    chunks = -(-R * L // 128)  # of tokens, all of one size
    logits = found.microbatches * chunks * -(-R * L // chunks)
    block = block_for(SMALL["heads"], arch.longest)
    few = L <= FEW_KEYS
    visited = R * L * L if few else R * -(-L // block) * found.rows.visits * block**2
    # Scores and sums of values; backwards four more products, and with blocks the scores again.
    products = 2 + (0 if not step else 4 if few else 5)
    attention = 2 * found.microbatches * visited * 16  # of one product
    again = (2 * logits * head / 4 + (0 if few else attention)) if step else 0
    return 2 * (tokens * projections + logits * head), products * attention, again


def test_a_sweeps_flops_by_hand(sweeps):
    arch = sweeps.policy.network.arch
    calls = sweeps.recorded()
    # The reference policy's; the one step scores the old policy itself.
    assert [call.name for call in calls] == ["score", "turn_step"]
    for call in calls:
        (found,) = (f for f in sweeps.flops([call]).values() if f.total)
        assert found == pytest.approx(by_hand(call, arch))
        assert call.positions == call.batch.microbatches * call.batch.tokens_MRL[0].size
    assert sum(f.total for f in sweeps.flops(calls).values()) == pytest.approx(
        sum(sum(by_hand(call, arch)[:2]) for call in calls)
    )


def test_layers_that_are_scanned_give_the_same_sweep_and_the_same_tensors(monkeypatch):
    """As on an accelerator, whose sweeps are compared with PyTorch's by the tensors' names."""
    monkeypatch.setitem(MODELS, SETTINGS.model, SMALL | {"layers": 2})
    found = []
    for scanned in (False, True):
        monkeypatch.setattr(machine, "scans_layers", lambda device, scanned=scanned: scanned)
        with prepared(SETTINGS, "float32") as inputs:
            sweeps = JaxSweeps(inputs)
            assert sweeps.policy.network.arch.scan_layers == scanned
            sweeps.run()
            found.append(sweeps.outcome())
    assert found[0].tensors.keys() == found[1].tensors.keys()
    assert max(comparison.differences(*found).values()) < 1e-5


def test_nothing_is_recorded_that_nobody_asked_for(sweeps):
    calls = sweeps.recorded()
    before = len(calls)
    sweeps.run()
    assert len(calls) == before


def batch_of(depth, end, target, microbatches):
    tokens = np.zeros_like(depth)
    nothing = np.zeros((1, 1), np.float32)
    return TurnBatch(
        tokens, depth, end, tokens, target, nothing, nothing, nothing[0], np.int32(microbatches)
    )


def two_branches():
    """A prompt of 64 tokens and two members of 64 after it; a microbatch of it, one of nothing."""
    depth = np.concatenate([np.arange(128), np.arange(64, 128)])
    end = np.concatenate([np.full(64, 192), np.full(64, 128), np.full(64, 192)])

    def fold(x):
        return np.stack([x, np.zeros_like(x)])[:, None].astype(np.int32)

    return fold(depth), fold(end)


def test_loops_run_as_often_as_the_trees_and_targets_say():
    depth, end = two_branches()
    target = np.full((2, 1, 192), NO_TARGET, np.int32)
    call = ProgramCall("score", None, (), batch_of(depth, end, target, 1), None)
    # Of three blocks of 64: the prompt sees itself, each member itself and the prompt.
    assert trips(call, ARCH) == Trips(1, Passes(visits=5 / 3, predicting=0.0))
    assert call.positions == 192

    wide = np.full((1, 1, 512), NO_TARGET, np.int32)
    wide[0, 0, 100] = 7
    zeros, ends = np.zeros((1, 1, 512), np.int32), np.arange(1, 513, dtype=np.int32)[None, None]
    call = ProgramCall("score", None, (), batch_of(zeros, ends, wide, 1), None)
    assert trips(call, ARCH).rows.predicting == 0.25  # the first of four chunks of 128


def test_continued_chunks_see_their_own_branch():
    depth, end = two_branches()
    target = np.zeros((2, 1, 192), np.int32)
    shape = (2, 3, 1, 128)  # microbatches, chunks of each, rows, tokens
    at = np.full(shape, 127, np.int32)  # after the first member's last token
    more = RefreshBatch(
        **dict.fromkeys(RefreshBatch._fields, None)
        | {
            "tokens_MQRC": np.zeros(shape, np.int32),
            "depth_MQRC": np.broadcast_to(128 + np.arange(128, dtype=np.int32), shape),
            "end_MQRC": np.full(shape, 128, np.int32),
            "at_MQRC": at,
            "target_MQRC": np.full(shape, NO_TARGET, np.int32),
            "chunks_M": np.array([2, 0], np.int32),
        }
    )
    call = ProgramCall("turn_step", None, (), batch_of(depth, end, target, 1), more)
    found = trips(call, ARCH)
    # A block of 64 sees the prompt and the member, but not the other one; then itself, and the
    # second block the first one too.
    assert (found.chunks, found.continued) == (2.0, Passes((3 + 4) / 2, predicting=0.0))
    assert call.positions == 192 + 2 * 128


def causal(length):
    depth = np.arange(length, dtype=np.int32)[None, None]
    return depth, np.full_like(depth, length)


def test_a_gpu_s_kernels_count_the_pairs_of_blocks_that_they_visit():
    """Their branch is CUDA's, and they estimate no cost of their own."""
    L, H, d = 256, 4, 16
    depth, end = causal(L)
    call = ProgramCall("score", None, (), batch_of(depth, end, np.zeros_like(depth), 1), None)
    arch = dataclasses.replace(ARCH, dtype="bfloat16")
    given = trips(call, arch, "gpu").rows
    # Two blocks of 128 held: the first meets two of 64, the second four. Two of keys likewise.
    assert (given.pairs, given.key_pairs) == (2 + 4, 4 + 2)

    def loss(q, k, v, depth, end):
        tree_mask = tree_mask_of(Tree(depth, end))
        return attend_trees(q, KeyValues(k, v), tree_mask, kernel="cudnn").astype(jnp.float32).sum()

    like = jax.ShapeDtypeStruct
    q, k = (like((1, L, heads, d), jnp.bfloat16) for heads in (H, 2))
    numbers = like((1, L), jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, numbers, numbers)
    found = count(traced.jaxpr, Trips(1, given), "gpu")
    product = H * 6 * 2 * 128 * 64 * d  # of all heads and pairs
    # Forwards 2; for queries scores again and 2 more; for keys 2 again and 2 more.
    assert found == Flops(attention=9 * product, recomputed=3 * product)
