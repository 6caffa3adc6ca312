"""Every recipe's sweep is the NumPy twin's, on random ragged batches."""

import dataclasses
import functools
from unittest import mock

import learner_cases as cases
import numpy as np
import numpy_twin as twin
import pytest
from numpy_credit import token_advantages
from numpy_model import token_logps
from stored_fields import with_fields

from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.entry_points import entry_names, find_entry
from seeupo_jax.configuration.layers import layered
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import SegmentBatch, Shapes, all_actions, lay_out
from seeupo_jax.learner.credit.advantages import assign_credit
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.options import names_of
from seeupo_jax.types import Trajectory, learnable

# One length, and room for all of a trajectory's actions: one program a recipe at the most.
SHAPES = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)
RATE = 0.12  # steps so large that ratios leave every recipe's clip range
EACH = [(0,), (1,), (2,), (3,)]
REVERSE = EACH[::-1]
ALL = [(0, 1, 2, 3)]
ORDERS = {
    "seeupo_forward": EACH,
    "seeupo_random": None,
    "seeupo": REVERSE,
    "seeupo_unweighted": REVERSE,
    "seeupo_group_std": REVERSE,
    "seeupo_noscale": REVERSE,
}
# A penalty that shows; ratios leave the clip range in the second of two epochs of a single step.
LOUD = {"kl_coef": 0.1}
TWICE = {"inner_epochs": 2}
NARROW = {"dppo_tv": {"clip_low": 0.01, "clip_high": 0.02, "clip_dual": 1.2}}
# Beside the policy, of no weight in the loss; its values begin at 0. More of it: test_critic.py.
SILENT_CRITIC = {"critic": {"kind": "model", "coef": 1e-12}}
BATCH = {"estimator": {"baseline": "batch"}}
A2TGPO = {"advantage": "a2tgpo", "estimator": {}}
KL_COV = {"covariance": {"kind": "kl", "share": 0.2, "coef": 0.5}}
# All within the bounds, so that it does not matter which are drawn.
CLIP_COV = {"covariance": {"kind": "clip", "share": 1.0, "low": 0.05}}
REWARD_WEIGHTS = {"form": 0.4, "late": 2.0}  # of those that `batch` names
CREDITS = {
    "a2tgpo": {
        "advantage": "a2tgpo",
        "scale": "group",
        "estimator": {"adaptation": 0.9, "discount": 0.9},
    },
    "gigpo": {"advantage": "gigpo", "estimator": {"step_coef": 0.7, "discount": 0.9}},
    "hgpo": {"advantage": "hgpo", "scale": "group", "estimator": {"power": 1.5, "discount": 0.9}},
    "returns": {"advantage": "returns", "estimator": {"discount": 0.9}},
    "gdpo": {"advantage": "gdpo", "estimator": {}},
    "dvao": {"advantage": "dvao", "estimator": {}},
    "maxrl": {"advantage": "maxrl", "estimator": {}},
    "otb": {"advantage": "otb", "estimator": {"zero_tail": False}},
    "prorl": {"advantage": "prorl", "estimator": {"discount": 0.9, "std_floor": 1.0}},
}
# Those of turns and trajectories whose presets are one action, under SeeUPO's order.
REVERSED = {
    "matchtir": {"advantage": "matchtir", "scale": "group", "estimator": {"discount": 0.9}},
    "a_grae": {"advantage": "a_grae", "estimator": {"alpha": 0.8}},
    "canon": {"advantage": "canon", "estimator": {"metric": "tokens", "mu": 0.8}},
    "gigpo by turn": {"advantage": "gigpo", "estimator": {"anchor": "turn", "discount": 0.9}},
}


@functools.cache
def batch(seed):
    """Eleven trajectories; beside those of `ragged` one that skips a turn and one left alone.

    All name the states that their turns began from and some rewards, every other one the rewards of
    its turns.
    """
    rng = np.random.default_rng(seed)
    part = functools.partial(cases.segment, rng)
    trajectories = [
        *cases.ragged(seed),
        Trajectory.of((part((0, 3, 2), (2, 4, 1)),), 0.3, 2),
        Trajectory.of((part((0, 2, 2)),), 5.0, 3),
        Trajectory.of((part((0, 2, 2)),), -9.0, 3, stop="timeout"),
    ]
    return tuple(_with_turns(i, trajectory, rng) for i, trajectory in enumerate(trajectories))


