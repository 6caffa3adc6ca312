"""The forms of a row that is a conversation: messages, ShareGPT, or a prompt and a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.tasks.chat_messages import from_share_gpt
from seeupo_jax.tasks.row_list import Row
from seeupo_jax.tasks.tables import as_rows
from seeupo_jax.tasks.templates import value_of

MESSAGES, SHARE_GPT = "messages", "conversations"
_OPTIONS = ("prompt", "completion")
_ALLOWED = (
    "the column messages, the column conversations of ShareGPT, or a prompt and a completion, whose"
    " columns config.sft.options={'prompt': COLUMN, 'completion': COLUMN} names"
)


@dataclass(frozen=True)
class RowForm:
    """The columns of rows that have a prompt and a completion. named: whether a user named them."""

    prompt: str = "prompt"
    completion: str = "completion"
    named: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], field: str) -> RowForm:
        """The form that `config.sft.options` names.

        Raises:
          ValueError: it names something else, or no text.
        """
        for name, column in options.items():
            if name not in _OPTIONS or not isinstance(column, str):
                raise ValueError(
                    f"{field}: got config.sft.options={dict(options)!r}; allowed for a file:"
                    " {'prompt': COLUMN, 'completion': COLUMN}, or none."
                )
        return cls(**options, named=bool(options))

    def conversation(self, row: Row, where: str) -> Row:
        """A row's `messages` and `tools`.

        Raises:
          ValueError: the row is no conversation in a known form; one sentence.
        """
        tools = {"tools": _tools(row, where)}
        if not self.named and row.get(MESSAGES) is not None:
            return {MESSAGES: as_rows(row[MESSAGES], where), **tools}
        if not self.named and row.get(SHARE_GPT) is not None:
            turns = as_rows(row[SHARE_GPT], where)
            messages = from_share_gpt(turns, f"{where}: {SHARE_GPT}")
            return {MESSAGES: [*_system(row), *messages], **tools}
        parts = [value_of(row, name) for name in (self.prompt, self.completion)]
        if None in parts:
            raise ValueError(
                f"{where}: messages: got none, with the columns {', '.join(row)}; allowed:"
                f" {_ALLOWED}."
            )
        asked, said = (
            _messages(part, role, where)
            for part, role in zip(parts, ("user", "assistant"), strict=True)
        )
        return {MESSAGES: [*_system(row), *asked, *said], **tools}


def _system(row: Row) -> list[dict[str, str]]:
    """The message of a column `system`, if the row has a text there."""
    text = row.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _tools(row: Row, where: str) -> Any:
    """The column `tools`, which a table may hold as a list per column; an empty cell is none."""
    tools = row.get("tools")
    if isinstance(tools, Mapping):
        return as_rows(tools, f"{where}: tools")
    return None if tools == "" else tools


def _messages(part: Any, role: str, where: str) -> list[Any]:
    if isinstance(part, list | tuple | Mapping):
        return as_rows(part, where)
    return [{"role": role, "content": part if isinstance(part, str) else str(part)}]
