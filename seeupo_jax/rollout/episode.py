"""One trajectory: what is asked for, and how it comes about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from seeupo_jax.envs.base import Message, StepResult, Tool
from seeupo_jax.envs.pool import CallOutcome, Failure
from seeupo_jax.envs.snapshot import Snapshot
from seeupo_jax.envs.validation import OWN_REWARD
from seeupo_jax.policy.files.tokenizer import TokenizedConversation, Transcript
from seeupo_jax.rewards.finished_episode import HISTORY, FinishedEpisode
from seeupo_jax.rewards.reward_ledger import RewardLedger
from seeupo_jax.rewards.scorer import Scored
from seeupo_jax.rollout.engine.sampling import branch_chance, task_number
from seeupo_jax.types import Segment, Trajectory


@dataclass(frozen=True)
class Request:
    """One trajectory to sample: one of group `group`, on one task.

    member: which of the task's trajectories; its groups share the numbers out.
    fork: the episode that it continues; None: it begins with its task.
    """

    task_id: str
    group: int
    member: int
    fork: Fork | None = None

    def episode_seed(self, *, seed: int, iteration: int) -> int:
        """Seed of its environment's random transitions, below 2**31 so that any generator takes it.

        It derives from what its tokens' random numbers derive from (`Streams`), or those of the
        episode that its tree began with.
        """
        member = self.member if self.fork is None else self.fork.origin
        numbers = [seed, iteration, task_number(self.task_id), member]
        return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)

    def chance(self, turns: int, *, seed: int, iteration: int) -> float:
        """Uniform in [0, 1), by which it is decided whether it branches after so many turns."""
        numbers = seed, iteration, task_number(self.task_id), self.member
        return branch_chance(*numbers, turns)


class Kept(NamedTuple):
    """What an environment's reply leaves for episodes that continue after it."""

    snapshot: Snapshot | None


@dataclass(frozen=True, eq=False)
class Fork:
    """Where an episode begins that continues another one of its group.

    place: of that one in the group. turns: that it has from it. origin: the member with which the
      tree began. start: that episode after these turns.
    """

    place: int
    turns: int
    origin: int
    start: Episode

    @property
    def replayed_turns(self) -> int:
        """Turns that its environment has to be brought through."""
        return self.turns if self.start.snapshot is None else 0


