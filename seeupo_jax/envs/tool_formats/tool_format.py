"""The form of a tool format: it reads, writes and recognises calls in the text of a message."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from seeupo_jax.configuration.user_code import encodes
from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.envs.tool_calls import (
    ToolCall,
    ToolCallError,
    decode_json,
    skip_thoughts,
    within_bounds,
)


class Tag(str):
    """A piece of a written message: a tag, one control token where the tokenizer has it as one."""


Call = TypeVar("Call")  # as a reader gives it
Write = Callable[[str, Sequence[ToolCall]], Iterable[str]]  # of `ToolFormat`


class Reading(NamedTuple):
    """The calls of a text, and the text without them."""

    outside: str
    calls: tuple[ToolCall, ...]


class Read(Protocol):
    """`ToolFormat.read`."""

    def __call__(self, text: str, tools: Sequence[Tool], cut: bool = False, /) -> Reading: ...


@dataclass(frozen=True)
class CallGrammar:
    """A format in Lark's syntax, for constrained decoding.

    opening: the text with which calls begin; "": they are the whole message.
    call: from a tool's name and the schema of its arguments, writes a call, after the opening.
    begin: between the opening and the first call. between: between two. end: after the last.
    rules: further rules, which calls refer to.
    excluded: further texts that no message has outside its calls.
    frame: rules of a whole message, with `{calls}` after the form that has none; "": it is a text,
      and then calls.
    """

    opening: str
    call: Callable[[str, Mapping[str, Any]], str]
    between: str
    begin: str = '""'
    end: str = '""'
    rules: str = ""
    excluded: tuple[str, ...] = ()
    frame: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    name: in the configuration.
    read: reads a message with the tools that it may call; raises ToolCallError if a call is
      malformed. Of a message that was cut, the calls before the first that is not complete.
    write: writes a message with content and calls, in pieces; `read` reads them back, unless the
      format has no way to write a value.
    shown: the part of an incomplete text that is certainly content.
    plain: the content of a text whose calls are not read; in most formats all of it.
    mark: the tag before calls, if other formats do not use it.
    grammar: None: calls in this format cannot be constrained.
    call_id: of formats whose calls have ids: from a call and its number in the conversation, the id
      that it is written with: its own if it has the format's form.
    """

    name: str
    read: Read
    write: Write
    shown: Callable[[str], str]
    plain: Callable[[str], str] = str
    mark: str = ""
    grammar: CallGrammar | None = None
    call_id: Callable[[ToolCall, int], str] | None = None

    def parse(
        self, text: str, tools: Sequence[Tool] = (), *, cut: bool = False
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Returns a message's content and calls; with a malformed call, all of it is content.

        Args:
          cut: whether the message was cut: its complete calls count, what follows them does not.
        """
        try:
            outside, calls = self.read(text, tools, cut)
        except ToolCallError:
            return self.plain(text), ()
        named = [(call.name, call.arguments) for call in calls]
        # A lone surrogate is valid JSON but not UTF-8, and could not be sent.
        if not calls or not encodes(json.dumps(named, ensure_ascii=False)):
            return self.plain(text), ()
        return outside.rstrip(), calls

    @property
    def without_calls(self) -> ToolFormat:
        """The format of messages that may call no tool."""

        def read(text: str, tools: Sequence[Tool], cut: bool = False) -> Reading:
            return Reading(self.plain(text), ())

        shown = str if self.plain is str else self.shown
        return dataclasses.replace(self, read=read, shown=shown, mark="")

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        """Writes the text of a message."""
        return "".join(self.write(content, calls))

    def tags(self, content: str, calls: Sequence[ToolCall]) -> list[int]:
        """The positions of the calls' tags in the text that `render` writes."""
        places, end = [], 0
        for piece in self.write(content, calls):
            if isinstance(piece, Tag):
                places.append(end)
            end += len(piece)
        return places

    @property
    def opening(self) -> str:
        """The text with which calls begin; "": none, or not known."""
        return "" if self.grammar is None else self.grammar.opening

    @property
    def own_tags(self) -> frozenset[str]:
        """The tags of calls."""
        pieces = self.write("", [ToolCall("f", {"x": 1})])
        return frozenset({*(p for p in pieces if isinstance(p, Tag)), self.mark} - {""})

    @property
    def example(self) -> str:
        """A call with names in capitals, which shows the form to a model."""
        text = self.render("", [ToolCall("TOOL", {"PARAMETER": "VALUE"})])
        return text.replace('"VALUE"', "VALUE")  # in JSON it need not be a text


class ReadCalls(Protocol):
    """Reads the calls of a message."""

    def __call__(self, text: str, start: int, tools: Sequence[Tool]) -> Iterator[ToolCall]:
        """Yields the calls up to the message's end.

        Args:
          start: the position of the mark with which they begin. tools: those that may be called.

        Raises:
          ToolCallError: a call is malformed, or something follows the last one.
        """
        ...


def complete_calls(calls: Iterable[Call], *, cut: bool) -> tuple[Call, ...]:
    """All calls that are read; of a message that was cut, those before the first error.

    Raises:
      ToolCallError: of the first call, or of any in a message that was not cut.
    """
    complete = list[Call]()
    try:
        for call in calls:
            complete.append(call)
    except ToolCallError:
        if not (cut and complete):
            raise
    return tuple(complete)


def expect_end(text: str, position: int) -> None:
    """Raises ToolCallError unless only white space follows a position."""
    if text[position:].strip():
        raise ToolCallError("nothing may follow the last tool call")


def shown_before(mark: str) -> Callable[[str], str]:
    """`ToolFormat.shown` of a format whose calls begin at a mark."""
    return lambda text: text[: text_before(text, mark, thoughts_end(text))]


def format_after(mark: str, name: str, read: ReadCalls, write: Write, **more: Any) -> ToolFormat:
    """A format whose calls begin at the first mark after the thoughts and end the message.

    Args:
      more: further fields of `ToolFormat`.
    """

    def read_message(text: str, tools: Sequence[Tool], cut: bool = False) -> Reading:
        start = text.find(mark, len(text) - len(skip_thoughts(text)))
        if start < 0:
            return Reading(text, ())
        return Reading(text[:start], complete_calls(read(text, start, tools), cut=cut))

    return ToolFormat(name, read_message, write, shown_before(mark), **more)


def text_before(text: str, mark: str, start: int) -> int:
    """The end of the text before the mark, or before its possible start, and white space."""
    end = text.find(mark, start)
    if end < 0:
        prefixes = (n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n], start))
        end = len(text) - next(prefixes, 0)
    return len(text[:end].rstrip())


