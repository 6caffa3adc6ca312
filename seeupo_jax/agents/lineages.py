"""Lineages of an episode's calls: converts histories that clients send to tokens.

A call whose messages start with an earlier call's messages and its answer continues that turn token
by token: sampled tokens are never tokenised again. The first call that continues a turn is in the
same lineage. Every other call (a branch, a rewritten or compacted history, a sub-agent) starts a
new lineage, in which the messages before it are context.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from seeupo_jax.agents.calls import HistoryMessage, ModelCall, context_exceeded
from seeupo_jax.agents.sampled_text import longest_token, text_with_mark
from seeupo_jax.envs.base import Message, Tool
from seeupo_jax.envs.thoughts import thought_tags
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.policy.files.chat.call_ids import as_function
from seeupo_jax.policy.files.messages import TaggedText
from seeupo_jax.policy.files.template_knowledge import lists_tools, template_writes, thoughts_around
from seeupo_jax.policy.files.tokenizer import TokenizedConversation, Tokenizer, Transcript
from seeupo_jax.rewards.finished_episode import HISTORY
from seeupo_jax.types import CONTEXT, Segment

_SLACK = 4  # a tokenizer may normalise a text to a shorter one

_KEPT_EVERY = 16  # one in this many consecutive turns keeps its conversation for branches


@dataclass(eq=False)
class ReadCall:
    """A call as the model reads it.

    role: that calls. tools: its tools. digest: of these and all its messages.
    parent: the turn that it continues. depth: number of its ancestors.
    messages, new: the messages since the parent, in the tokenizer's form, and as text with calls
      written out.
    kept: its conversation, if it is cached.
    """

    role: str
    tools: tuple[Tool, ...]
    digest: bytes
    parent: LineageTurn | None
    depth: int
    messages: Sequence[Message]
    new: tuple[Message, ...]
    kept: TokenizedConversation | None

    @property
    def conversation(self) -> TokenizedConversation:
        """The tokens up to the action; rebuilt from the nearest cached ancestor if necessary."""
        read, later = self, list[ReadCall]()
        while read.kept is None:
            assert read.parent is not None  # a conversation without a parent is always kept
            later.append(read)
            read = read.parent.read
        conversation = read.kept
        for read in reversed(later):
            assert read.parent is not None
            conversation = conversation.extend(read.parent.action, read.messages)
        return conversation

    def forget(self) -> None:
        """Drops the conversation: keeping all would need memory quadratic in the turns."""
        if self.depth % _KEPT_EVERY:
            self.kept = None


@dataclass(eq=False)
class LineageTurn:
    """A turn, open or answered.

    number: its index in the order in which turns began, including cancelled ones.
    lineage: turns of a lineage are sampled one after another, each after all earlier tokens.
    thoughts: of the answer, if they are no content.
    """

    read: ReadCall
    number: int
    lineage: int
    answered: bool = False
    action: Sequence[int] = ()
    thoughts: str = ""


class Lineages:
    """The turns of one episode.

    Args:
      tool_format: the format in which calls are written.
      volatile: patterns of texts in system messages that two calls of one conversation may have
        in different forms; the policy reads that of the first call.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat, volatile: Sequence[str] = ()):
        self._tokenizer, self._format, self._volatile = tokenizer, tool_format, tuple(volatile)
        self._turns: list[LineageTurn] = []  # open or answered
        self._tips: dict[int, LineageTurn] = {}  # the last turn of each lineage
        self._roles: dict[int, str] = {}  # of each lineage
        self._ends = defaultdict[bytes, list[LineageTurn]](list)  # by the digest with the answer
        self._transcripts = defaultdict[int, Transcript](Transcript)  # by lineage
        self._listed: dict[str, tuple[Tool, ...]] = {}  # each list of tools once, by its JSON
        self._started = self._lineages = 0
        self.tools: dict[str, Tool] = {}  # the tools of all calls, by name

    @property
    def turns(self) -> int:
        """The number of turns that were begun and not cancelled."""
        return len(self._turns)

    @property
    def count(self) -> int:
        """The number of lineages of the turns."""
        return len({turn.lineage for turn in self._turns})

    @property
    def cancelled(self) -> int:
        """The number of cancelled turns."""
        return self._started - len(self._turns)

    def read(self, call: ModelCall) -> ReadCall:
        """Finds the turn that a call would continue, and its tokens; changes no state.

        Raises:
          ValueError: the tokenizer rejects the messages.
        """
        digests = list(history_digests(call.messages, call.tools, call.role, self._volatile))
        tools = self._listed.setdefault(json.dumps(call.tools), call.tools)
        parent, shared = self._continued(digests, call.messages)
        new = call.messages[shared:]
        read = [to_tokenizer_message(each, self._tokenizer, self._format) for each in new]
        if parent is None:
            depth, conversation = 0, self._tokenizer.begin(read, tools)
        else:
            depth, before = parent.read.depth + 1, parent.read.conversation
            parent.read.kept = before  # it may be continued again
            conversation = before.extend(parent.action, read)
        shown = tuple(self._message(each) | _named(call.role) for each in new)
        return ReadCall(call.role, tools, digests[-1], parent, depth, read, shown, conversation)

    def begin(self, read: ReadCall) -> LineageTurn:
        """Begins the turn of a call that was just read."""
        parent = read.parent
        if parent is not None and self._tips[parent.lineage] is parent:
            lineage = parent.lineage
        else:
            lineage, self._lineages = self._lineages, self._lineages + 1
        turn = LineageTurn(read, self._started, lineage)
        self._started += 1
        self._turns.append(turn)
        self._tips[lineage] = turn
        self._roles[lineage] = read.role
        self.tools |= {tool["name"]: tool for tool in read.tools}
        return turn

    def act(
        self,
        turn: LineageTurn,
        tokens: Sequence[int],
        logp: Sequence[float],
        answer: HistoryMessage,
        expert_LG: np.ndarray | None = None,
        version_L: Sequence[int] = (),
    ) -> None:
        """Records the tokens sampled in an open turn, and the answer that the client received.

        Args:
          expert_LG, version_L: as in `Transcript.act`.
        """
        transcript, parent = self._transcripts[turn.lineage], turn.read.parent
        transcript.read(turn.read.conversation.tokens)
        transcript.act(tokens, turn.number, logp, expert_LG, version_L)
        turn.action, turn.answered, turn.thoughts = tokens, True, answer.thoughts
        self._ends[extend_digest(turn.read.digest, answer)].append(turn)
        if parent is not None and parent.lineage == turn.lineage:
            parent.read.forget()

    def cancel(self, turn: LineageTurn) -> None:
        """Removes an open turn; the turn that it continued can be continued again."""
        self._turns.remove(turn)
        parent = turn.read.parent
        if parent is not None and parent.lineage == turn.lineage:
            self._tips[turn.lineage] = parent
        else:
            del self._tips[turn.lineage]

    def segments(self) -> tuple[Segment, ...]:
        """The segments of all lineages; answered turns are numbered consecutively, in order."""
        dense_T = np.full(self._started, CONTEXT, np.int32)
        for number, turn in enumerate(self._answered()):
            dense_T[turn.number] = number
        segments = tuple(
            replace(segment, turn_L=_renumber(segment.turn_L, dense_T), role=self._roles[lineage])
            for lineage, transcript in sorted(self._transcripts.items())
            for segment in transcript.segments()
        )
        return segments or Transcript().segments()

    def messages(self) -> list[Message]:
        """The new messages and the action of each answered turn, in order."""
        messages: list[Message] = []
        for turn in self._answered():
            mark = self._format.mark if turn.read.tools else ""
            text = text_with_mark(self._tokenizer, turn.action, mark)
            answer = {"role": "assistant", "content": text} | _named(turn.read.role)
            messages += [*turn.read.new, answer]
        return messages

    def _answered(self) -> list[LineageTurn]:
        return [turn for turn in self._turns if turn.answered]

    def _continued(
        self, digests: Sequence[bytes], messages: Sequence[HistoryMessage]
    ) -> tuple[LineageTurn | None, int]:
        """Returns the turn that a history continues, and the number of messages up to its answer.

        The turn with the most messages is chosen, preferably the last of a lineage.
        """
        for count in range(len(digests) - 1, 0, -1):
            sent = messages[count - 1].thoughts
            turns = self._ends.get(digests[count], ())
            turns = [turn for turn in turns if same_thoughts(sent, turn.thoughts)]
            if turns:
                last = max(turns, key=lambda turn: (self._tips[turn.lineage] is turn, turn.number))
                return last, count
        return None, 0

    def _message(self, message: HistoryMessage) -> Message:
        """A message as text, for trajectories."""
        sent = {HISTORY: "sent"} if message.role == "assistant" else {}
        message = _with_thoughts(message, self._tokenizer)
        return {"role": message.role, "content": _written(message, self._format), **sent}


