"""Whole sweeps: equal to the NumPy twin, and indifferent to all that must not matter."""

import dataclasses
import functools
from unittest import mock

import jax
import learner_cases as cases
import numpy as np
import numpy_twin as twin
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.program_warming import compile_programs
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.types import Segment, Trajectory

REVERSE = [(3,), (2,), (1,), (0,)]
CUSTOM = (1, 3, 0, 2)
# Choices of the algorithm (and the temperature) -> the order of their steps. Those of one sweep
# that reach the compiled step together have one program; each of them has to matter in it.
MASK, REJECT = {"method": "mask"}, {"method": "reject"}
GEOMETRIC = {"clip": 1.2, "low": 0.8, **REJECT, "level": "geometric", "per": "trajectory"}
CASES = {
    "default": ({}, REVERSE),
    "old_policy=turn": ({"old_policy": "turn"}, REVERSE),
    "ratio=product, temperature=0.7, kl_coef=0.5, uneven clips": (
        {"ratio": "product", "temperature": 0.7, "kl_coef": 0.5, "clip_low": 0.1, "clip_high": 0.4},
        REVERSE,
    ),
    "ratio=token": ({"ratio": "token"}, REVERSE),
    "clip=none, kl_coef=0, weight_clip=none": (
        {"clip_low": None, "clip_high": None, "kl_coef": 0.0, "weight_clip": None},
        REVERSE,
    ),
    "normalize_by=active": ({"normalize_by": "active"}, REVERSE),
    "scale=none": ({"scale": "none"}, REVERSE),
    "scale=group": ({"scale": "group"}, REVERSE),
    "baseline=leave_one_out": ({"estimator": {"baseline": "leave_one_out"}}, REVERSE),
    "advantage_clip=0.5": ({"advantage_clip": 0.5}, REVERSE),
    "inner_epochs=2": ({"inner_epochs": 2}, REVERSE),
    "inner_epochs=2, old_policy=turn": ({"inner_epochs": 2, "old_policy": "turn"}, REVERSE),
    "order=forward": ({"order": "forward"}, REVERSE[::-1]),
    "order=custom": ({"order": "custom", "custom_order": CUSTOM}, [(t,) for t in CUSTOM]),
    "order=random": ({"order": "random"}, None),
    "tis_clip=1.1": ({"importance": {"clip": 1.1}}, REVERSE),
    "tis_clip=1.1, old_policy=turn, ratio=product": (
        {"importance": {"clip": 1.1}, "old_policy": "turn", "ratio": "product"},
        REVERSE,
    ),
    "tis_clip=1.1, tis_level=geometric": (
        {"importance": {"clip": 1.1, "level": "geometric"}},
        REVERSE,
    ),
    "tis_clip=1.1, ratio=token": ({"importance": {"clip": 1.1}, "ratio": "token"}, REVERSE),
    "tis_clip=1.1, turns_per_update=2": (
        {"importance": {"clip": 1.1}, "turns_per_update": 2},
        [(2, 3), (0, 1)],
    ),
    "tis_clip=1.1, turns_per_update=3": (
        {"importance": {"clip": 1.1}, "turns_per_update": 3},
        [(1, 2, 3), (0,)],
    ),
    "tis_clip=1.1, tis_level=geometric, ratio=product, turns_per_update=3": (
        {
            "importance": {"clip": 1.1, "level": "geometric"},
            "ratio": "product",
            "turns_per_update": 3,
        },
        [(1, 2, 3), (0,)],
    ),
    "token masks": ({"importance": {"clip": 2.0, "low": 0.5, **MASK, "per": "token"}}, REVERSE),
    "token masks, ratio=token, loss_aggregation=token": (
        {
            "importance": {"clip": 2.0, "low": 0.5, **MASK},
            "ratio": "token",
            "loss_aggregation": "token",
        },
        REVERSE,
    ),
    "turns weigh, ratio=token": (
        {"importance": {"clip": 1.5, "per": "turn", "level": "geometric"}, "ratio": "token"},
        REVERSE,
    ),
    "turn rejection, normalize_by=active": (
        {"importance": {"clip": 2.0, **REJECT, "per": "turn"}, "normalize_by": "active"},
        REVERSE,
    ),
    "rejection of actions, turns_per_update=3": (
        {"importance": {"clip": 1.3, "low": 0.5, **REJECT}, "turns_per_update": 3},
        [(1, 2, 3), (0,)],
    ),
    "token masks, turns_per_update=3": (
        {
            "importance": {"clip": 2.0, "low": 0.5, **MASK, "per": "token"},
            "turns_per_update": 3,
        },
        [(1, 2, 3), (0,)],
    ),
    "trajectory masks, inner_epochs=2": (
        {"importance": {"clip": 3.0, **MASK, "per": "trajectory"}, "inner_epochs": 2},
        REVERSE,
    ),
    "geometric rejection of trajectories, old_policy=turn": (
        {"importance": GEOMETRIC, "old_policy": "turn"},
        REVERSE,
    ),
}
# As users compile it; the case without optimizations would say the same of fewer passes.
OPTIMIZED = {"importance": {"clip": 1.1}, "old_policy": "turn", "inner_epochs": 2}


