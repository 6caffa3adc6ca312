"""Answers the calls of an endpoint's clients by an engine, until it is stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from seeupo_jax.agents.agent_episode import Answer, WaitingCall
from seeupo_jax.agents.answer_form import PLAIN_TEXT, AnswerForm
from seeupo_jax.agents.calls import (
    CallRefused,
    Completion,
    EchoedContext,
    HistoryMessage,
    ModelCall,
    VersionSpan,
    context_exceeded,
    form_refusal,
)
from seeupo_jax.agents.conversation_cache import CachedConversation, ConversationCache
from seeupo_jax.agents.harnesses.table import VOLATILE
from seeupo_jax.agents.lineages import check_length, to_tokenizer_message
from seeupo_jax.agents.sampled_text import SampledText, likeliest, token_bytes
from seeupo_jax.agents.serving_changes import Change, ServingChanges, awaited
from seeupo_jax.agents.serving_metrics import ServingMetrics
from seeupo_jax.configuration.user_code import describe
from seeupo_jax.policy.files.tokenizer import TokenizedConversation, Tokenizer
from seeupo_jax.rollout.engine.protocol import Action, Turn
from seeupo_jax.rollout.engine.slots import SlotEngine

_LOGGER = logging.getLogger(__name__)
# Tokens of all cached conversations: at 36 bytes in Python's lists at most 150 MB, plus texts.
CACHE_TOKENS = 2**22
_SHOWN, _NAMES = 80, 64  # characters of a field's name, and number of fields counted by name
_ALIKE = 32  # first tokens of prompts that are kept together
_SEEDED = 2**31  # added to the numbers of answers whose request has a seed
DEFAULT_VERSION = "default"  # SGLang's name of weights that were given none
_SHUTTING_DOWN = "The server is shutting down; ask again later, or another one."


@dataclasses.dataclass(eq=False)
class _Sampling:
    """A call whose turn is in the engine; it came at that `time.monotonic()`.

    count: of its tokens so far. aborted: it ends with them.
    """

    call: WaitingCall[Completion]
    conversation: TokenizedConversation | _Prompt
    group: int
    sampled: SampledText
    began_s: float
    count: int = 0
    aborted: bool = False

    def listen(self, tokens: Sequence[int]) -> int | None:
        """As of `Turn.listen`."""
        self.count = len(tokens)
        if self.aborted:
            return self.count
        return self.sampled.listen(tokens) if self.sampled.listens else None


class _Prompt(NamedTuple):
    """A context that is no conversation."""

    tokens: Sequence[int]


class ServingSession:
    """A `Session` without an end: every call starts a conversation or continues one.

    The thread that calls `run` drives the engine and sleeps while no call is open; all other
    methods may be called in any thread.

    Args:
      engine: already started with the served policy; its cache is kept between calls.
      max_action_tokens: of an answer. max_context: tokens of a conversation.
      cache_tokens: limit of `ConversationCache`.
      version: the name of the weights.
    """

    def __init__(
        self,
        engine: SlotEngine,
        tokenizer: Tokenizer,
        form: AnswerForm,
        *,
        max_action_tokens: int,
        max_context: int,
        cache_tokens: int = CACHE_TOKENS,
        version: str = DEFAULT_VERSION,
    ):
        self._engine, self._tokenizer, self._form = engine, tokenizer, form
        self._max_action_tokens, self._max_context = max_action_tokens, max_context
        self._cache = ConversationCache(cache_tokens, engine.release, VOLATILE)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open: dict[int, _Sampling] = {}
        self._held: list[WaitingCall[Completion]] = []  # calls that have to wait before they begin
        self._changes = ServingChanges()
        self._versions = [version]  # names of the weights, by the engine's numbers of them
        self._over = False
        self._keys, self._conversations = itertools.count(), 0
        self.counts: Counter[str] = Counter()  # of calls: answered, refused, cancelled
        self.metrics = ServingMetrics(self.counts, lambda: len(self._open))

    async def complete(
        self, call: ModelCall, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        """Answers a request, as `Session.complete` does."""
        return await self._ask(call, self._begin, on_text)

    async def context(self, call: ModelCall) -> Sequence[int]:
        """As `Session.context`."""
        return await self._ask(call, self._tokenize)

    async def _ask(
        self,
        call: ModelCall,
        handle: Callable[[WaitingCall[Answer]], None],
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        waiting = WaitingCall(next(self._keys), call, loop, answer, on_text)
        self._inbox.put(functools.partial(handle, waiting))
        if self._over:  # checked after `put`, since `run` empties the inbox at its end
            raise CallRefused(_SHUTTING_DOWN, status=503, code="shutting_down")
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._inbox.put(functools.partial(self._cancel, waiting))
            raise

    def ignored(self, param: str) -> None:
        """As `Session.ignored`; warns once per field, regardless of indices of lists."""
        name = re.sub(r"\[\d+\]", "[]", param)
        name = f"ignored {name[:_SHOWN]!r}"
        if name not in self.counts and len(self.counts) >= _NAMES:
            name = "ignored otherwise"
        self.counts[name] += 1
        if self.counts[name] == 1:
            _LOGGER.warning(f"warning: clients set fields without effect here: {name}.")

    async def pause(self, mode: str) -> None:
        """Stops sampling until `resume`; calls that come meanwhile wait.

        Args:
          mode: what becomes of open calls: `wait`: all end first; `abort`: they end with the tokens
            that they have; `keep`: they stand still.
        """

        def make() -> None:
            self._changes.paused = True

        await self._change(make, drains=mode != "keep", aborts=mode == "abort")

    async def resume(self) -> None:
        """Samples again."""

        def make() -> None:
            self._changes.paused = False

        await self._change(make)

    async def update(
        self, params: Any, version: str, *, abort: bool = False, pause: bool = False
    ) -> None:
        """Serves other weights of the same network.

        While sampling is paused it happens at once, and open calls go on with them; otherwise once
        no call is open.

        Args:
          version: their name. abort: ends open calls. pause: sampling is paused afterwards.
        """

        def make() -> None:
            self._engine.swap(params, len(self._versions))
            self._versions.append(version)
            self._changes.paused = self._changes.paused or pause

        await self._change(make, drains=not self._changes.paused, aborts=abort)

    async def rename(self, version: str) -> None:
        """Gives the weights another name."""

        def make() -> None:
            self._versions[-1] = version

        await self._change(make)

    @property
    def paused(self) -> bool:
        """Whether sampling is paused."""
        return self._changes.paused

    @property
    def version(self) -> str:
        """The name of the weights."""
        return self._versions[-1]

    async def _change(
        self, make: Callable[[], None], *, drains: bool = False, aborts: bool = False
    ) -> None:
        """Has `run` make a change, after those that were asked for before, and waits for it."""
        made, done = awaited()
        change = Change(make, done, drains, aborts)
        self._inbox.put(functools.partial(self._changes.add, change))
        if self._over:
            raise CallRefused(_SHUTTING_DOWN, status=503, code="shutting_down")
        await made

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def waiting(self) -> int:
        """The number of messages from clients that `run` has not processed."""
        return self._inbox.qsize()

    def stop(self) -> None:
        """Makes `run` return; a signal handler may call it."""
        self._inbox.put(None)

    def run(self) -> None:
        """Answers calls until `stop`, then refuses open and later calls."""
        try:
            while self._take():
                self._changes.make(lambda: bool(self._open), self._abort)
                while self._held and not self._changes.holds:
                    self._begin(self._held.pop(0))
                for action in (self._engine.step(True) or ()) if self._samples else ():
                    self._finish(action)
        finally:
            self._over = True
            for call in (*(sampling.call for sampling in self._open.values()), *self._held):
                self._refuse(call, _SHUTTING_DOWN, status=503, code="shutting_down")
            self._open.clear()
            self._held.clear()
            self._take()
            self._changes.refuse(_SHUTTING_DOWN)

    @property
    def _samples(self) -> bool:
        """Whether the engine has work to do."""
        return bool(self._open) and not self._changes.freezes

    def _abort(self) -> None:
        """Ends the open calls: with their tokens at the next ones, and without any at once."""
        for key, sampling in [*self._open.items()]:
            sampling.aborted = True
            if not sampling.count:
                del self._open[key]
                self._engine.cancel(key)
                self._engine.release(key)
                context = sampling.conversation.tokens
                none = dataclasses.replace(_no_answer(len(context)), finish="abort", prompt=context)
                self.counts["answered"] += 1
                sampling.call.finish(none)

    def _take(self) -> bool:
        """Processes clients' messages; waits for one if there is nothing to do. False: stop."""
        waits = not (self._samples or self._changes.waiting or self._over)
        while True:
            try:
                wanted = self._inbox.get(block=waits)
            except Empty:
                return True
            if wanted is None and not self._over:
                return False
            if wanted is not None:
                wanted()
            waits = False

    def _tokenize(self, call: WaitingCall[Sequence[int]]) -> None:
        try:
            call.finish(self._read(call.call)[0].tokens)
        except CallRefused as refusal:
            call.finish(refusal)

    def _begin(self, call: WaitingCall[Completion]) -> None:
        if self._changes.holds and not self._over:
            self._held.append(call)
            return
        try:
            self._check_biases(call.call)
            self._check_ends(call.call)
            conversation, group = self._read(call.call)
        except CallRefused as refusal:
            self.counts["refused"] += 1
            return call.finish(refusal)
        context = conversation.tokens
        room = self._max_context - len(context)
        if room < 1:
            self.counts["refused"] += 1
            got, most = f"{len(context)} tokens", self._max_context
            field = "messages" if call.call.prompt is None else "prompt"
            return call.finish(context_exceeded(got, "fewer", most, field))
        if call.call.max_tokens == 0:
            self.counts["answered"] += 1
            none = dataclasses.replace(_no_answer(len(context)), prompt=context)
            return call.finish(self._with_echo(none, call.call, context))
        self._submit(call, conversation, group, room)

    def _submit(
        self,
        call: WaitingCall[Completion],
        conversation: TokenizedConversation | _Prompt,
        group: int,
        room: int,
    ) -> None:
        """Gives a call's turn to the engine; `room`: for its answer, in the context."""
        context = conversation.tokens
        asked = self._max_action_tokens if call.call.max_tokens is None else call.call.max_tokens
        began_s, streamed = time.monotonic(), call.on_text is not None
        sampled = SampledText(
            self._tokenizer,
            call.call.stop,
            self.metrics.streamed(call.send_text, began_s) if streamed else None,
            self._form_of(call.call),
            call.call.tools,
            context,
        )
        sampling = _Sampling(call, conversation, group, sampled, began_s)
        self._open[call.key] = sampling
        task, member, turn = stream_numbers(call.key, call.call)
        self._engine.submit(
            Turn(
                key=call.key,
                context=context,
                group=group,
                task=task,
                member=member,
                turn=turn,
                tools=call.call.tools,
                limit=min(asked, self._max_action_tokens, room),
                listen=sampling.listen,
                sampling=call.call.sampling,
                constraint=self._form.after_thoughts(
                    call.call.constraint, self._tokenizer, context
                ),
                shard=group % self._engine.plan.shards,
                action=sum(each.role == "assistant" for each in call.call.messages),
            )
        )

    def _form_of(self, call: ModelCall) -> AnswerForm:
        return self._form.with_tools(call.tools) if call.prompt is None else PLAIN_TEXT

    def _with_echo(
        self, completion: Completion, call: ModelCall, context: Sequence[int]
    ) -> Completion:
        """The completion, with its context if the call asks for it."""
        if not call.echo:
            return completion
        pieces = tuple(token_bytes(self._tokenizer, token) for token in context)
        text = call.prompt if isinstance(call.prompt, str) else self._tokenizer.text(context)
        echoed = EchoedContext(text, pieces)
        if call.scores is not None:
            scores = self._engine.score(context, call.scores)
            top = likeliest(self._tokenizer, scores.top)
            echoed = echoed._replace(logp=tuple(scores.logp), top=top)
        return dataclasses.replace(completion, context=echoed)

    def _check_biases(self, call: ModelCall) -> None:
        for token, _ in () if call.sampling is None else call.sampling.bias:
            if token >= (size := self._tokenizer.vocab_size):
                raise CallRefused(
                    f"logit_bias: got token {token}; allowed: below {size}.",
                    code="invalid_value",
                    param="logit_bias",
                )

    def _check_ends(self, call: ModelCall) -> None:
        ends = self._tokenizer.end_ids
        for token in call.end_ids:
            if token not in ends:
                raise CallRefused(
                    f"stop_token_ids: got {token}; allowed: {', '.join(map(str, ends))}, with which"
                    " every answer ends.",
                    code="invalid_value",
                    param="stop_token_ids",
                )

    def _read(self, call: ModelCall) -> tuple[TokenizedConversation | _Prompt, int]:
        """Returns a call's conversation, with its sampled tokens unchanged, and its group.

        Raises:
          CallRefused: it is far too long, its messages cannot be rendered, or serving is over.
        """
        if self._over:
            raise CallRefused(_SHUTTING_DOWN, status=503, code="shutting_down")
        check_length(call, self._tokenizer, self._max_context)
        if call.prompt is not None and self._engine.turn_adapters:
            raise CallRefused(
                f"prompt: got one for a policy with {self._engine.turn_adapters} adapters per turn;"
                " allowed: messages, of which those of the assistant say which turn follows.",
                code="invalid_value",
                param="prompt",
            )
        if call.prompt is not None:
            return self._read_prompt(call.prompt)
        try:
            return self._continue(call)
        except Exception as error:  # a chat template may raise anything
            sentence = f"messages: the chat template refuses them: {describe(error)}"
            raise CallRefused(sentence, code="invalid_messages", param="messages") from None

    def _read_prompt(self, prompt: str | tuple[int, ...]) -> tuple[_Prompt, int]:
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        unknown = next((token for token in tokens if token not in self._tokenizer.ids), None)
        if unknown is not None or not tokens:
            got = "no token" if unknown is None else f"token {unknown}"
            raise CallRefused(
                f"prompt: got {got}; allowed: at least one, each an id of the tokenizer.",
                code="invalid_value",
                param="prompt",
            )
        # Prompts that begin alike are on one shard.
        number = zlib.crc32(repr(tokens[:_ALIKE]).encode())
        shards = self._engine.plan.shards
        return _Prompt(tokens), number * shards + number % shards

    def _continue(self, call: ModelCall) -> tuple[TokenizedConversation, int]:
        hit = self._cache.find(call.messages, call.tools)
        new = call.messages if hit is None else hit.messages
        tool_format = self._form.tool_format
        messages = [to_tokenizer_message(each, self._tokenizer, tool_format) for each in new]
        if hit is not None:
            answered = hit.answered
            return answered.conversation.extend(answered.action, messages), answered.group
        conversation = self._tokenizer.begin(messages, call.tools)
        # One group for the same tools and instructions, on each shard in turn; the answers to one
        # request are on one shard, which computes the prompt once.
        opening = [m.content for m in itertools.takewhile(_instructs, call.messages)]
        shards = self._engine.plan.shards
        number = zlib.crc32(repr((call.tools, opening)).encode())
        self._conversations += call.answer == 0
        return conversation, number * shards + self._conversations % shards

    def _cancel(self, call: WaitingCall[Any]) -> None:
        if call in self._held:
            self._held.remove(call)
            self.counts["cancelled"] += 1
        if self._open.pop(call.key, None) is not None:
            self._engine.cancel(call.key)
            self._engine.release(call.key)
            self.counts["cancelled"] += 1

    def _finish(self, action: Action) -> None:
        sampling = self._open.pop(action.key)
        call, conversation = sampling.call, sampling.conversation
        if action.failure:
            self._engine.release(action.key)
            if action.refuses_tools:
                return self._refuse_form(call, action.failure)
            _LOGGER.error(f"a call failed: {action.failure}")
            return self._refuse(call, action.failure, status=500, code="sampling_failed")
        prompt_tokens = len(conversation.tokens)
        done = sampling.sampled.complete(
            action, prompt_tokens=prompt_tokens, cached_tokens=action.cached
        )
        spans = version_spans(action.version_L[: len(done.tokens)], self._versions)
        done = dataclasses.replace(done, prompt=conversation.tokens, versions=spans)
        if sampling.aborted and done.finish == "length":
            done = dataclasses.replace(done, finish="abort")
        if isinstance(conversation, _Prompt):
            self._engine.release(action.key)
            done = self._with_echo(done, call.call, conversation.tokens)
        else:
            answered = CachedConversation(
                conversation, action.tokens, sampling.group, done.thoughts
            )
            history = [*call.call.messages, done.message]
            self._cache.add(action.key, history, call.call.tools, answered)
        self.counts["answered"] += 1
        self.metrics.answered(done, sampling.began_s)
        call.finish(done)

    def _refuse_form(self, call: WaitingCall[Any], reason: str) -> None:
        self.counts["refused"] += 1
        call.finish(form_refusal(call.call, reason))

    def _refuse(self, call: WaitingCall[Any], sentence: str, **fields: object) -> None:
        self.counts["refused"] += 1
        call.finish(CallRefused(sentence, **fields))


def version_spans(version_L: Sequence[int], names: Sequence[str]) -> tuple[VersionSpan, ...]:
    """The runs of tokens that the same weights have sampled; names by number of the weights."""
    spans, start = [], 0
    for number, run in itertools.groupby(version_L):
        end = start + len(list(run))
        spans.append(VersionSpan(names[number], start, end))
        start = end
    return tuple(spans)


def _no_answer(prompt_tokens: int) -> Completion:
    return Completion("", "", (), "length", (), (), prompt_tokens)


def stream_numbers(key: int, call: ModelCall) -> tuple[int, int, int]:
    """The numbers (task, member, turn) from which an answer's random numbers derive.

    No two requests share them, unless they have the same seed.
    """
    if call.seed is None:
        # The engine gives turns of number 0 a lower priority.
        return key % 2**32, call.answer, 1
    seed = call.seed % 2**64
    return seed % 2**32, _SEEDED + call.answer, (seed >> 32) ^ 1


def _instructs(message: HistoryMessage) -> bool:
    return message.role == "system"
