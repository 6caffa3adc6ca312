"""What the log of a run says about its iterations."""

import io
import types

import numpy as np
from places import TINY

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.episode_metrics import rewritten_episodes
from seeupo_jax.training.run_log import RunLog
from seeupo_jax.types import Segment, Trajectory

TOKENIZER = types.SimpleNamespace(
    token_bytes=lambda: [b"a"] * 10, why_rewritten=lambda: "The template forgets; set this."
)


def episode(*segments, **info):
    """Of the turn of each token, -1 for context."""
    made = tuple(
        Segment(np.arange(len(turn)) % 10, np.array(turn), np.zeros(len(turn))) for turn in segments
    )
    info = {"score": 1.0, "retries": 0} | info
    return Trajectory.of(made, 1.0, 0, "task", info=info)


# A prompt of two tokens; each turn reads one more and samples two.
FORGETS = episode([-1, -1, 0, 0], [-1] * 5 + [1, 1], [-1] * 8 + [2, 2])
KEEPS = episode([-1, -1, 0, 0, -1, 1, 1])


def collected(*trajectories):
    return Collected(trajectories, 1.0, 0.5, 10, 20)


def logged(tmp_path, *iterations):
    """The lines of a run with these collections, and the numbers of segments that it wrote."""
    config, stream = load_config(TINY), io.StringIO()
    with ProgressDisplay(len(iterations), "plain", stream=stream) as progress:
        log = RunLog(config, tmp_path, progress, TOKENIZER)
        for number, each in enumerate(iterations, 1):
            log.iteration(number, each, [None] * len(each.trajectories), {}, {})
        log.close()
    return stream.getvalue(), [line["rollout/segments_mean"] for line in read_metrics(tmp_path)]


def test_turns_that_are_segments_of_their_own_are_warned_of_once(tmp_path):
    text, segments = logged(tmp_path, collected(FORGETS, KEEPS, FORGETS), *[collected(FORGETS)] * 2)
    assert text.count("every turn is a segment of its own") == 1
    assert (
        "iteration 1: warning: in 2 of 3 episodes of several turns every turn is a segment of its"
        " own: they have 21 tokens on average, where one segment would have about 10. The template"
        " forgets; set this." in text
    )
    assert segments == [7 / 3, 3.0, 3.0]


def test_a_run_of_whole_episodes_is_not_warned(tmp_path):
    text, segments = logged(tmp_path, collected(FORGETS, KEEPS), collected(KEEPS))
    assert "segment" not in text
    assert segments == [2.0, 1.0]


def test_an_agents_conversations_side_by_side_are_no_rewritten_ones():
    of_agent = episode([-1, 0, 0], [-1, 1, 1], lineages=2, refused_calls=0)
    failed = Trajectory.of(FORGETS.segments, 0.0, 0, stop="env_error", info={"failure": "x"})
    counts = rewritten_episodes(collected(of_agent, failed))
    assert (counts.several, counts.rewritten) == (0, 0)
    one = episode([-1, 0, 0], [-1, -1, 1, 1], lineages=1, refused_calls=0)
    assert rewritten_episodes(collected(one)).rewritten == 1
