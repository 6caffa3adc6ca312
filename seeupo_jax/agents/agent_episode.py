"""A running episode of an agent: its calls, its turns, and its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from seeupo_jax.agents.calls import (
    Access,
    AgentFailure,
    AgentResult,
    CallRefused,
    Completion,
    ModelCall,
)
from seeupo_jax.agents.lineages import Lineages, LineageTurn
from seeupo_jax.agents.sampled_text import SampledText
from seeupo_jax.envs.base import Message, TurnRewards
from seeupo_jax.envs.pool import Failure
from seeupo_jax.envs.validation import (
    OWN_REWARD,
    ProtocolError,
    check_named_rewards,
    check_role_rewards,
    check_step_lists,
)
from seeupo_jax.rewards.reward_ledger import RewardLedger
from seeupo_jax.rollout.episode import Episode
from seeupo_jax.rollout.episode_metrics import AGENT_FAILURE, IGNORED, LINEAGES, REFUSED
from seeupo_jax.types import Segment

Answer = TypeVar("Answer")


@dataclass(eq=False)
class WaitingCall(Generic[Answer]):
    """A call whose client waits in an event loop; all methods may be called in any thread.

    It waits for a completion, or for the tokens of the call's context.

    key: of its episode; without episodes, of the call.
    """

    key: int
    call: ModelCall
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Answer]
    on_text: Callable[[str], None] | None

    def send_text(self, text: str) -> None:
        """Streams a piece of the answer's text to the client."""
        if self.on_text is not None:
            self._later(self._send_text, text)

    def finish(self, outcome: Answer | CallRefused) -> None:
        """Ends the client's wait with an answer or a refusal."""
        self._later(self._finish, outcome)

    def _later(self, function: Callable[[Any], None], argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits
            self.loop.call_soon_threadsafe(function, argument)

    def _send_text(self, text: str) -> None:
        if not self.answer.done() and self.on_text is not None:
            self.on_text(text)

    def _finish(self, outcome: Answer | CallRefused) -> None:
        if self.answer.done():  # its client has disconnected
            return
        if isinstance(outcome, CallRefused):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


@dataclass(eq=False)
class OpenTurn:
    """An accepted call. key: of its turn in the engine. submitted: the engine has the turn."""

    waiting: WaitingCall[Completion]
    turn: LineageTurn
    key: int
    sampled: SampledText
    submitted: bool = False


@dataclass(eq=False)
class AgentEpisode(Episode):
    """A running episode of an agent.

    open_turns: by their keys in the engine, in the order in which they began.
    keys: the engine's key of each lineage.
    role_names: of `config.roles`.
    limit: the limit that refused the last call, if one did: max_turns | max_tokens.
    unread: the new messages of the first call that was refused after the last turn.
    refused: number of refused calls.
    outcome: the agent's result or failure; None while it runs.
    ignored: sampling parameters without effect, counted in the event loop.
    """

    lineages: Lineages | None = None
    access: Access | None = None
    stop_agent: Callable[[], None] = lambda: None
    open_turns: dict[int, OpenTurn] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)
    limit: str | None = None
    role_names: Sequence[str] = ()
    unread: tuple[Message, ...] = ()
    refused: int = 0
    outcome: AgentResult | Failure | None = None
    ignored: Counter[str] = field(default_factory=Counter)
    _thought_s: float = 0.0
    _since: float = field(default_factory=time.monotonic)  # start of the current thinking time

    @property
    def thinks(self) -> bool:
        """Whether the agent runs without an open call."""
        return self.outcome is None and not self.open_turns

    @property
    def thought_s(self) -> float:
        """Seconds without an open call since the agent's last answer."""
        return self._thought_s + (time.monotonic() - self._since if self.thinks else 0.0)

    def add_turn(self, turn: OpenTurn) -> None:
        """Adds an accepted call."""
        self._thought_s, self.limit, self.unread = self.thought_s, None, ()
        self.open_turns[turn.key] = turn

    def refuse(self, limit: str, new: tuple[Message, ...] = ()) -> None:
        """Records that a limit of the episode refused a call; `new`: the call's new messages."""
        self.unread = new if self.limit is None else self.unread
        self.limit, self.refused = limit, self.refused + 1

    def remove_turn(self, turn: OpenTurn, *, answered: bool) -> None:
        """Removes a call that is no longer open; only an answer resets the thinking time."""
        del self.open_turns[turn.key]
        self._since = time.monotonic()
        if answered:
            self._thought_s = 0.0

    def segments(self) -> tuple[Segment, ...]:
        assert self.lineages is not None
        return self.lineages.segments()

    def conclude(
        self,
        weigh: Callable[[Mapping[str, TurnRewards], str, float], list[float]],
        timeout_as: str,
    ) -> None:
        """Ends the episode according to its outcome; no turn may be open.

        Args:
          weigh: as `RolloutWorker.weigh`. timeout_as: as in `config.env`.
        """
        outcome, lineages = self.outcome, self.lineages
        assert outcome is not None and lineages is not None
        self.messages = [*lineages.messages(), *self.unread]
        self.tools = tuple(lineages.tools.values())
        self.ledger = RewardLedger(turns=[0.0] * lineages.turns)
        self.info |= {LINEAGES: lineages.count, REFUSED: self.refused}
        if self.ignored:
            self.info[IGNORED] = self.ignored.total()
        if isinstance(outcome, AgentFailure) and outcome.answered and lineages.turns:
            outcome = outcome.answered
        if self.limit and isinstance(outcome, AgentFailure) and _let_through(outcome):
            self.info["agent_error"] = outcome.reason
            outcome = AgentResult(0.0)
        if isinstance(outcome, AgentResult):
            try:
                return self._take(outcome, weigh)
            except ProtocolError as error:
                outcome = AgentFailure("env_error", str(error), cause="result")
        self.on_failure(outcome, timeout_as)
        if isinstance(outcome, AgentFailure):
            self.info[AGENT_FAILURE] = outcome.cause

    def _take(
        self,
        result: AgentResult,
        weigh: Callable[[Mapping[str, TurnRewards], str, float], list[float]],
    ) -> None:
        turns = self.turn
        given = list(result.turn_rewards)
        if given and len(given) != turns:
            raise ProtocolError(
                f"the agent's result: turn_rewards: got {len(given)}; allowed: none, or one for"
                f" each of its {turns} turns."
            )
        check_step_lists(result.info, "the agent's result: info", turns)
        of_roles, where = result.role_rewards, "the agent's result: role_rewards"
        self.ledger.add_roles(check_role_rewards(of_roles, where, roles=self.role_names))
        where = "the agent's result: rewards"
        named = check_named_rewards(result.rewards, where, turns=turns)
        turn_rewards = given if given else [*[0.0] * (turns - 1), result.reward]
        weighted_sums = weigh(
            {OWN_REWARD: turn_rewards, **named}, "the agent's result: reward", 0.0
        )
        self.ledger.set_all(result.reward, turn_rewards, named, weighted_sums)
        score = result.reward if result.score is None else result.score
        self.score = min(max(score, 0.0), 1.0)
        self.info |= result.info
        self.stop = "done" if self.limit is None else self.limit


def _let_through(failure: AgentFailure) -> bool:
    """Whether a failure may be the error of a refused call that ended the agent."""
    return failure.cause == "exception" or failure.answered is not None
