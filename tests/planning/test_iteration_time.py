"""The estimate of an iteration, from the figures of a step's largest program."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from places import CONFIGS

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.abstract_run import abstract_run
from seeupo_jax.planning.chips import Chip
from seeupo_jax.planning.collectives import Collective
from seeupo_jax.planning.slices import roofline
from seeupo_jax.planning.slices.iteration_time import NEEDED, estimate_iteration
from seeupo_jax.planning.slices.roofline import Roofline
from seeupo_jax.planning.slices.slice_programs import (
    Setup,
    SliceProgram,
    UsefulWork,
    choose_programs,
    list_programs,
)

# A byte a second of memory, and of all links together; FLOPs take no time.
CHIP = Chip("toy", 1, float("inf"), 1.0, 1.0, 1.0, 4, 1, 3, 64, memory_efficiency=0.5)
LINE = Roofline(0, 0, 0, "memory", 0, 0, 0)
KINDS = (*NEEDED, "sweep/score", "sweep/reference", "rollout/reshard")
KINDS += ("sweep/value", "sweep/scorer", "sweep/refresh")


def setup_of(*choices, **mesh):
    config = load_config(CONFIGS / "quickstart.py", choices)
    sizes = schema.Mesh(**mesh)
    run = abstract_run(config, make_mesh(sizes, jax.devices()[: math.prod(mesh.values())]))
    return Setup(**vars(run), given=config, source="", topology=SimpleNamespace(chip=CHIP))


def estimated(setup, of_turn, line=LINE):
    """The parts of an iteration by name; of_turn: the step's program and its collectives."""
    turn, *gathered = of_turn
    others = {kind: replace(turn, name=kind) for kind in KINDS}
    figures = SimpleNamespace(roofline=line, collectives=gathered)
    found = estimate_iteration(setup, others, dict.fromkeys(others, figures))
    return {part.name: part for part in found.parts}


def parts_of(*choices, line=LINE):
    """As `estimated`, where a step reads 7 bytes a microbatch, and 5 once."""
    setup = setup_of("batching.buckets=(128,)", *choices)
    trips = setup.learner.shapes.microbatches(128)
    assert trips == 128  # each of a conversation

    hbm = {"hbm_bytes": 7.0 * trips + 5, "update_bytes": 5.0}
    turn = SliceProgram(
        "sweep/turn", setup.mesh, lambda: None, (), (), UsefulWork(tokens=1), trips, **hbm
    )
    return estimated(setup, (turn, Collective("all-gather", (), 8, 3, trips, "")), line)


@pytest.mark.parametrize(
    "parts, epochs, steps, trips", [(1, 1, 1, 128), (4, 1, 4, 32), (3, 2, 6, 43), (500, 1, 128, 1)]
)
def test_a_minibatch_has_its_share_of_the_microbatches_and_the_whole_optimizer(
    parts, epochs, steps, trips
):
    sizes = (f"algorithm.minibatches_per_turn={parts}", f"algorithm.inner_epochs={epochs}")
    turn = parts_of("recipe=grpo", *sizes)["sweep/turn"]
    assert turn.times == steps
    assert turn.serial_s == pytest.approx(steps * (trips * (7 + 3) + 5))
    assert turn.published_s == pytest.approx(steps * (trips * 7 + 5) / 0.5)


def test_passes_that_limit_tokens_by_their_covariance_are_of_a_minibatch():
    sizes = ("algorithm.minibatches_per_turn=4", "algorithm.inner_epochs=2")
    without = parts_of("recipe=grpo", *sizes)["sweep/score"].times
    assert without == 2  # the old policy and the reference
    limited = parts_of("recipe=grpo", "algorithm.covariance.kind=clip", *sizes)["sweep/score"].times
    assert limited == without + 7 / 4  # before each of 8 steps but the first


def test_the_model_that_scores_turns_steps_and_is_scored_in_every_epoch():
    """Of its scores a pass each, besides the old policy's and the reference's."""
    istar = ("algorithm.advantage=istar", "algorithm.estimator.scorer_epochs=3")
    parts = parts_of("recipe=grpo", *istar, line=Roofline(0, 0, 0, "memory", 2, 5, 7))
    assert (parts["sweep/scorer"].times, parts["sweep/score"].times) == (3, 2 + 3)
    scorer = parts["sweep/scorer"]
    assert (scorer.step_s, scorer.serial_s, scorer.published_s) == (3 * 2, 3 * 5, 3 * 7)


def test_weights_are_refreshed_after_every_turn_but_the_last_by_passes_of_their_own():
    """Four turns of 32 tokens, forwards: a row of 128 holds four of 32, two of 64, one of 96."""
    turns = ("recipe=seeupo_forward", "rollout.max_turns=4")
    assert parts_of(*turns)["sweep/refresh"].times == 1 / 4 + 1 / 2 + 1
    assert "sweep/refresh" not in parts_of()


