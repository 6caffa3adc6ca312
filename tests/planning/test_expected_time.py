"""Estimates of time: against programs that were measured once, and FLOPs worked by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from places import CONFIGS

import seeupo_jax
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.learner.batching import SegmentBatch, action_spans, lay_out
from seeupo_jax.learner.refresh_batch import make_refresh_batch
from seeupo_jax.learner.shapes import Shapes, row_lengths
from seeupo_jax.learner.token_trees import choose_length
from seeupo_jax.planning import expected_time
from seeupo_jax.planning.expected_time import (
    COMPILING_WITHIN,
    compile_seconds,
    iteration_flops,
    pack,
    pass_ends,
    refresh_chunks,
    time_lines,
)
from seeupo_jax.planning.explain.explain_parts import plan_run
from seeupo_jax.types import Segment, Trajectory

# Seconds of one core (user and system time of the process, from `lower` to the end of `compile`),
# jax 0.10.2 on two cores of an AMD EPYC with other programs beside it, November 2026: of the
# bundled policy (3 layers) and of new ones of the default sizes with 1 and 8 layers.
MEASURED = [
    ("rollout/prefill 8x128", 1, 0.35),
    ("rollout/prefill 8x128", 3, 1.02),
    ("rollout/prefill 8x128", 8, 1.50),
    ("rollout/decode 128x16", 1, 2.51),
    ("rollout/decode 128x16", 3, 3.46),
    ("rollout/decode 128x16", 8, 4.64),
    ("sweep/score 1024", 1, 1.91),
    ("sweep/score 1024", 3, 2.45),
    ("sweep/score 1024", 8, 3.11),
    ("sweep/refresh 1024", 1, 2.29),
    ("sweep/refresh 1024", 8, 3.62),
    ("sweep/turn 512", 1, 6.76),
    ("sweep/turn 512", 3, 8.79),
    ("sweep/turn 512", 8, 10.90),
    ("sweep/turn 1024", 1, 7.85),
    ("sweep/turn 1024", 3, 10.18),
    ("sweep/turn 1024", 8, 14.17),
]
# The same where attention computes all pairs.
OF_ALL_PAIRS = [
    ("rollout/prefill 2x128", 1, 0.28),
    ("rollout/prefill 16x16", 3, 0.81),
    ("rollout/decode 128x8", 3, 2.35),
    ("sweep/score 512", 1, 0.71),
    ("sweep/score 512", 3, 0.78),
    ("sweep/score 512", 8, 1.10),
    ("sweep/refresh 512", 3, 0.93),
    ("sweep/refresh 512", 8, 1.25),
    ("sweep/turn 512", 1, 4.47),
    ("sweep/turn 512", 3, 5.45),
    ("sweep/turn 512", 8, 6.69),
]


def quickstart_with(*choices):
    with pytest.MonkeyPatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda: one)
        config = load_config(CONFIGS / "quickstart.py", choices)
        return plan_run(config, config.model.path)[0]


@pytest.fixture(scope="module")
def quickstart():
    return quickstart_with()


class Layers:
    """All of an architecture that the time to compile is estimated by."""

    scan_layers = False

    def __init__(self, layers, attention="xla"):
        self.layers, self.attention = layers, attention


@pytest.mark.parametrize("attention, measured", [("xla", MEASURED), ("all_pairs", OF_ALL_PAIRS)])
def test_what_was_measured_is_within_the_factor_that_is_printed(attention, measured):
    for name, layers, seconds in measured:
        estimate = compile_seconds([name], Layers(layers, attention))
        assert 1 / COMPILING_WITHIN < estimate / seconds < COMPILING_WITHIN, name


def test_programs_add_up_and_scanned_layers_are_one():
    names, deep = ["sweep/turn 64", "sweep/turn 128", "sweep/copy cumulative ratio"], Layers(40)
    every = sum(compile_seconds([name], deep) for name in names)
    assert compile_seconds(names, deep) == pytest.approx(every)
    deep.scan_layers = True
    assert compile_seconds(names, deep) == compile_seconds(names, Layers(1))


def test_steps_end_where_evenly_growing_conversations_do():
    config = load_config(CONFIGS / "quickstart.py")  # 128 tokens in 6 turns
    assert pass_ends(config, "turn") == [128, 107, 86, 64, 43, 22]
    twice = load_config(CONFIGS / "quickstart.py", ["algorithm.inner_epochs=2"])
    assert pass_ends(twice, "turn") == [128, 128, 107, 107, 86, 86, 64, 64, 43, 43, 22, 22]
    parts = load_config(CONFIGS / "quickstart.py", ["algorithm.minibatches_per_turn=2"])
    assert pass_ends(parts, "turn") == pass_ends(twice, "turn")


def test_passes_of_their_own_that_refresh_weights_are_counted(quickstart):
    """One after each turn but the last, of the tokens up to that turn's end."""
    turns = ("recipe=seeupo_forward", "rollout.max_turns=4")
    forwards = quickstart_with(*turns)
    assert pass_ends(forwards.config, "refresh") == [32, 64, 96] and not pass_ends(
        quickstart.config, "refresh"
    )
    without = quickstart_with(*turns, "algorithm.cumulative_ratio=False")
    more = iteration_flops(forwards) - iteration_flops(without)
    whole = 2 * 705_600 * 128 * 128  # as above: a pass over all tokens, of which 192 of 128 here
    assert 192 / 128 * whole < more < 2 * 192 / 128 * whole
    by_turn = quickstart_with(*turns, "algorithm.old_policy=turn")
    assert pass_ends(by_turn.config, "old") == [32, 64, 96, 128] and not pass_ends(
        forwards.config, "old"
    )


