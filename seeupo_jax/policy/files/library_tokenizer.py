"""Loads tokenizers as tokenizer.json defines them, whatever class `transformers` chooses.

Version 4 of `transformers` uses the whole file; some classes of version 5 use only its vocabulary
and merges.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer

from seeupo_jax.envs.base import Message
from seeupo_jax.policy.files.chat.call_ids import id_formats, with_ids
from seeupo_jax.policy.files.chat.channels import to_channels, writes_channels
from seeupo_jax.policy.files.folder_files import read_json_object

_LOGGER = logging.getLogger(__name__)

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"

_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
# Options without effect on ids and texts: of offsets, and all of a byte-level decoder; and those of
# the model whose value is none, which classes and publishers write in two ways.
_INERT = {
    "pre_tokenizer": re.compile(rb',"trim_offsets":\w+'),
    "decoder": re.compile(rb'(?<="type":"ByteLevel")[^}]*'),
    "model": re.compile(
        rb'"(dropout":(null|0\.0)|(continuing_subword_prefix|end_of_word_suffix)":(null|"")),'
    ),
}
_ALONE, _ROWS, _LONGEST, _REPEATED = 2000, 500, 12, 40
_HOSTILE = (
    "",
    " ",
    "   two  runs   of spaces ",
    "\n\r\n\t\x00\x01\x7f\x85\xa0\u2028\u3000\ufeff\u200d",
    "naïve café e\u0301 Ω ﬁ 漢字 한글 🙂🏽👩‍👩‍👧 \U0010ffff\ufffd",
    "▁▁literal▁ <0x41><0x0A> <unk> <s></s>",
    "don't I'LL x1y2 ４５ ½ ² Ⅷ",
    "0123456789 3.14e-10 --==-- aaaaaaaa ababababa",
)


def render_template(
    library: transformers.PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    template: str,
    messages: Sequence[Message],
    functions: list[Any] | None,
    *,
    header: bool,
) -> str:
    """The text that a chat template makes of a conversation.

    Args:
      options: further variables of the template. functions: the tools; None: there are none.
      header: whether the one of the next assistant's message follows.

    Raises:
      Exception: of any class; the template may refuse the conversation.
    """
    if writes_channels(template):
        messages = to_channels(messages)
    elif id_formats(template):
        messages = with_ids(messages, template)
    return library.apply_chat_template(
        list(messages),
        tools=functions,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=header,
        **options,
    )


def load(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a folder, which tokenises as its tokenizer.json says, if it has one.

    Raises:
      Exception: of any class, for a damaged file.
    """
    library = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    file = folder / TOKENIZER_FILE
    plain = transformers.PreTrainedTokenizerFast  # the class that has nothing of its own
    if type(library) is plain or not library.is_fast or not file.is_file():
        return library
    stated, actual = _parts(Tokenizer.from_file(str(file))), _parts(library.backend_tokenizer)
    differing = [name for name in _PARTS if stated[name] != actual[name]]
    if not differing:
        return library
    _LOGGER.warning(
        "tokenizer: %s of transformers, which is what it takes for %s, has another %s than %s,"
        " by which texts are tokenised here.",
        *(type(library).__name__, folder, ", ".join(differing), TOKENIZER_FILE),
    )
    as_written = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    known, vocabulary = as_written.special_tokens_map, as_written.get_vocab()
    roles = library.special_tokens_map.items()  # with those that the class names by default
    named = {r: t for r, t in roles if r not in known and isinstance(t, str) and t in vocabulary}
    as_written.add_special_tokens(named)
    return as_written


def save(library: transformers.PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a tokenizer's files such that versions 4 and 5 of `transformers` read them."""
    library.save_pretrained(folder)
    values = read_json_object(folder / CONFIG_FILE)
    in_5 = transformers.PreTrainedTokenizerFast.__name__
    if values["tokenizer_class"] == in_5:
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):  # version 4 has names for these
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only"):  # of this folder, as it was read here
        values.pop(name, None)
    (folder / CONFIG_FILE).write_text(
        json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _parts(tokenizer: Tokenizer) -> dict[str, bytes | None]:
    """The parts that determine ids and texts, except for added tokens."""
    parts = {}
    for name in _PARTS:
        part = getattr(tokenizer, name)
        state = None if part is None else part.__getstate__()
        parts[name] = _INERT[name].sub(b"", state) if state and name in _INERT else state
    return parts


def check_same_ids(
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
        library = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises errors of any class
        raise ValueError(f"tokenizer: transformers does not read {folder}: {error}") from error
    for text in comparison_texts(pieces):
        wanted = list(encode(text))
        ids = library.encode(text, add_special_tokens=False, split_special_tokens=split)
        if ids != wanted or library.decode(wanted) != decode(wanted):
            raise ValueError(
                f"tokenizer: {type(library).__name__} of transformers, which is what it takes for"
                f" {folder}, gives other tokens for {text!r}"
            )


def comparison_texts(pieces: Sequence[str], seed: int = 0) -> list[str]:
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
