"""The twin against finite differences, hand-worked values and what must not matter."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import numpy_covariance
import numpy_credit as credit
import numpy_model as model
import numpy_twin as twin
import pytest

ARCH = model.Architecture(head_dim=4, rope_theta=100.0)
SHAPE = {"vocab_size": 11, "width": 8, "head_dim": 4, "mlp_width": 10}
# Two groups; trajectory 2 lacks turn 1, trajectory 3 rewrote its context between turns 0 and 1.
TRAJECTORIES = [
    twin.Trajectory([twin.Segment([1, 2, 3, 4, 5, 6], [-1, 0, 0, -1, 1, 1])], 1.0, 0),
    twin.Trajectory([twin.Segment([1, 2, 9, 4, 7], [-1, 0, 0, -1, 1])], 0.0, 0),
    twin.Trajectory([twin.Segment([8, 2, 3, 10], [-1, -1, 0, 0])], 0.5, 1),
    twin.Trajectory(
        [twin.Segment([8, 2, 5], [-1, -1, 0]), twin.Segment([8, 5, 1, 6], [-1, -1, 1, 1])], 0.0, 1
    ),
]
OPTIONS = twin.Options(order=[[1], [0]], learning_rate=0.5)


def small_weights(
    seed=0, *, layers=2, heads=4, kv_heads=2, qk_norm=True, qkv_bias=True, tied=False
):
    sizes = SHAPE | {"layers": layers, "heads": heads, "kv_heads": kv_heads}
    return model.random_weights(seed, qk_norm=qk_norm, qkv_bias=qkv_bias, tied=tied, **sizes)


def run(trajectories=TRAJECTORIES, ref_weights=None, **options):
    options = dataclasses.replace(OPTIONS, **options)
    return twin.sweep(small_weights(), trajectories, options, ARCH, ref_weights=ref_weights)


def assert_same_weights(left, right):
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=1e-9, atol=1e-12, err_msg=name)


def assert_gradients_match(value, weights, grads):
    """Five-point differences agree for every parameter, in a random and in an axis direction."""
    assert set(grads) == set(weights)
    rng = np.random.default_rng(7)
    for name, weight in weights.items():
        axis = np.zeros_like(weight)
        axis[np.unravel_index(np.abs(grads[name]).argmax(), weight.shape)] = 1.0
        for direction in (rng.normal(size=weight.shape), axis):
            far_down, down, up, far_up = (
                value(weights | {name: weight + h * direction}) for h in (-2e-4, -1e-4, 1e-4, 2e-4)
            )
            expected = (8 * (up - down) - (far_up - far_down)) / 12e-4
            slope = np.sum(grads[name] * direction)
            np.testing.assert_allclose(slope, expected, rtol=1e-6, atol=1e-9, err_msg=name)


def geometric_ratios(weights, turns):
    """Per trajectory the ratio of its tokens of these turns, now to at the start: none or one."""
    ratios = []
    for trajectory in TRAJECTORIES:
        logs = []
        for segment in trajectory.segments:
            new_L, old_L = (
                model.token_logps(w, segment.tokens_L, ARCH, 1.0)[0]
                for w in (weights, small_weights())
            )
            logs += (new_L - old_L)[np.isin(segment.turn_L, turns)].tolist()
        ratios.append([np.exp(np.mean(logs))] if logs else [])
    return ratios


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"qk_norm": False, "tied": True},
        {"qkv_bias": False, "heads": 2, "kv_heads": 2},
    ],
)
def test_the_gradients_of_log_probabilities_match_finite_differences(parts):
    weights = small_weights(**parts)
    tokens_L, slope_L = [3, 1, 4, 1, 5], np.array([0.0, 0.7, -1.3, 0.4, 2.0])
    _, backward = model.token_logps(weights, tokens_L, ARCH, 0.8)
    grads = {}
    backward(slope_L, grads)
    assert_gradients_match(
        lambda w: model.token_logps(w, tokens_L, ARCH, 0.8)[0] @ slope_L, weights, grads
    )


def step_arguments(options, turns=(1,)):
    """A step on some turns: the weights, and the rest of `turn_loss`'s arguments but the options.

    On turn 1 ratios are near 0.6, 1.3 and 1, and weights make both ends of the clip range bind. Of
    one layer: gradients through several are those of log-probabilities.
    """
    weights, other, ref_weights = (small_weights(seed, layers=1) for seed in (0, 117, 2))
    old_weights = {name: 0.9 * value + 0.1 * other[name] for name, value in weights.items()}
    actions = twin.step_actions(TRAJECTORIES, turns)
    old, ref = (twin.action_logps(w, actions, ARCH, options) for w in (old_weights, ref_weights))
    weight = [np.array([[-1.0, 2.0, 9.0, 0.5][action[0].trajectory]]) for action in actions]
    return weights, (actions, old, ref, weight, [0.25] * len(actions), ARCH)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ratio", ["geometric", "product", "token"])
@pytest.mark.parametrize("bounds", [(0.2, 0.2), (None, None)])
def test_the_gradients_of_a_step_match_finite_differences(ratio, bounds):
    clips = {"clip_low": bounds[0], "clip_high": bounds[1]}
    options = dataclasses.replace(OPTIONS, ratio=ratio, kl_coef=0.3, **clips)
    weights, rest = step_arguments(options)
    loss, grads = twin.turn_loss(weights, *rest, options)
    assert_gradients_match(lambda w: twin.turn_loss(w, *rest, options)[0], weights, grads)
    for bound in (name for name, value in clips.items() if value is not None):
        opened = dataclasses.replace(options, **{bound: None})
        assert loss > twin.turn_loss(weights, *rest, opened)[0] + 1e-3


def test_the_gradients_of_a_scorers_step_match_finite_differences():
    options = dataclasses.replace(
        OPTIONS,
        estimator={"implicit_coef": 0.7, "success_above": 0.2, "pair_score": "mean"},
    )
    policy, scorer = (small_weights(seed, layers=1) for seed in (0, 5))

    def step(weights):
        return twin.scorer_step(policy, weights, TRAJECTORIES, options, ARCH)

    found = step(scorer)
    assert found.pairs == 2 and found.loss > 0.1
    assert_gradients_match(lambda weights: step(weights).loss, scorer, found.gradients)
    moved = {name: value - 0.5 * found.gradients[name] for name, value in scorer.items()}
    assert_same_weights(found.weights, moved)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ratio", ["geometric", "product", "token"])
def test_the_gradients_of_the_log_probability_match_finite_differences(ratio):
    options = dataclasses.replace(OPTIONS, ratio=ratio, objective="logp", kl_in="reward")
    weights, rest = step_arguments(options)
    loss, grads = twin.turn_loss(weights, *rest, options)
    assert_gradients_match(lambda w: twin.turn_loss(w, *rest, options)[0], weights, grads)
    total = {"geometric": np.mean, "product": np.sum, "token": np.mean}[ratio]
    logps = twin.action_logps(weights, rest[0], ARCH, options)
    wanted = -sum(w[0] * total(logp_A) for w, logp_A in zip(rest[3], logps, strict=True)) / 4
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)


@pytest.mark.parametrize("ratio", ["geometric", "product", "token"])
def test_cispo_weighs_the_log_probability_by_a_bounded_ratio_held_constant(ratio):
    options = dataclasses.replace(OPTIONS, ratio=ratio, objective="cispo", clip_low=None)
    weights, (actions, old, ref, weight, *rest) = step_arguments(options)
    logps = twin.action_logps(weights, actions, ARCH, options)
    whole = {"geometric": np.mean, "product": np.sum, "token": lambda x_A: x_A}[ratio]
    pairs = zip(logps, old, strict=True)
    bounded = [np.minimum(np.exp(whole(logp_A - old_A)), 1.2) for logp_A, old_A in pairs]
    assert {True, False} == {bool(b) for b in np.hstack(bounded) == 1.2}
    result = twin.turn_loss(weights, actions, old, ref, weight, *rest, options)
    weight = [w * b for w, b in zip(weight, bounded, strict=True)]
    plain = dataclasses.replace(options, objective="logp")
    wanted = twin.turn_loss(weights, actions, old, ref, weight, *rest, plain)
    np.testing.assert_allclose(result[0], wanted[0], rtol=1e-12)
    assert_same_weights(result[1], wanted[1])


def test_an_actions_advantage_is_the_mean_over_its_tokens_unless_ratios_are_per_token():
    logp_A, old_A, weight_A = np.array([-1.0, -2.0]), np.array([-1.1, -1.8]), np.array([1.0, 3.0])
    for ratio, wanted in {
        "geometric": 2 * np.exp(-0.05),
        "product": 2 * np.exp(-0.1),
        "token": (np.exp(0.1) + 3 * np.exp(-0.2)) / 2,
    }.items():
        options = dataclasses.replace(OPTIONS, ratio=ratio, kl_in="reward", kl_coef=9.0)
        value, _ = twin.piece_objective(logp_A, old_A, -logp_A, weight_A, options)
        np.testing.assert_allclose(value, wanted, rtol=1e-12)


@pytest.mark.parametrize("objective", ["clipped", "cispo"])
@pytest.mark.parametrize("ratio", ["geometric", "token"])
def test_the_scale_of_an_actions_clip_range(ratio, objective):
    """Of each token, or for one ratio an action the mean of its tokens."""
    options = dataclasses.replace(OPTIONS, ratio=ratio, objective=objective)
    weights, (actions, old, ref, weight, *rest) = step_arguments(options)
    scale = [np.linspace(0.5, 1.0, len(old_A)) for old_A in old]
    result = twin.turn_loss(weights, actions, old, ref, weight, *rest, options, scale=scale)
    if ratio == "geometric":
        level = [np.full(len(x_A), x_A.mean()) for x_A in scale]
        same = twin.turn_loss(weights, actions, old, ref, weight, *rest, options, scale=level)
        np.testing.assert_allclose(result[0], same[0], rtol=1e-12)
    narrow = dataclasses.replace(options, clip_low=0.1, clip_high=0.1)
    half = [np.full(len(x_A), 0.5) for x_A in scale]
    other = twin.turn_loss(weights, actions, old, ref, weight, *rest, options, scale=half)
    wanted = twin.turn_loss(weights, actions, old, ref, weight, *rest, narrow)
    np.testing.assert_allclose(other[0], wanted[0], rtol=1e-12)
    assert_same_weights(other[1], wanted[1])
    assert abs(other[0] - result[0]) > 1e-4


def test_what_an_action_counts_in_each_mean():
    """Turn 1 has actions of 2, 1 and 2 tokens in three of four trajectories."""
    actions = twin.step_actions(TRAJECTORIES, [1])
    for choices, wanted in [
        ({}, [1 / 4] * 3),
        ({"normalize_by": "active"}, [1 / 3] * 3),
        ({"loss_aggregation": "token"}, [2 / 5, 1 / 5, 2 / 5]),
        ({"loss_aggregation": "constant", "longest": 6}, [2 / 24, 1 / 24, 2 / 24]),
    ]:
        shares = twin.shares(actions, range(3), 4, dataclasses.replace(OPTIONS, **choices))
        np.testing.assert_allclose(shares, wanted, rtol=1e-12)


def test_logits_depend_on_no_later_token_and_on_the_order():
    def logits(tokens_L):
        return model.forward(small_weights(), tokens_L, ARCH)[0]

    np.testing.assert_allclose(logits([1, 2, 3, 4])[:3], logits([1, 2, 3, 9])[:3], rtol=1e-12)
    assert np.abs(logits([1, 2, 3])[2] - logits([2, 1, 3])[2]).max() > 1e-3


def test_probabilities_of_the_next_token_sum_to_one_at_any_temperature():
    for temperature in (1.0, 0.5):
        logp = [
            model.token_logps(small_weights(), [1, 2, v], ARCH, temperature)[0][2]
            for v in range(SHAPE["vocab_size"])
        ]
        np.testing.assert_allclose(np.exp(logp).sum(), 1.0, rtol=1e-12)


def test_the_advantage_of_two_trajectories_by_hand():
    options = {"baseline": "mean", "clip": None}
    expected = {"none": 0.5, "batch": 0.5**0.5, "group": 0.5 / (0.5**0.5 + 1e-6)}
    for scale, value in expected.items():
        result = credit.group_relative_advantages(
            [1, 0], [0, 0], [True] * 2, scale=scale, **options
        )
        np.testing.assert_allclose(result, [value, -value], rtol=1e-12)
    alone = credit.group_relative_advantages(
        [1, 0, 5], [0, 0, 0], [True, True, False], baseline="leave_one_out", scale="none", clip=None
    )
    np.testing.assert_allclose(alone, [1, -1, 0], rtol=1e-12)


def test_a_first_step_by_hand():
    """At the old policy every ratio is 1: the loss is minus the mean weight of the pool."""
    sweep = run(kl_coef=0.5, scale="none", advantage_clip=None)
    np.testing.assert_allclose(sweep.advantage_N, [0.5, -0.5, 0.25, -0.25])
    assert [step.turns for step in sweep.steps] == [(1,), (0,)]
    np.testing.assert_allclose(sweep.steps[0].loss, -(0.5 - 0.5 - 0.25) / 4, rtol=1e-12)
    active = run(scale="none", normalize_by="active").steps[0]
    np.testing.assert_allclose(active.loss, -(0.5 - 0.5 - 0.25) / 3, rtol=1e-12)


def test_factors_multiply_the_ratios_of_the_updated_policy():
    sweep = run(weight_clip=None, clip_low=None, clip_high=None)
    after_first = run(order=[[1]], clip_low=None, clip_high=None).weights
    (r0,), (r1,), no_turn, (r3,) = geometric_ratios(after_first, [1])
    assert not no_turn
    expected = np.array([r0, r1, 1.0, r3])
    np.testing.assert_allclose(sweep.steps[0].cumulative_ratio_N, expected, rtol=1e-10)
    expected *= np.concatenate(geometric_ratios(sweep.weights, [0]))
    np.testing.assert_allclose(sweep.steps[1].cumulative_ratio_N, expected, rtol=1e-10)
    assert max(np.abs(sweep.steps[1].cumulative_ratio_N - 1)) > 0.05
    clipped = run(weight_clip=0.01).steps[0].cumulative_ratio_N
    np.testing.assert_allclose(
        clipped, np.clip(sweep.steps[0].cumulative_ratio_N, 0.99, 1.01), rtol=1e-10
    )


def test_the_second_step_weighs_by_the_factors_of_the_first():
    """One step on turn 0 from the policy after turn 1, with advantage x factor as weights."""
    sweep = run(kl_coef=0.0, scale="none", clip_low=None, clip_high=None)
    after = run(order=[[1]], kl_coef=0.0, scale="none", clip_low=None, clip_high=None)
    weight_N = sweep.advantage_N * after.steps[0].cumulative_ratio_N
    loss = -np.concatenate(geometric_ratios(after.weights, [0])) @ weight_N / 4
    np.testing.assert_allclose(sweep.steps[1].loss, loss, rtol=1e-10)


def test_old_policy_turn_restarts_every_ratio_at_one():
    options = {"scale": "none", "kl_coef": 0.0, "old_policy": "turn"}
    first, second = run(**options).steps
    weight_N = run(**options).advantage_N * first.cumulative_ratio_N
    np.testing.assert_allclose(second.loss, -weight_N.sum() / 4, rtol=1e-10)
    assert abs(run(scale="none", kl_coef=0.0).steps[1].loss - second.loss) > 1e-4


def test_importance_of_tokens_by_hand():
    odds_A = np.array([2.0, 0.5, 4.0])  # their product is 4, its root 4^(1/3)
    root = 4 ** (1 / 3)
    cases = [
        ({"clip": 9.0}, (4.0, True)),
        ({"clip": 3.0}, (3.0, True)),
        ({"clip": 9.0, "level": "geometric"}, (root, True)),
        ({"clip": 3.0, "method": "mask"}, (0.0, False)),
        ({"clip": 9.0, "method": "mask", "low": 3.0}, (4.0, True)),
        ({"clip": 9.0, "method": "mask", "low": 5.0}, (0.0, False)),
        ({"clip": 9.0, "method": "reject", "low": 3.0}, (1.0, True)),
        ({"clip": 1.5, "method": "reject", "level": "geometric"}, (0.0, False)),
    ]
    for options, wanted in cases:
        np.testing.assert_allclose(twin.importance_of(odds_A, options), wanted, rtol=1e-12)


def test_a_turn_that_nobody_has_takes_no_step():
    sweep = run(order=[[5], [1], [3], [0]], optimizer="adam", learning_rate=0.01)
    assert [step.turns for step in sweep.steps] == [(1,), (0,)]
    assert_same_weights(sweep.weights, run(optimizer="adam", learning_rate=0.01).weights)


@pytest.mark.parametrize("failed", [{"failed": True}, {"group": 7}], ids=["failed", "alone"])
def test_what_is_not_learned_from_changes_nothing(failed):
    failed = dataclasses.replace(TRAJECTORIES[0], reward=50.0, **failed)
    for normalize_by in ("all", "active"):
        sweep = run([failed, *TRAJECTORIES], normalize_by=normalize_by)
        assert_same_weights(sweep.weights, run(normalize_by=normalize_by).weights)
        assert sweep.advantage_N[0] == 0.0 and sweep.steps[-1].cumulative_ratio_N[0] == 1.0


def test_merged_turns_are_one_action_in_however_many_segments():
    sweep = run(order=[[1, 0]], weight_clip=None)
    ratios = geometric_ratios(sweep.weights, [0, 1])
    np.testing.assert_allclose(
        sweep.steps[0].cumulative_ratio_N, np.concatenate(ratios), rtol=1e-10
    )
    # At ratio 1 every trajectory has one term: N = 4, weights 0.5, -0.5, 0.25, -0.25.
    for normalize_by in ("all", "active"):
        loss = (
            run(order=[[1, 0]], scale="none", normalize_by=normalize_by, kl_coef=0.0).steps[0].loss
        )
        np.testing.assert_allclose(loss, 0, atol=1e-12)


@pytest.mark.parametrize("ratio", ["geometric", "product", "token"])
def test_segments_of_a_trajectory_do_not_change_what_it_weighs(ratio):
    """Four turns in one segment and in four, with advantages of +-0.5, at ratio 1."""
    parts = [([1, 2], [-1, turn]) for turn in range(4)]
    whole = twin.Segment(*(sum(values, []) for values in zip(*parts, strict=True)))
    split = [twin.Segment(*part) for part in parts]
    pair = [twin.Trajectory([whole], 1.0, 0), twin.Trajectory(split, 0.0, 0)]
    options = {"order": [[0, 1, 2, 3]], "scale": "none", "kl_coef": 0.0, "ratio": ratio}
    step = run(pair, **options).steps[0]
    np.testing.assert_allclose(step.loss, 0, atol=1e-12)
    assert max(np.abs(gradient).max() for gradient in step.gradients.values()) > 0


def test_the_gradients_of_the_entropy_bonus_and_of_drift_match_finite_differences():
    limit = {"kind": "kl", "coef": 1.0}
    options = dataclasses.replace(OPTIONS, ratio="token", entropy_coef=0.7, temperature=0.8)
    options = dataclasses.replace(options, covariance=limit)
    weights, rest = step_arguments(options)
    drift = [np.arange(len(old_A)) % 2 for old_A in rest[1]]
    loss, grads = twin.turn_loss(weights, *rest, options, drift)
    assert_gradients_match(lambda w: twin.turn_loss(w, *rest, options, drift)[0], weights, grads)
    for without in ({"entropy_coef": 0.0}, {"covariance": limit | {"coef": 0.0}}):
        other = dataclasses.replace(options, **without)
        assert abs(loss - twin.turn_loss(weights, *rest, other, drift)[0]) > 1e-3


@pytest.mark.parametrize("ratio", ["geometric", "product"])
def test_the_gradients_of_an_action_in_two_segments_match_finite_differences(ratio):
    options = dataclasses.replace(OPTIONS, ratio=ratio, clip_low=None, clip_high=None)
    weights, rest = step_arguments(options, turns=(0, 1))
    assert [len(action) for action in rest[0]] == [1, 1, 1, 2]
    _, grads = twin.turn_loss(weights, *rest, options)
    assert_gradients_match(lambda w: twin.turn_loss(w, *rest, options)[0], weights, grads)


def test_a_minibatch_counts_for_its_trajectories_and_means_over_its_own_tokens():
    """Turn 1 has actions of 2, 1 and 2 tokens in three of four trajectories."""
    actions = twin.step_actions(TRAJECTORIES, [1])
    for choices, wanted in [
        ({}, [3 / 8] * 2),
        ({"normalize_by": "active"}, [1 / 2] * 2),
        ({"loss_aggregation": "token"}, [1 / 3, 2 / 3]),
        ({"loss_aggregation": "constant", "longest": 6}, [3 / 8 / 6, 3 / 8 * 2 / 6]),
    ]:
        shares = twin.shares(actions, [1, 2], 4, dataclasses.replace(OPTIONS, **choices))
        np.testing.assert_allclose(shares, wanted, rtol=1e-12)
    parts = [[[0, 2], [1, 3]], [[0, 1, 2, 3]]]
    sweep = run(minibatches=parts, scale="none", kl_coef=0.0, normalize_by="active")
    assert [step.turns for step in sweep.steps] == [(1,), (1,), (0,)]
    # Trajectory 0 alone has turn 1 in the first part; a third of the step's trajectories.
    np.testing.assert_allclose(sweep.steps[0].loss, -0.5, rtol=1e-12)
    assert (sweep.steps[0].cumulative_ratio_N == 1).all() and (
        sweep.steps[1].cumulative_ratio_N != 1
    ).any()


def test_parallel_actions_have_a_ratio_each_and_are_added_up():
    """At ratio 1 each action adds its weight: turn 0 all four, turn 1 all but the third."""
    options = {"order": [[0, 1]], "scale": "none", "kl_coef": 0.0, "actions": [[0], [1]]}
    sweep = run(weight_clip=None, **options)
    np.testing.assert_allclose(sweep.steps[0].loss, -(0.5 - 0.5 - 0.25) / 4, rtol=1e-10)
    ratios = zip(*(geometric_ratios(sweep.weights, [turn]) for turn in (0, 1)), strict=True)
    wanted = [np.prod(first + second) for first, second in ratios]
    np.testing.assert_allclose(sweep.steps[0].cumulative_ratio_N, wanted, rtol=1e-10)
    merged = run(**options | {"actions": None})
    assert np.abs(merged.weights["lm_head.weight"] - sweep.weights["lm_head.weight"]).max() > 1e-3
    alone = [run(**options | {"order": [[turn]]}).steps[0].gradients for turn in (0, 1)]
    together = {name: alone[0][name] + alone[1][name] for name in alone[0]}
    assert_same_weights(sweep.steps[0].gradients, together)
    assert_same_weights(run(**options | {"actions": [[0, 1]]}).weights, merged.weights)


def test_without_weights_the_factors_stay_one():
    sweep = run(cumulative_ratio=False, kl_coef=0.0, scale="none", clip_low=None, clip_high=None)
    assert all((step.cumulative_ratio_N == 1).all() for step in sweep.steps)
    after = run(order=[[1]], kl_coef=0.0, scale="none", clip_low=None, clip_high=None)
    loss = -np.concatenate(geometric_ratios(after.weights, [0])) @ sweep.advantage_N / 4
    np.testing.assert_allclose(sweep.steps[1].loss, loss, rtol=1e-10)


def test_a_penalty_in_the_reward_is_of_the_sampling_policy_and_leaves_the_loss():
    ref_weights, choices = small_weights(3), {"scale": "none", "kl_in": "reward", "kl_coef": 0.3}
    sweep = run(ref_weights=ref_weights, **choices)
    penalized = []
    for trajectory in TRAJECTORIES:
        total = 0.0
        for segment in trajectory.segments:
            own, ref = (
                model.token_logps(w, segment.tokens_L, ARCH, 1.0)[0]
                for w in (small_weights(), ref_weights)
            )
            total += (own - ref)[np.array(segment.turn_L) >= 0].sum()
        penalized.append(dataclasses.replace(trajectory, reward=trajectory.reward - 0.3 * total))
    plain = run(penalized, ref_weights=ref_weights, scale="none", kl_coef=0.0)
    np.testing.assert_allclose(sweep.advantage_N, plain.advantage_N, rtol=1e-10)
    assert_same_weights(sweep.weights, plain.weights)
    assert np.abs(plain.advantage_N - run(scale="none").advantage_N).max() > 0.01


def test_inner_epochs_hold_the_old_policy_and_the_weights():
    sweep = run(inner_epochs=2, clip_low=None, clip_high=None, kl_coef=0.0)
    assert [step.turns for step in sweep.steps] == [(1,), (1,), (0,), (0,)]
    np.testing.assert_array_equal(sweep.steps[0].cumulative_ratio_N, np.ones(4))
    assert sweep.steps[1].cumulative_ratio_N[0] != 1.0
    after = {k: v - 0.5 * sweep.steps[0].gradients[k] for k, v in small_weights().items()}
    r0, r1, _, r3 = (sum(r) for r in geometric_ratios(after, [1]))
    loss = -np.array([r0, r1, 0.0, r3]) @ sweep.advantage_N / 4
    np.testing.assert_allclose(sweep.steps[1].loss, loss, rtol=1e-10)


def test_the_kl_term_is_a_mean_over_the_tokens_of_each_action():
    ref_weights = small_weights(3)
    loss = [run(order=[[1]], ref_weights=ref_weights, kl_coef=c).steps[0].loss for c in (0.0, 0.3)]
    kl = 0.0
    for piece in twin.step_pieces(TRAJECTORIES, [1]):
        ref, own = (
            model.token_logps(w, piece.tokens_L, ARCH, 1.0)[0][piece.position_A]
            for w in (ref_weights, small_weights())
        )
        kl += np.mean(np.exp(ref - own) - (ref - own) - 1) / 4
    np.testing.assert_allclose(loss[1] - loss[0], 0.3 * kl, rtol=1e-9)


def test_adam_and_the_norm_bound_by_hand():
    grads = {"a": np.array([3.0]), "b": np.array([4.0])}
    start = {"a": np.zeros(1), "b": np.zeros(1)}
    bounded = dataclasses.replace(OPTIONS, max_grad_norm=1.0, learning_rate=1.0)
    stepped = twin.Optimizer(bounded).step(start, grads)
    np.testing.assert_allclose([stepped["a"][0], stepped["b"][0]], [-0.6, -0.8])
    adam = twin.Optimizer(dataclasses.replace(OPTIONS, optimizer="adam", learning_rate=0.1))
    once = adam.step(start, grads)
    np.testing.assert_allclose([once["a"][0], once["b"][0]], [-0.1, -0.1], rtol=1e-7)
    twice = adam.step(once, {"a": np.array([-1.0]), "b": np.array([4.0])})
    # mean (0.9 x 0.3 - 0.1) / 0.19, square (0.999 x 0.009 + 0.001) / 0.001999
    move = 0.1 * (0.17 / 0.19) / np.sqrt(0.009991 / 0.001999)
    np.testing.assert_allclose(twice["a"][0], once["a"][0] - move, rtol=1e-6)


def test_the_twin_imports_numpy_and_nothing_of_the_package():
    names = set()
    for module in (model, credit, numpy_covariance, twin):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names.add(node.module)
    own = {"numpy_covariance", "numpy_credit", "numpy_model"}
    assert names == {"__future__", "collections.abc", "dataclasses", "numpy", "typing"} | own