def _with_turns(index, trajectory, rng):
    names = [str(name) for name in rng.choice(["left", "right"], trajectory.turns)]
    rewards = tuple(float(reward) for reward in rng.normal(size=trajectory.turns))
    executed = [(index + turn) % 3 > 0 for turn in range(trajectory.turns)]
    if trajectory.failed:  # the step that failed said nothing
        names, executed = names[:-1], executed[:-1]
    info = {"states": names, "executed": executed}
    of_turns = {name: own for name, own in _turn_rewards(index, trajectory) if index % 3}
    fields = {"rewards": _rewards(index, trajectory), "named_turn_rewards": of_turns}
    named = with_fields(trajectory, info=info, **fields)
    if not trajectory.failed:
        named = dataclasses.replace(named, stop=("done", "max_turns", "max_tokens")[index % 3])
    if index % 2:
        return named
    return with_fields(named, turn_rewards=rewards, reward=sum(rewards))


def _rewards(index, trajectory):
    """Of each name another deviation: `late` is equal in a group, every sixth has no `form`."""
    rng = np.random.default_rng((7, index))
    found = {"env": float(rng.normal()), "late": 0.1 + trajectory.group}
    return found if index % 6 == 2 else found | {"form": float(5 * rng.random())}


def _turn_rewards(index, trajectory):
    """`late` never differs, and so is nothing once it is centred."""
    rng = np.random.default_rng((8, index))
    yield "env", tuple(rng.normal(size=trajectory.turns).tolist())
    yield "late", (0.25,) * trajectory.turns
    if index % 2:
        yield "form", tuple((9 * rng.random(size=trajectory.turns)).tolist())


def batch_for(advantage, seed):
    """`batch`, with rewards that the estimator is for."""
    if find_entry("advantage", advantage).reward_range is None:
        return batch(seed)

    def bounded(reward):
        return float(np.clip(0.5 + reward / 2, 0.1, 1.0))

    return tuple(
        with_fields(t, reward=t.reward if t.failed else bounded(t.reward), turn_rewards=())
        for t in batch(seed)
    )


@functools.cache
def reference():
    """Parameters of a reference policy that is not the policy."""
    return cases.jittered(cases.policy()[1], 0.02)


def learner(name, **choices):
    optimizer = cases.recording(rate=RATE)
    fixed = {"shapes": SHAPES, "optimizer": optimizer, "reward_weights": REWARD_WEIGHTS}
    return cases.learner(**fixed, **layered(RECIPES[name], choices))


def assert_equal_to_the_twin(made, seed, order, **rest):
    rest |= {"learning_rate": RATE}
    rest = {"actions": EACH if made.algorithm.order == "parallel" else None} | rest
    trajectories = batch_for(made.algorithm.advantage, seed)
    return cases.assert_equal_to_the_twin(made, trajectories, order, ref_params=reference(), **rest)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "opd"])  # test_teaching.py
