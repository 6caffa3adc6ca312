"""Puts the results of parallel tool calls in the order of their calls.

Clients run calls in parallel and send the results in any order; only ids assign results to calls.
Neither a chat template nor the digest of a history reads ids, so the order has to be the calls'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Named(NamedTuple):
    """A reference to a call, in the call itself or in its result.

    id: None: it has none. field: its path in the request. tool: the tool's name, if stated.
    """

    id: str | None
    field: str
    tool: str | None = None


class Link(NamedTuple):
    """The tool calls and results of one message.

    result: the call that it answers.
    closes: all calls before it must have their results.
    """

    calls: Sequence[Named] = ()
    result: Named | None = None
    closes: bool = True


class Words(NamedTuple):
    """An API's messages that a call needs a result, and a result a call."""

    call: str
    result: str


CHAT_WORDS = Words(
    "an assistant message with 'tool_calls' must be followed by tool messages responding to each"
    " 'tool_call_id'",
    "messages with role 'tool' must be a response to a preceding message with 'tool_calls'",
)


class UnmatchedResult(ValueError):
    """A call has no result, or a result no call. field: its path in the request."""

    def __init__(self, field: str, sentence: str):
        super().__init__(f"{field}: {sentence}.")
        self.field = field


class _Calls:
    """Calls that wait for results together."""

    def __init__(self, words: Words):
        self._words = words
        self._calls: list[Named] = []
        self._waiting: dict[str | None, deque[int]] = {}  # numbers of calls by id
        self._places: dict[int, int] = {}  # of results, by the number of the call

    @property
    def answered(self) -> bool:
        return len(self._places) == len(self._calls)

    @property
    def has_results(self) -> bool:
        return bool(self._places)

    def check_answered(self) -> None:
        for number, call in enumerate(self._calls):
            if number not in self._places:
                got = f"got {'a call' if call.id is None else repr(call.id)} without a result"
                allowed = f"allowed: one result for each call ({self._words.call})"
                raise UnmatchedResult(call.field, f"{got}; {allowed}")

    def add(self, calls: Sequence[Named]) -> None:
        """Adds calls: either all have different ids, or none has an id."""
        for call in calls:
            if call.id is not None and call.id in self._waiting:
                sentence = f"got {call.id!r} for two calls; allowed: a different id for each"
                raise UnmatchedResult(call.field, sentence)
            if self._calls and (call.id is None) != (self._calls[0].id is None):
                got = "no id" if call.id is None else repr(call.id)
                sentence = (
                    f"got {got} together with calls {'with' if call.id is None else 'without'} ids"
                )
                raise UnmatchedResult(call.field, f"{sentence}; allowed: ids for all, or for none")
            self._waiting.setdefault(call.id, deque()).append(len(self._calls))
            self._calls.append(call)

    def answer(self, result: Named, place: int) -> None:
        """Adds the result that is in a place."""
        if result.id is None and not self._calls:
            return  # the calls of this conversation are plain text
        waiting = self._waiting.get(result.id)
        if waiting is None:
            got = "no id" if result.id is None else repr(result.id)
            ids = " or ".join(repr(call.id) for call in self._calls if call.id is not None)
            sentence = f"got {got}; allowed: {ids or 'none'} ({self._words.result})"
            raise UnmatchedResult(result.field, sentence)
        if not waiting:
            got = "one more result" if result.id is None else f"{result.id!r} a second time"
            raise UnmatchedResult(result.field, f"got {got}; allowed: one result for each call")
        number = waiting.popleft()
        tool = self._calls[number].tool
        if result.id is None and result.tool not in (None, tool):
            got = f"got a result of {result.tool!r} without an id"
            allowed = f"allowed: an id, or the result of the next call, of {tool!r}"
            raise UnmatchedResult(result.field, f"{got}; {allowed}")
        self._places[number] = place

    def order(self) -> dict[int, int]:
        """Maps each result's place to the place of the result that belongs there, once complete."""
        if not self.answered:
            return {}
        sources = (self._places[number] for number in range(len(self._calls)))
        return dict(zip(sorted(self._places.values()), sources, strict=True))


def result_order(links: Sequence[Link], words: Words, *, ends: bool = True) -> list[int]:
    """Returns the places of messages in an order in which results follow their calls' order.

    Only results change places. Results without ids are assigned to the calls in order.

    Args:
      ends: the calls of the last message need results too.

    Raises:
      UnmatchedResult: an id is unknown, missing or occurs twice.
    """
    moves, calls = dict[int, int](), _Calls(words)
    for place, link in enumerate(links):
        if link.result is not None:
            calls.answer(link.result, place)
            moves |= calls.order()
            continue
        if link.closes:
            calls.check_answered()
        if calls.answered and (link.closes or link.calls):
            calls = _Calls(words)
        calls.add(link.calls)
    if ends or calls.has_results:
        calls.check_answered()
    return [moves.get(place, place) for place in range(len(links))]