@functools.cache
def reference():
    """Parameters of a reference policy that is not the policy."""
    return cases.jittered(cases.policy()[1], 0.02)


@functools.cache
def mismatched():
    """The ragged trajectories, from a sampler that differs from the trainer."""
    return cases.as_sampled(cases.ragged(), spread=1.0)


@functools.cache
def default():
    """The default sweep, which the invariances are held against."""
    return cases.observe(cases.learner(), cases.ragged(), ref_params=reference())


@functools.cache
def default_twin():
    return cases.twin_sweep(cases.learner(), cases.ragged(), REVERSE, ref_params=reference())


def assert_same_sweep(observed, other, tolerance=1e-6):
    cases.assert_trees_close(observed.state.params, other.state.params, tolerance)
    np.testing.assert_allclose(observed.losses, other.losses, rtol=tolerance, atol=tolerance)
    assert observed.metrics["sweep/steps"] == other.metrics["sweep/steps"]


def assert_equal_to_the_twin(learner, order, **optimizer):
    return cases.assert_equal_to_the_twin(
        learner, mismatched(), order, ref_params=reference(), **optimizer
    )


def assert_every_choice_matters(choices, order, wanted):
    """Without any one of them the twin ends with other weights."""
    pairs = [{"clip_low", "clip_high"}, {"order", "custom_order"}, {"importance"}]
    for name in choices:
        without = next((pair for pair in pairs if name in pair), {name})
        rest = {key: value for key, value in choices.items() if key not in without}
        turns = order if "turns_per_update" in rest else REVERSE
        other = cases.twin_sweep(cases.learner(**rest), mismatched(), turns, ref_params=reference())
        moved = [abs(wanted.weights[n] - w).max() for n, w in other.weights.items()]
        assert max(moved) > 1e-4, name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_a_sweep_is_the_twins(name):
    choices, order = CASES[name]
    _, wanted = assert_equal_to_the_twin(cases.learner(**choices), order)
    assert_every_choice_matters(choices, order, wanted)


@pytest.mark.exhaustive
def test_a_sweep_compiled_as_users_compile_it_is_the_twins(optimized):
    # A temperature that no other test has: nothing of it is compiled yet.
    learner = cases.unshared(cases.learner(temperature=0.83, **OPTIMIZED))
    _, wanted = assert_equal_to_the_twin(learner, REVERSE)
    assert_every_choice_matters(OPTIMIZED | {"temperature": 0.83}, REVERSE, wanted)


def test_a_sweep_with_adam_and_a_bound_on_the_gradient_is_the_twins():
    options = {"learning_rate": 0.01, "max_grad_norm": 1.0}
    learner = cases.learner(optimizer=cases.recording("adam", 0.01, 1.0))
    observed, _ = assert_equal_to_the_twin(learner, REVERSE, optimizer="adam", **options)
    assert observed.metrics["sweep/grad_norm"] > 1.0


def test_the_default_sweep_reaches_the_clips():
    steps = default_twin().steps
    factors = np.concatenate([step.cumulative_ratio_N for step in steps])
    low, high = (np.isclose(factors, bound).sum() for bound in (0.8, 1.2))
    between = (np.abs(factors - 1) < 0.199) & (factors != 1)
    assert min(low, high, between.sum()) > 2
    assert 0 < default().metrics["sweep/clip_fraction"] < 1
    assert default().metrics["sweep/kl"] > 1e-3


