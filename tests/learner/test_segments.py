"""A trajectory's segments are one action: it weighs the same in however many its turns lie."""

import dataclasses
import functools
from unittest import mock

import jax
import learner_cases as cases
import numpy as np
import pytest
from stored_fields import with_fields

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.types import CONTEXT, Segment, Trajectory

# Not shared: the segments of a trajectory, which begin alike, do not lie in one row then.
SHAPES = Shapes((32,), action=16, rows=4, trajectories=8, turns=4, share=False)
HAND = {"kl_coef": 0.0, "scale": "none"}
# Ratios that leave the clip range, and a sampler that differs from the trainer.
OFTEN = {"inner_epochs": 2, "minibatches_per_turn": 2, "importance": {"clip": 1.1}}
CASES = {
    "gspo": RECIPES["gspo"] | OFTEN,
    "ppo, product": RECIPES["ppo"] | OFTEN | {"ratio": "product", "loss_aggregation": "action"},
    "two turns an action, old_policy=turn": {"turns_per_update": 2, "old_policy": "turn"},
    "a clip range of each turn": RECIPES["gspo"]
    | OFTEN
    | {
        "advantage": "a2tgpo",
        "estimator": {"adaptation": 0.9},
        "clip_low": 0.05,
        "clip_high": 0.05,
    },
    "grpo, by hand": RECIPES["grpo"] | HAND,
    "gspo, by hand": RECIPES["gspo"] | HAND,
}


def split(trajectory):
    """Every turn in a segment of its own, after exactly what it was sampled after."""
    (whole,) = trajectory.segments
    segments = []
    for turn in range(trajectory.turns):
        own = np.flatnonzero(whole.turn_L == turn)
        end = own[-1] + 1
        turn_L = np.where(whole.turn_L[:end] == turn, turn, CONTEXT).astype(np.int32)
        logp_L = np.where(turn_L == turn, whole.logp_L[:end], 0).astype(np.float32)
        segments.append(Segment(whole.tokens_L[:end], turn_L, logp_L))
    return dataclasses.replace(trajectory, segments=tuple(segments))


@functools.cache
def whole():
    """Trajectories of one segment each, of one to four turns."""
    kept = [t for t in cases.ragged() if len(t.segments) == 1]
    rng = np.random.default_rng(3)
    long = Trajectory.of((cases.segment(rng, *((turn, 2, 3) for turn in range(4))),), 0.2, 2)
    paid = [with_fields(t, turn_rewards=(*rng.random(t.turns),)) for t in [*kept, long]]
    return tuple(cases.as_sampled(paid, spread=1.0))


@functools.cache
def in_segments():
    """The same, every other one with as many segments as turns."""
    return tuple(split(t) if i % 2 == 0 else t for i, t in enumerate(whole()))


@functools.cache
def reference():
    return cases.jittered(cases.policy()[1], 0.02)


@functools.cache
def learner(name):
    return cases.learner(shapes=SHAPES, **CASES[name])


def observe(made, trajectories):
    return cases.observe(made, list(trajectories), ref_params=reference())


def parts(batch, size):
    """How many spans have another one of their trajectory in an earlier part of so many tokens.

    Args:
      size: 0: any other one.
    """
    real = batch.mask_PA[:, 0] > 0
    part_P = batch.slot_PA[real, 0] // size if size else np.arange(real.sum())
    places = set(zip(batch.trajectory_P[real].tolist(), part_P.tolist(), strict=True))
    return len(places) - len({owner for owner, _ in places})


@pytest.mark.parametrize("recipe", ["grpo", "gspo"])
def test_one_segment_against_four_by_hand(recipe):
    """Advantages of +-0.5 at ratio 1: what the one pushes up the other pushes down."""
    trajectory = whole()[-1]
    up, down = (with_fields(trajectory, reward=r, group=0) for r in (1.0, 0.0))
    made = learner(f"{recipe}, by hand")
    for pair in ([up, split(down)], [split(up), down]):
        (update,) = observe(made, pair).updates
        (step,) = update.metrics
        np.testing.assert_allclose(step["loss"], 0, atol=1e-6)
        np.testing.assert_allclose(step["actions"], 2, rtol=1e-6)
        # The same tokens with opposite weights: nothing is left of either's gradient.
        assert step["grad_norm"] < 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in CASES if "by hand" not in name])
def test_a_trajectory_in_segments_is_updated_as_in_one(name):
    one, several = (observe(learner(name), ts) for ts in (whole(), in_segments()))
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-5, atol=1e-6)
    cases.assert_trees_close(several.state.params, one.state.params, 1e-5)
    for update, wanted in zip(several.updates, one.updates, strict=True):
        np.testing.assert_allclose(update.cumulative_ratio_N, wanted.cumulative_ratio_N, rtol=1e-5)
    # What is computed differs, since a segment repeats what came before.
    computed = ("tokens", "computed", "shared_fraction", "padding_fraction")
    for key, value in one.metrics.items():
        if not key.endswith(computed):
            np.testing.assert_allclose(several.metrics[key], value, rtol=1e-4, err_msg=key)
    moved = [abs(update.cumulative_ratio_N - 1).max() > 1e-3 for update in one.updates]
    assert one.metrics["sweep/clip_fraction"] > 0 or any(moved)


def test_the_ratio_of_the_whole_is_computed_only_where_it_is_needed():
    made, steps = learner("gspo"), []
    for trajectories in (whole(), in_segments()):
        score, turn_step = (mock.Mock(wraps=f) for f in (made.score, made.turn_step))
        observe(cases.with_programs(made, score=score, turn_step=turn_step), trajectories)
        steps.append([call.args[1] for call in turn_step.mock_calls])
        split = [parts(batch, 0) > 0 for batch in steps[-1]]
        # Two passes begin a sweep; its first step reads what they found.
        assert len(split) == 4 and score.call_count == 2 + sum(split[1:])
        assert any(split[1:]) == (trajectories is in_segments())
    # The segments lie in several rows and in several microbatches.
    for size in (32, 4 * 32):
        assert any(parts(batch, size) for batch in steps[1])


def test_segments_on_other_devices_and_in_other_microbatches_are_one_action():
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    network, params = cases.policy()
    placed = param_shardings(mesh, network.logical_axes(), params)
    plain = learner("gspo")
    wanted = observe(plain, whole())
    with jax.set_mesh(mesh):
        state = cases.new_state(plain.optimizer, jax.device_put(params, placed))
        layout = jax.tree.map(lambda x: x.sharding, state)
        made = cases.unshared(plain, state_shardings=layout, replicated=sharding(mesh, ()))
        ref_params = jax.device_put(reference(), placed)
        state, metrics, *_ = sweep(made, state, ref_params, list(in_segments()), iteration=3)
    cases.assert_trees_close(cases.host(state.params), wanted.state.params, 1e-5)
    np.testing.assert_allclose(metrics["sweep/loss"], wanted.metrics["sweep/loss"], rtol=1e-5)
