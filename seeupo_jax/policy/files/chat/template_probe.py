"""Which messages a chat template writes: conversations whose texts are found again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seeupo_jax.envs.base import Message

Shape = tuple[tuple[str, int], ...]  # of each message: its role, and how many calls it has

_NAME = "probe_function"
FUNCTION = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A function.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
# Conversations in which messages of a role stand as runs send them.
USUAL: dict[str, tuple[tuple[str, ...], ...]] = {
    "user": (("user", "assistant", "user"),),
    "system": (("system", "user"),),
    "tool": (("user", "assistant", "tool"), ("user", "assistant", "tool", "tool")),
}


def conversation_shape(messages: Sequence[Message]) -> Shape:
    return tuple((message["role"], len(message.get("tool_calls", ()))) for message in messages)


def conversation_of_roles(roles: Sequence[str]) -> list[Message]:
    """A conversation of such messages, each with a text of its own."""
    return make_conversation(tuple((role, 0) for role in roles))


def make_conversation(shape: Shape) -> list[Any]:
    return [_message(index, role, calls) for index, (role, calls) in enumerate(shape)]


def _message(index: int, role: str, calls: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": f"text-{index}-of-it"}
    if calls:
        message["tool_calls"] = [make_call(f"{index}c{number}") for number in range(calls)]
    return message


def make_call(number: str) -> dict[str, Any]:
    """A call whose name, argument and value are found again by this number."""
    function = {"name": f"name-{number}-of-it", "arguments": {f"key-{number}-of": f"v-{number}-of"}}
    # An id as Mistral's templates want it: nine letters and digits.
    return {"id": f"{number:a<9}", "type": "function", "function": function}


def omitted_role(messages: Sequence[Message], text: str) -> str | None:
    """The role of the first message that a template has left out; None: it has written all.

    The text of a message with calls may be left out, as Llama 3 does. A system message may stand
    anywhere, since some templates write it into the last user message; the others are in order.

    Args:
      messages: of `make_conversation`. text: as the template renders them.
    """
    place = 0
    for message in messages:
        if calls := message.get("tool_calls"):
            if not all(_writes_call(text, call) for call in calls):
                return message["role"]
            continue
        found = text.find(message["content"], 0 if message["role"] == "system" else place)
        if found < 0:
            return message["role"]
        place = max(place, found)
    return None


def _writes_call(text: str, call: Any) -> bool:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return all(part in text for part in (name, *arguments, *arguments.values()))


def lists_functions(render: Callable[..., str], *, system: bool) -> bool:
    """Whether a template names the functions that it is given.

    Args:
      render: the text of messages and functions. system: whether it writes system messages.
    """
    openings = (("user",), ("system", "user")) if system else (("user",),)
    try:
        return all(_NAME in render(conversation_of_roles(roles), [FUNCTION]) for roles in openings)
    except Exception:  # a template may raise anything
        return False
