"""A trajectory's request, and its episode while it is played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from seeupo_jax.envs.base import Message, StepResult, Tool
from seeupo_jax.envs.pool import CallOutcome, Failure
from seeupo_jax.envs.snapshot import Snapshot
from seeupo_jax.envs.validation import OWN_REWARD
from seeupo_jax.policy.files.tokenizer import TokenizedConversation, Tokenizer, Transcript
from seeupo_jax.rewards.finished_episode import HISTORY, FinishedEpisode
from seeupo_jax.rewards.reward_ledger import RewardLedger
from seeupo_jax.rewards.scorer import ScoringResult
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.engine.sampling import branch_chance, task_number
from seeupo_jax.types import CONTEXT, UNKNOWN_VERSION, Segment, Trajectory


@dataclass(frozen=True)
class EpisodeRequest:
    """One trajectory to sample, in group `group` on one task.

    member: its number among the task's trajectories, which the task's groups divide.
    fork: the episode that it continues; None: it begins with its task.
    shard: of the sampler's rows, which its conversation is dealt to; see `deal`.
    iteration: that it is sampled for, or any other number that keeps the random numbers of two
      collections apart, which derive from it, the seed, the task and the member; below 2**32.
    """

    task_id: str
    group: int
    member: int
    fork: Fork | None = None
    shard: int = 0
    iteration: int = 0

    def episode_seed(self, seed: int) -> int:
        """Seed of its environment's random transitions, below 2**31 so that any generator takes it.

        It derives from the numbers that seed its tokens (`Streams`), or for a branch those of its
        tree's root.
        """
        member = self.member if self.fork is None else self.fork.origin
        numbers = [seed, self.iteration, task_number(self.task_id), member]
        return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)

    def chance(self, turns: int, *, seed: int) -> float:
        """Uniform in [0, 1): decides whether it branches after a number of turns."""
        numbers = seed, self.iteration, task_number(self.task_id), self.member
        return branch_chance(*numbers, turns)


class ForkPoint(NamedTuple):
    """A point after an environment's reply at which other episodes may continue."""

    snapshot: Snapshot | None


@dataclass(frozen=True, eq=False)
class Fork:
    """The start of an episode that continues another one of its group.

    place: of the parent in the group. turns: shared with it. origin: member number of the tree's
      root. start: the parent's state after these turns.
    """

    place: int
    turns: int
    origin: int
    start: Episode

    @property
    def replayed_turns(self) -> int:
        """Turns that its environment has to replay."""
        return self.turns if self.start.snapshot is None else 0


class LastAction(NamedTuple):
    """The last action of a role, and the conversation before it."""

    conversation: TokenizedConversation
    tokens: Sequence[int]