@dataclass
class Episode:
    """A trajectory in the making."""

    request: Request
    slot: int  # of the pool: which environment
    conversation: TokenizedConversation | None = None  # none until the environment has begun
    transcript: Transcript = field(default_factory=Transcript)
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Tool] = ()
    ledger: RewardLedger = field(default_factory=RewardLedger)
    has_finish: bool = False  # its environment's `finish` has yet to be called
    score: float = 0.0
    stop: str | None = None
    timeout_counts: bool = False
    retries: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    said: list[int] = field(default_factory=list)  # each action's place among the messages
    entropy: list[float] = field(default_factory=list)  # `Action.entropy`, where it is known
    ends: dict[int, Episode] = field(default_factory=dict)  # it, after so many turns, for forks
    snapshot: Snapshot | None = None  # its environment then; None: replayed
    replayed: int | None = None  # turns that its environment was brought through; None: all

    @property
    def turn(self) -> int:
        """The number of the turn to be sampled next."""
        return len(self.ledger.turns)

    @property
    def failed(self) -> bool:
        """Whether the episode failed, as in `Trajectory.failed`."""
        return self.stop == "env_error" or (self.stop == "timeout" and not self.timeout_counts)

    def copy(self, snapshot: Snapshot | None = None) -> Episode:
        """It as it is now, whatever becomes of it; with a copy of its environment."""
        return replace(
            self,
            transcript=self.transcript.copy(),
            messages=list(self.messages),
            ledger=self.ledger.copy(),
            said=list(self.said),
            entropy=list(self.entropy),
            retries=0,
            ends={},
            snapshot=snapshot,
        )

    @classmethod
    def begin(cls, request: Request, slot: int) -> Episode:
        """An episode of a request; one that continues another has its turns as history."""
        if request.fork is None:
            return cls(request, slot)
        return replace(request.fork.start.copy(), request=request, slot=slot, replayed=0)

    def segments(self) -> tuple[Segment, ...]:
        """The segments read and sampled so far."""
        return self.transcript.segments()

    def on_result(self, outcome: CallOutcome, timeout_as: str) -> None:
        """Takes what its environment answered to `reset`, `step` or `finish`; a failure ends it."""
        self.retries += outcome.retries
        result = outcome.result
        if isinstance(result, Failure):
            self.on_failure(result, timeout_as)
        elif self.stop is not None:  # of `finish`, whose reward is added to the last turn's
            last_reward, paid, self.score = result
            self.ledger.add({OWN_REWARD: last_reward}, paid)
        elif self.conversation is None:  # of `reset`
            messages, self.tools, self.conversation, self.has_finish = result
            self.messages += messages
        else:
            self._take_step(*result)

    def on_failure(self, failure: Failure, timeout_as: str) -> None:
        """Ends it by what its environment, or its agent, failed by.

        With `timeout_as=zero_reward` an episode counts that hung after an action: the rewards
        before that turn stay, and its score is 0.
        """
        self.fail(failure.stop, failure.reason)
        if failure.stop == "timeout" and timeout_as == "zero_reward" and self.turn:
            self.timeout_counts, self.score = True, 0.0

    def on_scored(self, scored: Scored, paid: Sequence[float]) -> None:
        """Takes what the reward functions gave, and the weighted sums of it for the last turns."""
        self.ledger.add(scored.rewards, paid)

    def view(self, split: str, candidate: str | None = None) -> FinishedEpisode:
        """The episode for reward functions; for a judge with a candidate of the turn at its end."""
        named = dict(self.ledger.named)
        more = () if candidate is None else ({"role": "assistant", "content": candidate},)
        return FinishedEpisode(
            task_id=self.request.task_id,
            split=split,
            messages=(*self._marked(), *more),
            tools=tuple(self.tools),
            stop="candidate" if more else "done" if self.stop is None else self.stop,
            turns=self.turn + len(more),
            reward=named.pop(OWN_REWARD),
            rewards=named,
            score=self.score,
            info=self.info,
        )

    def _marked(self) -> Sequence[Message]:
        """The messages; an assistant's has the key `HISTORY` where the policy has not sampled it.

        The turns of an agent have no known places: its messages have been marked before.
        """
        if len(self.said) < self.turn:
            return self.messages
        said = set(self.said)
        return [
            {HISTORY: "sent", **message}
            if message["role"] == "assistant" and place not in said
            else message
            for place, message in enumerate(self.messages)
        ]

    def _take_step(
        self,
        step: StepResult,
        paid: Sequence[float],
        score: float,
        conversation: TokenizedConversation | None,
        snapshot: Kept | None,
    ) -> None:
        self.ledger.add_step({OWN_REWARD: step.reward, **step.rewards}, paid)
        self.score, self.conversation = score, conversation
        self.messages += step.observation
        self.info = self.info | step.info
        if step.done:
            self.stop = "done"
        if snapshot is not None:
            self.ends[self.turn] = self.copy(snapshot.snapshot)

    def fail(self, stop: str, reason: str) -> None:
        self.stop, self.info = stop, self.info | {"failure": reason}

    def finish(self, seed: int, policy_version: int | None, *, weighted: bool) -> Trajectory:
        """The trajectory; `weighted`: its rewards have names, also where `env` is the only one."""
        request = self.request
        episode_info = {"score": self.score, "member": request.member, "retries": self.retries}
        if self.entropy:
            episode_info["entropy"] = [round(entropy, 6) for entropy in self.entropy]
        return Trajectory(
            segments=self.segments(),
            reward_table=self.ledger.table(with_names=weighted),
            group=request.group,
            task_id=request.task_id,
            seed=seed,
            stop="done" if self.stop is None else self.stop,
            messages=tuple(self.messages),
            info=self.info | episode_info,
            policy_version=policy_version,
            timeout_counts=self.timeout_counts,
            parent=None if request.fork is None else request.fork.place,
            fork=0 if request.fork is None else request.fork.turns,
        )
