"""Zero-advantage groups give way to groups of other tasks, and nothing is forgotten."""

import dataclasses
import itertools

import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import entry_names, find_entry
from seeupo_jax.configuration.rules.algorithm_rules import check_choices
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.batching import SegmentBatch, Shapes
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import most_frequent_failure, rollout_metrics
from seeupo_jax.rollout.resample import collection_number, has_signal, resample
from seeupo_jax.types import Segment, Trajectory, learnable

# What a group's trajectories bring, by the first letter of its task; None: the environment failed.
REWARDS = {
    "s": (1.0, 0.0, 1.0),  # a signal
    "e": (0.5, 0.5, 0.5),  # equal
    "f": (None, None, None),  # failed
    "o": (None, 1.0, None),  # one is left
    "t": (None, 1.0, 0.0),  # two are left, a signal
    "q": (None, 0.3, 0.3),  # two are left, equal
}


def trajectory(task_id, group, reward):
    info = {"score": 0.0 if reward is None else reward, "retries": 1}
    if reward is None:
        return Trajectory.of(
            (), 0.0, group, task_id, stop="env_error", info=info | {"failure": task_id}
        )
    turn_L = np.array([-1, 0], np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(2, np.float32))
    return Trajectory.of((segment,), reward, group, task_id, info=info)


def turns_of(rewards, group=0):
    """A trajectory whose turns were paid so much."""
    turn_L = np.array([x for turn in range(len(rewards)) for x in (-1, turn)], np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(len(turn_L), np.float32))
    return Trajectory.of((segment,), sum(rewards), group, "task", turn_rewards=rewards)


class Sampler:
    """Rounds as they are asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, number, tasks):
        self.asked.append((number, list(tasks)))
        every = [
            trajectory(task_id, group, reward)
            for group, task_id in enumerate(tasks)
            for reward in REWARDS[task_id[0]]
        ]
        usage = {"prefilled_tokens": 10 ** len(self.asked), "memory_waits": 0}
        return Collected(tuple(every), 0.5, 0.125, 100 + number, 1000, usage)


def played(first, others, rounds):
    sample = Sampler()
    stream = (task_id for task_id in others.split())
    return sample, resample(sample, first.split(), stream, rounds=rounds)


def tasks_of(collected):
    """Each group's task, in the order of their numbers."""
    groups = itertools.groupby(collected.trajectories, key=lambda t: (t.group, t.task_id))
    found = [(*key, len([*members])) for key, members in groups]
    assert [(group, size) for group, _, size in found] == [(i, 3) for i in range(len(found))]
    return " ".join(task_id for _, task_id, _ in found)


@pytest.mark.parametrize("kind", REWARDS)
def test_a_group_has_a_signal_if_rewards_of_those_that_count_differ(kind):
    group = [trajectory(kind, 4, reward) for reward in REWARDS[kind]]
    assert has_signal(group) == (kind in "st")


def test_rewards_that_are_compared_by_name_are_a_signal_where_one_that_weighs_differs():
    group = [trajectory("e", 4, 1.0) for _ in range(3)]
    named = [{"env": 1.0, "late": 0.0}, {"env": 0.0, "late": 1.0}, {"env": 1.0}]
    group = [with_fields(t, rewards=own) for t, own in zip(group, named, strict=True)]
    assert not has_signal(group)  # their sums are equal
    assert has_signal(group, {}) and has_signal(group, {"env": 0.0})
    assert not has_signal(group, {"env": 0.0, "late": 0.0})
    assert not has_signal(group[:1], {})
    unnamed = [with_fields(t, rewards={}, reward=i) for i, t in enumerate(group)]
    assert has_signal(unnamed, {}) and not has_signal([unnamed[0]] * 2, {})