# The bundled policy has three layers of width 128, with four heads of 32, keys and values of two,
# 384 inside, and 896 words. A token's matrices, times two; what attention takes of each pair of a
# token and one that it sees; the scores of all words.
MATRICES, PAIR, WORDS = 2 * 3 * (3 * 128**2 + 3 * 128 * 384), 3 * 4 * 4 * 32, 2 * 896 * 128
# The 128 trajectories of 128 tokens, in 32 rows of 512; sampled, half of their tokens.
PASS = 32 * (512 * MATRICES + 512 * 513 // 2 * PAIR)
SAMPLED = 128 * (128 * MATRICES + 128 * 129 // 2 * PAIR + 64 * WORDS)


def test_a_teacher_adds_a_pass_of_its_own_and_its_memory(tmp_path):
    """Half as wide inside and of one layer; two of them score as much as one."""
    desk = Path(seeupo_jax.__path__[0]) / "assets" / "order_desk" / "config.json"
    values = json.loads(desk.read_text()) | {"num_hidden_layers": 1, "intermediate_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(values))
    alone = quickstart_with()
    places = ["teacher.dtype=float32", f"teacher.path={tmp_path}"]
    matrices = 2 * (3 * 128**2 + 3 * 128 * 192)
    one_pass = 32 * (512 * matrices + 512 * 513 // 2 * PAIR / 3 + 512 * WORDS)
    size = 128 * 896 + matrices // 2 + 3 * 128 + 2 * 32
    for more, count in (([], 1), ([f"teacher.by_task={{'env=a':'{tmp_path}'}}"], 2)):
        run = quickstart_with(*places, *more)
        assert iteration_flops(run) - iteration_flops(alone) == one_pass
        assert run.parts["teacher"] == count * 4 * size and "teacher" not in alone.parts
        assert sum(name.startswith("sweep/teacher") for name in run.sweep_programs()) == 3


@pytest.mark.parametrize(
    "recipe, without, added, flops",
    [
        ("grpo", ["kl_coef=0"], [], PASS + 32 * 512 * WORDS),
        ("grpo", [], ["dynamic_sampling=3"], 3 * SAMPLED),
        (
            "grpo",
            ["minibatches_per_turn=4"],
            ["minibatches_per_turn=4", "covariance.kind=clip"],
            3 / 4 * (PASS + 32 * 512 * WORDS),
        ),
        (
            "a2tgpo",
            ["minibatches_per_turn=4", "estimator.gain=turn_reward"],
            ["minibatches_per_turn=4"],
            PASS + 32 * 512 * WORDS,
        ),
    ],
)
def test_a_choice_adds_the_passes_that_it_takes(recipe, without, added, flops):
    before, after = (
        iteration_flops(
            quickstart_with(f"recipe={recipe}", *(f"algorithm.{choice}" for choice in choices))
        )
        for choices in (without, added)
    )
    assert after - before == flops


def test_conversations_that_share_no_row_have_one_each():
    """128 of 300 tokens, of rows of multiples of 64: in 128 of 320, not in 75 of 512."""
    long = ("recipe=grpo", "rollout.max_context=300")
    without, with_reference = (
        iteration_flops(quickstart_with(*long, f"algorithm.kl_coef={coef}")) for coef in (0, 0.1)
    )
    row = 320 * (MATRICES + WORDS) + 320 * 321 // 2 * PAIR
    assert with_reference - without == 128 * row


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tokens", [1, 40, 64, 65, 100, 128, 200, 256])
def test_rows_are_those_that_the_sweep_lays_out(tokens, rows):
    shapes = Shapes(row_lengths(512, block=16), 8, rows, 13, context=256)
    alone = [np.full(tokens, i, np.int32) for i in range(13)]
    for lengths in (shapes.lengths, shapes.long):
        found = pack(shapes, 13, tokens, lengths)
        allowed = [each for each in lengths if each >= tokens]
        length, forest = choose_length(alone, range(13), lengths=allowed, rows=rows)
        assert (found.length, found.microbatches) == (length, -(-len(forest.tokens) // rows))


@pytest.mark.parametrize("turn, chunks", [(1, 1), (3, 2), (7, 4)])
def test_chunks_of_a_refresh_are_those_that_the_sweep_lays_out(turn, chunks):
    """Of 8 tokens: four conversations of 8 tokens go on by a turn behind their last token."""
    shapes = Shapes((8, 32), action=8, rows=1, trajectories=4)
    turns = np.repeat([-1, 0, -1, 1], [1, 7, turn - 1, 1]).astype(np.int32)
    tokens = [100 * i + np.arange(turns.size, dtype=np.int32) for i in range(4)]
    segments = [(Segment(each, turns, np.zeros(turns.size, np.float32)),) for each in tokens]
    rows = SegmentBatch.of([Trajectory.of(each, 0.0, 0, stop="done") for each in segments])
    layout = lay_out(rows, action_spans(rows, (0,)), shapes)
    refresh, left = make_refresh_batch(rows, layout, action_spans(rows, (1,)), shapes, tokens)
    assert (layout.length, refresh.chunks_M[0], left) == (32, chunks, [])
    assert refresh_chunks(shapes, pack(shapes, 4, 8), turn) == chunks


def test_a_value_function_takes_a_pass_without_logits():
    critic = iteration_flops(quickstart_with("recipe=ppo"))
    assert critic - iteration_flops(quickstart_with("recipe=grpo")) == PASS


def test_the_estimate_is_said_with_what_it_rests_on(quickstart, monkeypatch):
    monkeypatch.setattr(expected_time, "usable_cores", lambda: 3)
    compiling, iteration = time_lines(quickstart)
    names = [*quickstart.rollout_programs(), *quickstart.sweep_programs()]
    core = re.search(r"(\d+) s of one core", compiling)[1]
    assert int(core) == round(compile_seconds(names, quickstart.policy.network.arch))
    assert "on the 3 cores here" in compiling
    assert "each program within a factor of 1.5" in compiling
    assert "6 turns and 128 tokens in every conversation, nothing shared" in iteration


@pytest.mark.parametrize("scanned", [False, True])
def test_on_a_gpu_layers_that_are_compiled_one_by_one_are_told(quickstart, scanned):
    device = np.array([SimpleNamespace(platform="gpu")])
    arch = replace(quickstart.policy.network.arch, layers=24, scan_layers=scanned)
    network, mesh = SimpleNamespace(arch=arch), SimpleNamespace(devices=device)
    found = SimpleNamespace(policy=SimpleNamespace(network=network, mesh=mesh))
    lines = time_lines(found)
    assert lines[0].startswith("not estimated for gpu")
    assert lines[1:] == ([] if scanned else [lines[-1]])
    assert scanned or lines[1].startswith("24 layers are compiled one by one")
