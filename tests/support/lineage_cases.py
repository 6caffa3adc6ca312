"""What the tests of agents share: a tokenizer of characters, and agents without a network."""

import asyncio
import itertools
import threading
from dataclasses import dataclass

from seeupo_jax.agents.agent_player import AgentHost
from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import (
    Access,
    AgentFailure,
    AgentResult,
    CallRefused,
    HistoryMessage,
    ModelCall,
)
from seeupo_jax.envs.tool_formats.formats import choose_format
from seeupo_jax.envs.validation import describe
from seeupo_jax.types import CONTEXT

END = 0  # of an action and of every message
HEADERS = {"system": 1, "user": 2, "tool": 3, "assistant": 4}
HERMES = choose_format("hermes")


@dataclass(frozen=True)
class CharConversation:
    tokens: list

    def extend(self, action, messages):
        return CharConversation([*self.tokens, *action, *context_tokens(messages)])


def context_tokens(messages):
    """Messages and the header of the next one, without a tokenizer's code."""
    tokens = []
    for message in messages:
        tokens += [HEADERS[message["role"]], *map(ord, message["content"]), END]
    return [*tokens, HEADERS["assistant"]]


class CharTokenizer:
    """Characters below 128; tokens 128 to 255 are bytes of longer ones, which `text` joins."""

    vocab_size, end_ids, writes_calls, tool_listing = 256, (END,), False, "auto"

    def begin(self, messages, tools):
        if any(message["content"] == "refuse me" for message in messages):
            raise RuntimeError("no such message")
        shown = [{"role": "system", "content": tool["name"]} for tool in tools]
        return CharConversation(context_tokens([*shown, *messages]))

    def text(self, tokens):
        return bytes(token for token in tokens if token > 4).decode(errors="replace")

    def action(self, text):
        return say(text)

    def token_bytes(self):
        return [bytes([token]) if token > 4 else b"" for token in range(256)]


def say(text, *, end=True):
    """The tokens of an action."""
    return [*text.encode(), *([END] if end else [])]


def readable(segment):
    """A segment as a readable list: context as text, each turn's number with its text."""
    parts = []
    pairs = zip(segment.turn_L.tolist(), segment.tokens_L.tolist(), strict=True)
    for turn, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        text = "".join(chr(token) if token > 4 else "/" for _, token in group)
        parts.append(text if turn == CONTEXT else (turn, text))
    return parts


def user(content):
    return HistoryMessage("user", content)


def assistant(content, *calls):
    return HistoryMessage("assistant", content, calls)


def ask(*messages, **options):
    """A call whose texts are the user's."""
    return ModelCall(tuple(user(m) if isinstance(m, str) else m for m in messages), **options)


class Agents:
    """Runs `async def agent(task, session)` in an event loop of its own; makes and closes keys."""

    def __init__(self, agent):
        self._agent, self._keys = agent, itertools.count()
        self.sessions, self.closed, self.stopped = {}, [], 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def host(self, *, timeout_s=30.0, **options):
        return AgentHost(
            self, self.open_key, self.closed.append, AnswerForm(HERMES), timeout_s, **options
        )

    def open_key(self, session, temperature):
        key = str(next(self._keys))
        self.sessions[key] = session
        return Access("http://nowhere/v1", key)

    def start(self, task, access, on_end):
        async def run():
            try:
                result = await self._agent(task, self.sessions[access.api_key])
                on_end(result if isinstance(result, AgentResult) else AgentResult(result))
            except Exception as error:
                on_end(AgentFailure("env_error", describe(error), cause="exception"))

        future = self.submit(run())

        def stop():
            self.stopped += 1
            future.cancel()

        return stop

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self):
        """Ends what still runs: what a stopped loop forgets is logged in a later test."""

        async def end():
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.submit(end()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def refusal(session, call):
    """The error of a call that has to be refused."""
    try:
        await session.complete(call)
    except CallRefused as refused:
        return refused
    raise AssertionError("the call was answered")
