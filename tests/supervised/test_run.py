"""How many steps a supervised run has, and what it says of the policy that it leaves."""

import contextlib
from types import SimpleNamespace

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.errors import DataChanged
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.supervised import run as sft_run
from seeupo_jax.supervised.run import SftRun, with_held_out_loss
from seeupo_jax.supervised.sft_components import SftState
from seeupo_jax.supervised.sft_config import count_steps


@pytest.mark.parametrize(
    "conversations, epochs, steps",
    [(5, 1, 2), (5, 3, 4), (3, 1, 1), (4, 1, 1), (8, 3, 6)],
)
def test_a_run_has_the_fewest_steps_that_are_all_epochs(conversations, epochs, steps):
    fields = {"epochs": epochs, "batch_size": 4}
    assert count_steps(from_dict({"sft": fields}), conversations) == steps
    assert count_steps(from_dict({"sft": {**fields, "steps": 7}}), conversations) == 7


@pytest.mark.parametrize(
    ("keep_best", "best", "said", "before"),
    [
        (1, 8, "after step 8, held-out loss 0.2500", None),
        (1, 12, "after step 12, held-out loss 0.2500", 0.26),
        (0, 8, "after step 12", 0.26),  # whose loss is not the best one
        (1, None, "after step 12", None),
        (1, 8, "after step 8, held-out loss 0.2500", 0.25),
        (0, 8, "after step 12", 0.0625),
    ],
)
def test_the_loss_that_is_told_is_that_of_the_policy_that_is_left(
    keep_best, best, said, before, tmp_path, monkeypatch
):
    logged, nothing = [], SimpleNamespace(wait=lambda: None, policy_at=lambda step, train: {})
    checkpoint = SimpleNamespace(keep_best=keep_best, export=True)
    monkeypatch.setattr(sft_run, "final_params", lambda train: {})
    monkeypatch.setattr(sft_run, "write_policy", lambda *given: None)
    parts = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint),
        workdir=tmp_path,
        given=None,
        policy=None,
        progress=SimpleNamespace(log=logged.append),
    )
    lowest = None if best is None else SimpleNamespace(step=best, loss=0.25)
    state = SimpleNamespace(best=lowest, saved=True, done=12, train=None, before=before)
    run = SimpleNamespace(parts=parts, checkpoints=nothing)
    sft_run.SftRun.finish(run, state)
    assert logged[0] == f"wrote {tmp_path / 'policy'}: {said}"
    warned = before is not None and before <= 0.25
    assert len(logged) == 1 + warned
    if warned:
        losses = f"was {before:.4f} before the first step and is 0.2500 at its lowest since, after"
        assert logged[1].startswith(f"warning: the held-out loss {losses} step 8: no policy of")


def changed_at(place):
    """Batches 0, 1, ..., of which one holds a conversation that has changed."""
    for number in range(9):
        if number == place:
            raise DataChanged("here")
        yield number


def run_of(monkeypatch, batches, **parts):
    monkeypatch.setattr(sft_run, "SftCheckpoints", lambda parts: None)
    request = SimpleNamespace(asked=False)
    given = {"batches": SimpleNamespace(after=lambda done: batches), "request": request}
    return SftRun(SimpleNamespace(**given, **parts))


@pytest.mark.parametrize("done", range(3))
def test_processes_agree_on_their_end_before_every_step(done, monkeypatch):
    """Another process wants an end; this one, which was asked nothing, ends after the same step."""
    run, state = run_of(monkeypatch, changed_at(None)), SftState(done, None)
    run.prepare_step(state)
    monkeypatch.setattr(sft_run, "max_over_processes", lambda wants: [1, 0])
    with pytest.raises(Stopped, match=f"^after step {done}$"):
        run.prepare_step(state)
    monkeypatch.setattr(sft_run, "max_over_processes", lambda wants: [0, 1])
    with pytest.raises(DataChanged, match="as another process found"):
        run.prepare_step(state)


@pytest.mark.parametrize("place", [None, 2])
def test_a_held_out_measurement_ends_between_two_batches(place, monkeypatch):
    measured, times = [], SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    held_out = SimpleNamespace(in_order=lambda: (batch_of(n) for n in changed_at(place)))
    imitation = SimpleNamespace(loss=lambda params, rows: measured.append(rows) or 0.0)
    given = {"times": times, "held_out": held_out, "imitation": imitation}
    run = run_of(monkeypatch, iter(()), **given)
    monkeypatch.setattr(sft_run, "final_params", lambda train: {})
    asked = property(lambda _: place is None and len(measured) == 2)
    run.parts.request = type("Request", (), {"asked": asked})()
    with pytest.raises(Stopped if place is None else DataChanged):
        run.evaluate(SftState(4, None))
    assert measured == [0, 1]


def batch_of(number):
    return SimpleNamespace(rows=number, trained=1)


def test_a_change_of_the_data_waits_until_all_processes_agree_on_it(monkeypatch):
    run, wanted = run_of(monkeypatch, changed_at(0)), []
    monkeypatch.setattr(sft_run, "max_over_processes", lambda wants: wanted.append(wants) or wants)
    with pytest.raises(DataChanged, match="^here$"):
        run.prepare_step(SftState(4, None))
    assert wanted == [[False, True]]


@pytest.mark.parametrize(
    "before, losses, worse, best",
    [
        (0.5, [0.4, 0.3, 0.35, 0.3, 0.2], [0, 0, 1, 2, 0], 4),
        (0.5, [0.9, 0.6, 0.7, 0.5, 0.4], [1, 2, 3, 4, 0], 4),
        (0.1, [0.9, 0.6, 0.7], [1, 2, 3], 1),  # the lowest of those after a step
        (None, [0.9, 0.6, 0.7], [0, 0, 1], 1),  # resumed from an earlier version's checkpoint
    ],
)
def test_patience_counts_from_the_loss_before_the_first_step(before, losses, worse, best):
    states = [SftState(0, None, before=before)]
    for step, loss in enumerate(losses):
        states.append(with_held_out_loss(states[-1]._replace(done=step), loss))
    assert [state.worse for state in states[1:]] == worse
    assert states[-1].best == (best, losses[best])
