"""Conversations whose tokens are whole messages, for servers of OpenAI's chat completions.

Such a server takes messages and tools and applies its own chat template, so neither the model nor
its tokenizer is needed here. Each message has a number; a context is the number of the tools,
followed by those of the messages, and an action is the number of one message. The log-probability
of an action is unknown: NaN.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from seeupo_jax.agents.server_dialects import Reply, ServerDialect, read_usage
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.rollout.engine.sampling import Sampling

NO_RESULT = "No result."  # of a call that the environment did not answer; the API wants one of each


class ChatAction(NamedTuple):
    """An assistant's message. sent: in the history. text: for the environment and for people."""

    sent: dict[str, Any]
    text: str


class ChatMessages:
    """The messages of all conversations of an evaluation; threads may use one object at once.

    It is to a player what a tokenizer is: `begin` and `text` are as of `Tokenizer`.

    Args:
      tool_format: in which the environment reads calls.

    Attributes:
      limit_field: of a request, with the most tokens of an answer.
    """

    def __init__(self, tool_format: ToolFormat):
        self.limit_field = "max_tokens"
        self._format, self._lock = tool_format, threading.Lock()
        self._entries: list[Any] = []  # by number: tools, a message to send, or a `ChatAction`

    @property
    def dialect(self) -> ServerDialect:
        """The requests and replies of these conversations' server."""
        needs = "a server of OpenAI's chat completions"
        path = "/v1/chat/completions"
        return ServerDialect(path, self._body, self._read, needs, greedy_trial=False)

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> ChatConversation:
        """A conversation up to the first action."""
        functions = [{"type": "function", "function": tool} for tool in tools]
        return ChatConversation(self, (self.add(functions), *map(self.add, messages)))

    def text(self, tokens: Sequence[int]) -> str:
        """An action's text, with its calls in the environment's format."""
        (number,) = tokens
        return self._entries[number].text

    def add(self, entry: Any) -> int:
        """Keeps an entry; returns its number."""
        with self._lock:
            self._entries.append(entry)
            return len(self._entries) - 1

    def answers(self, number: int, observation: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages that answer an action, as the API wants them.

        Results come first, in the order of the calls, one for each. A further one, and one of a
        text that the environment took for a call, is sent as the user's.
        """
        waiting = [call["id"] for call in self._entries[number].sent.get("tool_calls", ())]
        results: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for message in observation:
            if message["role"] != "tool":
                others.append(dict(message))
            elif waiting:
                results.append({**message, "tool_call_id": waiting.pop(0)})
            else:
                others.append({"role": "user", "content": message["content"]})
        missing = [{"role": "tool", "content": NO_RESULT, "tool_call_id": i} for i in waiting]
        return [*results, *missing, *others]

    def _body(
        self, model: str, context: Sequence[int], sampling: Sampling, seed: int | None
    ) -> dict[str, Any]:
        tools, *messages = (self._entries[number] for number in context)
        body = {
            "model": model,
            "messages": [m.sent if isinstance(m, ChatAction) else m for m in messages],
            "temperature": 0.0 if sampling.top_k == 1 else sampling.temperature,
            self.limit_field: sampling.max_tokens,
        }
        if sampling.top_p is not None:
            body["top_p"] = sampling.top_p
        if seed is not None:
            body["seed"] = seed
        return body | {"tools": tools} if tools else body

    def _read(self, reply: Any) -> Reply:
        (choice,) = reply["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        number = self.add(_action(message, self._format))
        if reason in ("tool_calls", "function_call"):
            reason = "stop"
        usage = read_usage(reply.get("usage")) | {"cut_answers": int(reason == "length")}
        return Reply([number], [math.nan], reason, usage=usage)


class ChatConversation(NamedTuple):
    """An episode as a server reads it; a `TokenizedConversation` without `say`."""

    known: ChatMessages
    tokens: tuple[int, ...]

    def extend(self, action: Sequence[int], messages: Sequence[Message]) -> ChatConversation:
        """The conversation after an action and the messages that answer it."""
        (number,) = action
        answers = self.known.answers(number, messages)
        return self._replace(tokens=(*self.tokens, number, *map(self.known.add, answers)))


def _action(message: Any, tool_format: ToolFormat) -> ChatAction:
    """An assistant's message of the API.

    Where the arguments of a call are no JSON object, no call is made: the environment reads the
    text, and answers that.
    """
    content, sent = message.get("content") or "", message.get("tool_calls") or []
    calls = []
    for number, call in enumerate(sent):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            read = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            written = "\n".join(
                f"{c['function']['name']}{c['function']['arguments']}" for c in sent
            )
            text = f"{content}\n{written}" if content else written
            return ChatAction({"role": "assistant", "content": text}, text)
        function = {"name": name, "arguments": arguments or "{}"}
        given = call.get("id") or f"call_{number}"
        calls.append(
            (ToolCall(name, read), {"id": given, "type": "function", "function": function})
        )
    if not calls:
        return ChatAction({"role": "assistant", "content": content}, content)
    text = tool_format.render(content, [call for call, _ in calls])
    asked = [each for _, each in calls]
    return ChatAction({"role": "assistant", "content": content or None, "tool_calls": asked}, text)