@dataclass
class Episode:
    """A trajectory while it is played."""

    request: EpisodeRequest
    slot: int  # of the pool: which environment
    role: str = ""  # that acts next
    conversation: TokenizedConversation | None = None  # the role's; None until it is reset
    last_actions: dict[str, LastAction] = field(default_factory=dict)  # by role
    transcripts: dict[str, Transcript] = field(default_factory=dict)  # by role
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Tool] = ()
    ledger: RewardLedger = field(default_factory=RewardLedger)
    has_finish: bool = False  # its environment's `finish` must still be called
    score: float = 0.0
    stop: str | None = None
    timeout_counts: bool = False
    retries: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    action_message_indices: list[int] = field(default_factory=list)  # of each turn, in `messages`
    entropy: list[float] = field(default_factory=list)  # `Action.entropy`, where it is known
    fork_states: dict[int, Episode] = field(default_factory=dict)  # copies by number of turns
    snapshot: Snapshot | None = None  # of its environment, in a fork state; None: replayed
    replayed: int | None = None  # turns that its environment has replayed; None: all

    @property
    def turn(self) -> int:
        """The number of the turn to be sampled next."""
        return len(self.ledger.turns)

    @property
    def transcript(self) -> Transcript:
        """The transcript of the role that acts next."""
        return self.transcripts.setdefault(self.role, Transcript())

    @property
    def failed(self) -> bool:
        """Whether the episode failed, as in `Trajectory.failed`."""
        return self.stop == "env_error" or (self.stop == "timeout" and not self.timeout_counts)

    def copy(self, snapshot: Snapshot | None = None) -> Episode:
        """A copy that later turns do not change, with a snapshot of its environment."""
        return replace(
            self,
            last_actions=dict(self.last_actions),
            transcripts={role: each.copy() for role, each in self.transcripts.items()},
            messages=list(self.messages),
            ledger=self.ledger.copy(),
            action_message_indices=list(self.action_message_indices),
            entropy=list(self.entropy),
            retries=0,
            fork_states={},
            snapshot=snapshot,
        )

    @classmethod
    def begin(cls, request: EpisodeRequest, slot: int) -> Episode:
        """The episode of a request; a branch begins with its parent's turns."""
        if request.fork is None:
            return cls(request, slot)
        return replace(request.fork.start.copy(), request=request, slot=slot, replayed=0)

    def segments(self) -> tuple[Segment, ...]:
        """The segments read and sampled so far, those of a role side by side."""
        transcripts = self.transcripts or {self.role: Transcript()}
        return tuple(
            replace(segment, role=role)
            for role, transcript in transcripts.items()
            for segment in transcript.segments()
        )

    def act(self, action: Action) -> None:
        """Records an action of the role that acts next."""
        assert self.conversation is not None  # it was sampled from
        self.transcript.act(action.tokens, self.turn, action.logp, action.experts, action.version_L)
        self.last_actions[self.role] = LastAction(self.conversation, action.tokens)
        self.ledger.open_turn()
        if action.entropy is not None:
            self.entropy.append(action.entropy)

    def after(self, step: StepResult, tokenizer: Tokenizer) -> TokenizedConversation:
        """The conversation of the role that acts after a step; changes no state."""
        last = self.last_actions.get(step.role)
        if last is None:
            return tokenizer.begin(step.observation, self.tools)
        return last.conversation.extend(last.tokens, step.observation)

    def say(self, messages: Sequence[Message]) -> None:
        """Adds messages of the conversation of the role that acts next."""
        named = {"name": self.role} if self.role else {}
        self.messages += [message | named for message in messages]

    def on_result(self, outcome: CallOutcome, timeout_as: str) -> None:
        """Takes its environment's answer to `reset`, `step` or `finish`; a failure ends it."""
        self.retries += outcome.retries
        result = outcome.result
        if isinstance(result, Failure):
            self.on_failure(result, timeout_as)
        elif self.stop is not None:  # an answer to `finish`
            last_reward, weighted_sums, self.score = result
            self.ledger.add({OWN_REWARD: last_reward}, weighted_sums)
        elif self.conversation is None:  # of `reset`
            messages, self.tools, self.conversation, self.has_finish, self.role = result
            self.say(messages)
        else:
            self._take_step(*result)

    def on_failure(self, failure: Failure, timeout_as: str) -> None:
        """Ends it with the failure of its environment or its agent.

        With `timeout_as=zero_reward` an episode that hung after an action counts: it keeps the
        rewards before that turn, and its score is 0.
        """
        self.fail(failure.stop, failure.reason)
        if failure.stop == "timeout" and timeout_as == "zero_reward" and self.turn:
            self.timeout_counts, self.score = True, 0.0

    def on_scored(self, scored: ScoringResult, weighted_sums: Sequence[float]) -> None:
        """Takes the rewards of the reward functions, and their weighted sums of the last turns."""
        self.ledger.add(scored.rewards, weighted_sums)

    def view(self, split: str, candidate: str | None = None) -> FinishedEpisode:
        """The episode for reward functions or, with a candidate of the next turn, for a judge."""
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
        """The messages; an assistant message that the policy did not sample has the key `HISTORY`.

        An agent's messages are marked already: the places of its turns are not known here.
        """
        if len(self.action_message_indices) < self.turn:
            return self.messages
        sampled = set(self.action_message_indices)
        return [
            {HISTORY: "sent", **message}
            if message["role"] == "assistant" and place not in sampled
            else message
            for place, message in enumerate(self.messages)
        ]

    def _take_step(
        self,
        step: StepResult,
        weighted_sums: Sequence[float],
        score: float,
        conversation: TokenizedConversation | None,
        fork_point: ForkPoint | None,
    ) -> None:
        self.ledger.add_step({OWN_REWARD: step.reward, **step.rewards}, weighted_sums)
        self.ledger.add_roles(step.role_rewards)
        self.score, self.conversation, self.role = score, conversation, step.role
        self.say(step.observation)
        self.info = self.info | step.info
        if step.done:
            self.stop = "done"
        if fork_point is not None:
            self.fork_states[self.turn] = self.copy(fork_point.snapshot)

    def fail(self, stop: str, reason: str) -> None:
        self.stop, self.info = stop, self.info | {"failure": reason}

    def finish(self, seed: int, policy_version: int | None, *, weighted: bool) -> Trajectory:
        """The trajectory.

        Args:
          policy_version: where its actions do not say by which version they were sampled.
          weighted: its rewards have names, also where `env` is the only one.
        """
        request, segments = self.request, self.segments()
        began = _first_version(segments)
        version = policy_version if began is None else began
        episode_info = {"score": self.score, "member": request.member, "retries": self.retries}
        if self.entropy:
            episode_info["entropy"] = [round(entropy, 6) for entropy in self.entropy]
        return Trajectory(
            segments=tuple(
                replace(segment, version_L=segment.versions(version)) for segment in segments
            ),
            reward_table=self.ledger.table(with_names=weighted),
            group=request.group,
            task_id=request.task_id,
            seed=seed,
            stop="done" if self.stop is None else self.stop,
            messages=tuple(self.messages),
            info=self.info | episode_info,
            policy_version=version,
            timeout_counts=self.timeout_counts,
            parent=None if request.fork is None else request.fork.place,
            fork=0 if request.fork is None else request.fork.turns,
        )


def _first_version(segments: Sequence[Segment]) -> int | None:
    """The version that sampled the first token of the first turn; None: it is not known."""
    firsts: list[tuple[int, int]] = []
    for segment in segments:
        sampled = np.flatnonzero(segment.turn_L != CONTEXT)
        if segment.version_L is not None and sampled.size:
            firsts.append((int(segment.turn_L[sampled[0]]), int(segment.version_L[sampled[0]])))
    _, version = min(firsts, default=(0, UNKNOWN_VERSION))
    return None if version == UNKNOWN_VERSION else version
