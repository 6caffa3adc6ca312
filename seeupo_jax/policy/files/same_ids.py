"""Checks that `transformers` reads the tokenizer that was written into a folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

_ALONE, _ROWS, _LONGEST, _REPEATED = 2000, 500, 12, 40
_HOSTILE = (
    "",
    " ",
    "   two  runs   of spaces ",
    "\n\r\n\t\x00\x01\x7f\x85\xa0\u2028\u3000\ufeff\u200d",
    "naïve café e\u0301 Ω ﬁ 漢字 한글 🙂🏽👩‍👩‍👧 \U0010ffff\ufffd",
    "▁▁literal▁ <0x41><0x0A> <unk> <s></s>",
    "0123456789 3.14e-10 --==-- aaaaaaaa ababababa",
)


def compare(
    folder: Path,
    pieces: Sequence[str],
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    split: bool = False,
) -> None:
    """Compares the ids of many texts, and their decoded texts.

    Args:
      folder: with the config.json of the model, if any, which determines the class.
      pieces: texts of tokens, of which the compared texts are made.
      encode, decode: of the tokenizer that was written.
      split: whether names of control tokens in a text are text.

    Raises:
      ValueError: a text for which they differ, or a folder that is refused.
    """
    try:
        library = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises errors of any class
        raise ValueError(f"tokenizer: transformers does not read {folder}: {error}") from error
    for text in try_texts(pieces):
        wanted = list(encode(text))
        ids = library.encode(text, add_special_tokens=False, split_special_tokens=split)
        if ids != wanted or library.decode(wanted) != decode(wanted):
            raise ValueError(
                f"tokenizer: {type(library).__name__} of transformers, which is what it takes for"
                f" {folder}, gives other tokens for {text!r}"
            )


def try_texts(pieces: Sequence[str], seed: int = 0) -> list[str]:
    """Texts to compare tokenizers on, the same ones every time.

    Pieces alone and in sequence, repeated where a piece can overlap itself, and unusual characters.
    """
    numbers = random.Random(seed)
    alone = numbers.sample(pieces, min(len(pieces), _ALONE))
    rows = (numbers.choices(pieces, k=numbers.randint(2, _LONGEST)) for _ in range(_ROWS))
    wild = (
        "".join(chr(numbers.choice((32, numbers.randrange(0xD800), 0x10FFFF))) for _ in range(20))
        for _ in range(_ROWS // 10)
    )
    repeated = (piece[:size] * _REPEATED for piece in alone for size in _periods(piece))
    return [*_HOSTILE, *alone, *map("".join, rows), *wild, *dict.fromkeys(repeated)]


def _periods(text: str) -> Iterator[int]:
    """The periods with which a text repeats itself."""
    return (n for n in range(1, len(text)) if text[n:] == text[: len(text) - n])