def test_rewards_that_float64_alone_tells_apart_are_no_signal():
    """Estimators read float32, in which the same payments in any order have one sum."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        paid = rng.choice([0.05, 0.1, 0.15, 0.2, 0.25, 0.3], 5).tolist()
        sums = {sum(rng.permutation(paid).tolist()) for _ in range(9)}
        assert len({np.float32(each) for each in sums}) == 1
        group = [trajectory("e", 4, each) for each in (*sums, *sums)]
        named = [with_fields(t, rewards={"env": t.reward}) for t in group]
        assert not has_signal(group) and not has_signal(named, {})
    one, other = (turns_of((1.0, each)) for each in (0.1 + 0.2, 0.3))
    assert one.turn_rewards != other.turn_rewards
    for last in (other, dataclasses.replace(other, parent=0, fork=1)):
        assert not has_signal([one, last], by_turn=True)
    assert has_signal([trajectory("e", 4, each) for each in (0.3, 0.3 + 1e-7)])


@pytest.mark.parametrize(
    "recipe", ["seeupo", "arpo", "spo_tree", "gigpo", "hgpo", "slate", "prorl"]
)
def test_equal_sums_are_a_signal_where_turns_are_compared(recipe):
    by_turn = Config(recipe=recipe).algorithm.by_turn
    early, late = (turns_of((1.0,)), turns_of((0.0, 1.0)))
    # GiGPO discounts by 0.95: where both began, the first turn's returns are 1 and 0.95.
    assert has_signal([early, late], by_turn=by_turn) == by_turn
    assert by_turn == (recipe not in ("seeupo", "arpo", "spo_tree"))
    assert not has_signal([late, late], by_turn=by_turn)
    paid_at_the_end = with_fields(late, turn_rewards=())
    assert not has_signal([late, paid_at_the_end], by_turn=by_turn)


def test_rewards_of_turns_that_are_compared_by_name_are_a_signal_where_one_that_weighs_differs():
    first, last = (
        with_fields(turns_of(own), rewards={"env": 1.0}, named_turn_rewards={"env": own})
        for own in ((1.0, 0.0), (0.0, 1.0))
    )
    assert has_signal([first, last], {}, by_turn=True) and not has_signal([first, last], {})
    assert not has_signal([first, first], {}, by_turn=True)
    assert not has_signal([first, last], {"env": 0.0}, by_turn=True)


@pytest.mark.parametrize("turn, signal", [(0.0, False), (1.0, True)])
def test_turns_that_an_episode_did_not_have_are_compared_as_paid_nothing(turn, signal):
    one, other = turns_of((0.0, 0.0)), turns_of((0.0, 0.0, turn))
    assert has_signal([one, other], by_turn=True) == signal
    named = [
        with_fields(t, rewards={"env": 0.0}, named_turn_rewards={"env": t.turn_rewards})
        for t in (one, other)
    ]
    assert has_signal(named, {}, by_turn=True) == signal


def test_where_rewards_are_centred_another_number_of_turns_is_a_signal():
    """ProRL's turn that was paid 0 has -mean / std, and one that there was not has nothing."""
    one, other = turns_of((0.0,)), turns_of((0.0, 0.0))
    compared = {"by_turn": True, "centred": Config(recipe="prorl").algorithm.keeps_statistics}
    assert has_signal([one, other], **compared) and not has_signal([other] * 2, **compared)
    named = [
        with_fields(t, rewards={"env": 0.0}, named_turn_rewards={"env": t.turn_rewards})
        for t in (one, other)
    ]
    assert has_signal(named, {}, **compared) and not has_signal(named, {"env": 0.0}, **compared)


def accepted():
    """Algorithms that dynamic sampling is accepted with."""
    more = {
        "a2tgpo": [{"gain": "turn_reward"}],
        "canon": [{"mu": 1.0}, {}],
        "gigpo": [{"anchor": "turn", "discount": 0.9}],
        "hgpo": [{"anchor": "turn", "discount": 0.9}],
        "tree": [{}, {"baseline": "siblings"}],
    }
    for name, scale in itertools.product(entry_names("advantage"), ("none", "group", "batch")):
        for choices in more.get(name, [{}]):
            algorithm = Algorithm(
                advantage=name, scale=scale, dynamic_sampling=1, estimator=choices
            )
            try:
                check_choices(algorithm, max_turns=4)
            except ValueError:
                continue
            yield algorithm


