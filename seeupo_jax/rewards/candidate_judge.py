"""The judge of a turn's candidates: `config.judge`, or one that an environment comes with."""

from __future__ import annotations

from seeupo_jax.configuration.reward import Judge, Reward
from seeupo_jax.rewards.reward_functions import load_function
from seeupo_jax.rewards.scorer import Scorer

# Environment -> its judge, where `config.judge.function` is none.
JUDGES = {"order_desk": "seeupo_jax.rewards.order_desk_judge:judge_action"}


def make_judge(judge: Judge, environment: str) -> Scorer:
    """The judge of candidates; it reads the conversation up to and including the candidate.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    function = JUDGES.get(environment) if judge.function is None else judge.function
    if function is None:
        raise ValueError(
            f"config.judge.function: got none with env {environment}; allowed: module:function or"
            f" module:Class, since only {', '.join(JUDGES)} has a judge of its own."
        )
    calls = {"concurrency": judge.concurrency, "timeout_s": judge.timeout_s}
    reward = Reward(function, name="judge", options=judge.options, **calls)
    return Scorer((load_function(reward, "config.judge"),))
