"""Programs compiled side by side are those that are then called, and a stop is heard meanwhile."""

import threading

import jax
import numpy as np
import pytest

from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.compiling import WORKERS, compile_all


def programs(count):
    """Jitted functions that differ, and what each is called with."""
    return [(jax.jit(lambda x, n=n: x * n + 1), np.float32(n)) for n in range(count)]


def test_calls_of_what_was_compiled_ahead_compile_nothing():
    made, looks = programs(5), []
    compilations = Compilations()
    compile_all(
        (lambda f=f, x=x: f.lower(x) for f, x in made),
        lambda: looks.append(compilations.programs),
    )
    assert compilations.programs == 5
    assert [float(f(x)) for f, x in made] == [n * n + 1 for n in range(5)]
    compilations.close()
    assert compilations.programs == 5
    assert len(looks) >= 5 and min(looks[-5:]) >= 1  # after each


class Meets:
    """A lowered program that is compiled once another one is."""

    barrier = threading.Barrier(2, timeout=60)

    def compile(self):
        self.barrier.wait()


@pytest.mark.skipif(WORKERS == 1, reason="one core")
def test_two_programs_are_compiled_at_the_same_time():
    compile_all([Meets] * 4)


def test_a_stop_ends_the_compilation_and_an_error_is_raised():
    lowered = []

    def lower(f, x):
        lowered.append(x)
        return f.lower(x)

    def stop():
        raise KeyboardInterrupt

    made = [lambda f=f, x=x: lower(f, x) for f, x in programs(20)]
    with pytest.raises(KeyboardInterrupt):
        compile_all(made, stop)
    assert len(lowered) <= WORKERS + 1
    wrong = [lambda: jax.jit(lambda x: x @ x).lower(np.float32(1))]
    with pytest.raises(ValueError, match="matmul"):
        compile_all([*made[:2], *wrong])


class Endless:
    """A lowered program that is compiled when it is released."""

    def __init__(self):
        self.released = threading.Event()

    def compile(self):
        self.released.wait(60)


def test_a_stop_is_heard_while_a_program_is_being_compiled():
    program = Endless()

    def stop():
        assert not program.released.is_set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([lambda: program], stop)
    program.released.set()


def test_seconds_of_programs_that_are_compiled_side_by_side_count_once():
    compilations = Compilations()
    for event in ("jaxpr_trace_duration", *["backend_compile_duration"] * 3):
        jax.monitoring.record_event_duration_secs(f"/jax/core/compile/{event}", 1000.0)
    compilations.close()
    assert compilations.programs == 3
    assert compilations.seconds == pytest.approx(1000.0, abs=30)