def drawn_batch(seed, groups=6, size=3):
    """Episodes of 1 to 4 turns; in most groups each turn is paid alike, where there is one."""
    rng = np.random.default_rng(seed)
    for group in range(groups):
        paid = np.where(rng.random(4) < 0.5, rng.choice([0.0, 0.1, 0.7, 1.0], 4), 0.0)
        for _ in range(size):
            own = paid if group % 3 else paid * (rng.random(4) < 0.5)
            least = 1 + np.flatnonzero(own).max(initial=0)
            yield turns_of(tuple(own[: rng.integers(least, 5)].tolist()), group)


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(a, id=f"{a.advantage}-{a.scale}-{a.estimator}") for a in accepted()],
)
def test_a_group_without_a_signal_has_no_advantage_whatever_else_is_in_the_batch(algorithm):
    estimator = find_entry("advantage", algorithm.advantage)
    scaling = {"scale": algorithm.scale, "clip": algorithm.advantage_clip}
    compared = {"by_turn": algorithm.by_turn, "centred": algorithm.keeps_statistics}
    shapes = Shapes((16,), action=4, rows=2, trajectories=18, turns=4)
    idle, largest = 0, 0.0
    for seed in range(8):
        batch = [*drawn_batch(seed)]
        given = CreditArrays(algorithm, shapes, SegmentBatch.of(batch), batch, {})
        inputs = estimator.inputs(algorithm.estimator, algorithm.scale)
        arrays = {name: getattr(given, name) for name in inputs}
        advantage = np.asarray(estimator.credit(arrays, algorithm.estimator, **scaling).advantage)
        # A mean that is 0 but for float32's rounding is subtracted from all.
        is_scaled = "standardize" in estimator.programs(algorithm.scale)
        most = 32 * np.finfo(np.float32).eps if is_scaled else 0
        largest = max(largest, np.abs(advantage).max())
        for group in set(given.group_N.tolist()):
            own = [trajectory for trajectory in batch if trajectory.group == group]
            if not has_signal(own, **compared):
                idle += 1
                assert np.abs(advantage[given.group_N == group]).max() <= most
    assert idle > 8 and largest > 0.1


@pytest.mark.parametrize("rewards, signal", [((1.0, 2.0), True), ((1.0, 1.0), False)])
def test_where_trajectories_fork_turns_are_compared_that_begin_at_one_node(rewards, signal):
    whole = turns_of((1.0, 0.5))
    failed = dataclasses.replace(turns_of((9.0,)), stop="env_error")
    branch = dataclasses.replace(turns_of((rewards[0], 0.5)), parent=0, fork=1)
    assert has_signal([whole, failed, branch, turns_of(rewards[1:])], by_turn=True) == signal
    # Second turns that begin at other nodes are not compared.
    other = turns_of((1.0, 0.7))
    assert not has_signal([whole, failed, branch, other], by_turn=True)
    assert has_signal([whole, dataclasses.replace(other, parent=0, fork=1)], by_turn=True)


def test_without_more_rounds_a_collection_is_what_was_sampled():
    sample, collected = played("e0 s0 f0", "", rounds=0)
    assert sample.asked == [(0, ["e0", "s0", "f0"])]
    assert tasks_of(collected) == "e0 s0 f0"
    counts = dataclasses.replace(Sampler()(0, []), trajectories=collected.trajectories)
    assert collected == counts


