"""FLOPs of a sweep, counted in its programs, are those worked by hand."""

import dataclasses

import pytest
from bench_cases import SETTINGS, SMALL, small  # noqa: F401

from seeupo_jax.bench import swept_fields, synthetic, workloads
from seeupo_jax.bench.runners import bench_models
from seeupo_jax.bench.runners.jax_runner import OurSweeps
from seeupo_jax.bench.runners.program_recorder import trips
from seeupo_jax.policy.kernels.attention import FEW_KEYS
from seeupo_jax.policy.kernels.tree_attention import block_for


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Of trajectories of one turn: no refresh goes on from a step."""
    folder, settings = tmp_path_factory.mktemp("sweep"), dataclasses.replace(SETTINGS, turns=1)
    arch = bench_models.architecture("tiny", "float32")
    bench_models.write(arch, folder / "model", seed=0)
    work = workloads.make(settings, arch.vocab_size)
    lines = synthetic.records(work, synthetic.random_actions(work, 0), seed=0)
    synthetic.write(lines, folder / "lines.jsonl")
    values = swept_fields.values(settings, turns=1, dtype="float32")
    return OurSweeps(folder / "model", folder / "lines.jsonl", values)


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
    _, calls = sweeps.recorded()
    assert [call.name for call in calls] == ["score", "score", "turn_step"]
    for call in calls:
        (found,) = (f for f in sweeps.flops([call]).values() if f.total)
        assert found == pytest.approx(by_hand(call, arch))
        assert call.positions == call.batch.microbatches * call.batch.tokens_MRL[0].size
    assert sum(f.total for f in sweeps.flops(calls).values()) == pytest.approx(
        sum(sum(by_hand(call, arch)[:2]) for call in calls)
    )


def test_nothing_is_recorded_that_nobody_asked_for(sweeps):
    _, calls = sweeps.recorded()
    before = len(calls)
    sweeps.run()
    assert len(calls) == before
