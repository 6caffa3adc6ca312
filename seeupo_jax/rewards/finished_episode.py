"""The argument of a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.types import HISTORY as HISTORY


@dataclass(frozen=True)
class FinishedEpisode:
    """A finished episode, a copy for each call.

    task_id, split: the task and its split: `train`, or an evaluation's.
    messages: the whole conversation, in order; the policy's have the role `assistant`. Before each
      of them stand the messages that an agent's call newly showed the policy. An assistant message
      that the policy did not sample in this form (an agent's or an environment's) has the key
      `history`.
    tools: those that the policy had.
    stop: done | max_turns | max_tokens | timeout (with env.timeout_as=zero_reward); `candidate`
      where a judge scores the last message, which no environment has executed.
    turns: how many messages of the policy.
    reward: the environment's own, before its weight.
    rewards: those that the environment names, before their weights.
    score: the environment's, in [0, 1]; 1 is success.
    info: every `StepResult.info` merged into one dict, later steps overwriting earlier ones: an
      environment passes details of its task here.
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
        replies = (m for m in reversed(self.messages) if m["role"] == "assistant")
        return next((m["content"] for m in replies if HISTORY not in m), "")
