"""Programs compiled side by side are those that are then called, and a stop is heard meanwhile."""

import threading
import time

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
        [lambda f=f, x=x: f.lower(x) for f, x in made],
        lambda *_: looks.append(compilations.programs),
    )
    assert compilations.programs == 5
    assert [float(f(x)) for f, x in made] == [n * n + 1 for n in range(5)]
    compilations.close()
    assert compilations.programs == 5
    assert len(looks) >= 6 and min(looks[-5:]) >= 1  # before the first, and after each


def test_each_look_has_the_number_that_are_compiled_and_of_all():
    looks = []
    made = [lambda f=f, x=x: f.lower(x) for f, x in programs(2 * WORKERS + 5)]
    compile_all(made, lambda *look: looks.append(look))
    assert [*dict.fromkeys(looks)] == [(done, len(made)) for done in range(len(made) + 1)]


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

    def stop(done, total):
        if done:
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

    looks = []

    def stop(done, total):
        assert (done, total) == (0, 1) and not program.released.is_set()
        looks.append(done)
        if len(looks) == 2:  # the first is before anything is compiled
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_all([lambda: program], stop)
    program.released.set()


def test_what_is_under_way_counts_from_its_beginning_and_once():
    now = [100.0]
    compilations = Compilations(clock=lambda: now[0])

    def begin(event):
        jax.monitoring.record_scalar(f"/jax/core/compile/{event}", now[0])

    def end(event, seconds):
        jax.monitoring.record_event_duration_secs(f"/jax/core/compile/{event}", seconds)

    assert compilations.under_way_s(100.0) == compilations.seconds_at(100.0) == 0
    begin("jaxpr_trace_duration")  # holds another one, and a compilation of its constants
    now[0] = 102.0
    begin("backend_compile_duration")
    assert compilations.under_way_s(103.0) == compilations.seconds_at(103.0) == 3
    now[0] = 104.0
    end("backend_compile_duration", 2.0)
    assert compilations.under_way_s(105.0) == compilations.seconds_at(105.0) == 5
    assert compilations.seconds == 2  # of what is over
    now[0] = 106.0
    end("jaxpr_trace_duration", 6.0)
    assert compilations.under_way_s(110.0) == 0
    assert compilations.seconds_at(110.0) == compilations.seconds == 6
    now[0] = 120.0
    begin("backend_compile_duration")
    begin("something_else")
    assert (compilations.under_way_s(121.0), compilations.seconds_at(121.0)) == (1, 7)
    compilations.close()


def test_jax_reports_that_a_program_is_under_way_and_that_it_is_over():
    compilations, seconds = Compilations(), []

    def traced(x):
        seconds.append(compilations.under_way_s(time.monotonic()))
        return x

    jax.jit(traced)(np.float32(1))
    assert seconds[0] > 0 == compilations.under_way_s(time.monotonic())
    assert compilations.seconds == compilations.seconds_at(time.monotonic()) > seconds[0]
    compilations.close()


def test_seconds_of_programs_that_are_compiled_side_by_side_count_once():
    compilations = Compilations()
    for event in ("jaxpr_trace_duration", *["backend_compile_duration"] * 3):
        jax.monitoring.record_event_duration_secs(f"/jax/core/compile/{event}", 1000.0)
    compilations.close()
    assert compilations.programs == 3
    assert compilations.seconds == pytest.approx(1000.0, abs=30)
