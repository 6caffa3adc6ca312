"""Two sweeps are the same, or the error says what is not; contenders alternate; ratios."""

import numpy as np
import pytest

from seeupo_jax.benchmarks.comparison import (
    SweepOutcome,
    Timing,
    against_torch,
    alternate,
    bounds,
    differences,
    fastest,
    moved,
    ratio,
    require_same,
)

# What a sweep in bfloat16 did, and how far PyTorch's was from it, on an H200
# (docs/benchmarks_gpu/update_order_desk_0.5b.json; loss and KL of a shorter one, on CPU).
SWEPT = {"loss": 0.555, "kl": 4.4, "weights": 0.5, "parameters": 0.0031245413119904697}
MEASURED = {"loss": 0.0022, "kl": 0.0069, "weights": 1e-7, "parameters": 0.0007334798574447632}


def outcome(loss=0.5, kl=0.25, weights=(1.0, None), tensor=(1.0, 2.0), turn=0, norm=0.25):
    step = {"turns": [turn], "loss": loss, "kl": kl, "weights": list(weights), "grad_norm": norm}
    return SweepOutcome([step], {"w": np.array(tensor)})


def test_equal_outcomes_do_not_differ():
    assert set(differences(outcome(), outcome()).values()) == {0.0}


@pytest.mark.parametrize(
    ("name", "change", "difference"),
    [
        ("loss", {"loss": 0.75}, 0.25),
        ("kl", {"kl": 0.0}, 0.25),
        ("weights", {"weights": (1.5, None)}, 0.5 / 1.5),  # above 1 it is relative
        ("weights", {"weights": (1.0, 2.0)}, np.inf),  # left out on one side only
        ("weights", {"weights": (1.0,)}, np.inf),
        ("parameters", {"tensor": (1.0, 4.0)}, 0.5),
        ("parameters", {"tensor": (np.nan, 2.0)}, np.inf),
        ("loss", {"turn": 1}, np.inf),
        # Clipping hides a gradient's size from the weights; relative, however small.
        ("grad_norm", {"norm": 0.75}, 2 / 3),
        ("grad_norm", {"norm": 0.0}, 0.25),
        ("grad_norm", {"norm": None}, np.inf),
    ],
)
def test_a_changed_number_is_found_under_its_name(name, change, difference):
    found = differences(outcome(), outcome(**change))
    assert found[name] == pytest.approx(difference)
    with pytest.raises(ValueError, match=f"seeupo_jax and other differ: .*{name} by"):
        require_same(found, "other", bounds(SWEPT, "float32"))


def test_other_tensors_differ_infinitely():
    other = SweepOutcome(outcome().steps, {"v": np.array([1.0, 2.0])})
    assert differences(outcome(), other)["parameters"] == np.inf


def test_the_tolerance_is_that_of_the_type():
    found = differences(outcome(), outcome(loss=0.5 + 1e-3))
    with pytest.raises(ValueError, match="loss by 0.001, allowed: 0.0001"):
        require_same(found, "other", bounds(SWEPT, "float32"))
    require_same(found, "other", bounds(SWEPT, "bfloat16"))


@pytest.mark.parametrize("name", [None, *SWEPT])
def test_a_side_that_does_nothing_is_not_the_same(name):
    """As measured it is the same; a quantity as far off as the sweep went is not."""
    allowed = bounds(SWEPT, "bfloat16")
    if name is None:
        return require_same(MEASURED, "other", allowed)
    with pytest.raises(ValueError, match=f"differ: {name} by"):
        require_same(MEASURED | {name: SWEPT[name]}, "other", allowed)


def test_a_sweep_of_one_step_has_no_kl_to_be_compared_with():
    assert bounds(SWEPT | {"kl": 4e-12}, "bfloat16")["kl"] == 1e-4  # of float32
    assert bounds(SWEPT, "float32") == dict.fromkeys((*SWEPT, "grad_norm"), 1e-4)
    assert bounds(SWEPT, "bfloat16")["grad_norm"] == 5e-2


def test_what_a_sweep_moved_is_reported():
    first = {"turns": [1], "weights": [1.0], "loss": -0.75, "kl": 0.0}
    steps = [first, {"turns": [0], "weights": [0.75], "loss": 0.5, "kl": 0.125}]
    after = SweepOutcome(steps, {"w": np.array([0.5])})
    assert moved({"w": np.array([0.25])}, after) == {
        "loss": 0.75,
        "kl": 0.125,
        "weights": 0.25,
        "parameters": 0.25,
    }


def test_contenders_alternate():
    seen = []

    def contender(name):
        return lambda number: seen.append((number, name)) or float(number)

    timings = alternate({"a": contender("a"), "b": contender("b")}, 3)
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert timings["a"].each == (0.0, 1.0, 2.0)


def test_a_ratio_is_of_medians_with_the_rounds_around_it():
    slow, fast = Timing((4.0, 9.0, 5.0)), Timing((2.0, 3.0, 1.0))
    assert ratio(slow, fast) == {"ratio": 2.5, "ratio_least": 2.0, "ratio_most": 5.0}
    assert slow.as_json() == {
        "median_s": 5.0,
        "least_s": 4.0,
        "most_s": 9.0,
        "each_s": [4.0, 9.0, 5.0],
    }
    assert fastest({"slow": slow, "fast": fast}, ["slow", "fast"]) == "fast"


def test_the_recipe_and_packed_rows_have_ratios_of_their_own_and_are_not_the_baseline():
    seconds = {"eager": 8.0, "compile": 6.0, "recipe": 12.0, "packed": 3.0}
    timings = {f"PyTorch, {way}": Timing((each,)) for way, each in seconds.items()}
    found = against_torch(timings | {"seeupo_jax": Timing((2.0,))}, [*seconds])
    assert (found["against"], found["ratio"]) == ("PyTorch, compile", 3.0)
    assert found["over_recipe"]["ratio"] == 6.0 and found["over_packed"]["ratio"] == 1.5
