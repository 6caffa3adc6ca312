"""Statistics of a run's rewards: as of all its turns at once, and the same after a resume."""

import json
from typing import Any

import learner_cases as cases
import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.running_rewards import Moments, running_statistics
from seeupo_jax.types import learnable

SHAPES = Shapes((64,), action=8, rows=4, trajectories=8)


def iteration(seed, *, named=True):
    """Eight ragged trajectories, one of which failed."""
    rng, made = np.random.default_rng(seed), []
    for i, trajectory in enumerate(cases.ragged(seed)):
        each = tuple((10 + rng.normal(size=trajectory.turns)).tolist())
        fields: dict[str, Any] = {"turn_rewards": each, "reward": sum(each)}
        if named and i != 3:
            late = tuple(rng.random(trajectory.turns).tolist())
            fields |= named_fields({"env": each, "late": late})
        made.append(with_fields(trajectory, **fields))
    return made


def named_fields(by_turn):
    """The fields of rewards that are known by name and turn."""
    return {"rewards": {n: sum(r) for n, r in by_turn.items()}, "named_turn_rewards": by_turn}


def turns(batches, name):
    """All numbers of a name that count."""
    found = []
    for batch in batches:
        for trajectory, keep in zip(batch, learnable(batch), strict=True):
            given = trajectory.named_turn_rewards.get(name, (0.0,) * trajectory.turns)
            own = trajectory.turn_rewards if name == "env" else given
            found += [*own] if keep else []
    return np.array(found)


def assert_of_turns(statistics, batches):
    """They are NumPy's, of all turns of these iterations."""
    assert statistics.keys() == {"env", "late"}
    for name, found in statistics.items():
        numbers = turns(batches, name)
        assert found.count == len(numbers)
        assert found.mean == pytest.approx(numbers.mean(), rel=1e-12)
        assert found.std == pytest.approx(numbers.std(ddof=1), rel=1e-12)


def test_they_are_those_of_all_turns_so_far_without_those_that_failed():
    batches = [iteration(seed) for seed in (1, 2, 3)]
    statistics = None
    for batch in batches:
        statistics = running_statistics(batch, statistics)
    assert_of_turns(statistics, batches)


def unnamed(batch, *names):
    """The same trajectories, of which an environment named nothing by these names."""
    kept = [{n: r for n, r in t.named_turn_rewards.items() if n not in names} for t in batch]
    return [with_fields(t, **named_fields(each)) for t, each in zip(batch, kept, strict=True)]


NAMED, PARTLY, PLAIN = iteration(1), unnamed(iteration(2), "late"), iteration(3, named=False)


@pytest.mark.parametrize(
    "batches",
    [
        (NAMED, PARTLY, PLAIN, iteration(4)),
        (PARTLY, PLAIN, NAMED, PARTLY),
        (PLAIN, NAMED, PLAIN),
    ],
)
def test_a_name_of_some_iterations_alone_counts_zeros_in_the_others(batches):
    statistics = None
    for batch in batches:
        read = None if statistics is None else json.loads(json.dumps(statistics))
        again = None if read is None else {name: Moments(*each) for name, each in read.items()}
        statistics = running_statistics(batch, statistics)
        assert running_statistics(batch, again) == statistics
    assert_of_turns(statistics, batches)


@pytest.mark.parametrize("last", [PARTLY, PLAIN])
def test_advantages_are_the_same_whether_a_reward_of_zero_is_named_or_not(last):
    zeros = []
    for trajectory in last:
        named = {"env": trajectory.turn_rewards, "late": (0.0,) * trajectory.turns}
        zeros.append(with_fields(trajectory, **named_fields(named)))
    algorithm = Algorithm(**RECIPES["prorl"])
    found = []
    for batch in (last, zeros):
        statistics = running_statistics(batch, running_statistics(NAMED))
        rows = SegmentBatch.of(batch, grouped=True)
        arrays = CreditArrays(algorithm, SHAPES, rows, batch, {}, statistics=statistics)
        assert arrays.running_mean_Q[1] == pytest.approx(turns([NAMED, zeros], "late").mean())
        credit, shares = assign_credit(arrays)
        found.append((np.concatenate(credit["advantage"]).tolist(), shares))
    assert found[0] == found[1] and found[0][1]["sweep/reward_share/late"] > 0


def test_a_resumed_run_has_them_bit_for_bit():
    first, second = iteration(1), iteration(2)
    before = running_statistics(first)
    read = json.loads(json.dumps(before))
    again = {name: Moments(*each) for name, each in read.items()}
    assert running_statistics(second, again) == running_statistics(second, before)


def test_without_names_they_are_of_the_turns_rewards_and_one_number_deviates_by_nothing():
    batch = iteration(4, named=False)
    (found,) = running_statistics(batch).items()
    assert found[0] == "env" and found[1].mean == pytest.approx(turns([batch], "env").mean())
    assert Moments(1, 3.0, 0.0).std == 0.0
    kept = running_statistics([], {"env": found[1]})
    assert kept == {"env": found[1]}


def test_an_update_reads_those_of_the_run_or_of_the_batch_alone():
    batch, earlier = iteration(5), iteration(6)
    algorithm = Algorithm(**RECIPES["prorl"])
    rows = SegmentBatch.of(batch, grouped=True)

    def arrays(statistics):
        return CreditArrays(
            algorithm, SHAPES, rows, batch, {}, {"late": 0.5}, statistics=statistics
        )

    alone, both = arrays(None), arrays(running_statistics(batch, running_statistics(earlier)))
    for found, batches in ((alone, [batch]), (both, [earlier, batch])):
        numbers = [turns(batches, name) for name in ("late", "env")]  # configured names first
        np.testing.assert_allclose(found.running_mean_Q[:2], [x.mean() for x in numbers], rtol=1e-6)
        np.testing.assert_allclose(
            found.running_std_Q[:2], [x.std(ddof=1) for x in numbers], rtol=1e-6
        )
        assert found.turn_weight_Q.tolist() == [0.5, 1, 0, 0]
    credits = [np.concatenate(assign_credit(a)[0]["advantage"]) for a in (alone, both)]
    assert np.abs(credits[0] - credits[1]).max() > 1e-3
    shares = assign_credit(both)[1]
    assert shares.keys() == {"sweep/reward_share/late", "sweep/reward_share/env"}
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0.05
