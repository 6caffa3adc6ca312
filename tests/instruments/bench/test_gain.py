"""The benchmark of the information gain: both ways give the same, and it says what they cost."""

import dataclasses

from bench_cases import SETTINGS, small  # noqa: F401

from seeupo_jax.instruments.bench import gain


def test_both_ways_give_the_same_gains_and_are_timed(capsys):
    found = gain.run(dataclasses.replace(SETTINGS, repeats=1))
    assert found["largest_difference"] < 1e-4 and found["gains"] > 0
    assert found["passes"] == 3 and set(found["contenders"]) == {
        gain.PLAIN,
        gain.BRANCHES,
        gain.SEPARATE,
    }
    plain, branches, separate = (
        found["contenders"][name]["median_s"] for name in (gain.PLAIN, gain.BRANCHES, gain.SEPARATE)
    )
    assert found["branches_over_none"]["ratio"] == branches / plain
    assert found["separate_over_branches"]["ratio"] == separate / branches
    first = capsys.readouterr().out.splitlines()[0]
    ratio = found["separate_over_branches"]["ratio"]
    assert first.startswith(f"{ratio:.2f}x faster than 3 passes")
