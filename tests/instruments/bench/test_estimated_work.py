"""What `bench estimates` measures is what an estimate assumes, in the models' real sizes."""

import pytest

from seeupo_jax.instruments.bench import estimates
from seeupo_jax.planning.chips import Chip

PEAK, BANDWIDTH = 1e11, 1e10
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize("case", estimates.CASES, ids=str)
def test_conversations_are_those_that_an_estimate_assumes(case):
    work = estimates._conversations(case)
    chip = Chip("cpu", 0, PEAK, BANDWIDTH, 0.0, 0.0, 1, 1, 2, 1)
    found = estimates._estimate(estimates._fields(case, work), chip)
    assert {c.tokens for c in work.conversations} == {case.context}
    assert found.sampled * case.turns * case.conversations == work.sampled
    assert found.context == work.tokens - work.sampled
    assert len({c.prompt for c in work.conversations}) == case.conversations  # nothing is shared


def test_a_sweep_is_estimated_by_its_products():
    """By hand: 2 FLOPs a weight and token forwards, 6 with the way back, all pairs of tokens."""
    case = estimates.EstimateCase("tiny", 512, 2, 16)
    chip = Chip("cpu", 0, PEAK, 1e30, 0.0, 0.0, 1, 1, 2, 1)
    fields = estimates._fields(case, estimates._conversations(case))
    parts = {part.name: part for part in estimates._estimate(fields, chip).parts}
    layers = 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)  # q, o; k, v; the MLP's three
    head, tokens = 256 * 8192, 16 * 512
    pairs = 6 * 4 * 256 * 512**2 * 16
    scored = 2 * (2 * tokens * (layers + head) + pairs)  # by the old and the reference policy
    assert parts["sweep/score"].times == 2
    assert parts["sweep/score"].serial_s == pytest.approx(scored / PEAK, rel=1e-3)
    # Steps over whole and over half conversations; the refresh and the logits of actions besides.
    stepped = 6 * (tokens + tokens / 2) * layers + 3 * (pairs + pairs / 4)
    assert 1 < parts["sweep/turn"].serial_s * PEAK / stepped < 1.8


def test_what_an_iteration_reads_is_counted_by_hand():
    """In float32: weights anew in each pass and each step, keys and values of half a context."""
    case = estimates.EstimateCase("tiny", 512, 2, 16)
    chip = Chip("cpu", 0, float("inf"), 1.0, 0.0, 0.0, 1, 1, 2, 1)  # a byte per second
    fields = estimates._fields(case, estimates._conversations(case))
    layer = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256 + 2 * 64  # and four norms
    weights = 4 * (6 * layer + 256 + 256 * 8192)
    cache = 6 * 2 * 2 * 64 * 4  # of a token: in six layers keys and values, two heads of 64
    reads = {part.name: part.serial_s for part in estimates._estimate(fields, chip).parts}
    # Of 16 conversations half the tokens are sampled: 4,096, and as many are prefilled, 8 x 128 at
    # once. All are decoded together, 256 times one token.
    assert reads["rollout/prefill"] == 4 * (weights + 8 * 256 * cache)
    assert reads["rollout/decode"] == 256 * (weights + 16 * 256 * cache)
    # A step of 16 microbatches, one of 8, each of two conversations of half the length, and in both
    # once AdamW: it reads parameters, gradients and two moments, and writes all but the gradients.
    assert reads["sweep/turn"] == (16 + 8) * 2 * weights + 2 * 7 * weights
    again = estimates._estimate(fields | {"model.remat": "full"}, chip).parts[-1]
    assert again.serial_s == (16 + 8) * 3 * weights + 2 * 7 * weights