def read_each(
    head: re.Pattern[str],
    read_call: Callable[[str, re.Match[str], Sequence[Tool]], tuple[ToolCall, int]],
    problem: str,
) -> ReadCalls:
    """Makes a function that reads calls one after the other.

    Args:
      head: matches how a call begins. read_call: from the text, this match and the tools, returns
        the call and its end. problem: the error where no call begins.
    """

    def read_calls(text: str, start: int, tools: Sequence[Tool]) -> Iterator[ToolCall]:
        if not head.match(text, start):
            raise ToolCallError(problem)
        while found := head.match(text, start):
            call, start = read_call(text, found, tools)
            yield call
        expect_end(text, start)

    return read_calls


def read_section(
    opening: str, end: str, head: str, read_call: Callable[[str, int], tuple[ToolCall, int]]
) -> ReadCalls:
    """Makes a function that reads a section of calls.

    Args:
      opening, end: of the section. head: the tag before a call.
      read_call: from the text and the end of that tag, returns the call and its end.
    """

    def read_calls(text: str, start: int, tools: Sequence[Tool]) -> Iterator[ToolCall]:
        place = start + len(opening)
        if not text.startswith(head, skip_space(text, place)):
            raise ToolCallError(f"after {opening} a {head} must follow")
        while text.startswith(head, skip_space(text, place)):
            call, place = read_call(text, expect(text, place, head))
            yield call
        expect_end(text, expect(text, place, end))

    return read_calls


def expect(text: str, position: int, wanted: str) -> int:
    """Returns the end of a text that has to stand at a position, after white space.

    Raises:
      ToolCallError: another text stands there.
    """
    start = skip_space(text, position)
    if not text.startswith(wanted, start):
        raise ToolCallError(f"a tool call needs {wanted} after {text[:position][-40:]!r}")
    return start + len(wanted)


def skip_space(text: str, position: int) -> int:
    """The position of the next character that is no white space."""
    found = _SPACE.match(text, position)
    assert found is not None  # it matches the empty text
    return found.end()


_SPACE = re.compile(r"\s*")


def read_until(text: str, position: int, wanted: str) -> tuple[str, int]:
    """Returns the text up to another one, stripped, and the end of that.

    Raises:
      ToolCallError: the other text does not follow.
    """
    end = text.find(wanted, position)
    if end < 0:
        raise ToolCallError(f"a tool call needs {wanted} after {text[:position][-40:]!r}")
    return text[position:end].strip(), end + len(wanted)


def read_arguments(text: str, position: int, name: str, given: str = "") -> tuple[ToolCall, int]:
    """Returns a call whose arguments are the JSON object at a position, and their end.

    Raises:
      ToolCallError: no JSON object stands there, or its values are out of bounds.
    """
    value, end = decode_json(text, position)
    if not isinstance(value, dict):
        raise ToolCallError("the arguments of a tool call must be one JSON object")
    return within_bounds(ToolCall(name, value, id=given)), end


def json_text(value: Any) -> str:
    """JSON whose letters are not escaped, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def literal(text: str) -> str:
    """A text in Lark's syntax."""
    return json.dumps(text, ensure_ascii=False)


def json_arguments(schema: Mapping[str, Any]) -> str:
    """A JSON object in Lark's syntax."""
    return f"%json {json.dumps(schema)}"