def _named(role: str) -> Message:
    """The field of a message of this role's conversation."""
    return {"name": role} if role else {}


def _renumber(turn_L: np.ndarray, number_T: np.ndarray) -> np.ndarray:
    return np.where(turn_L == CONTEXT, CONTEXT, number_T[turn_L]).astype(np.int32)


def check_length(call: ModelCall, tokenizer: Tokenizer, max_context: int) -> None:
    """Refuses far too long calls before they are tokenised, which would block all other calls.

    Raises:
      CallRefused: no text with so many characters fits into the context.
    """
    longest = longest_token(tokenizer)
    if longest is None:
        return
    most, size = _SLACK * longest * max_context, sum(map(_characters, call.messages))
    if call.prompt is not None:  # of tokens, each at least a character
        size = len(call.prompt)
    name = "messages" if call.prompt is None else "prompt"
    got = f"{size} characters"
    if size <= most and call.tools and lists_tools(tokenizer):
        size += len(json.dumps(call.tools, ensure_ascii=False))
        name, got = "tools", f"{size} characters with the messages"
    if size > most:
        raise context_exceeded(got, "fewer", max_context, name)


def _characters(message: HistoryMessage) -> int:
    """The number of characters of a message's content and thoughts, and of its calls as JSON."""
    calls = [[call.name, call.arguments, call.positional] for call in message.calls]
    written = json.dumps(calls, ensure_ascii=False) if calls else ""
    return len(message.content) + len(message.thoughts) + len(written)