@pytest.mark.parametrize(
    "axes, shrinks",
    [
        (("tensor",), True),
        (("context",), True),
        (("fsdp", "tensor"), True),
        (("fsdp",), False),
        (("fsdp", "context"), False),
    ],
)
def test_only_what_is_moved_of_tokens_shrinks_with_the_rows(axes, shrinks, monkeypatch):
    """Six turns of 128, 107, 86, 64, 43 and 22 tokens in rows of 128 and 96.

    The rows with the fewest tokens hold 1, 1, 1 (of 96), 2, 2 (of 96) and 4 (of 96) conversations.
    """
    monkeypatch.setattr(roofline, "axis_links", lambda mesh: dict.fromkeys(mesh.shape, 6.0))
    sizes = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
    setup = setup_of("batching.buckets=(96,128)", **sizes)
    turn = SliceProgram(
        "sweep/turn", setup.mesh, lambda: None, (), (), UsefulWork(tokens=1), 64, 0.0
    )
    # The links of all axes are those of the chip: a byte a second.
    parts = estimated(setup, (turn, Collective("all-gather", axes, 2, 3, 64, "")))
    of_96 = (64 + 32 + 16) * (0.75 if shrinks else 1)
    assert parts["sweep/turn"].serial_s == 3 * (64 + 64 + 32 + of_96)


def test_along_the_only_axis_that_cuts_weights_these_are_gathered_too(monkeypatch):
    monkeypatch.setattr(roofline, "axis_links", lambda mesh: dict.fromkeys(mesh.shape, 6.0))
    setup = setup_of("batching.buckets=(96,128)", data=1, context=2)
    turn = SliceProgram(
        "sweep/turn", setup.mesh, lambda: None, (), (), UsefulWork(tokens=1), 128, 0.0
    )
    parts = estimated(setup, (turn, Collective("all-gather", ("context",), 2, 3, 128, "")))
    assert parts["sweep/turn"].serial_s == 3 * (3 * 128 + 2 * 64 + 32)


def test_longer_rows_of_several_conversations_are_no_more_work():
    """16 conversations of 512 tokens, in 16 rows of 512 or 8 of 1024, whose halves see no other."""
    sizes = ("rollout.max_context=512", "rollout.max_turns=2", "rollout.tasks=8")
    work, turns = {}, {}
    for microbatch in (512, 1024):
        rows = f"batching.buckets={tuple(dict.fromkeys((256, 512, microbatch)))}"
        setup = setup_of(*sizes, "rollout.group_size=2", "model.attention=xla", rows)
        programs = {each.kind: each for each in choose_programs(list_programs(setup))}
        assert programs["sweep/score"].trips == 16 * 512 // microbatch
        work[microbatch] = [programs[kind].work for kind in ("sweep/score", "sweep/turn")]
        figures = dict.fromkeys(programs, SimpleNamespace(roofline=LINE, collectives=()))
        parts = estimate_iteration(setup, programs, figures).parts
        turns[microbatch] = {part.name: part.times for part in parts}
    assert work[512][0].tokens == 16 * 512
    assert work[512] == work[1024]  # the step's too: a chunk of the refresh for each conversation
    assert turns[512] == turns[1024]


def test_attention_that_skips_nothing_is_counted_over_whole_rows():
    """Four conversations of 128 in a row of 512, all pairs of which are computed."""
    executed = []
    for attention in ("all_pairs", "xla"):
        setup = setup_of("batching.buckets=(512,)", f"model.attention={attention}")
        (score,) = choose_programs(list_programs(setup), ["sweep/score"])
        executed.append(score.work)
    whole, apart = executed
    assert whole.needed == apart.needed and whole.tokens == apart.tokens
    pairs = 32 * (512**2 - 4 * 128**2)
    assert whole.executed - apart.executed == pairs * 3 * 4 * 4 * 32  # layers, heads of 32


def test_the_rollout_takes_as_long_as_the_shard_with_the_most_conversations(monkeypatch):
    """12 conversations: two on four of eight shards, whose slots then are 16."""
    monkeypatch.setattr(roofline, "axis_links", lambda mesh: dict.fromkeys(mesh.shape, 6.0))
    sizes = ("rollout.tasks=3", "rollout.group_size=4")
    shards = ("rollout.mesh={'data': -1}", "rollout.concurrency=16")
    times = []
    for setup in (setup_of(*sizes), setup_of(*sizes, *shards, data=4, tensor=2)):
        turn = SliceProgram(
            "sweep/turn", setup.mesh, lambda: None, (), (), UsefulWork(tokens=1), 12, 0.0
        )
        parts = estimated(setup, (turn,))
        times.append([parts[f"rollout/{kind}"].times for kind in ("prefill", "decode")])
    assert times[1] == pytest.approx([time * 16 / 12 for time in times[0]])
