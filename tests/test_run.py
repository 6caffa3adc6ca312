"""What a run says about a collection."""

from seeupo_jax.rollout.collect import Collected
from seeupo_jax.run import most_frequent_failure
from seeupo_jax.types import Trajectory


def collected(*reasons):
    """A collection with a trajectory a reason; None: it went well."""
    trajectories = [
        Trajectory((), 0.0, 0)
        if reason is None
        else Trajectory((), 0.0, 0, stop="env_error", info={"failure": reason})
        for reason in reasons
    ]
    return Collected(tuple(trajectories), 1.0, 0.5, 10, 20)


def test_the_most_frequent_failure_is_told_in_a_line():
    told = most_frequent_failure(collected("a: x", None, "b: y\n  z", "b: y\n  z"))
    assert told == "3 environments failed, 2 of them so: b: y z"
    assert most_frequent_failure(collected(None, None)) is None
    assert len(most_frequent_failure(collected("long " * 1000))) < 260
