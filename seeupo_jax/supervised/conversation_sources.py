"""Where conversations come from: a JSONL file, tfds, or an environment's demonstrations."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from seeupo_jax import envs
from seeupo_jax.configuration.schema import Config
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.envs.validation import has_demonstrations
from seeupo_jax.errors import DataChanged
from seeupo_jax.supervised.conversation import ALLOWED, ReadConversation, read_conversation
from seeupo_jax.trajectories.json_lines import read_object, short

TFDS, DEMONSTRATIONS = "tfds:", "demonstrations"
KINDS = "FILE.jsonl, tfds:FOLDER, tfds:NAME, or demonstrations of config.env"


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
      split: of tfds and of demonstrations. options: of demonstrations.
      field: that has named it, in errors.

    Raises:
      ValueError: nothing is there, or nothing in it; one sentence.
    """
    if data.startswith(TFDS):
        conversations: Conversations = TfdsConversations(data.removeprefix(TFDS), split, field)
    elif data == DEMONSTRATIONS:
        conversations = EnvironmentConversations(config, split, options, field)
    else:
        conversations = ConversationFile(Path(data), field)
    if not len(conversations):
        raise ValueError(f"{field}: {data} has no conversation; allowed: at least one.")
    return conversations


class ConversationFile:
    """The lines of a JSONL file, each read when it is asked for; empty ones count for nothing.

    A line that is not the one that was there at first is an error: a file may be written anew.
    """

    def __init__(self, path: Path, field: str):
        self._path, self._field, self._file = path, field, path.absolute()
        try:
            self._starts = _lines(self._file)
        except OSError as error:
            raise ValueError(
                f"{field}: got {str(path)!r}, which cannot be read ({error.strerror}); allowed:"
                f" {KINDS}."
            ) from None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> ReadConversation:
        _, offset, size, digest = self._starts[index]
        where = self.where(index)
        try:
            with self._file.open("rb") as file:
                file.seek(offset)
                line = file.read(size)
        except OSError as error:
            raise _changed(
                where, f"a file that cannot be read any more ({error.strerror})"
            ) from None
        if _digest(line) != digest:
            raise _changed(where, "another line than when the run first read it")
        return read_conversation(read_object(line, where, ALLOWED), where)

    def where(self, index: int) -> str:
        return f"{self._field}: {self._path}, line {self._starts[index][0]}"


def _changed(where: str, got: str) -> DataChanged:
    return DataChanged(
        f"{where}: got {got}; allowed: a file that stays as it is until the run is complete."
    )


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _lines(path: Path) -> list[tuple[int, int, int, bytes]]:
    """Number, offset, bytes and digest of each line that is not empty."""
    starts, offset = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                starts.append((number, offset, len(line), _digest(line)))
            offset += len(line)
    return starts


class TfdsConversations:
    """Records of a dataset of TensorFlow Datasets in ArrayRecord, by random access.

    `messages` of a record is a text of JSON, or a sequence of features with `role` and `content`;
    `tools`, where there is any, a text of JSON.
    """

    def __init__(self, name: str, split: str, field: str):
        import tensorflow_datasets as tfds  # it takes seconds

        self._name, self._split, self._field = name, split, field
        try:
            folder = Path(name).is_dir()
            builder = tfds.builder_from_directory(name) if folder else tfds.builder(name)
            self._source = builder.as_data_source(split=split)
        except Exception as error:  # the library's are of any class
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"{field}: got 'tfds:{name}' with split {split!r}, which cannot be read ({reason});"
                " allowed: a prepared dataset in array_record."
            ) from None

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> ReadConversation:
        record, where = self._source[index], self.where(index)
        fields = {n: _decoded(record[n], where) for n in ("messages", "tools") if n in record}
        return read_conversation(fields, where)

    def where(self, index: int) -> str:
        return f"{self._field}: tfds:{self._name}, {self._split}, record {index}"


def _decoded(value: Any, where: str) -> Any:
    """A feature as JSON has it: bytes as texts, a table of columns as a list of rows.

    Raises:
      ValueError: neither a text of JSON, nor a table, nor a list of objects.
    """
    if isinstance(value, bytes | str):
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise ValueError(f"{where}: got {short(text)}; allowed: JSON.") from None
    try:
        if isinstance(value, Mapping):
            rows = zip(*value.values(), strict=True)
            value = [dict(zip(value, row, strict=True)) for row in rows]
        return [{name: _text(item) for name, item in dict(row).items()} for row in value]
    except (TypeError, ValueError):
        got = short(" ".join(repr(value).split()))  # an array's has several lines
        raise ValueError(
            f"{where}: got {got}; allowed: a text of JSON, or a list of objects."
        ) from None


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


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