def test_groups_with_a_signal_take_the_places_of_those_without_first_come_first():
    sample, collected = played("e0 s0 q0 f0 t0", "e1 s1 o1 s2 s3", rounds=4)
    assert sample.asked == [
        (0, ["e0", "s0", "q0", "f0", "t0"]),
        (1, ["e1", "s1", "o1"]),
        (2, ["s2", "s3"]),
    ]
    assert tasks_of(collected) == "s1 s0 s2 s3 t0"
    assert collected.rounds == 3
    assert learnable(collected.trajectories).sum() == 4 * 3 + 2
    left_out = [t.task_id for t in collected.left_out[::3]]
    assert sorted(left_out) == ["e0", "e1", "f0", "o1", "q0"] and len(collected.left_out) == 15


def test_what_is_left_when_the_rounds_are_over_is_the_first_rounds():
    sample, collected = played("e0 f0 s0 o0", "e1 s1 f1 q2 e2", rounds=2)
    assert [len(tasks) for _, tasks in sample.asked] == [4, 3, 2]
    assert tasks_of(collected) == "s1 f0 s0 o0"
    assert len(collected.left_out) == 3 * 5


def test_no_round_is_begun_that_nothing_is_left_for():
    sample, collected = played("s0 t0", "", rounds=9)
    assert len(sample.asked) == collected.rounds == 1
    assert not collected.left_out
    sample, collected = played("e0", "s1", rounds=9)
    assert len(sample.asked) == collected.rounds == 2 and tasks_of(collected) == "s1"


def test_every_round_is_counted():
    _, collected = played("e0 s0", "f1 s2", rounds=3)
    assert (collected.wall_s, collected.environment_s) == (1.5, 0.375)
    assert (collected.sampled_tokens, collected.context_tokens) == (303, 3000)
    assert collected.usage == {"prefilled_tokens": 1110, "memory_waits": 0}
    every = sorted(t.task_id for t in collected.sampled)
    assert every[::3] == every[2::3] == ["e0", "f1", "s0", "s2"]


def test_metrics_are_of_all_that_was_sampled_and_of_the_groups_that_are_trained_on():
    metrics = rollout_metrics(played("e0 s0 f0 o0", "f1 e1 s1", rounds=1)[1])
    # s1 took e0's place: of four groups f0 and o0 have no signal, and are dropped.
    assert (metrics["rollout/rounds"], metrics["rollout/no_signal_fraction"]) == (2, 0.5)
    assert metrics["rollout/groups_dropped"] == 2
    # Trajectories that did not fail: e0 and e1 of 0.5, s0 and s1 of 1, 0, 1, and one of o0.
    np.testing.assert_allclose(metrics["rollout/reward_mean"], (6 * 0.5 + 4 + 1) / 13)
    np.testing.assert_allclose(metrics["rollout/success_rate"], 5 / 13)
    assert (metrics["rollout/failed"], metrics["rollout/stop_env_error"]) == (8, 8)
    assert metrics["rollout/retries"] == 21
    assert metrics["rollout/tokens_per_second"] == 201 / 1
    whole = rollout_metrics(played("s0 t0", "", rounds=1)[1])
    assert (whole["rollout/rounds"], whole["rollout/no_signal_fraction"]) == (1, 0)


def test_failures_of_all_rounds_are_told():
    logged = most_frequent_failure(played("f0 s0", "o1 s1", rounds=2)[1])
    assert logged == "5 environments failed, 3 of them so: f0"


def test_a_run_that_is_stopped_in_a_round_stops():
    def sample(number, tasks):
        if number == 1:
            raise Stopped
        return Sampler()(number, tasks)

    with pytest.raises(Stopped):
        resample(sample, ["e0"], iter(["s0"]), rounds=2)


def test_rounds_of_all_iterations_and_evaluations_have_random_numbers_of_their_own():
    iterations = (0, 1, 2, 1000, 2**24 - 1)
    numbers = [collection_number(i, round) for i in iterations for round in (0, 1, 2, 127)]
    assert len(set(numbers)) == len(numbers) and max(numbers) < 2**31
    assert [collection_number(i, 0) for i in iterations] == list(iterations)
