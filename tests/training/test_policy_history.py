"""Which of the trajectories that a stopped run has left may be trained on."""

import numpy as np
import pytest

from seeupo_jax.training.policy_history import (
    PolicyHistory,
    Verdict,
    join_origins,
    split_origins,
)
from seeupo_jax.types import Segment, Trajectory


def sampled(version_L, began):
    turn_L = np.where(np.array(version_L) < 0, -1, 0).astype(np.int32)
    segment = Segment(turn_L, turn_L, np.zeros(len(turn_L), np.float32))
    segment = Segment(turn_L, turn_L, segment.logp_L, version_L=np.array(version_L, np.int32))
    return Trajectory.of((segment,), 0.0, 0, policy_version=began)


@pytest.fixture
def history():
    """Versions 2 to 5, of at most two sweeps of lag: the oldest is forgotten."""
    history = PolicyHistory(2)
    for version in range(2, 6):
        history.add(version, f"f{version}")
    return history


@pytest.mark.parametrize(
    "sampled_by, iteration, verdict",
    [
        ({5: "f5"}, 6, Verdict.USABLE),
        ({3: "f3", 5: "f5"}, 6, Verdict.USABLE),
        ({3: "f3"}, 7, Verdict.STALE),  # three sweeps before version 6, which is trained
        ({4: "other"}, 6, Verdict.OTHER),
        ({4: "f4", 5: "other"}, 6, Verdict.OTHER),
        ({4: ""}, 6, Verdict.OTHER),  # of a version that was not known when it was logged
        ({5: "f5", 6: "f6"}, 7, Verdict.COMING),
        ({3: "other", 6: "f6"}, 7, Verdict.COMING),  # judged once its newest policy is there
    ],
)
def test_only_what_this_runs_policies_have_sampled_is_used(history, sampled_by, iteration, verdict):
    assert history.judge(sampled_by, iteration) is verdict


def test_a_resumed_run_knows_the_policies_before_its_checkpoint(history):
    resumed = PolicyHistory(2)
    resumed.restore(history.state())
    resumed.add(6, "f6")
    assert resumed.judge({4: "f4", 6: "f6"}, 7) is Verdict.USABLE
    resumed.add(7, "f7")
    assert resumed.judge({4: "f4"}, 7) is Verdict.OTHER  # forgotten: no iteration may use it


def test_versions_are_those_of_the_tokens_and_of_the_beginning(history):
    trajectories = [sampled([-1, 4, 4, 5], 4), sampled([-1, 5], 3), sampled([-1], 3)]
    assert history.sampled(trajectories) == {3: "f3", 4: "f4", 5: "f5"}
    assert history.sampled([sampled([-1, 6], 6)]) == {6: ""}


@pytest.mark.parametrize("sampled_by", [{5: "ab"}, {4: "cd"}, {3: "ef", 5: "ab"}])
def test_origins_are_one_text_that_of_on_policy_data_is_a_fingerprint(sampled_by):
    text = join_origins(sampled_by, 6)
    assert split_origins(text, 6) == sampled_by
    assert (text == "ab") == (sampled_by == {5: "ab"})