def test_a_recipes_sweep_is_the_twins(name):
    order = ORDERS.get(name, ALL)
    choices = {} if RECIPES[name].get("kl_coef") == 0 else LOUD
    choices = choices | (SILENT_CRITIC if RECIPES[name]["critic"]["kind"] != "none" else {})
    choices = choices | NARROW.get(name, {}) | (TWICE if order == ALL else {})
    made = learner(name, **choices)
    observed, _ = assert_equal_to_the_twin(made, len(name), order)
    bounded = any(name.startswith("clip") for name in made.algorithm.objective_entry.bounds)
    assert (observed.metrics["sweep/clip_fraction"] > 0) == bounded
    assert observed.metrics["sweep/kl"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("advantage", sorted(CREDITS))
@pytest.mark.parametrize("name", ["seeupo", "parallel"])
def test_any_credit_feeds_any_update(name, advantage):
    made = learner(name, **LOUD, **CREDITS[advantage])
    _, wanted = assert_equal_to_the_twin(made, 11, ORDERS.get(name, ALL))
    (first_L,) = wanted.credit[0]
    single = find_entry("advantage", advantage).level == "trajectory"
    assert (len({*first_L}) > 2) == (not single)  # and 0 at context


@pytest.mark.parametrize("name", REVERSED)
def test_credit_of_one_action_feeds_seeupo(name):
    observed, wanted = assert_equal_to_the_twin(learner("seeupo", **REVERSED[name]), 11, REVERSE)
    assert len({*np.concatenate(wanted.credit[0])}) > (1 if "turn" not in name else 2)
    factors_N = observed.updates[-1].cumulative_ratio_N
    assert np.abs(factors_N - 1).max() > 0.01  # M is not the advantage


def test_a_sweep_whose_every_token_is_too_likely_takes_no_step():
    made = learner("spo_tree", mask_above=0.0)
    state = cases.new_state(made.optimizer)
    before = cases.host(state)
    done = sweep(made, state, reference(), cases.trees(), iteration=1)
    assert done.metrics["sweep/turns"] == 0 and done.metrics["sweep/masked_fraction"] == 1
    assert done.stats == [None] * 10 and done.steps == ()
    cases.assert_trees_equal(cases.host(done.train), before)


@pytest.mark.parametrize("name, order", [("spo_tree", [(0, 1, 2)]), ("seeupo", [(2,), (1,), (0,)])])
def test_a_last_turn_whose_every_token_is_too_likely_is_no_part_of_a_sweep(name, order):
    trees = cases.trees(30)  # their one token of the last turn is among the likeliest
    longest = max(trees, key=lambda trajectory: trajectory.turns)
    (segment,) = longest.segments
    weights = cases.weights_of(cases.policy()[1])
    temperature = learner(name).temperature
    logp_L, _ = token_logps(weights, segment.tokens_L, cases.NUMPY_ARCH, temperature)
    bound = 0.99 * float(np.exp(logp_L[segment.turn_L == 3].min()))
    made = learner(name, **LOUD | {"advantage": "tree", "mask_above": bound})
    observed, _ = cases.assert_equal_to_the_twin(
        made, trees, order, ref_params=reference(), learning_rate=RATE
    )
    assert longest.turns == 4 and observed.metrics["sweep/masked_fraction"] < 0.5


@pytest.mark.parametrize(
    "name, choices, order",
    [
        ("spo_tree", TWICE | {"mask_above": 0.05}, ALL),
        ("arpo", TWICE | {"clip_dual": 1.01}, ALL),
        ("slate", TWICE, ALL),
        ("slate", {"scale": "batch"}, ALL),
        ("seeupo", {"advantage": "tree"}, REVERSE),
        ("seeupo", {"advantage": "tree", "truncated": "mask"}, REVERSE),
    ],
)
def test_a_trees_shared_turns_are_trained_once_as_the_twins(name, choices, order):
    made = learner(name, **LOUD, **choices)
    trees = cases.judged_trees() if name == "slate" else cases.trees()
    if made.algorithm.truncated == "mask":  # the root was cut: its branches own what it shares
        trees[0] = dataclasses.replace(trees[0], stop="max_turns")
    observed, wanted = cases.assert_equal_to_the_twin(
        made,
        trees,
        order,
        ref_params=reference(),
        learning_rate=RATE,
        actions=EACH if made.algorithm.order == "parallel" else None,
    )
    if made.algorithm.mask_above is not None:
        assert 0.1 < observed.metrics["sweep/masked_fraction"] < 0.9
    # What trajectories have in common stands in a row once, and is trained once.
    acted, rows = [], SegmentBatch.of(trees)
    spans = all_actions(rows)
    wide = lay_out(rows, spans, dataclasses.replace(SHAPES, lengths=(128,), rows=1))
    begun = {
        (int(rows.group_S[span.segment]), rows.tokens[span.segment][: end + 1].tobytes())
        for span in spans
        for end in range(span.end)
    }
    assert wide.tokens == len(begun) < 0.8 * sum(span.end for span in spans)
    for row, turn_L in enumerate(rows.turn):
        acted += [rows.tokens[row][: 1 + place].tobytes() for place in np.flatnonzero(turn_L >= 0)]
    assert (
        len({*acted}) == len(acted) < sum((s.turn_L >= 0).sum() for t in trees for s in t.segments)
    )
    assert all(np.isfinite(credit_L).all() for own in wanted.credit for credit_L in own)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name, choices, order, rest",
    [
        ("seeupo", {"objective": "cispo", "loss_aggregation": "token"}, REVERSE, {}),
        (
            "seeupo",
            {
                "estimator": {"baseline": "batch"},
                "loss_aggregation": "constant",
                "normalize_by": "active",
            },
            None,
            {},
        ),
        ("seeupo", {"objective": "sapo", "tau_neg": 3.0, "kl_estimate": "k3+"}, REVERSE, {}),
        ("seeupo", {"objective": "gmpo", "clip_low": 0.05, "clip_high": 0.05}, REVERSE, {}),
        (
            "seeupo",
            {"objective": "dppo_tv", "ratio": "token", "clip_high": 0.01, "clip_low": 0.01},
            REVERSE,
            {},
        ),
        ("parallel", {"importance": {"clip": 1.1}, "loss_aggregation": "token"}, ALL, {}),
        ("grpo", TWICE | {"clip_dual": 1.01}, ALL, {}),
        ("parallel", {"turns_per_update": 3}, ALL, {"actions": [(1, 2, 3), (0,)]}),
        ("seeupo", {"entropy_coef": 0.3}, REVERSE, {}),
        ("grpo", TWICE | {"entropy_coef": 0.3, "loss_aggregation": "token"}, ALL, {}),
        ("grpo", TWICE | KL_COV, ALL, {}),
        ("seeupo", KL_COV | {"ratio": "token"}, REVERSE, {}),
        ("dapo", TWICE | CLIP_COV, ALL, {}),
        ("gspo", TWICE | {"advantage": "a2tgpo", "estimator": {"adaptation": 0.9}}, ALL, {}),
        (
            "cispo",
            TWICE | {"advantage": "a2tgpo", "estimator": {}, "clip_low": 0.1, "clip_high": 0.1},
            ALL,
            {},
        ),
    ],
    ids=[
        "cispo",
        "batch baseline",
        "sapo",
        "gmpo",
        "dppo_tv",
        "importance",
        "dual clip",
        "long actions",
        "entropy per turn",
    ]
    + ["entropy", "KL-Cov", "KL-Cov per turn", "Clip-Cov"]
    + ["a clip range an action", "a clip range a token"],
)
def test_choices_that_no_recipe_makes_are_the_twins(name, choices, order, rest):
    made = learner(name, **LOUD, **choices)
    observed, wanted = assert_equal_to_the_twin(made, 12, order, **rest)
    assert ("sweep/entropy" in observed.metrics) == (made.algorithm.entropy_coef > 0)
    if made.algorithm.entropy_coef > 0:
        entropy = np.mean([each for step in wanted.steps for each in step.entropies])
        np.testing.assert_allclose(observed.metrics["sweep/entropy"], entropy, rtol=1e-5)
    limited = observed.metrics.get("sweep/covariance_tokens", 0)
    assert (limited > len(observed.updates)) == (made.algorithm.covariance.kind != "none")


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_minibatches_are_the_twins_each_of_whole_trajectories_and_a_mean_of_its_own(name):
    made = learner(name, minibatches_per_turn=2, inner_epochs=2)
    turn_step = mock.Mock(wraps=made.turn_step)
    cases.observe(cases.with_programs(made, turn_step=turn_step), batch(4))
    batches = [call.args[1] for call in turn_step.mock_calls]
    parts = [set(b.trajectory_P[b.mask_PA[:, 0] > 0].tolist()) for b in batches]
    kept = set(np.flatnonzero(learnable(batch(4))).tolist())
    assert len(parts) == 4
    for first, second in (parts[:2], parts[2:]):
        assert first | second == kept and not first & second
    tokens = [b.mask_PA.sum() / len(part) for b, part in zip(batches, parts, strict=True)]
    assert max(tokens) > 1.1 * min(tokens)  # their share of the trajectories is not of the tokens
    assert_equal_to_the_twin(made, 4, ALL, minibatches=[parts])


