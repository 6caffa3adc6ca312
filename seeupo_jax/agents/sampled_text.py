"""A growing action as text for a client: whole characters, truncated at a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

from seeupo_jax.agents.answer_form import PLAIN_TEXT, AnswerForm
from seeupo_jax.agents.calls import Completion
from seeupo_jax.envs.base import THOUGHT, Tool
from seeupo_jax.policy.files.template_knowledge import opens_thoughts
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.vocabulary import CONTROL
from seeupo_jax.rollout.engine.protocol import Action

_UNFINISHED = "\ufffd"  # a tokenizer's text for bytes that are not yet a character


class SampledText:
    """Follows an action while it is sampled; `listen` has the form of `Turn.listen`.

    Args:
      stop: non-empty stop strings; the message ends before them.
      on_text: as in `Session.complete`, called in the caller's thread.
      form: the form in which it is parsed. tools: those that it may call.
      context: the tokens before it, of which the last may open its thoughts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        form: AnswerForm = PLAIN_TEXT,
        tools: Sequence[Tool] = (),
        context: Sequence[int] = (),
    ):
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._form, self._tools = form, tools
        opened = form.thoughts_apart and opens_thoughts(tokenizer, context)
        self._opening = f"{THOUGHT}\n" if opened else ""
        self._growing = GrowingText(self._text)
        self._read = 0  # tokens
        self._given = 0  # characters
        # Tokens and characters up to a stop string, and the stop string.
        self._end: tuple[int, int, str] | None = None

    @property
    def listens(self) -> bool:
        """Whether it needs tokens before the action is complete."""
        return bool(self._stop) or self._on_text is not None

    def listen(self, tokens: Sequence[int]) -> int | None:
        """Reads an action's tokens so far.

        Returns: the number of tokens of the ended action, once there is a stop string; else None.
        """
        if self._end is None:
            text = self._growing.text(tokens)
            if self._place(text) is not None:
                self._end = self._first_end(tokens)
                text = text[: self._end[1]]
            else:
                self._growing.fix(tokens, text)
                text = text[: len(text) - self._unsure(text)]
            self._read = len(tokens)
            self._give(text)
        return None if self._end is None else self._end[0]

    def complete(
        self,
        action: Action,
        *,
        prompt_tokens: int,
        cached_tokens: int = 0,
    ) -> Completion:
        """Returns the message of a complete action; `on_text` receives the rest of its text.

        Args:
          prompt_tokens, cached_tokens: as in `Completion`.
        """
        tokens = action.tokens[: self.listen(action.tokens)]
        text, given = self._text(tokens), self._growing.text(tokens)
        if self._end is not None:
            given = given[: self._end[1]]
            place = self._place(text)
            text = given if place is None else text[: place[0]]
        self._give(given)
        text = self._opening + text
        whole = bool(tokens) and tokens[-1] in self._tokenizer.end_ids
        answer = self._form.parse(text, self._tools)
        cut = not answer.calls and not whole
        if cut:
            answer = self._form.parse(text, self._tools, cut=True)
        ended = whole or self._end is not None
        return Completion(
            text=text,
            content=answer.content,
            calls=answer.calls,
            finish="tool_calls" if answer.calls and not cut else "stop" if ended else "length",
            pieces=tuple(token_bytes(self._tokenizer, token) for token in tokens),
            logp=tuple(action.logp[: len(tokens)]),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            stopped_at=None if self._end is None else self._end[2],
            thoughts=answer.thoughts,
            top=likeliest(self._tokenizer, (action.top or ())[: len(tokens)]),
            tokens=tuple(tokens),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return text_with_mark(self._tokenizer, tokens, self._form.tool_format.mark)

    def _give(self, text: str) -> None:
        """Passes the new part of the text to `on_text`."""
        text = self._opening + text
        new, self._given = text[self._given :], max(self._given, len(text))
        if new and self._on_text is not None:
            self._on_text(new)

    def _place(self, text: str) -> tuple[int, str] | None:
        """The position of the first stop string, and the stop string."""
        places = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        return min(places, default=None)

    def _first_end(self, tokens: Sequence[int]) -> tuple[int, int, str]:
        """The fewest tokens whose text has a stop string, its position, and the stop string."""
        low, high = self._read + 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if self._place(self._growing.text(tokens[:middle])) is None:
                low = middle + 1
            else:
                high = middle
        place = self._place(self._growing.text(tokens[:high]))
        assert place is not None, "a text has a stop string that its tokens do not have"
        return high, *place

    def _unsure(self, text: str) -> int:
        """The number of characters at the end that may change or become a stop string."""
        certain = text.rstrip(_UNFINISHED)
        prefixes = (
            size
            for stop in self._stop
            for size in range(min(len(stop) - 1, len(certain)), 0, -1)
            if certain.endswith(stop[:size])
        )
        return len(text) - len(certain) + max(prefixes, default=0)


class GrowingText:
    """Decodes a growing action incrementally: only the last few tokens at each call.

    The decoded tokens start at least one character before the new tokens, since a decoder may drop
    the first space of a text. If invalid bytes follow, Llama 2's decoder also withdraws characters
    before them; text that was already decoded here is kept.

    Args:
      decode: the text of tokens; U+FFFD stands for bytes that are not yet a character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._fixed = ""  # the text of the first `_decoded` tokens
        self._first = self._decoded = 0

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an action's tokens so far, which include the fixed ones."""
        fixed = self._decode(tokens[self._first : self._decoded])
        return self._fixed + self._decode(tokens[self._first :])[len(fixed) :]

    def fix(self, tokens: Sequence[int], text: str) -> None:
        """Fixes the text of tokens if it ends with a whole character; it is not decoded again."""
        if len(text) > len(self._fixed) and not text.endswith(_UNFINISHED):
            self._fixed, self._first, self._decoded = text, self._decoded, len(tokens)


def text_with_mark(tokenizer: Tokenizer, tokens: Sequence[int], mark: str) -> str:
    """The text of an action, with a mark also where it is a control token."""
    control = _control_token(tokenizer, mark) if mark else None
    if control is None:
        return tokenizer.text(tokens)
    return "".join(
        mark * len(list(run)) if is_control else tokenizer.text(list(run))
        for is_control, run in groupby(tokens, key=control.__eq__)
    )


def likeliest(
    tokenizer: Tokenizer, top: Sequence[Sequence[tuple[int, float]]]
) -> tuple[tuple[tuple[bytes, float], ...], ...]:
    """The likeliest tokens at each place, by their bytes."""
    return tuple(
        tuple((token_bytes(tokenizer, token), logp) for token, logp in each) for each in top
    )


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of one token, possibly part of a character; for a control token its name."""
    table = _bytes_by_id(tokenizer)
    if table is None:
        return tokenizer.text([token]).encode()
    # A model may have more tokens than its tokenizer (a padded head), which have no text.
    piece = table[token] if token < len(table) else b""
    return piece.removeprefix(CONTROL)


@lru_cache(maxsize=1)
def longest_token(tokenizer: Tokenizer) -> int | None:
    """The number of bytes of the longest token's text; None if unknown."""
    table = _bytes_by_id(tokenizer)
    return None if table is None else max(map(len, table))


@lru_cache(maxsize=1)
def _control_token(tokenizer: Tokenizer, name: str) -> int | None:
    piece, table = CONTROL + name.encode(), _bytes_by_id(tokenizer) or []
    return table.index(piece) if piece in table else None


@lru_cache(maxsize=1)  # a process samples with one tokenizer
def _bytes_by_id(tokenizer: Tokenizer) -> list[bytes] | None:
    try:
        return tokenizer.token_bytes()
    except ValueError:  # a decoder whose tokens' bytes are unknown
        return None
