"""Episodes of agents: connects the event loop that receives calls to the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from seeupo_jax.agents.agent_episode import AgentEpisode, Answer, OpenTurn, WaitingCall
from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import (
    Access,
    AgentFailure,
    AgentResult,
    AgentTask,
    CallRefused,
    Completion,
    ModelCall,
    Runner,
    Session,
    context_exceeded,
    form_refusal,
)
from seeupo_jax.agents.lineages import Lineages, ReadCall, check_length
from seeupo_jax.agents.sampled_text import SampledText
from seeupo_jax.configuration.role_schema import role_names
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.envs.pool import Failure
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.sampling import task_number
from seeupo_jax.rollout.episode import Episode, EpisodeRequest
from seeupo_jax.rollout.player import STOP_POLL_S, CollectionOptions, Prefetched, RolloutWorker

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentHost:
    """A `Host` of agents: their runner and the endpoint by which they reach the policy.

    open_key: opens a key of the endpoint for a session and the temperature of its collection (None:
      the temperature of training). close_key: called for each key when its episode ends.
    timeout_s: seconds that an agent may be without an open call.
    close_endpoint: ends the endpoint, after all agents have ended.
    data: additional data of a task, by task and split.
    volatile: as of `Harness`.
    """

    runner: Runner
    open_key: Callable[[Session, float | None], Access]
    close_key: Callable[[str], None]
    form: AnswerForm
    timeout_s: float
    data: Callable[[str, str], Any] = lambda task_id, split: None
    close_endpoint: Callable[[], None] = lambda: None
    volatile: Sequence[str] = ()

    def player(self, worker: RolloutWorker, options: CollectionOptions) -> AgentPlayer:
        return AgentPlayer(self, worker, options)

    def prefetch(
        self,
        worker: RolloutWorker,
        requests: Sequence[EpisodeRequest],
        options: CollectionOptions,
        max_idle_s: float,
    ) -> Prefetched | None:
        """Returns None: a prefetched agent would call immediately."""
        return None

    def drain(self) -> None:
        """No effect, since there is no prefetching."""

    def close(self) -> None:
        try:
            self.runner.close()
        finally:
            self.close_endpoint()


class _Inbox:
    """Messages from other threads to the thread that drives the engine.

    closed: messages are no longer read.
    """

    def __init__(self) -> None:
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.closed = False

    def put(self, event: Callable[[], None]) -> None:
        self._events.put(event)

    def take(self, wait_s: float) -> None:
        """Runs all events, after waiting at most `wait_s` for the first.

        Events that arrive meanwhile are left for the next call: clients must not delay the engine.
        """
        with contextlib.suppress(Empty):
            self._events.get(timeout=wait_s)()
            for _ in range(self._events.qsize()):
                self._events.get_nowait()()


class _AgentSession:
    """A `Session`: one episode in the endpoint's event loop."""

    def __init__(self, player: AgentPlayer, inbox: _Inbox, key: int, episode: AgentEpisode):
        self._player, self._inbox, self._key, self._episode = player, inbox, key, episode

    async def complete(
        self, call: ModelCall, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        return await self._ask(call, self._player.on_call, on_text)

    async def context(self, call: ModelCall) -> Sequence[int]:
        return await self._ask(call, self._player.on_count)

    @property
    def max_context(self) -> int:
        return self._player.max_context

    async def _ask(
        self,
        call: ModelCall,
        handle: Callable[[WaitingCall[Answer]], None],
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        waiting = WaitingCall(self._key, call, loop, answer, on_text)
        self._inbox.put(functools.partial(handle, waiting))
        if self._inbox.closed:  # checked after `put`, since the inbox is read once more at closing
            waiting.answer.cancel()
            raise _over()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._inbox.put(functools.partial(self._player.on_vanished, waiting))
            raise

    def ignored(self, param: str) -> None:
        self._episode.ignored[param] += 1


def _over() -> CallRefused:
    sentence = "The episode of this key is over; allowed: calls while its agent runs."
    return CallRefused(sentence, status=410, code="episode_over")


@functools.cache  # once per process
def _warn_of_concurrent_calls() -> None:
    _LOGGER.warning(
        "warning: rollout.deterministic: an agent has several calls open at once; they are numbered"
        " as they arrive, so a rerun may differ."
    )


class AgentPlayer:
    """A `Player` of agents' episodes; an answer is sent as soon as it is sampled.

    The host's runner starts the agents. Their calls and outcomes arrive in the inbox, which only
    the thread that drives the engine reads.
    """

    def __init__(self, host: AgentHost, worker: RolloutWorker, options: CollectionOptions):
        self._host, self._worker, self._options = host, worker, options
        self._engine, self._rollout = worker.engine, worker.rollout
        self._slots = list(range(worker.engine.concurrency))[::-1]  # free ones
        self._open: dict[int, AgentEpisode] = {}
        self._owner: dict[int, int] = {}  # by the engine's key, the key of the episode
        self._keys = itertools.count()
        self._over: list[tuple[int, Episode]] = []
        self._inbox = _Inbox()

    @property
    def max_context(self) -> int:
        return self._rollout.max_context

    @property
    def room(self) -> int:
        return len(self._slots)

    @property
    def beginning(self) -> bool:
        return any(not each.keys for each in self._open.values())

    @property
    def stepping(self) -> int:
        return sum(each.thinks for each in list(self._open.values()))

    @property
    def slowest(self) -> tuple[str, float] | None:
        thinking = [each for each in list(self._open.values()) if each.thinks]
        slowest = max(thinking, key=lambda each: each.thought_s, default=None)
        return None if slowest is None else (slowest.request.task_id, slowest.thought_s)

    def adopt(self, keys: Sequence[int], prefetched: Prefetched) -> None:
        raise AssertionError("agents are never prefetched")

    def open(self, key: int, request: EpisodeRequest) -> None:
        tool_format, volatile = self._host.form.tool_format, self._host.volatile
        lineages = Lineages(self._worker.tokenizer, tool_format, volatile)
        names = role_names(self._worker.roles)
        slot = self._slots.pop()
        episode = AgentEpisode(request, slot, lineages=lineages, role_names=names)
        self._open[key] = episode
        options, split = self._options, self._options.split
        session = _AgentSession(self, self._inbox, key, episode)
        episode.access = self._host.open_key(session, options.temperature)
        task = AgentTask(
            task_id=request.task_id,
            split=split,
            data=copy.deepcopy(self._host.data(request.task_id, split)),  # agents may change it
            seed=options.seed,
            episode_seed=request.episode_seed(options.seed),
            max_turns=self._rollout.max_turns,
        )

        def on_end(outcome: AgentResult | AgentFailure) -> None:
            self._inbox.put(functools.partial(self._on_end, key, outcome))

        episode.stop_agent = self._host.runner.start(task, episode.access, on_end)

    def poll(self, wait_s: float) -> list[tuple[int, Episode]]:
        self._take(wait_s)
        while self._rollout.deterministic and self.stepping and not self._worker.stop():
            self._take(STOP_POLL_S)
        for key, episode in sorted(self._open.items(), key=lambda pair: pair[1].slot):
            if episode.outcome is not None:
                self._end(key, episode)
                continue
            for turn in episode.open_turns.values():
                if not turn.submitted:
                    self._submit(episode, turn)
        over, self._over = self._over, []
        return over

    def act(self, action: Action) -> None:
        """Answers the call for which an action was sampled."""
        episode = self._open[self._owner[action.key]]
        turn = episode.open_turns[action.key]
        if action.refuses_tools and turn.waiting.call.constraint is not None:
            return self._drop(episode, turn, form_refusal(turn.waiting.call, action.failure))
        if action.failure:
            episode.outcome = Failure("env_error", action.failure)
            episode.stop_agent()
            return self._drop(episode, turn)
        prompt_tokens = len(turn.turn.read.conversation.tokens)
        completion = turn.sampled.complete(
            action, prompt_tokens=prompt_tokens, cached_tokens=action.cached
        )
        of_tokens = action.experts, action.version_L
        episode.lineages.act(turn.turn, action.tokens, action.logp, completion.message, *of_tokens)
        episode.remove_turn(turn, answered=True)
        turn.waiting.finish(completion)

    def close(self) -> None:
        """Ends the agents that still run, and refuses open and later calls."""
        for episode in self._open.values():
            episode.stop_agent()
            self._host.close_key(episode.access.api_key)
            for turn in episode.open_turns.values():
                turn.waiting.finish(_over())
        self._open.clear()
        self._inbox.closed = True
        self._inbox.take(0.0)

    def on_count(self, waiting: WaitingCall[Sequence[int]]) -> None:
        """Answers with the tokens of a call's context."""
        episode = self._open.get(waiting.key)
        if episode is None or episode.outcome is not None:
            return waiting.finish(_over())
        try:
            waiting.finish(self._read(episode, waiting.call).conversation.tokens)
        except CallRefused as refusal:
            waiting.finish(refusal)

    def on_call(self, waiting: WaitingCall[Completion]) -> None:
        """Accepts a call, or refuses it."""
        episode = self._open.get(waiting.key)
        if episode is None or episode.outcome is not None:
            return waiting.finish(_over())
        try:
            turn = self._begin(episode, waiting)
        except CallRefused as refusal:
            return waiting.finish(refusal)
        if episode.open_turns and self._rollout.deterministic:
            _warn_of_concurrent_calls()
        episode.add_turn(turn)

    def on_vanished(self, waiting: WaitingCall[Any]) -> None:
        """Cancels a call whose client no longer waits, unless its action has arrived."""
        episode = self._open.get(waiting.key)
        turns = () if episode is None else episode.open_turns.values()
        for turn in [turn for turn in turns if turn.waiting is waiting]:
            self._cancel(episode, turn)

    def _on_end(self, key: int, outcome: AgentResult | AgentFailure) -> None:
        episode = self._open.get(key)
        if episode is not None and episode.outcome is None:
            episode.outcome = outcome

    def _take(self, wait_s: float) -> None:
        """Processes calls and outcomes, and ends agents that are late."""
        limit_s = self._host.timeout_s
        left_s = (limit_s - each.thought_s for each in self._open.values() if each.thinks)
        self._inbox.take(max(0.0, min(wait_s, *left_s, math.inf)))
        for episode in self._open.values():
            if episode.thinks and episode.thought_s >= limit_s:
                reason = f"the agent was without an open call for {limit_s:g} s"
                episode.outcome = AgentFailure("timeout", reason, cause="timeout")
                episode.stop_agent()

    def _begin(self, episode: AgentEpisode, waiting: WaitingCall[Completion]) -> OpenTurn:
        """Begins the turn of a call, or refuses the call."""
        lineages, rollout = episode.lineages, self._rollout
        used_up = self._used_up(lineages)
        if used_up is not None and episode.limit == "max_turns":
            episode.refuse("max_turns")  # a repeated refusal, for which no message is read
            raise used_up
        try:
            read = self._read(episode, waiting.call)
        except CallRefused as refusal:
            if refusal.code == "context_length_exceeded":
                episode.refuse("max_tokens")
            raise
        if used_up is not None:
            episode.refuse("max_turns", read.new)
            raise used_up
        if not self._engine.fits(read.conversation.tokens):
            episode.refuse("max_tokens", read.new)
            got = f"{len(read.conversation.tokens)} tokens"
            allowed = f"the model's context less an action's {rollout.max_action_tokens}"
            raise context_exceeded(got, allowed, rollout.max_context, "messages")
        turn = lineages.begin(read)
        if turn.lineage not in episode.keys:
            key = episode.keys[turn.lineage] = next(self._keys)
            self._owner[key] = waiting.key
        call, on_text = waiting.call, None if waiting.on_text is None else waiting.send_text
        sampled = SampledText(
            self._worker.tokenizer,
            call.stop,
            on_text,
            self._host.form.with_tools(call.tools),
            call.tools,
            read.conversation.tokens,
        )
        return OpenTurn(waiting, turn, episode.keys[turn.lineage], sampled)

    def _read(self, episode: AgentEpisode, call: ModelCall) -> ReadCall:
        """Reads a call, which changes no state.

        Raises:
          CallRefused: it is far too long, or its messages cannot be rendered.
        """
        check_length(call, self._worker.tokenizer, self.max_context)
        try:
            return episode.lineages.read(call)
        except Exception as error:  # a chat template may raise anything
            sentence = f"messages: the chat template refuses them: {describe(error)}"
            raise CallRefused(sentence, code="invalid_messages", param="messages") from None

    def _used_up(self, lineages: Lineages) -> CallRefused | None:
        """The refusal of further turns if the episode has used them up; otherwise None."""
        most = self._rollout.max_turns
        # An agent whose clients cancel every call would otherwise never end.
        for got, what in ((lineages.turns, "calls"), (lineages.cancelled, "calls taken back")):
            if got >= most:
                sentence = f"{what}: got {got} before this one; allowed: rollout.max_turns={most}."
                return CallRefused(sentence, code="max_turns")
        return None

    def _submit(self, episode: AgentEpisode, turn: OpenTurn) -> None:
        request, call, sampled = episode.request, turn.waiting.call, turn.sampled
        turn.submitted = True
        self._engine.submit(
            Turn(
                turn.key,
                turn.turn.read.conversation.tokens,
                request.group,
                task_number(request.task_id),
                request.member,
                turn.turn.number,
                call.tools,
                limit=call.max_tokens,
                listen=sampled.listen if sampled.listens else None,
                constraint=self._host.form.after_thoughts(
                    call.constraint, self._worker.tokenizer, turn.turn.read.conversation.tokens
                ),
                role=call.role,
                shard=request.shard,
                iteration=request.iteration,
            )
        )

    def _cancel(self, episode: AgentEpisode, turn: OpenTurn) -> None:
        if turn.submitted:
            self._engine.cancel(turn.key)
        self._drop(episode, turn)

    def _drop(
        self, episode: AgentEpisode, turn: OpenTurn, refusal: CallRefused | None = None
    ) -> None:
        """Removes a turn without an answer; `refusal`: None: the episode is over."""
        episode.lineages.cancel(turn.turn)
        episode.remove_turn(turn, answered=False)
        turn.waiting.finish(refusal or _over())  # a client that disconnected does not receive it

    def _end(self, key: int, episode: AgentEpisode) -> None:
        """Ends an episode whose agent has an outcome."""
        for turn in list(episode.open_turns.values()):
            self._cancel(episode, turn)
        self._host.close_key(episode.access.api_key)
        episode.conclude(self._worker.weigh, self._worker.env.timeout_as)
        del self._open[key]
        self._slots.append(episode.slot)
        for lineage_key in episode.keys.values():
            self._engine.release(lineage_key)
            del self._owner[lineage_key]
        self._over.append((key, episode))
