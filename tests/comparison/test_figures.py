"""The comparison of runs as a table."""

import io

import numpy as np
from rich.console import Console

from seeupo_jax.comparison.figures import Line, RunCurve, table, token_budget
from seeupo_jax.metrics.statistics import Estimate


def test_names_of_recipes_are_as_they_are_given():
    text = io.StringIO()
    Console(width=160, file=text).print(table([Line("grpo[b]:100:", 2, ())], k=[4]))
    assert "grpo[b]:100:" in text.getvalue() and "0 of 2" in text.getvalue()


def test_runs_are_compared_as_far_as_the_shortest_has_got():
    def history(seed, *tokens):
        success_I, before = np.full(len(tokens), 0.5), Estimate(0.5, 0.4, 0.6)
        at_I = np.array(tokens)
        return RunCurve(seed, True, at_I, at_I / 50, success_I, before, 0.5, 400, 8)

    line = Line("grpo", 2, (history(0, 0.0, 100.0, 300.0), history(1, 0.0, 150.0, 200.0)))
    assert (line.reach(), line.reach("steps")) == (200.0, 4.0)
    assert line.curve()[-1].at == 200.0 == token_budget([line])
