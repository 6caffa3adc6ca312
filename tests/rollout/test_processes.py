"""Several processes sample what one does, each with environments of its own."""

import pickle

import numpy as np
import pytest
from process_cases import run_processes


def collect(folder, processes, devices):
    """What each process has: the trajectories of three collections, of which one is prefetched, one
    in rounds and one played by agents, and the actions of its own turns in a fourth one, in which
    some turns are cancelled and the policy is swapped for itself.
    """
    return run_processes("rollout_process.py", processes, devices, folder, read=pickle.loads)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (one,) = collect(tmp_path_factory.mktemp("alone"), 1, 1)
    return one


@pytest.mark.sampled("2-2")
@pytest.mark.parametrize("processes, devices", [(2, 2), (4, 1)])
def test_several_processes_give_the_trajectories_of_one(alone, tmp_path, processes, devices):
    every = collect(tmp_path, processes, devices)
    *collections, uncancelled = alone
    merged = {key: action for *_, own in every for key, action in own.items()}
    assert merged.keys() == uncancelled.keys() and sum(len(own) for *_, own in every) == 16
    for key, (tokens, logp) in uncancelled.items():
        assert merged[key][0] == tokens
        np.testing.assert_allclose(merged[key][1], logp, atol=1e-5)
    for got in every:
        for collection, wanted in zip(got[:-1], collections, strict=True):
            assert [t.stop for t in collection] == [t.stop for t in wanted]
            for trajectory, other in zip(collection, wanted, strict=True):
                assert trajectory.messages == other.messages
                assert trajectory.info == other.info
                assert (trajectory.reward, trajectory.group) == (other.reward, other.group)
                assert (trajectory.turn_rewards, trajectory.task_id) == (
                    other.turn_rewards,
                    other.task_id,
                )
                (segment,), (same,) = trajectory.segments, other.segments
                np.testing.assert_array_equal(segment.tokens_L, same.tokens_L)
                np.testing.assert_array_equal(segment.turn_L, same.turn_L)
                np.testing.assert_allclose(segment.logp_L, same.logp_L, atol=1e-5)


def test_the_collections_of_the_test_are_no_trivial_ones(alone):
    prefetched, rounds, agents, uncancelled = alone
    assert {t.stop for t in agents} == {"done", "max_turns", "env_error"}
    assert [t.turns for t in agents[::3]] == [4, 2, 3, 4, 2, 4, 1, 3]
    assert {t.info.get("agent_failure") for t in agents} == {None, "exception"}
    kept, left_out = rounds[:24], rounds[24:]
    for collection in (prefetched, rounds):
        assert {t.stop for t in collection} == {"done", "max_turns", "env_error"}
        lengths = [len(t.segments[0].tokens_L) for t in collection]
        assert min(lengths) < 40 < 70 < max(lengths)
    assert len({t.segments[0].tokens_L.tobytes() for t in (*prefetched, *rounds[:24])}) >= 40
    assert len(kept) == 24 and not any(t.failed for t in kept)
    assert len({t.reward for t in kept}) > 10
    assert any(t.failed for t in left_out)
    assert len(uncancelled) == 16
