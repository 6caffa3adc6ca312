"""Where the time went."""

import random

import pytest

from seeupo_jax.metrics.phases import PHASES, split_time, total_time

LINE = {
    "time/rollout_s": 10.0,
    "time/sweep_s": 6.0,
    "time/evaluation_s": 2.0,
    "time/checkpoint_s": 1.0,
    "time/environment_s": 3.0,
    "time/prefill_s": 1.0,
    "time/decode_s": 4.0,
}


def test_a_rollout_is_its_parts_and_what_is_left():
    assert split_time(LINE) == {
        "rollout: decode": 4.0,
        "rollout: prefill": 1.0,
        "rollout: environment": 3.0,
        "rollout: rest": 2.0,
        "sweep": 6.0,
        "evaluation": 2.0,
        "checkpoint": 1.0,
    }


def test_compiling_is_taken_out_of_where_it_happened_by_programs():
    programs = {"rollout/programs_compiled": 1, "sweep/programs_compiled": 3}
    times = split_time({**LINE, "time/compile_s": 4.0, **programs})
    assert times["compile"] == 4.0
    assert times["sweep"] == 3.0 and times["rollout: rest"] == 1.0


def test_compiling_is_taken_out_of_supervised_steps_too():
    for programs in ({}, {"sft/programs_compiled": 2}):
        times = split_time({"time/sft_s": 5.0, "time/compile_s": 2.0, **programs})
        assert times == {"sft": 3.0, "compile": 2.0}


def test_compiling_leaves_what_a_rollout_measured_as_long_as_it_fits_elsewhere():
    programs = {"rollout/programs_compiled": 8, "sweep/programs_compiled": 1}
    times = split_time({**LINE, "time/compile_s": 5.0, **programs})
    assert times["rollout: decode"] == 4.0 and "rollout: rest" not in times
    assert (times["sweep"], times["compile"]) == (3.0, 5.0)


def test_compiling_without_counts_is_taken_by_time():
    times = split_time({"time/rollout_s": 3.0, "time/sweep_s": 1.0, "time/compile_s": 2.0})
    assert times == {"rollout: rest": 1.5, "sweep": 0.5, "compile": 2.0}


def test_compiling_that_does_not_fit_one_phase_goes_to_another():
    line = {"time/rollout_s": 5.0, "time/sweep_s": 1.0, "time/compile_s": 3.0}
    times = split_time({**line, "sweep/programs_compiled": 9})
    assert times == {"rollout: rest": 3.0, "compile": 3.0}


def test_a_rollout_that_went_by_during_a_sweep_is_no_longer_than_was_waited_for_it():
    times = split_time({"time/rollout_s": 1.0, "time/decode_s": 6.0, "time/environment_s": 2.0})
    assert times == {"rollout: decode": 0.75, "rollout: environment": 0.25}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(50))
def test_the_parts_add_up_to_the_whole_and_none_is_negative(seed):
    draw = random.Random(seed)
    names = [f"time/{n}_s" for n in ("rollout", "sweep", "evaluation", "checkpoint", "compile")]
    names += [f"time/{n}_s" for n in ("environment", "prefill", "decode")]
    line = {name: draw.expovariate(1.0) for name in names if draw.random() < 0.7}
    for part in ("rollout", "sweep", "evaluation"):
        if draw.random() < 0.5:
            line[f"{part}/programs_compiled"] = draw.randrange(4)
    times = split_time(line)
    assert sum(times.values()) == pytest.approx(total_time(line), abs=1e-12)
    assert all(seconds > 0 for seconds in times.values())
    assert list(times) == [phase for phase in PHASES if phase in times]


def test_what_is_no_time_is_none():
    assert split_time({"time/sweep_s": None, "time/rollout_s": "long", "iteration": 3}) == {}
