"""The conversations of a supervised run, each read and checked before anything is compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.envs.null_fields import NullCounts
from seeupo_jax.learner.imitation.action_segments import Segments, Tokenized
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.parallel.stop_signal import Stopped
from seeupo_jax.policy.files.rewritten import RewrittenEpisodes
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.supervised.conversation_sources import (
    DEMONSTRATIONS,
    Conversations,
    ToolCallsAsText,
    format_of_listing,
    open_conversations,
)
from seeupo_jax.types import CONTEXT, Segment

_SPLIT_STREAM = 1  # of the seed: which conversations are held out
OnRead = Callable[[int, int], None]  # conversations read, of how many


@dataclass(frozen=True)
class Subset(Sequence[Segments]):
    """Some of the conversations of a source, as segments."""

    tokenized: Tokenized
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Segments:
        return self.tokenized[self.numbers[index]]


@dataclass(frozen=True)
class SftData:
    """Conversations to learn from, and those to measure the held-out loss on.

    held_out: empty where nothing is held out.
    skipped, cut: conversations of more tokens than a conversation may have.
    trained_tokens: of the training conversations' assistant messages, once.
    fingerprint: of all tokens, in order.
    nulls: of tools and of calls' arguments, in all conversations.
    rewritten: a warning that most of them are a segment for every turn; None: they are not.
    """

    training: Subset
    held_out: Subset | None
    skipped: int
    cut: int
    trained_tokens: int
    fingerprint: str
    nulls: NullCounts
    rewritten: str | None = None

    def lines(self) -> list[str]:
        """The counts as lines of text."""
        text = f"{len(self.training):,} conversations to train on, {self.trained_tokens:,} tokens"
        text += " of assistant messages"
        held_out = 0 if self.held_out is None else len(self.held_out)
        text += f"; {held_out:,} held out" if held_out else "; none held out"
        nulls = "nulls in tools and in arguments of calls"
        counts = {
            "{:,} conversations are skipped: longer than rollout.max_context": self.skipped,
            "{:,} conversations are cut: longer than rollout.max_context": self.cut,
            f"warning: {{:,}} {nulls} are left out: the schemas do not allow them, and typed tables"
            " write them for what is absent": self.nulls.dropped,
            f"{{:,}} {nulls} stay: the schemas allow them, or do not say": self.nulls.kept,
        }
        warnings = [] if self.rewritten is None else [self.rewritten]
        lines = [line.format(count) for line, count in counts.items() if count]
        return [text, *lines, *warnings]


def tokenize(
    source: Conversations, tokenizer: Tokenizer, *, train_on: str = "all", limit: int | None = None
) -> Tokenized:
    """Conversations as segments; tool calls as text where the tokenizer writes none."""
    shown = source
    if not tokenizer.writes_calls:
        shown = ToolCallsAsText(source, format_of_listing(tokenizer.tool_listing))
    return Tokenized(shown, tokenizer, train_on, limit)


class _Reading:
    """Goes through a source once: which conversations are kept, and what they are."""

    def __init__(self, config: Config, tokenizer: Tokenizer, on_read: OnRead):
        self._config, self._tokenizer, self._on_read = config, tokenizer, on_read
        self._digest = hashlib.sha256()
        self.skipped = self.cut = 0
        self.nulls, self.rewritten = NullCounts(), RewrittenEpisodes()

    def read(self, source: Conversations) -> tuple[Tokenized, list[int], list[int]]:
        """The conversations as segments, the numbers of those that are kept, their tokens.

        Raises:
          ValueError: one of them is none, or too long where that is an error.
        """
        sft, limit = self._config.sft, self._config.rollout.max_context
        cut = limit if sft.too_long == "cut" else None
        tokenized = tokenize(source, self._tokenizer, train_on=sft.train_on, limit=cut)
        numbers, sizes = [], []
        for number in range(len(source)):
            size = self._keep(tokenized, number, source)
            if size:
                numbers.append(number)
                sizes.append(size)
            self._on_read(number + 1, len(source))
        return tokenized, numbers, sizes

    def _keep(self, tokenized: Tokenized, number: int, source: Conversations) -> int:
        """The tokens that are trained of a conversation; 0: it is skipped."""
        limit, too_long = self._config.rollout.max_context, self._config.sft.too_long
        where = source.where(number)
        try:
            segments, conversation = tokenized.all_segments(number), source[number]
            if self._config.sft.train_on == "last":
                _check_last(conversation)
        except ValueError as error:
            message = str(error)
            raise ValueError(
                message if message.startswith(where) else f"{where}: {message}"
            ) from None
        self.nulls.dropped += conversation.nulls.dropped
        self.nulls.kept += conversation.nulls.kept
        self.rewritten.add(segments)
        longest = max(_needed(segment) for segment in segments)
        if longest > limit and too_long == "error":
            raise ValueError(
                f"{where}: got a conversation of {longest:,} tokens; allowed: at most"
                f" config.rollout.max_context={limit}, or config.sft.too_long=skip or cut."
            )
        included = [segment for segment in segments if _needed(segment)]
        if longest > limit and too_long == "cut":
            included = list(tokenized[number])
        if (longest > limit and too_long == "skip") or not included:
            self.skipped += 1
            return 0
        self.cut += longest > limit
        for segment in included:
            self._digest.update(np.int64(len(segment.tokens_L)).tobytes())
            self._digest.update(segment.tokens_L.tobytes() + segment.turn_L.tobytes())
        return int(sum((segment.turn_L != CONTEXT).sum() for segment in included))

    def fingerprint(self) -> str:
        """A hash of the conversations kept so far, the same in all processes.

        Raises:
          ValueError: the processes have read different conversations.
        """
        digest = self._digest.hexdigest()
        if len(set(gather(digest))) > 1:
            raise ValueError(
                "--data: got other conversations in one process than in another; allowed: the same"
                " in all of them."
            )
        return digest


def _check_last(conversation: Demonstration) -> None:
    """ValueError where the last message of an assistant, the only one to train on, is context."""
    weights = [m.get("weight", 1) for m in conversation.messages if m["role"] == "assistant"]
    if weights and not weights[-1]:
        raise ValueError(
            "messages: got weight 0 for the last one of the assistant; allowed with"
            " config.sft.train_on=last: 1."
        )


def _needed(segment: Segment) -> int:
    """Tokens up to the last that is trained; 0 without any."""
    return 1 + int(np.flatnonzero(segment.turn_L != CONTEXT).max(initial=-1))


def read_data(config: Config, tokenizer: Tokenizer, on_read: OnRead) -> SftData:
    """The conversations that `config.sft` names, each read once; every process calls it.

    Raises:
      ValueError: no data, or a conversation that is none; one sentence that says where.
    """
    sft = config.sft
    source = open_conversations(config, str(sft.data), sft.split, sft.options, "--data")
    reading = _Reading(config, tokenizer, on_read)
    tokenized, numbers, sizes = reading.read(source)
    _check_left("--data", len(source), len(numbers), "to train on")
    held_out = None
    if sft.held_out_data is not None:
        field = "config.sft.held_out_data"
        # Options of demonstrations are none of files, and the other way round.
        alike = (sft.held_out_data == DEMONSTRATIONS) == (sft.data == DEMONSTRATIONS)
        options = sft.options if alike else {}
        other = open_conversations(config, sft.held_out_data, sft.held_out_split, options, field)
        held_out = Subset(*reading.read(other)[:2])
        _check_left(field, len(other), len(held_out), "to hold out")
    elif sft.held_out:
        numbers, sizes, held_out_places = _hold_out(numbers, sizes, sft.held_out, config.seed)
        held_out = Subset(tokenized, held_out_places)
    return SftData(
        Subset(tokenized, numbers),
        held_out,
        reading.skipped,
        reading.cut,
        sum(sizes),
        reading.fingerprint(),
        reading.nulls,
        reading.rewritten.warning("conversations", tokenizer.why_rewritten),
    )


def _check_left(field: str, total: int, included: int, what_for: str) -> None:
    """ValueError where a source has no conversation that is short enough."""
    if not included:
        raise ValueError(
            f"{field}: got {total} conversations, of which none is left {what_for}; allowed: at"
            " least one of no more than config.rollout.max_context tokens."
        )


def _hold_out(
    numbers: Sequence[int], sizes: Sequence[int], share: float, seed: int
) -> tuple[list[int], list[int], list[int]]:
    """Numbers and sizes to train on, and the numbers held out: a share of them, at least one.

    Raises:
      ValueError: none would be left to train on.
    """
    count = max(1, round(share * len(numbers)))
    if count >= len(numbers):
        raise ValueError(
            f"--data: got {len(numbers)} conversations, of which none is left to train on, since"
            f" config.sft.held_out={share:g} holds out {count}; allowed: more of them, a smaller"
            " share, 0 for none, or others to hold out in config.sft.held_out_data."
        )
    drawn = np.random.default_rng((seed, _SPLIT_STREAM)).permutation(len(numbers))
    held_out = set(drawn[:count].tolist())
    training = [place for place in range(len(numbers)) if place not in held_out]
    return (
        [numbers[place] for place in training],
        [sizes[place] for place in training],
        [numbers[place] for place in sorted(held_out)],
    )


def load_data(
    config: Config, progress: ProgressDisplay, stop: Callable[[], bool] = lambda: False
) -> SftData:
    """`read_data` with the configuration's own tokenizer, shown while it is read.

    Args:
      stop: whether this process was asked to stop. Of several processes none stops here.

    Raises:
      Stopped: it was.
    """

    def on_read(done: int, total: int) -> None:
        progress.step(done, total)
        if jax.process_count() == 1 and stop():
            raise Stopped(f"after {done:,} of {total:,} conversations were read")

    tokenizer = read_tokenizer(str(config.model.path), config.chat)
    assert tokenizer is not None  # `check_sft` has found it
    progress.phase("conversations")
    data = read_data(config, tokenizer, on_read)
    for line in data.lines():
        progress.log(line)
    return data