def test_metrics_of_a_sweep():
    metrics, wanted = default().metrics, default_twin()
    assert (metrics["sweep/turns"], metrics["sweep/steps"]) == (4, 4)
    np.testing.assert_allclose(metrics["sweep/loss"], np.mean(default().losses), rtol=1e-6)
    norms = [update.metrics[0]["grad_norm"] for update in default().updates]
    np.testing.assert_allclose(metrics["sweep/grad_norm"], np.mean(norms), rtol=1e-6)
    # A step weighs its rows by the factors after the steps before it.
    factors = [np.ones(8), *(step.cumulative_ratio_N for step in wanted.steps)]
    largest = []
    for turn, cumulative_ratio_N in zip((3, 2, 1, 0), factors, strict=False):
        active = [t.turns > turn and not t.failed for t in cases.ragged()]
        largest.append(np.abs(wanted.advantage_N * cumulative_ratio_N)[active].max())
    np.testing.assert_allclose(metrics["sweep/weight_max"], max(largest), rtol=1e-5)


@pytest.mark.parametrize(
    "ratio, old_policy", [("geometric", "iteration"), ("product", "turn"), ("token", "iteration")]
)
def test_metrics_of_truncated_importance(ratio, old_policy):
    # Weights are of the policy that the sweep began with, whichever the ratio is to.
    learner = cases.learner(importance={"clip": 1.1}, ratio=ratio, old_policy=old_policy)
    observed = cases.observe(learner, mismatched())
    options = twin.Options(order=REVERSE, importance={"clip": 1.1}, ratio=ratio)
    start = cases.weights_of(cases.policy()[1])
    marks = twin.importances(start, mismatched(), cases.NUMPY_ARCH, options)
    weights = [
        twin.joined(marks[p.trajectory][p.place][0][p.position_A] for p in action)
        for turns in REVERSE
        for action in twin.step_actions(mismatched(), turns)
    ]

    def mean(values):
        return np.mean([value_A.mean() for value_A in values])

    truncated = mean([weight_A == 1.1 for weight_A in weights])
    assert 0.1 < truncated < 0.9
    metrics = observed.metrics
    np.testing.assert_allclose(metrics["sweep/tis_weight_mean"], mean(weights), rtol=1e-5)
    np.testing.assert_allclose(metrics["sweep/tis_truncated"], truncated, rtol=1e-6)


def test_what_the_sampler_recorded_reaches_nothing_without_tis_clip():
    other = cases.observe(cases.learner(), mismatched(), ref_params=reference())
    cases.assert_trees_equal(other.state, default().state)
    actual = {k: v for k, v in other.metrics.items() if not k.startswith("logp/")}
    assert actual.items() <= default().metrics.items()
    assert not [name for name in actual if "tis" in name]


