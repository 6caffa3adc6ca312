"""What a reward function is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Message, Tool

HISTORY = "history"  # a key of an assistant's message that the policy has not sampled


@dataclass(frozen=True)
class FinishedEpisode:
    """A finished episode, a copy for each call.

    task_id, split: the task, and what it is of: `train`, or an evaluation's split.
    messages: the whole conversation, in order; the policy's have the role `assistant`. What an
      agent's calls newly showed the policy stands before each. An assistant's message that the
      policy has not sampled so, an agent's or an environment's, has the key `history`.
    tools: those that the policy had.
    stop: done | max_turns | max_tokens | timeout (with env.timeout_as=zero_reward); `candidate`
      where a judge is asked what the last message is worth, which no environment has executed.
    turns: how many messages of the policy.
    reward: the environment's own, before its weight.
    rewards: those that the environment names, before their weights.
    score: the environment's, in [0, 1]; 1 is success.
    info: every `StepResult.info` in one dict, of each name the last value that a step gave: what
      the environment offers of its task belongs there.
    """

    task_id: str
    split: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    stop: str
    turns: int
    reward: float
    rewards: Mapping[str, float]
    score: float
    info: Mapping[str, Any]

    @property
    def answer(self) -> str:
        """The policy's last message; empty where it wrote none."""
        said = (m for m in reversed(self.messages) if m["role"] == "assistant")
        return next((m["content"] for m in said if HISTORY not in m), "")
