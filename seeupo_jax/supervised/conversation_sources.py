"""Where conversations come from: rows of files, or an environment's demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from seeupo_jax import envs
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.envs.validation import has_demonstrations
from seeupo_jax.supervised.conversation import ALLOWED, ReadConversation, read_conversation
from seeupo_jax.supervised.row_forms import RowForm
from seeupo_jax.tasks.records import KINDS as SOURCES
from seeupo_jax.tasks.records import open_records
from seeupo_jax.tasks.row_list import Records

DEMONSTRATIONS = "demonstrations"
KINDS = f"{SOURCES}, or demonstrations of config.env"


class Conversations(Protocol):
    """Conversations by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> ReadConversation:
        """A conversation; ValueError with its place: it is none, or (DataChanged) another now."""
        ...

    def where(self, index: int) -> str:
        """The place of one of them, in errors."""
        ...


def open_conversations(
    config: Config, data: str, split: str, options: Mapping[str, Any], field: str
) -> Conversations:
    """Opens the source of conversations that `config.sft.data` names.

    Args:
      split: of tfds, of a folder with splits and of demonstrations.
      options: of demonstrations, or the names of a row's columns `prompt` and `completion`.
      field: that has named it, in errors.

    Raises:
      ValueError: nothing is there, or nothing in it; one sentence.
    """
    if data == DEMONSTRATIONS:
        conversations: Conversations = EnvironmentConversations(config, split, options, field)
    else:
        records = open_records(data, field, split, row_form=ALLOWED)
        conversations = RecordConversations(records, options, field)
    if not len(conversations):
        raise ValueError(f"{field}: {data} has no conversation; allowed: at least one.")
    return conversations


class RecordConversations:
    """Rows of a file, a folder or tfds as conversations, each read when it is asked for."""

    def __init__(self, records: Records, options: Mapping[str, Any], field: str):
        self._records, self._columns = records, RowForm.of(options, field)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> ReadConversation:
        where = self.where(index)
        return read_conversation(self._columns.conversation(self._records[index], where), where)

    def where(self, index: int) -> str:
        return self._records.where(index)


class EnvironmentConversations:
    """Demonstrations of an environment."""

    def __init__(self, config: Config, split: str, options: Mapping[str, Any], field: str):
        environment = envs.make(config.env.name, **config.env.options)
        if not has_demonstrations(environment):
            raise ValueError(
                f"{field}: got {DEMONSTRATIONS!r}; allowed: another source, since env"
                f" {config.env.name} has no demonstrations() and vocabulary()."
            )
        try:
            self._shown = environment.demonstrations(split, **options)
        except TypeError as error:  # an option that it does not have, or of another type
            raise ValueError(f"{field}: got the options {options!r}: {error}.") from error
        self._place = f"{field}: {DEMONSTRATIONS} of {config.env.name}, {split}"

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, index: int) -> ReadConversation:
        shown = self._shown[index]
        fields = {"messages": list(shown.messages), "tools": list(shown.tools)}
        return read_conversation(fields, self.where(index))

    def where(self, index: int) -> str:
        return f"{self._place}, {index}"


def format_of_listing(tools: str | None) -> ToolFormat:
    """The format of calls where tools are listed as `chat.tools` says; hermes by default."""
    return TOOL_FORMATS.get(tools or "", TOOL_FORMATS["hermes"])


@dataclasses.dataclass(frozen=True)
class ToolCallsAsText(Sequence[ReadConversation]):
    """Conversations whose tool calls are text in a format, for tokenizers that write none.

    Tools that a chat template does not list are listed with the words to write calls so.
    """

    conversations: Conversations
    tool_format: ToolFormat

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> ReadConversation:
        shown = self.conversations[index]
        return dataclasses.replace(
            shown, messages=tuple(_as_text(message, self.tool_format) for message in shown.messages)
        )


def _as_text(message: Mapping[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    plain = {n: v for n, v in message.items() if n not in ("tool_calls", "reasoning_content")}
    calls = [
        ToolCall(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    content = tool_format.render(message["content"], calls)
    if thoughts := message.get("reasoning_content"):
        content = f"<think>\n{thoughts.strip()}\n</think>\n\n{content}"
    return plain | {"content": content}