@pytest.mark.parametrize("ratio", ["geometric", "token"])
def test_a_sampler_that_agrees_with_the_trainer_needs_no_weights(ratio):
    exact = cases.as_sampled(cases.ragged(), spread=0.0)
    plain = cases.observe(cases.learner(ratio=ratio), exact)
    weighted = cases.observe(cases.learner(ratio=ratio, importance={"clip": 1.1}), exact)
    assert plain.metrics["logp/sampler_trainer_gap"] < 1e-5
    assert_same_sweep(weighted, plain, 1e-5)
    assert weighted.metrics["sweep/tis_truncated"] == 0
    np.testing.assert_allclose(weighted.metrics["sweep/tis_weight_mean"], 1.0, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("choices", [{}, {"old_policy": "turn"}, {"turns_per_update": 2}])
def test_a_fused_refresh_is_the_separate_one(choices):
    fused, separate = cases.learner(**choices), cases.learner(**choices, refresh="separate")
    assert fused.fused and not separate.fused
    refresh = mock.Mock(wraps=fused.refresh)
    one = cases.observe(cases.with_programs(fused, refresh=refresh), cases.ragged())
    left = sum(int(call.args[1].mask_PA[:, 0].sum()) for call in refresh.mock_calls)
    two = cases.observe(separate, cases.ragged())
    assert_same_sweep(one, two)
    # Rows that the step cannot hold are refreshed before it: some are, not all.
    assert 0 < left < sum(step["actions"] for update in one.updates[:-1] for step in update.metrics)
    # A factor is exp of a difference of log-probabilities near -8, which float32 rounds by 1e-6.
    for fused_update, separate_update in zip(one.updates[1:], two.updates, strict=False):
        np.testing.assert_allclose(
            fused_update.cumulative_ratio_N,
            separate_update.cumulative_ratio_N,
            rtol=3e-6,
            err_msg=separate_update.turns,
        )


@pytest.mark.parametrize("refresh", ["fused", "separate"])
def test_a_trajectory_without_the_turn_keeps_its_factor_bit_for_bit(refresh):
    observed = cases.observe(cases.learner(refresh=refresh), cases.ragged())
    before_N = np.ones(8, np.float32)
    updated = [set(), {0, 2}, {0, 2, 5, 6, 7}, {0, 1, 2, 5, 6, 7}]  # trajectories with turn t + 1
    if refresh == "separate":
        updated = [*updated[1:], set()]
    for update, allowed in zip(observed.updates, updated, strict=True):
        changed = set(np.flatnonzero(update.cumulative_ratio_N != before_N))
        assert changed <= allowed and bool(changed) == bool(allowed)
        before_N = update.cumulative_ratio_N


def test_a_turn_that_nobody_has_takes_no_step():
    trajectories = cases.ragged()
    renamed = []
    for trajectory in trajectories:  # turns 0, 1, 2, 3 become 0, 2, 3, 5
        segments = tuple(
            Segment(s.tokens_L, np.array([-1, 0, 2, 3, 5], np.int32)[s.turn_L + 1], s.logp_L)
            for s in trajectory.segments
        )
        renamed.append(dataclasses.replace(trajectory, segments=segments))
    observed = cases.observe(cases.learner(), renamed, ref_params=reference())
    assert [len(update.metrics) for update in observed.updates] == [1, 0, 1, 1, 0, 1]
    cases.assert_trees_equal(observed.state, default().state)
    for turn in (1, 4):
        cases.assert_trees_equal(observed.updates[turn].params, observed.updates[turn - 1].params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "shapes",
    [
        Shapes((8, 48), action=16, rows=1, trajectories=10),
        Shapes((32,), action=8, rows=5, trajectories=5),
    ],
    ids=lambda shapes: f"{shapes.rows} rows, {shapes.lengths}",
)
def test_shapes_do_not_matter(shapes):
    observed = cases.observe(cases.learner(shapes=shapes), cases.ragged(), ref_params=reference())
    assert_same_sweep(observed, default())


def test_the_order_of_trajectories_does_not_matter():
    order = [6, 0, 3, 7, 5, 1, 4, 2]  # groups interleaved, the failed one moved
    moved = [cases.ragged()[i] for i in order]
    observed = cases.observe(cases.learner(), moved, ref_params=reference())
    assert_same_sweep(observed, default())
    for update, wanted in zip(observed.updates, default().updates, strict=True):
        np.testing.assert_allclose(
            update.cumulative_ratio_N, wanted.cumulative_ratio_N[order], rtol=3e-6
        )


def test_groups_are_only_names():
    renamed = [dataclasses.replace(t, group=[70, 3, 11][t.group]) for t in cases.ragged()]
    observed = cases.observe(cases.learner(), renamed, ref_params=reference())
    cases.assert_trees_equal(observed.state, default().state)


@pytest.mark.parametrize("stop", ["env_error", "timeout"])
def test_what_a_failed_trajectory_holds_does_not_matter(stop):
    trajectories = cases.ragged()
    rng = np.random.default_rng(9)
    parts = [(turn, 9, 1) for turn in range(6)]  # more turns than any, longer than any shape
    for reward, group in ((np.nan, 0), (-1e9, 2)):
        trajectories[4] = Trajectory.of((cases.segment(rng, *parts),), reward, group, stop=stop)
        observed = cases.observe(cases.learner(), trajectories, ref_params=reference())
        cases.assert_trees_equal(observed.state, default().state)
        assert observed.metrics == default().metrics


def test_the_state_is_donated_and_the_reference_is_not():
    learner = cases.learner()
    state, ref_params = cases.new_state(learner.optimizer), jax.device_put(reference())
    sweep(learner, state, ref_params, cases.ragged(), iteration=1)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(ref_params))


