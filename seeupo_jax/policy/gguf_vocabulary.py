"""The vocabulary of a GGUF file as a tokenizer of Hugging Face's `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

# Kinds of tokens in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

# Where a text is cut before byte pairs are merged; `{digits}` differs between families.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_words(digits: str) -> pre_tokenizers.PreTokenizer:
    words = Regex(_WORDS.format(digits=digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _by_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _by_words(r"\p{N}")


def _llama_bpe(tokenizer: Tokenizer) -> None:
    tokenizer.model.ignore_merges = True  # a word that is a token is that token
    tokenizer.pre_tokenizer = _by_words(r"\p{N}{1,3}")


def _smollm(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = _by_digits()


# `tokenizer.ggml.pre`: how a text is prepared.
PREPARATIONS: Mapping[str, Callable[[Tokenizer], None]] = {
    "llama-bpe": _llama_bpe,
    "qwen2": _qwen2,
    "smollm": _smollm,
}


def build(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A byte-level byte-pair encoding from a GGUF file's metadata, with its chat template.

    Raises:
      ValueError: a missing key; a model, or a way to prepare text, that is not known here.
    """
    model = _field(fields, "tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"GGUF: tokenizer.ggml.model is {model!r}; allowed: gpt2.")
    pre = _field(fields, "tokenizer.ggml.pre")
    if pre not in PREPARATIONS:
        raise ValueError(
            f"GGUF: tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PREPARATIONS)}."
        )
    names = list(_field(fields, "tokenizer.ggml.tokens"))
    kinds = [int(kind) for kind in _field(fields, "tokenizer.ggml.token_type")]
    if len(kinds) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"GGUF: {len(names)} tokens ({len(set(names))} different) and {len(kinds)} types;"
            " allowed: different tokens, and a type for each."
        )
    vocabulary = {n: i for i, n in enumerate(names) if kinds[i] != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _field(fields, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    PREPARATIONS[pre](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    added = {_CONTROL: [], _USER_DEFINED: []}
    for name, kind in zip(names, kinds, strict=True):
        if kind in added:
            added[kind].append(AddedToken(name, normalized=False, special=kind == _CONTROL))
    tokenizer.add_tokens(added[_USER_DEFINED])
    tokenizer.add_special_tokens(added[_CONTROL])
    named = {
        f"{role}_token": names[int(fields[key])]
        for role in ("bos", "eos")
        if (key := f"tokenizer.ggml.{role}_token_id") in fields
    }
    library = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    library.chat_template = fields.get("tokenizer.chat_template")
    return library


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation, by the file's keys for the ends of turns and of texts."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eos"))
    return [int(fields[key]) for key in keys if key in fields]


def _field(fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise ValueError(f"GGUF: no key {key}; allowed: a file with a tokenizer.")
    return fields[key]
