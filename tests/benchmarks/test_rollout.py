"""The figures of rollouts and iterations, from seconds that were made up."""

from types import SimpleNamespace

import pytest

from seeupo_jax.benchmarks import rollout
from seeupo_jax.benchmarks.comparison import JAX, Timing

SECONDS = {"resent": 8.0, "kept": 2.0, "static": 4.0}


def timings(seconds):
    return {name: Timing((each,)) for name, each in seconds.items()}


def over(found):
    """The ratios by their names, as numbers."""
    return {
        name.removeprefix("over_"): each and each["ratio"]
        for name, each in found.items()
        if name.startswith("over_")
    }


@pytest.mark.parametrize("ways", [("resent", "kept"), ("kept", "resent"), ("static", "resent")])
def test_a_rollouts_ratio_is_to_the_fastest_way_to_generate_in_whatever_order(ways):
    sides = {rollout.WAYS[way][0]: SECONDS[way] for way in ways}
    found = rollout.ratios(timings(sides | {JAX: 1.0}))
    fastest = min(ways, key=SECONDS.__getitem__)
    assert found["against"] == rollout.WAYS[fastest][0]
    assert [found[key] for key in ("ratio", "ratio_least", "ratio_most")] == [SECONDS[fastest]] * 3
    none = dict.fromkeys(("resent", "kept", "static", "recipe", "packed"))
    assert over(found) == none | {way: SECONDS[way] for way in ways}


def test_an_iterations_ratio_is_to_the_fastest_that_neither_pads_turns_nor_packs_rows():
    seconds = {"eager": (9.0, 7.0), "compile": (8.0, 6.0), "recipe": (12.0, 10.0)}
    sides = {JAX: 2.0}
    for way, (resent, kept) in (seconds | {"packed": (5.0, 3.0)}).items():
        sides |= {f"PyTorch, {way}": resent, f"PyTorch, {way}, KV cache kept": kept}
    found = rollout.ratios(timings(sides))
    assert found["against"] == "PyTorch, compile, KV cache kept" and found["ratio"] == 3.0
    ratios = {"resent": 4.0, "kept": 3.0, "static": None, "recipe": 5.0, "packed": 1.5}
    assert over(found) == ratios


def test_our_side_alone_has_no_ratio():
    found = rollout.ratios(timings({JAX: 1.0}))
    assert found["against"] is None and "ratio" not in found
    assert set(over(found).values()) == {None}


def test_rates_are_of_the_tokens_that_are_sampled():
    work = SimpleNamespace(tokens=1000, sampled=100, least_computed=400)
    sides = {JAX: {"computed": 600, "positions": 800}}
    found = rollout._figures({JAX: Timing((2.0, 4.0, 9.0))}, sides, work)
    side = found["contenders"][JAX]
    assert side["tokens_per_second"] == 25.0  # 100 in the median of 4 s
    assert side["computed_per_sampled"] == 6.0 and side["positions_per_sampled"] == 8.0
    assert side["waste"] == 1.5 and found["least_computed_per_sampled"] == 4.0
