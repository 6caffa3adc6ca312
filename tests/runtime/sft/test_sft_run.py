"""How many steps a supervised run has, and what it says of the policy that it leaves."""

from types import SimpleNamespace

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.runtime.sft import sft_run
from seeupo_jax.runtime.sft.supervised import count_steps


@pytest.mark.parametrize(
    "conversations, epochs, steps",
    [(5, 1, 2), (5, 3, 4), (3, 1, 1), (4, 1, 1), (8, 3, 6)],
)
def test_a_run_has_the_fewest_steps_that_are_all_epochs(conversations, epochs, steps):
    fields = {"epochs": epochs, "batch_size": 4}
    assert count_steps(from_dict({"sft": fields}), conversations) == steps
    assert count_steps(from_dict({"sft": {**fields, "steps": 7}}), conversations) == 7


@pytest.mark.parametrize(
    ("keep_best", "best", "said"),
    [
        (1, 8, "after step 8, held-out loss 0.2500"),
        (1, 12, "after step 12, held-out loss 0.2500"),
        (0, 8, "after step 12"),  # whose loss is not the best one
        (1, None, "after step 12"),
    ],
)
def test_the_loss_that_is_told_is_that_of_the_policy_that_is_left(
    keep_best, best, said, tmp_path, monkeypatch
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
    state = SimpleNamespace(best=lowest, saved=True, done=12, train=None)
    run = SimpleNamespace(parts=parts, checkpoints=nothing)
    sft_run.SftRun.finish(run, state)
    assert logged == [f"wrote {tmp_path / 'policy'}: {said}"]
