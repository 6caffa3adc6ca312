"""How a run ends in which a callback raises."""

import contextlib
from types import SimpleNamespace

import pytest

from seeupo_jax.errors import NotLearning
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.training.callbacks import (
    Callback,
    Callbacks,
    RunHandle,
    check_callbacks,
    notify_callbacks,
)


class Raises(Callback):
    """Raises an error after an iteration, and keeps what `on_end` is given."""

    def __init__(self, error):
        self.error, self.ends = error, []

    def on_iteration(self, run, iteration, metrics):
        raise self.error

    def on_end(self, run, error):
        self.ends.append(error)


@pytest.mark.parametrize("error", [LookupError("mine"), SystemExit("enough"), NotLearning("x")])
@pytest.mark.parametrize("idle", [None, NotLearning("iteration 1 learned nothing")])
def test_a_callbacks_error_is_raised_when_the_run_is_saved(error, idle, tmp_path):
    mine, request, saved = Raises(error), StopRequest(), []
    callbacks = Callbacks([mine], RunHandle(SimpleNamespace(), tmp_path, request))
    run = contextlib.ExitStack()
    run.callback(saved.append, True)
    with pytest.raises(type(error)) as raised, notify_callbacks(run, callbacks, 0):
        callbacks.iteration(1, {})
        assert request.reason == f"Raises raised {type(error).__name__}"
        callbacks.iteration(2, {})  # is not called any more
        if idle is not None:
            raise idle
    assert raised.value is error and error.__cause__ is idle
    assert mine.ends == [error] and saved == [True]


class RaisesAtEnd(Raises):
    def on_end(self, run, error):
        super().on_end(run, error)
        raise self.error


@pytest.mark.parametrize("own", [None, LookupError("of the run")])
def test_all_callbacks_hear_the_end_and_one_error_is_raised_and_none_lost(own, tmp_path, caplog):
    ending = [RaisesAtEnd(OSError("first")), RaisesAtEnd(SystemExit("second")), Raises(None)]
    callbacks = Callbacks(ending, RunHandle(SimpleNamespace(), tmp_path, StopRequest()))
    run = contextlib.nullcontext()
    with pytest.raises(BaseException) as raised, notify_callbacks(run, callbacks, 0):
        if own is not None:
            raise own
    assert raised.value is (ending[0].error if own is None else own)
    assert [each.ends for each in ending] == [[own]] * 3
    logged = [record.getMessage() for record in caplog.records]
    assert all(text.startswith("on_end of RaisesAtEnd raised ") for text in logged)
    names = [text.split()[4] for text in logged]
    assert names == [*(["OSError:"] if own else []), "SystemExit:"]


def test_a_run_that_does_not_learn_is_told_by_its_own_error(tmp_path):
    mine, idle = Raises(None), NotLearning("iteration 1 learned nothing")
    callbacks = Callbacks([mine], RunHandle(SimpleNamespace(), tmp_path, StopRequest()))
    with (
        pytest.raises(NotLearning) as raised,
        notify_callbacks(contextlib.nullcontext(), callbacks, 0),
    ):
        raise idle
    assert raised.value is idle and mine.ends == [idle]


class Helping(Callback):
    """A callback of one event, with methods and attributes of its own that are no event's."""

    def __init__(self):
        self.on_done = print  # an attribute, which nobody takes for a method

    def on_end(self, run, error):
        self.report()

    def report(self):
        pass


class Late(Callback):
    """Has its method since it was made."""

    def __init__(self):
        self.on_iteration = print


class Plural(Helping):
    def on_iterations(self, run, iteration, metrics):
        pass


class Short(Helping):
    def onstep(self, run, iteration, step, steps):
        pass


class Other(Helping):
    def on_epoch(self, run):
        pass


class Silent(Callback):
    def report(self):
        pass


@pytest.mark.parametrize(
    "wrong, got",
    [
        (Plural, "Plural with the method 'on_iterations', which no event calls"),
        (Short, "Short with the method 'onstep', which no event calls"),
        (Other, "Other with the method 'on_epoch', which no event calls"),
        (Silent, "Silent without a method for an event"),
    ],
)
def test_a_method_that_no_event_calls_is_refused(wrong, got):
    check_callbacks([Helping(), Late()])
    with pytest.raises(ValueError) as error:
        check_callbacks([Helping(), wrong()])
    assert str(error.value).startswith(f"callbacks[1]: got {got}; allowed: ")
    assert "on_start, on_trajectories, on_step, on_iteration, on_evaluation, on_end" in str(
        error.value
    )
