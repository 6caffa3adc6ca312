"""The comparison of runs as a table."""

import io

from rich.console import Console

from seeupo_jax.compare.figures import Line, table


def test_names_of_recipes_are_as_they_are_given():
    text = io.StringIO()
    Console(width=160, file=text).print(table([Line("grpo[b]:100:", 2, ())], k=[4]))
    assert "grpo[b]:100:" in text.getvalue() and "0 of 2" in text.getvalue()
