"""Messages in a row, as OpenAI writes them (`role`, `content`) or ShareGPT (`from`, `value`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seeupo_jax.tasks.row_list import short

# Speakers of ShareGPT's conversations and their roles.
SPEAKERS = {
    **{name: "user" for name in ("human", "user")},
    **{name: "assistant" for name in ("gpt", "chatgpt", "assistant", "model", "bing", "bard")},
    "system": "system",
    **{name: "tool" for name in ("tool", "observation", "function_response")},
}
ROLES = ("system", "developer", "user", "assistant", "tool")


def from_share_gpt(turns: Any, where: str) -> Any:
    """Messages of ShareGPT's `conversations`; a list without `from` is returned as it is.

    Raises:
      ValueError: a turn of another speaker, or without a text.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return turns
    if not any(isinstance(turn, Mapping) and "from" in turn for turn in turns):
        return turns
    return [_message(turn, f"{where}[{index}]") for index, turn in enumerate(turns)]


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        raise ValueError(f"{where}: got {short(turn)}; allowed: an object with from and value.")
    speaker = turn.get("from")
    if speaker == "function_call":
        raise ValueError(
            f"{where}.from: got 'function_call'; allowed: messages in OpenAI's form, with the call"
            " in tool_calls of a message of role assistant."
        )
    if not isinstance(speaker, str) or speaker.lower() not in SPEAKERS:
        allowed = ", ".join(SPEAKERS)
        raise ValueError(f"{where}.from: got {short(speaker)}; allowed: {allowed}.")
    others = {name: item for name, item in turn.items() if name not in ("from", "value")}
    return {"role": SPEAKERS[speaker.lower()], "content": turn["value"], **others}


def prompt_messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    """The messages of a prompt: of a text one of the user, of a list each with role and content.

    Raises:
      ValueError: it is neither, or its last message is the assistant's.
    """
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    turns = from_share_gpt(value, where)
    if not isinstance(turns, Sequence):
        raise ValueError(f"{where}: got {short(value)}; allowed: a text or a list of messages.")
    messages = tuple(_plain(turn, f"{where}[{index}]") for index, turn in enumerate(turns))
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: got messages that end with the assistant's; allowed: a prompt, which the"
            " policy answers. Finished conversations are data of seeupo-sft."
        )
    return messages


def _plain(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
        raise ValueError(
            f"{where}: got {short(turn)}; allowed: an object with content and a role of"
            f" {', '.join(ROLES)}."
        )
    more = [n for n, item in turn.items() if n not in ("role", "content") and item]
    if more:
        raise ValueError(f"{where}: got {more[0]!r} in a prompt; allowed: role, content.")
    content = turn.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        got = short(turn.get("content"))
        raise ValueError(f"{where}.content: got {got}; allowed: a text, or parts of type text.")
    return {"role": turn["role"].replace("developer", "system"), "content": content}