def test_a_sweep_without_a_sampled_turn_returns_the_state_as_it_came():
    learner = cases.learner()
    failed = [dataclasses.replace(t, stop="timeout") for t in cases.ragged()]
    context = Segment(np.arange(4), np.full(4, -1), np.zeros(4, np.float32))
    for trajectories in (
        failed,
        [Trajectory.of((context,), 1.0, 0)] * 8,
        [Trajectory.of((), 1.0, 0)],
    ):
        state = cases.new_state(learner.optimizer)
        returned, metrics, *_ = sweep(learner, state, reference(), trajectories, iteration=1)
        assert returned is state and metrics == {"sweep/turns": 0}
    assert not state.step.is_deleted()


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_counted():
    # One token stands in trajectory 5 alone, and the reference policy's embedding of it is NaN.
    trajectories = cases.ragged()
    (segment,) = trajectories[5].segments
    tokens_L = segment.tokens_L.copy()
    tokens_L[0] = cases.VOCAB - 1
    trajectories[5] = dataclasses.replace(
        trajectories[5], segments=(dataclasses.replace(segment, tokens_L=tokens_L),)
    )
    broken = cases.host(reference())
    broken["embedding"][-1] = np.nan
    observed = cases.observe(cases.learner(), trajectories, ref_params=broken)
    assert (observed.state.step, observed.state.skipped) == (1, 3)  # it has no turn 3
    assert observed.metrics["sweep/updates_skipped"] == 3
    cases.assert_trees_equal(observed.state.params, observed.updates[0].params)
    whole = cases.observe(cases.learner(), trajectories, ref_params=reference())
    assert whole.metrics["sweep/updates_skipped"] == 0
    cases.assert_trees_equal(whole.updates[0].params, observed.updates[0].params)


@pytest.mark.parametrize("refresh", ["auto", "separate"])
def test_a_ratio_without_a_bound_skips_no_later_step(refresh):
    trajectories = cases.ragged()
    (segment,) = trajectories[0].segments
    unlikely = dataclasses.replace(segment, logp_L=np.where(segment.turn_L >= 2, -40, 0.0))
    # Of an earlier policy's: its recorded log-probabilities are the old ones.
    trajectories[0] = dataclasses.replace(trajectories[0], segments=(unlikely,), policy_version=1)
    free = {"ratio": "product", "weight_clip": None, "refresh": refresh}
    observed = cases.observe(cases.learner(**free), trajectories)
    assert max(u.cumulative_ratio_N[0] for u in observed.updates) == np.float32(np.exp(30))
    assert (observed.state.step, observed.state.skipped) == (4, 0)


