"""A judge of candidates has the limits of `config.judge`."""

import reward_cases

from seeupo_jax.configuration.reward import Judge
from seeupo_jax.rewards.candidate_judge import make_judge
from seeupo_jax.rewards.finished_episode import FinishedEpisode


def test_a_call_beyond_the_configured_time_is_the_candidates_failure():
    scorer = make_judge(Judge(function="reward_cases:hangs", timeout_s=0.1), "order_desk")
    try:
        scorer.submit(0, FinishedEpisode("bad", "train", (), (), "candidate", 1, 0, {}, 0, {}))
        ((_, scored),) = scorer.poll(1.0, timeout_s=20)
    finally:
        reward_cases.released.set()
        scorer.close()
        reward_cases.released.clear()
    assert scored.failure.reason == "reward judge: no answer in 0.1 s"
