"""One trajectory: what is asked for, and how it comes about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seeupo_jax.envs.base import Message, StepResult, Tool
from seeupo_jax.envs.pool import Failure, Outcome
from seeupo_jax.policy.files.tokenizer import Conversation, Transcript
from seeupo_jax.rollout.engine.sampling import task_number
from seeupo_jax.types import Trajectory


@dataclass(frozen=True)
class Request:
    """One trajectory to sample: one of group `group`, on one task.

    member: which of the task's trajectories; its groups share the numbers out.
    """

    task_id: str
    group: int
    member: int

    def episode_seed(self, *, seed: int, iteration: int) -> int:
        """Seed of its environment's random transitions, below 2**31 so that any generator takes it.

        It derives from what its tokens' random numbers derive from (`Streams`).
        """
        numbers = [seed, iteration, task_number(self.task_id), self.member]
        return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


@dataclass
class Episode:
    """A trajectory in the making."""

    request: Request
    slot: int  # of the pool: which environment
    conversation: Conversation | None = None  # none until the environment has begun
    transcript: Transcript = field(default_factory=Transcript)
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Tool] = ()
    rewards: list[float] = field(default_factory=list)  # of each turn that was sampled
    turnless_reward: float = 0.0  # paid by `finish` where no turn was sampled
    has_finish: bool = False  # its environment's `finish` has yet to be called
    score: float = 0.0
    stop: str | None = None
    timeout_counts: bool = False
    retries: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def turn(self) -> int:
        """To be sampled next."""
        return len(self.rewards)

    @property
    def earned(self) -> float:
        """The rewards so far."""
        return sum(self.rewards, self.turnless_reward)

    def on_result(self, outcome: Outcome, timeout_as: str) -> None:
        """Takes what its environment answered to `reset`, `step` or `finish`; a failure ends it.

        With `timeout_as=zero_reward` an episode counts whose environment hung after an action: the
        rewards before that turn stay, and its score is 0.
        """
        self.retries += outcome.retries
        result = outcome.result
        if isinstance(result, Failure):
            self.fail(result.stop, result.reason)
            if result.stop == "timeout" and timeout_as == "zero_reward" and self.rewards:
                self.timeout_counts, self.score = True, 0.0
        elif self.stop is not None:  # of `finish`, whose reward is added to the last turn's
            reward, self.score = result
            if self.rewards:
                self.rewards[-1] += reward
            else:
                self.turnless_reward = reward
        elif self.conversation is None:  # of `reset`
            messages, self.tools, self.conversation, self.has_finish = result
            self.messages += messages
        else:
            self._take_step(*result)

    def _take_step(self, step: StepResult, score: float, conversation: Conversation | None) -> None:
        self.rewards[-1] = step.reward
        self.score, self.conversation = score, conversation
        self.messages += step.observation
        self.info = self.info | step.info
        if step.done:
            self.stop = "done"

    def fail(self, stop: str, reason: str) -> None:
        self.stop, self.info = stop, self.info | {"failure": reason}

    def finish(self, seed: int, policy_version: int | None) -> Trajectory:
        request = self.request
        own = {"score": self.score, "member": request.member, "retries": self.retries}
        return Trajectory(
            segments=self.transcript.segments(),
            reward=self.earned,
            group=request.group,
            task_id=request.task_id,
            seed=seed,
            stop="done" if self.stop is None else self.stop,
            messages=tuple(self.messages),
            info=self.info | own,
            policy_version=policy_version,
            turn_rewards=tuple(self.rewards),
            timeout_counts=self.timeout_counts,
        )