def test_minibatches_are_a_partition_each_divided_by_its_share():
    learner = cases.learner(minibatches_per_turn=2, inner_epochs=2, refresh="separate")
    turn_step = mock.Mock(wraps=learner.turn_step)
    observed = cases.observe(cases.with_programs(learner, turn_step=turn_step), cases.ragged())
    calls = [call.args for call in turn_step.mock_calls]
    assert observed.metrics["sweep/steps"] == len(calls) == 16
    pools = [[0, 2], [0, 2, 5, 6, 7], [0, 1, 2, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7]]
    drawn = []
    for epoch in range(8):  # two of each turn
        pool, parts = pools[epoch // 2], []
        for _, batch, _, _, denominator in calls[2 * epoch : 2 * epoch + 2]:
            parts.append(batch.trajectory_P[batch.mask_PA[:, 0] > 0].tolist())
            np.testing.assert_allclose(denominator, 7 * len(parts[-1]) / len(pool), rtol=1e-6)
        assert sorted(parts[0] + parts[1]) == pool
        assert abs(len(parts[0]) - len(parts[1])) <= 1
        drawn.append(parts)
    assert drawn[-1] != drawn[-2]  # anew each epoch


def programs_of(run):
    """How many programs `run()` compiles."""
    compilations = Compilations()
    run()
    compilations.close()
    return compilations.programs


def test_sweeps_of_other_trajectories_compile_nothing():
    default()
    tokens = []

    def sweeps():
        short = [dataclasses.replace(t, segments=t.segments[:1]) for t in cases.ragged(1)]
        for trajectories in (cases.ragged(2)[::-1], short):
            observed = cases.observe(cases.learner(), trajectories, ref_params=reference())
            tokens.append(observed.metrics["sweep/tokens"])

    assert programs_of(sweeps) == 0
    assert len({*tokens, default().metrics["sweep/tokens"]}) > 1
    assert programs_of(lambda: jax.jit(lambda x: x + 1)(np.float32(1))) == 1  # the count counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "choices, temperature",
    [({"importance": {"clip": 2.0}}, 0.9), ({"refresh": "separate", "old_policy": "turn"}, 0.8)],
    ids=["fused, tis", "separate"],
)
def test_programs_compiled_ahead_are_all_that_a_sweep_needs(choices, temperature):
    _, params = cases.policy()
    # Temperatures that no other test has: nothing is compiled yet.
    learner = cases.unshared(cases.learner(temperature=temperature, **choices))
    state = cases.new_state(learner.optimizer, params)
    before = cases.host(state)
    state = compile_programs(learner, state, params, trajectories=6)
    cases.assert_trees_equal(cases.host(state), before)
    rng = np.random.default_rng(0)
    # Turns 0 and 1 need programs of different length; turn 1 does not fit a fused refresh.
    segments = [cases.segment(rng, (0, 4, 2), (1, 6, 3)) for _ in range(6)]
    trajectories = [Trajectory.of((s,), float(i % 3), i // 3) for i, s in enumerate(segments)]
    observe = functools.partial(cases.observe, learner, trajectories, ref_params=params)
    swept = []
    assert programs_of(lambda: swept.append(observe(state=state))) == 0
    assert swept[0].state.step == 2


def test_a_sweep_on_a_mesh_is_the_sweep_on_one_device():
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    shapes = Shapes((8, 32), action=8, rows=4, trajectories=8)
    network, params = cases.policy()
    placed = param_shardings(mesh, network.logical_axes(), params)
    replicated = sharding(mesh, ())
    plain = cases.learner(shapes=shapes)
    with jax.set_mesh(mesh):
        state = cases.new_state(plain.optimizer, jax.device_put(params, placed))
        layout = jax.tree.map(lambda x: x.sharding, state)
        learner = cases.unshared(plain, state_shardings=layout, replicated=replicated)
        ref_params = jax.device_put(reference(), placed)
        state, metrics, *_ = sweep(learner, state, ref_params, cases.ragged(), iteration=3)
        updated = cases.host(state.params)
        kept = jax.tree.map(lambda x, wanted: x.sharding == wanted, state.params, placed)

        def again():
            return sweep(learner, state, ref_params, cases.ragged(), iteration=4)

        assert programs_of(again) == 0  # every program returns the layout that it was given
    assert all(jax.tree.leaves(kept))
    assert not placed["embedding"].is_fully_replicated
    cases.assert_trees_close(updated, default().state.params, 1e-5)
    np.testing.assert_allclose(metrics["sweep/loss"], default().metrics["sweep/loss"], rtol=1e-5)


@pytest.mark.parametrize("choices", [{}, {"refresh": "separate"}])
def test_what_members_of_a_group_share_is_computed_once_and_changes_no_number(choices):
    trajectories = cases.branching()
    shared = cases.assert_equal_to_the_twin(
        cases.learner(**choices), trajectories, None, ref_params=reference()
    )[0]
    shapes = dataclasses.replace(cases.SHAPES, share=False)
    alone = cases.observe(
        cases.learner(shapes=shapes, **choices), trajectories, ref_params=reference()
    )
    np.testing.assert_allclose(shared.losses, alone.losses, atol=1e-5)
    cases.assert_trees_close(shared.state.params, alone.state.params, 1e-5)
    assert alone.metrics["sweep/shared_fraction"] == 0 < shared.metrics["sweep/shared_fraction"]
    assert alone.metrics["sweep/tokens"] == shared.metrics["sweep/tokens"]
    for metrics in (shared.metrics, alone.metrics):  # padding fills the rows of a microbatch
        computed = metrics["sweep/tokens"] * (1 - metrics["sweep/shared_fraction"])
        positions = round(computed / (1 - metrics["sweep/padding_fraction"]), 6)
        assert 0 < metrics["sweep/padding_fraction"] and positions % cases.SHAPES.rows == 0
