"""Constrained decoding: which tokens may come next in an action, as bit masks.

A grammar speaks of text. A token is allowed where its bytes keep the text within the grammar, be it
one token or many that spell a tag; where the grammar leaves one text only, the one token remains
that the tokenizer would write it with. llguidance does the parsing.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.envs.base import Tool
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import CallGrammar, ToolFormat, literal
from seeupo_jax.policy.files.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

TOOL_CALLS, SETTING = "tool_calls", "config.rollout.grammar"
COMPILED = 256  # grammars of different tools that are kept
# A call of a tool may begin with more than the parser's 2,000 items where its schema has so many
# characters (at most 4 items for a property, which has at least 9: refused from 5,170 on), or one
# of these keys, with which a property counts several times (from 667 characters on).
_LARGE = 4096
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref"}

# As `json.dumps` writes, or without the spaces: white space that is free has no end.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

# Rules of a message without calls: a thought that begins also ends.
_TEXT = r"""
TEXT: /(?s:.*)/
THINKS: THINK | MISTRALS
THINK: /[\s\x1c-\x1f]*<think>(?s:.*)/ & ~/(?s:.*)<\/think>(?s:.*)/
MISTRALS: /[\s\x1c-\x1f]*\[THINK\](?s:.*)/ & ~/(?s:.*)\[\/THINK\](?s:.*)/
"""
# A call has strings, which may hold any tag: what follows the opening is the calls' own grammar.
_AROUND = "start: MESSAGE\nMESSAGE: PLAIN ({opening} TEXT)?\n"
_CALLS = """start: TEXT | first begin call {more} end
first[lazy]: TEXT {opening}
"""
_PARTS = """begin: {begin}
next: {between}
end: {end}
"""
# Calls that are the whole message, which therefore has no thoughts.
_BARE_CALLS = """start: BARE | begin call %s end
BARE: PLAIN & ~/[\\s\\x1c-\\x1f]*(<think>|\\[THINK\\]|\\{)(?s:.*)/
"""


class Grammars:
    """Grammars of conversations, compiled once each.

    Args:
      source: `tool_calls`: an action is a text (or none) and then any number of calls in the tool
        format; each names one of the conversation's tools and has arguments that its schema
        allows, in the schema's order. Or a file: `.json` (a JSON schema), `.regex` or `.lark`
        (llguidance's syntax) of the action. None: only what a turn's constraint says.
      vocab_size: of the model's head, at least the tokenizer's.
      tool_format: of calls.

    A JSON schema's `x-guidance` sets llguidance's options, `{"lenient": true}` to pass over what it
    cannot enforce. A grammar does not check, and leaves to `parse_hermes`: duplicate keys in an
    object whose keys the schema leaves open, a number out of range, nesting without end.

    Raises:
      ValueError: an unknown or missing file, a grammar that llguidance refuses, a tool format
        without one, a tokenizer whose tokens' bytes are not known.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        vocab_size: int,
        tool_format: ToolFormat = TOOL_FORMATS["hermes"],
    ):
        if vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"config.rollout.grammar: the model has {vocab_size} tokens, its tokenizer"
                f" {tokenizer.vocab_size}; allowed: at least as many."
            )
        self.words = -(-vocab_size // 32)
        self._format = tool_format
        self._tokenizer = tokenizer
        if source == TOOL_CALLS:
            call_grammar(tool_format)
        self._of_tools = functools.lru_cache(COMPILED)(self._compile_tools)
        self._fixed = None
        if source is not None:
            _library(tokenizer)  # a tokenizer that cannot be used is refused now
        if source not in (None, TOOL_CALLS):
            self._fixed = (self.compile(_read(source), source),)

    def begin(self, tools: Sequence[Tool], *, single: bool = False) -> Matcher:
        """A matcher at the start of an action.

        Args:
          single: whether it has at most one call of a tool.

        Raises:
          ValueError: a tool whose schema llguidance refuses.
        """
        parsers = self._of_tools(json.dumps(tools), single) if self._fixed is None else self._fixed
        return self.matcher(parsers)

    def matcher(self, parsers: tuple[LLMatcher, ...], setting: str = SETTING) -> Matcher:
        """A matcher at the start of an action; `setting`: where the grammar comes from."""
        copies = tuple(parser.deep_copy() for parser in parsers)
        return Matcher(copies, self._tokenizer, setting)

    def _compile_tools(self, listing: str, single: bool) -> tuple[LLMatcher, ...]:
        tools, form = json.loads(listing), call_grammar(self._format)
        plain = _plain(form)
        if not tools:
            without = form.frame.format(calls="") or f"{plain}start: PLAIN"
            return (self.compile(without, TOOL_CALLS),)
        arguments = [arguments_schema(tool) for tool in tools]
        names = [tool["name"] for tool in tools]
        try:
            calls = self.compile(_calls(form, names, arguments, single=single), TOOL_CALLS)
        except ValueError:
            check_tools(tools)  # which of them it was
            raise
        self.try_calls(calls, names, arguments)
        if form.frame or not form.opening:
            return (calls,)
        around = _AROUND.format(opening=literal(form.opening))
        return calls, self.compile(plain + around, TOOL_CALLS)

    def try_calls(
        self, parser: LLMatcher, names: Sequence[str], schemas: Sequence[dict[str, Any]]
    ) -> None:
        """Begins a call of every tool whose size may be beyond a limit; see `_try_call`."""
        for name, schema in zip(names, schemas, strict=True):
            if len(json.dumps(schema)) >= _LARGE or _COMBINED & schema.keys():
                self._try_call(parser.deep_copy(), name)

    def _try_call(self, parser: LLMatcher, tool: str) -> None:
        """Begins a call of a tool, where the size of its schema may be beyond a limit.

        Raises:
          ValueError: it is.
        """
        text = self._format.render("", [ToolCall(tool, {})])
        head = text[: text.rfind("{") + 1]  # up to the arguments' first key
        parser.consume_tokens(_library(self._tokenizer).greedy_tokenize(head))
        _check(parser.get_error(), f"tool {tool!r}")

    def compile(self, grammar: str, name: str, setting: str = SETTING) -> LLMatcher:
        """A parser of a grammar in Lark's syntax.

        Args:
          name: what llguidance may refuse. setting: where it comes from.

        Raises:
          ValueError: llguidance refuses it.
        """
        library = _llguidance()
        limits = library.LLParserLimits(verbose_errors=False)
        parser = library.LLMatcher(_library(self._tokenizer), grammar, log_level=0, limits=limits)
        _check(parser.get_error(), name, setting)
        return parser


class Matcher:
    """The tokens that a grammar allows next in one action; `Grammars.begin` makes one.

    setting: where the grammar comes from, for errors.

    Not for two threads at once; different ones may work side by side (llguidance frees Python's
    lock).
    """

    def __init__(self, parsers: tuple[LLMatcher, ...], tokenizer: Tokenizer, setting: str):
        self._parsers, self._tokenizer, self._setting = parsers, tokenizer, setting
        self._tokens: list[int] = []

    def allowed(self, words_W: np.ndarray) -> None:
        """Writes which tokens may come next: bit i of word w is token 32 w + i.

        An end token may come exactly where the action is complete, and no token that the tokenizer
        does not know ever. At least one bit is set.

        Args:
          words_W: uint32 or int32 [ceil(vocab_size / 32)], overwritten.

        Raises:
          RuntimeError: the grammar is stuck: no token may follow, nor the end (it contradicts
            itself, or is beyond llguidance's limits). Which action it was is in the message.
        """
        count = -(-self._tokenizer.vocab_size // 32)  # llguidance may give one more
        masks = [np.frombuffer(p.compute_bitmask(), "<u4", count) for p in self._parsers]
        mask = functools.reduce(np.bitwise_and, masks)
        # Where llguidance is stuck it answers with the end tokens, which would cut the action.
        errors = [p.get_error().partition("\n")[0] for p in self._parsers if p.is_error()]
        if errors or not mask.any():
            raise RuntimeError(
                f"{self._setting}: stuck after {self._text()!r}"
                f" ({', '.join(errors) if errors else 'no token is left'})."
            )
        words_W[:count] = mask.view(words_W.dtype)
        words_W[count:] = 0

    def accept(self, token: int) -> None:
        """Advances by a sampled token.

        Raises:
          RuntimeError: the token may not come here.
        """
        if not all(parser.consume_token(token) for parser in self._parsers):
            raise RuntimeError(f"{self._setting}: token {token} may not follow {self._text()!r}.")
        self._tokens.append(token)

    def _text(self) -> str:
        return self._tokenizer.text(self._tokens)


def apply_mask(logits_NV: jax.Array, mask_NW: jax.Array) -> jax.Array:
    """Logits with -inf at tokens that are not allowed; apply it before top-k and top-p.

    Args:
      mask_NW: uint32 or int32 [N, ceil(V / 32)], as `Matcher.allowed` writes them.

    Returns: [N, V], of the logits' dtype.
    """
    rows, vocab_size = logits_NV.shape
    bits = mask_NW[:, :, None] >> jnp.arange(32, dtype=mask_NW.dtype)[None, None, :]
    allowed_NV = (bits & 1).astype(bool).reshape(rows, -1)[:, :vocab_size]
    return jnp.where(allowed_NV, logits_NV, -jnp.inf)


# A large vocabulary takes half a second, the same for every grammar of a tokenizer.
@functools.lru_cache(maxsize=2)
def _library(tokenizer: Tokenizer) -> Any:
    """A tokenizer as llguidance has it."""
    return _Vocabulary(tokenizer).library


def _llguidance() -> ModuleType:
    """The library, which is imported with the first grammar: most runs have none."""
    return importlib.import_module("llguidance")


def _from_json(text: str) -> str:
    json.loads(text)  # llguidance's own error would come late and without a place
    return _llguidance().LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)


# A grammar file's suffix -> its reader.
FORMATS: Mapping[str, Callable[[str], str]] = {
    ".json": _from_json,
    ".regex": lambda text: _llguidance().LLMatcher.grammar_from_regex(text.removesuffix("\n")),
    ".lark": lambda text: _llguidance().LLMatcher.grammar_from_lark(text),
}


def _read(source: str) -> str:
    file = Path(source)
    if file.suffix not in FORMATS:
        raise ValueError(
            f"config.rollout.grammar: got {source!r}; allowed: none, {TOOL_CALLS!r}, or a file"
            f" {', '.join(FORMATS)}."
        )
    if not file.is_file():
        raise ValueError(f"config.rollout.grammar: no file {source!r}.")
    try:
        return FORMATS[file.suffix](file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config.rollout.grammar: {source} cannot be read: {error}.") from None


def _check(error: str, name: str, setting: str = SETTING) -> None:
    if error:
        said = re.split(r"\n *\d+ *\| ", error)[0]  # without the grammar, which it repeats
        reason = " ".join(said.replace("<non-verbose/>", "").split())
        raise ValueError(f"{setting}: llguidance refused {name}: {reason}.")


def check_grammar(grammar: str, name: str, setting: str = SETTING) -> None:
    """ValueError: llguidance refuses a grammar in Lark's syntax."""
    _check(_llguidance().LLMatcher.validate_grammar(grammar), name, setting)


def check_tools(tools: Sequence[Tool]) -> None:
    """Whether calls of these tools can be constrained.

    Raises:
      ValueError: a tool whose schema llguidance refuses.
    """
    for tool in tools:
        check_grammar(
            f"start: %json {json.dumps(arguments_schema(tool))}", f"tool {tool['name']!r}"
        )


def call_grammar(tool_format: ToolFormat) -> CallGrammar:
    """The grammar of a format's calls.

    Raises:
      ValueError: it has none.
    """
    if tool_format.grammar is None:
        allowed = [name for name, each in TOOL_FORMATS.items() if each.grammar is not None]
        raise ValueError(
            f"config.rollout.grammar: got {TOOL_CALLS!r} with calls in the format"
            f" {tool_format.name!r}; allowed: none, a file, or calls in one of"
            f" {', '.join(allowed)}."
        )
    return tool_format.grammar


def _plain(form: CallGrammar) -> str:
    """Rules of a text that has no tag of a call, and whose thoughts end."""
    tags = [re.escape(tag).replace("/", r"\/") for tag in (form.opening, *form.excluded) if tag]
    without = "".join(f" & ~/(?s:.*){tag}(?s:.*)/" for tag in tags)
    return f"{_TEXT}PLAIN: TEXT{without} & ~THINKS\n"


def _calls(
    form: CallGrammar, names: Sequence[str], schemas: Sequence[dict[str, Any]], *, single: bool
) -> str:
    """The grammar of actions that may call tools with arguments of these schemas."""
    more = "" if single else "(next call)*"
    if form.frame:
        head = form.frame.format(calls=" | call")
    elif form.opening:
        head = _TEXT + _CALLS.format(opening=literal(form.opening), more=more)
    else:
        head = _plain(form) + _BARE_CALLS % more
    return head + call_rules(form, names, schemas)


def call_rules(form: CallGrammar, names: Sequence[str], schemas: Sequence[dict[str, Any]]) -> str:
    """The rules `begin`, `call`, `next` and `end` of calls of tools."""
    calls = [form.call(name, schema) for name, schema in zip(names, schemas, strict=True)]
    parts = _PARTS.format(begin=form.begin, between=form.between, end=form.end)
    return parts + form.rules + "call: " + "\n  | ".join(calls) + "\n"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, and no key beyond those that are listed."""
    schema = {**tool.get("parameters", {}), "type": "object"}
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise ValueError(
            f"config.rollout.grammar: tool {tool['name']!r}: x-guidance: got {guidance!r}; allowed:"
            " a dict."
        )
    if "properties" in schema and not _COMBINED & schema.keys():
        schema = {"additionalProperties": False, **schema}
    return schema | {"x-guidance": JSON_STYLE | guidance}


class _Vocabulary:
    """A tokenizer for llguidance: each token's bytes, and how a text is tokenised."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.tokens = tokenizer.token_bytes()
        self.eos_token_id = tokenizer.end_ids[0]
        ends = list(tokenizer.end_ids)
        library = _llguidance()
        self.library = library.LLTokenizer(library.TokenizerWrapper(self), eos_token=ends)

    def __call__(self, data: bytes) -> list[int]:
        text = data.decode()
        tokens = self._tokenizer.action(text)[:-1]
        if b"".join(self.tokens[token] for token in tokens) == data:
            return tokens
        return self.library.greedy_tokenize(text)  # a tokenizer that normalises, and changed it
