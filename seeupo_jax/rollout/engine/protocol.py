"""The protocol between a collection and the engine that samples actions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from seeupo_jax.envs.base import Tool
from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.types import UNKNOWN_VERSION


@dataclass(frozen=True)
class TurnSampling:
    """How the tokens of one action are drawn, by an engine where each turn has its own sampling.

    temperature: below 1e-5 the likeliest token is taken.
    top_k: 0: of all tokens. min_p: candidates have at least this part of the highest probability.
    presence, frequency, repetition: penalties; the first two are of the action's tokens, the last
      also of the context's.
    bias: of tokens: added to their logits.
    top_logprobs: number of the likeliest tokens that are returned with each token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens matter."""
        return self.presence != 0 or self.frequency != 0 or self.repetition != 1


@dataclass(frozen=True)
class Constraint:
    """The form that one action must have.

    calls: none | may | must: whether it calls tools. names: of those that it may call; empty: all.
    single: whether it has at most one call.
    schema: JSON of the schema that its text has where it calls none; "": any text.
    thoughts: what may come before: none | may | open (thoughts that the context has opened).
    field: of the request that asks for it.
    """

    calls: str = "none"
    names: tuple[str, ...] = ()
    single: bool = False
    schema: str = ""
    thoughts: str = "none"
    field: str = ""

    @property
    def optional(self) -> bool:
        """Whether it holds only where a grammar constrains calls anyway."""
        return self.calls == "may" and not self.names and not self.schema


@dataclass(frozen=True)
class Turn:
    """One action to sample.

    key: identifies the conversation in the answer; one turn of a conversation at a time.
    context: all tokens before the action.
    group: conversations of one group begin alike.
    task, member, turn: with `iteration` and the collection's seed, all that random numbers derive
      from: nothing that other conversations share or shift.
    tools: that exist, where a grammar allows well-formed calls only.
    limit: tokens that the action may have at most, if these are fewer than the engine's own limit.
    listen: called with the action's tokens so far whenever there are more, in the stepping thread;
      a returned number, at least 1, ends the action after that many tokens.
    sampling: None: the engine's. constraint: instead of the run's grammar.
    view: makes the conversation that ends with an action of these tokens, for a judge.
    role: that acts.
    shard: of the engine's rows, the same for all turns of a conversation; see `shard_owners`.
    action: its number in the conversation (0, 1, ...), by which the policy has an adapter where it
      has several (`LoraAdapters.per_turn`).
    iteration: that the conversation is sampled for, or any other number that keeps the random
      numbers of two collections apart; below 2**32.
    """

    key: int
    context: Sequence[int]
    group: int
    task: int
    member: int
    turn: int
    tools: Sequence[Tool] = ()
    limit: int | None = None
    listen: Callable[[Sequence[int]], int | None] | None = None
    sampling: TurnSampling | None = None
    constraint: Constraint | None = None
    view: Callable[[Sequence[int]], FinishedEpisode] | None = field(default=None, compare=False)
    role: str = ""
    shard: int = 0
    iteration: int = 0
    action: int = 0


@dataclass(frozen=True)
class Action:
    """A sampled action, its end token included.

    logp: log-probability of each token under the distribution that it was drawn from; where each
      turn has its own sampling, at temperature 1, without penalties and with all tokens that a
      grammar allows.
    too_long: there is none, since a server has no room for one after the context.
    failure: why there is none; empty otherwise. refuses_tools: it is a tool or the constraint of
      the turn, of which there is no grammar.
    cached: tokens of the context that the engine had computed before.
    entropy: sum over its first `Sampling.entropy_tokens` tokens of the sampling distribution's
      entropy, in units of its maximum, log V; None: not computed.
    experts: of the tokens of the context and of the action but its last, [L, G], as
      `Architecture.routing` says; None: not recorded.
    top: of each token, the likeliest tokens there and their log-probabilities; None: not asked for.
    version_L: of each token, the version of the policy that sampled it, as of `Engine.begin` and
      `Engine.swap`.
    """

    key: int
    tokens: list[int]
    logp: list[float]
    failure: str = ""
    cached: int = 0
    entropy: float | None = None
    experts: np.ndarray | None = None
    refuses_tools: bool = False
    top: list[list[tuple[int, float]]] | None = None
    too_long: bool = False
    version_L: list[int] = field(default_factory=list[int])


class Engine(Protocol):
    """Samples actions for many conversations at once.

    A collection calls `begin`, then `submit` whenever an environment has answered, and `step`
    repeatedly until it returns None; all in one thread.
    """

    @property
    def concurrency(self) -> int:
        """How many conversations may be open at once in this process."""
        ...

    def begin(
        self,
        params: Any,
        *,
        seed: int,
        temperature: float | None = None,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Starts a collection; earlier keys and values are not used.

        Args:
          seed: what random numbers derive from, with the numbers of each turn.
          temperature: None: the engine's own.
          version: of the parameters, as `Action.version_L` names it.
        """
        ...

    def swap(self, params: Any, version: int) -> None:
        """Replaces the policy of the collection between two steps.

        Conversations and actions under way go on under the new one; several processes call it
        between the same steps.

        Args:
          version: as of `begin`.
        """
        ...

    @property
    def shard_owners(self) -> Sequence[int]:
        """The process of each shard of its rows, over which conversations are dealt.

        A process has as many as any other, and submits turns of its own alone.
        """
        ...

    def one_policy(self) -> contextlib.AbstractContextManager[None]:
        """Within it, collections of the same parameters share what the first one prepares.

        That is memory of the devices: a cache, and a copy of the policy. Nothing that one has
        cached is read by the next. It is freed at the end; otherwise at the end of a collection.
        """
        ...

    def fits(self, context: Sequence[int]) -> bool:
        """Whether there is room for a full action after a context."""
        ...

    def submit(self, turn: Turn) -> None:
        """Asks for an action; its context must `fits`."""
        ...

    def step(self, unfinished: bool, stop: bool = False) -> list[Action] | None:
        """Goes on for a little while; the actions finished meanwhile.

        Args:
          unfinished: whether this process has conversations that are not over.
          stop: whether this process was asked to stop.

        Returns: None once no process has any; with several of them, all call it equally often.

        Raises:
          Stopped: a process was asked to stop; all of them raise it in the same step.
        """
        ...

    def cancel(self, key: int) -> None:
        """Takes back a conversation's open turn, if there is one: no action comes of it."""
        ...

    def release(self, key: int) -> None:
        """Says that a conversation is over; none of its turns is open."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any turn that was asked for is not finished."""
        ...

    @property
    def poll_interval_s(self) -> float | None:
        """How long `step` need not be called while this process asks for nothing; None: forever."""
        ...

    def usage(self) -> Mapping[str, int]:
        """Counts of this process's work on the collection so far, by name."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Device seconds of this work by kind; empty if the engine does not measure them."""
        ...
