"""The vocabulary of a GGUF file as a tokenizer of Hugging Face's `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from seeupo_jax.configuration.user_code import describe, shown

# Kinds of tokens in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_ITEMS = {str: "texts", int: "whole numbers"}

# Pre-tokenisation before byte pairs are merged; `{digits}` differs between families.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(first: pre_tokenizers.PreTokenizer, **options: bool) -> pre_tokenizers.PreTokenizer:
    second = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    return pre_tokenizers.Sequence([first, second])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    words = Regex(_WORDS.format(digits=digits))
    return _byte_level(pre_tokenizers.Split(words, behavior="isolated"), use_regex=False)


KIND = "tokenizer.ggml.model"  # the key of a file's kind of vocabulary, where it has one
# `tokenizer.ggml.pre` -> its normalizer, its pre-tokenizer, and whether a word in the vocabulary is
# that token, whatever the merges.
PREPARATIONS: Mapping[str, tuple[Any, pre_tokenizers.PreTokenizer, bool]] = {
    "llama-bpe": (None, _words(r"\p{N}{1,3}"), True),
    "qwen2": (normalizers.NFC(), _words(r"\p{N}"), False),
    "smollm": (None, _byte_level(pre_tokenizers.Digits(individual_digits=True)), False),
}


def build_tokenizer(fields: Mapping[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level byte-pair encoding from a GGUF file's metadata, with its chat template.

    Raises:
      ValueError: a missing key; an unsupported model or pre-tokenisation.
    """
    model = _field(fields, KIND, str)
    if model != "gpt2":
        raise ValueError(f"GGUF: {KIND} is {model!r}; allowed: gpt2.")
    pre = _field(fields, "tokenizer.ggml.pre", str)
    if pre not in PREPARATIONS:
        raise ValueError(
            f"GGUF: tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PREPARATIONS)}."
        )
    names = _field(fields, "tokenizer.ggml.tokens", list, str)
    kinds = _field(fields, "tokenizer.ggml.token_type", list, int)
    if len(kinds) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"GGUF: {len(names)} tokens ({len(set(names))} different) and {len(kinds)} types;"
            " allowed: different tokens, and a type for each."
        )
    vocabulary = {n: i for i, n in enumerate(names) if kinds[i] != _UNUSED}
    stated = _field(fields, "tokenizer.ggml.merges", list, str)
    merges = [tuple(merge.split(" ", 1)) for merge in stated]
    try:
        tokenizer = Tokenizer(BPE(vocabulary, merges))
    except Exception as error:  # the library has no error class of its own
        raise ValueError(
            f"GGUF: tokenizer.ggml.merges cannot be used: {describe(error)}; allowed: pairs of"
            " tokens whose union is one."
        ) from None
    normalizer, tokenizer.pre_tokenizer, tokenizer.model.ignore_merges = PREPARATIONS[pre]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    added = {_CONTROL: [], _USER_DEFINED: []}
    for name, kind in zip(names, kinds, strict=True):
        if kind in added:
            added[kind].append(AddedToken(name, normalized=False, special=kind == _CONTROL))
    tokenizer.add_tokens(added[_USER_DEFINED])
    tokenizer.add_special_tokens(added[_CONTROL])
    named = {
        f"{role}_token": names[_id(fields, key, len(names))]
        for role in ("bos", "eos")
        if (key := f"tokenizer.ggml.{role}_token_id") in fields
    }
    library = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    if "tokenizer.chat_template" in fields:
        library.chat_template = _field(fields, "tokenizer.chat_template", str)
    return library


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: the file's ends of turns and of texts."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eos"))
    size = len(_field(fields, "tokenizer.ggml.tokens", list, str))
    return [_id(fields, key, size) for key in keys if key in fields]


def _field(fields: Mapping[str, Any], key: str, kind: type, item: type = object) -> Any:
    """A value of a type; of a list also the type of its items."""
    if key not in fields:
        raise ValueError(f"GGUF: no key {key}; allowed: a file with a tokenizer.")
    value = fields[key]
    items = value if isinstance(value, list) else ()
    if not isinstance(value, kind) or not all(isinstance(each, item) for each in items):
        allowed = "a text" if kind is str else f"a list of {_ITEMS[item]}"
        raise ValueError(f"GGUF: {key} is {shown(value)}; allowed: {allowed}.")
    return value


def _id(fields: Mapping[str, Any], key: str, size: int) -> int:
    value = fields[key]
    if not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"GGUF: {key} is {shown(value)}; allowed: an id from 0 to {size - 1}.")
    return value
