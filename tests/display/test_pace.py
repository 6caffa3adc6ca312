"""Times left and rates, worked out by hand."""

from seeupo_jax.display.pace import PhaseDurations, Rate


def test_a_phase_is_judged_by_earlier_ones_without_the_first():
    pace = PhaseDurations()
    assert pace.left("sweep", 3.0) is None
    pace.record("sweep", 90.0)  # it compiled
    assert pace.left("sweep", 3.0) == 87.0
    for seconds in (10.0, 14.0, 12.0):
        pace.record("sweep", seconds)
    assert pace.left("sweep", 3.0) == 9.0
    assert pace.left("rollout", 3.0) is None


def test_a_phase_that_outruns_earlier_ones_is_judged_by_what_is_done():
    pace = PhaseDurations()
    pace.record("rollout", 10.0)
    assert pace.left("rollout", 30.0) is None
    assert pace.left("rollout", 30.0, 0.75) == 10.0
    assert pace.left("evaluation", 0.5, 0.1) is None  # too early to tell


def test_a_rate_is_of_the_last_seconds():
    rate = Rate()
    assert rate.of(100.0, 0) == 0.0
    assert rate.of(101.0, 50) == 50.0
    for second in range(2, 40):  # faster from then on
        last = rate.of(100.0 + second, 50 + 200 * (second - 1))
    assert last == 200.0
    assert rate.of(141.0, 10) == 0.0  # another collection
    assert rate.of(142.0, 40) == 30.0