@pytest.mark.sampled(15)
@pytest.mark.parametrize("scale", ["batch", "none"])
@pytest.mark.parametrize("name", entry_names("advantage"))
def test_every_estimator_is_the_twins_wherever_a_trajectorys_tokens_lie(name, scale):
    needs = find_entry("advantage", name).needs
    entry = find_entry("advantage", name)
    options = {"discount": 0.97, "step_coef": 0.7, "history": 1, "power": 1.5, "lam": 0.9}
    options |= {
        "zero_tail": True,
        "alpha": 0.9,
        "metric": "entropy",
        "mu": 0.7,
        "norm": "batch_max",
    }
    options |= {"baseline": "parent" if name == "tree" else "leave_one_out"}
    options["bootstrap_truncated"] = True
    options = {key: x for key, x in options.items() if key in names_of(entry.options)}
    both = {"advantage": name, "scale": scale, "advantage_clip": None}
    unreached = {"reward_NK", "rewards_NQ", "rewards_NKQ", "node_NK", "baseline_N"}
    penalised = not unreached & set(needs)
    penalised = penalised and entry.reward_range is None
    choices = {"kl_in": "reward" if penalised else "loss", "kl_coef": 0.1}
    choices["critic"] = {"kind": "head" if "value_NL" in needs else "none"}
    algorithm = Algorithm(**both, estimator=options, **choices)
    both["estimator"] = dataclasses.asdict(algorithm.estimator)
    trajectories, rng = batch_for(name, 6), np.random.default_rng(0)
    rows = SegmentBatch.of(trajectories, grouped=algorithm.grouped)

    def draw(size):
        return rng.normal(size=size).astype(np.float32)

    names = ("old_logp", "ref_logp", "value", "scorer_logp", "entropy", "progress", "collision")
    per_token = {name: [draw(len(turn_L)) for turn_L in rows.turn] for name in names}
    arrays = CreditArrays(algorithm, SHAPES, rows, trajectories, per_token, REWARD_WEIGHTS)
    credit, _ = assign_credit(arrays)

    # One a segment, as rows are; without groups the last one left of its own is learned from too.
    spans = twin.step_pieces(trajectories, ALL[0], grouped=algorithm.grouped)
    assert (9 in rows.trajectory_S) == (not algorithm.grouped) and 10 not in rows.trajectory_S
    pairs = zip(spans, per_token["old_logp"], per_token["ref_logp"], strict=True)
    penalty = [0.1 * penalised * (old_L - ref_L)[span.position_A] for span, old_L, ref_L in pairs]
    pairs = zip(spans, per_token["scorer_logp"], per_token["old_logp"], strict=True)
    odds = [(own_L - old_L)[span.position_A] for span, own_L, old_L in pairs]
    pairs = zip(spans, per_token["progress"], strict=True)
    progress = [said_L[span.position_A] for span, said_L in pairs]
    kept = learnable(trajectories, grouped=algorithm.grouped)

    def nested_as_trajectories(name):
        left = iter(per_token[name])
        return [
            [next(left) for _ in t.segments] if keep else []
            for t, keep in zip(trajectories, kept, strict=True)
        ]

    values, entropies = (nested_as_trajectories(name) for name in ("value", "entropy"))
    drawn = [
        list(zip(*own, strict=True))
        for own in zip(*map(nested_as_trajectories, ("old_logp", "collision")), strict=True)
    ]

    def advantages(**other):
        options = twin.Options([], **both | {"reward_weights": REWARD_WEIGHTS} | other)
        known = values, odds, entropies, progress, drawn
        nested = token_advantages(trajectories, spans, penalty, options, *known)
        return [nested[span.trajectory][span.place] for span in spans]

    wanted, raw = advantages(), advantages(scale="none")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for row, span in enumerate(spans):
        at_A = span.position_A
        close(credit["advantage"][row][at_A], wanted[row][at_A])
        if "value_NL" in needs:
            close(credit["returns"][row][at_A], (raw[row] + per_token["value"][row])[at_A])
