"""The vocabulary of a GGUF file as a tokenizer of Hugging Face's `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from seeupo_jax.configuration.user_code import describe, shown

# Kinds of tokens in `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_ITEMS = {str: "texts", int: "whole numbers", float: "numbers"}

# Parts of the expressions that cut a text into words, as the families' own tokenizers have them.
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGN = r"[^\r\n\p{L}\p{N}]?"  # before a word
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Letters with case that deepseek-llm takes together.
_CASED_LETTERS = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ"
    r"\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _words(digits: str, letters: str = r"\p{L}") -> str:
    others = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return rf"{_SUFFIX}|{_SIGN}[{letters}]+|{digits}|{others}|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    """Words that end before a capital letter which follows a small one."""
    words = rf"{_SIGN}{_UPPER}*{_LOWER}+{suffix}|{_SIGN}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\x{d7ff}]+",
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


def _byte_level(*expressions: str) -> pre_tokenizers.PreTokenizer:
    """Cuts at each expression in turn, then writes bytes as letters."""
    cuts = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in expressions]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, last])


def _gpt2(*first: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Cuts as GPT-2 does, by the expression of the library itself."""
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return _gpt2(pre_tokenizers.Digits(individual_digits=True))


KIND = "tokenizer.ggml.model"  # the key of a file's kind of vocabulary, where it has one
_THREE, _ONE = r"\p{N}{1,3}", r"\p{N}"
# `tokenizer.ggml.pre` -> its normalizer, its pre-tokenizer, and whether a word in the vocabulary is
# that token, whatever the merges.
PREPARATIONS: Mapping[str, tuple[Any, pre_tokenizers.PreTokenizer, bool]] = {
    "llama-bpe": (None, _byte_level(_words(_THREE)), True),
    "qwen2": (normalizers.NFC(), _byte_level(_words(_ONE)), False),
    "qwen35": (normalizers.NFC(), _byte_level(_words(_ONE, r"\p{L}\p{M}")), False),
    "smollm": (None, _single_digits(), False),
    "gpt-2": (None, _gpt2(), False),
    "phi-2": (None, _gpt2(), False),
    "starcoder": (None, _single_digits(), False),
    "refact": (None, _single_digits(), False),  # Granite's too
    "command-r": (normalizers.NFC(), _single_digits(), False),
    "dbrx": (None, _byte_level(_words(_THREE)), False),  # Olmo 2's and Phi 4's too
    "gpt-4o": (None, _byte_level(_cased_words(_THREE, f"{_SUFFIX}?")), True),
    "llama4": (None, _byte_level(_cased_words(_THREE, f"{_SUFFIX}?")), True),
    "tekken": (None, _byte_level(_cased_words(_ONE, "")), True),
    "chatglm-bpe": (None, _byte_level(_words(_THREE)), False),
    "glm4": (None, _byte_level(_words(_THREE)), True),
    "deepseek-llm": (None, _byte_level(*_DEEPSEEK_LLM), False),
    "deepseek-v3": (None, _byte_level(*_DEEPSEEK_V3), False),
}


def build_tokenizer(fields: Mapping[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer from a GGUF file's metadata, with its chat template.

    Raises:
      ValueError: a missing key; an unsupported model or pre-tokenisation.
    """
    model = _field(fields, KIND, str)
    if model not in _MODELS:
        raise ValueError(f"GGUF: {KIND} is {model!r}; allowed: {', '.join(_MODELS)}.")
    names = _field(fields, "tokenizer.ggml.tokens", list, str)
    kinds = _field(fields, "tokenizer.ggml.token_type", list, int)
    if len(kinds) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"GGUF: {len(names)} tokens ({len(set(names))} different) and {len(kinds)} types;"
            " allowed: different tokens, and a type for each."
        )
    tokenizer = _MODELS[model](fields, names, kinds)
    added = {_CONTROL: [], _USER_DEFINED: []}
    for name, kind in zip(names, kinds, strict=True):
        if kind in added and not _is_space(name):
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


def _byte_pairs(fields: Mapping[str, Any], names: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    """A byte-level byte-pair encoding by its merges."""
    pre = _field(fields, "tokenizer.ggml.pre", str)
    if pre not in PREPARATIONS:
        raise ValueError(
            f"GGUF: tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PREPARATIONS)}."
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
    return tokenizer


_SPACE = "▁"  # stands for a space in SentencePiece's pieces


def _sentence_pieces(
    fields: Mapping[str, Any], names: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    """SentencePiece's byte-pair encoding, which merges the pair whose union has the best score."""
    scores = _field(fields, "tokenizer.ggml.scores", list, float)
    if len(scores) != len(names):
        raise ValueError(
            f"GGUF: {len(names)} tokens and {len(scores)} scores; allowed: a score for each token."
        )
    if fields.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise ValueError(
            "GGUF: tokenizer.ggml.remove_extra_whitespaces is True; allowed: False, a vocabulary"
            " that keeps all spaces."
        )
    pieces = [name.replace(" ", _SPACE) if _is_space(name) else name for name in names]
    vocabulary = {n: i for i, n in enumerate(pieces) if kinds[i] != _UNUSED}
    merged = {
        piece: scores[i]
        for i, piece in enumerate(pieces)
        if kinds[i] == _NORMAL or (kinds[i] == _USER_DEFINED and _is_space(names[i]))
    }
    unknown = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _UNKNOWN]
    options = {"unk_token": unknown[0], "fuse_unk": True} if unknown else {}
    merges = _merges(merged, vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, merges, byte_fallback=_BYTE in kinds, **options))
    spaces = normalizers.Replace(" ", _SPACE)
    decoder = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = spaces, decoders.Sequence(decoder)
    return tokenizer


def _is_space(name: str) -> bool:
    """Whether a piece stands for spaces only: it is merged from shorter ones, as in a text."""
    return not name.strip(" ")


def _merges(score_of: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of pieces whose union is one: of the best score first, of equal scores the longest.

    Pairs of one union are in the order of their ids, as `transformers` converts these vocabularies.
    """
    merges = []
    for piece in sorted(score_of, key=lambda piece: (-score_of[piece], -len(piece))):
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in score_of and pair[1] in score_of]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


# `tokenizer.ggml.model` -> the tokenizer of a vocabulary and its types.
_MODELS = {"gpt2": _byte_pairs, "llama": _sentence_pieces}


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