def to_tokenizer_message(
    message: HistoryMessage, tokenizer: Tokenizer, tool_format: ToolFormat
) -> dict[str, Any]:
    """Converts a client's message to the tokenizer's form.

    The chat template writes the calls if it writes them in the tool format; otherwise they become
    text.

    Raises:
      ValueError: it contains a lone surrogate, which JSON allows.
    """
    message = _with_thoughts(message, tokenizer)
    written = _written(message, tool_format)
    written.encode()
    if message.role != "assistant":
        return {"role": message.role, "content": written}
    thoughts = thought_tags(message.content)
    after_text = bool(message.content)
    if message.calls and template_writes(tokenizer, tool_format, after_text):
        calls = [as_function(call) for call in message.calls]
        json.dumps(calls, ensure_ascii=False).encode()  # the form in templates
        content = TaggedText(message.content, thoughts)
        return {"role": message.role, "content": content, "tool_calls": calls}
    tags = tool_format.tags(message.content, message.calls) if message.calls else ()
    if not written.startswith(message.content):
        thoughts = ()  # harmony writes them as a message
    return {"role": message.role, "content": TaggedText(written, [*thoughts, *tags])}


def _with_thoughts(message: HistoryMessage, tokenizer: Tokenizer) -> HistoryMessage:
    """The same message with its thoughts in its content, between the model's tags."""
    if not message.thoughts:
        return message
    opening, closing = thoughts_around(tokenizer)
    content = f"{opening}\n{message.thoughts.strip()}\n{closing}\n\n{message.content}"
    return replace(message, content=content, thoughts="")


def _written(message: HistoryMessage, tool_format: ToolFormat) -> str:
    """The text of a message with its calls, if any."""
    if not message.calls:
        return message.content
    return tool_format.render(message.content, message.calls)


def same_thoughts(sent: str, sampled: str) -> bool:
    """Whether a client's message may be the sampled one: most clients send no thoughts back."""
    return not sent or sent.strip() == sampled


def plain_text(message: HistoryMessage) -> str:
    """A normal form of a message: clients may change white space and the form of JSON.

    Thoughts of a field of their own are no part of it (see `same_thoughts`).
    """
    calls = [[call.name, call.arguments, call.positional] for call in message.calls]
    return canonical_json([message.role, message.content.strip(), calls])


def history_digests(
    messages: Sequence[HistoryMessage],
    tools: Sequence[Tool],
    role: str = "",
    volatile: Sequence[str] = (),
) -> Iterator[bytes]:
    """Yields the digests of the first 0, 1, 2, ... messages of a role with these tools.

    Args:
      volatile: as of `Lineages`; histories that differ only in these texts have the same digests.
    """
    digest = hashlib.sha256(role.encode() + canonical_json(tools).encode()).digest()
    yield digest
    for message in messages:
        digest = extend_digest(digest, _without(volatile, message))
        yield digest


def _without(volatile: Sequence[str], message: HistoryMessage) -> HistoryMessage:
    """The same message without its volatile texts, if it is the system's."""
    if message.role != "system" or not volatile:
        return message
    content = re.sub("|".join(volatile), "", message.content, flags=re.MULTILINE)
    return replace(message, content=content)


def extend_digest(digest: bytes, message: HistoryMessage) -> bytes:
    """The digest of a history that is extended by one message."""
    return hashlib.sha256(digest + plain_text(message).encode()).digest()


def canonical_json(value: Any) -> str:
    """JSON text that is the same for equivalent values."""
    return json.dumps(_canonical(value), sort_keys=True)


def _canonical(value: Any) -> Any:
    """Makes 1 and 1.0 the same, since not all languages distinguish them."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
