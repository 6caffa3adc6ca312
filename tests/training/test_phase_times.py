"""What compiles during an evaluation is of its own line, not of the iteration's."""

import io

import jax
import jax.numpy as jnp
import pytest

from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.training.phase_times import PhaseTimes


@pytest.fixture
def times():
    with ProgressDisplay(1, stream=io.StringIO()) as progress:
        yield PhaseTimes(progress)


def test_what_is_counted_apart_is_not_among_what_the_iteration_spent(times):
    with times.counted("sweep"):
        jax.jit(lambda x: 3 * x)(jnp.ones(7)).block_until_ready()
    with times.apart("evaluation") as spent:
        jax.jit(lambda x: 5 * x)(jnp.ones(7)).block_until_ready()
    assert spent["evaluation/programs_compiled"] >= 1
    assert 0 < spent["time/compile_s"] <= spent["time/evaluation_s"]
    of_iteration = times.take()
    assert of_iteration["sweep/programs_compiled"] >= 1
    assert not {"time/evaluation_s", "evaluation/programs_compiled"} & set(of_iteration)
    assert of_iteration["time/compile_s"] <= of_iteration["time/sweep_s"]
