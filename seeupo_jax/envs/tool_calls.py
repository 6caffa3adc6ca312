"""Strict parsers of the tool calls in a response: Hermes and Llama JSON, Python calls, fenced code.

Text is never evaluated. A malformed call is rejected with a reason that the model can read.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import math
import re
import threading
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from seeupo_jax.envs.base import CALL, CALL_END, PYTHON_TAG
from seeupo_jax.envs.thoughts import marks_thoughts, thoughts_end, thoughts_tags

MAX_CHARS = 32_768  # of Python calls; the longest official BFCL answer has 6,839
MAX_DEPTH = 64  # of nested lists and dicts; Python's own parsers and writers fail near 1000
MAX_DIGITS = 1000  # of an integer; Python writes at most 4300, in quadratic time

_TOO_LARGE = 10**MAX_DIGITS


class ToolCallError(ValueError):
    """A response has no valid tool call; the text is the reason, for the model."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments by name.

    positional: positional arguments, which only the Python form has; they come first.
    id: the id that the model gave the call; "": none. Results refer to it.
    """

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()
    id: str = field(default="", compare=False, repr=False)


def skip_thoughts(text: str) -> str:
    """Returns a text without the thoughts at its start."""
    opening, closing = thoughts_tags(text)
    if closing not in text:
        raise ToolCallError(f"{opening} needs its {closing}")
    return text[thoughts_end(text) :]


def no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Makes a dict from pairs; a key that occurs twice is an error."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ToolCallError("a key or an argument occurs twice")
    return result


def within_bounds(call: ToolCall) -> ToolCall:
    """Returns the call if its values are within the bounds."""
    for value in (*call.positional, *call.arguments.values()):
        _check_bounds(value, depth=0)
    return call


def _check_bounds(value: Any, depth: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolCallError("a number must be finite")
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise ToolCallError(f"an integer may have at most {MAX_DIGITS} digits")
    if not isinstance(value, dict | list | tuple):
        return
    if depth == MAX_DEPTH:
        raise ToolCallError(f"values may be nested at most {MAX_DEPTH} deep")
    for part in (*value, *value.values()) if isinstance(value, dict) else value:
        _check_bounds(part, depth + 1)


def render_hermes(name: str, /, **arguments: Any) -> str:
    """Writes a tool call in the Hermes/Qwen form; `parse_hermes` reads the same call back."""
    call = {"name": name, "arguments": arguments}
    body = json.dumps(call, allow_nan=False, ensure_ascii=False)
    # Letters are written as they are, except lone surrogates, which UTF-8 cannot encode.
    body = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half.group()):04x}", body)
    # Other parsers end a call at a closing tag, even in an argument; \/ is JSON's other slash.
    return CALL + body.replace("</", r"<\/") + CALL_END


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks, in order.

    Tags within JSON strings neither begin nor end a block. Text before and between the blocks
    (reasoning) is allowed; an unclosed block, text after the last block, other keys, duplicate keys
    and NaN or Infinity are not. `<think>...</think>` at the start is skipped, including blocks in
    it. A lone surrogate (`\\ud800`) is valid JSON and passes. Without a block: ().

    Raises:
      ToolCallError: a block violates the form or the bounds above, or a `<think>` is not closed.
    """
    return tuple(block.call for block in read_hermes(text))


class HermesBlock(NamedTuple):
    """A call, and the start and end of its block in the text."""

    call: ToolCall
    start: int
    end: int


def read_hermes(text: str) -> Iterator[HermesBlock]:
    """Yields the calls that `parse_hermes` parses, with their positions; raises as it does."""
    end, found = len(text) - len(skip_thoughts(text)), False
    while (start := text.find(CALL, end)) >= 0:
        if CALL_END in text[end:start]:
            raise ToolCallError(_UNPAIRED)
        call, size = _read_block(text[start + len(CALL) :])
        end, found = start + len(CALL) + size, True
        yield HermesBlock(call, start, end)
    if CALL_END in text[end:]:
        raise ToolCallError(_UNPAIRED)
    if found and text[end:].strip():
        raise ToolCallError("nothing may follow the last </tool_call>")


def _read_block(rest: str) -> tuple[ToolCall, int]:
    """Parses the call after an opening tag; returns it and its size with the closing tag."""
    value, end = None, 0
    with contextlib.suppress(ValueError, RecursionError):
        value, end = _DECODER.raw_decode(rest, _SPACE.search(rest).end())
        end = _SPACE.search(rest, end).end()
    if end and rest.startswith(CALL_END, end):
        return call_of_object(value, "arguments"), end + len(CALL_END)
    if CALL_END not in rest[end:]:
        raise ToolCallError(_UNPAIRED)
    reason = "text stands behind it"
    try:
        json.loads(rest.partition(CALL_END)[0], object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise ToolCallError(f"a tool call must be one JSON object: {reason}")


_UNPAIRED = "every <tool_call> needs its </tool_call>"
_SPACE = re.compile(r"[ \t\n\r]*")  # of JSON


def call_of_object(value: Any, key: str) -> ToolCall:
    """Returns the call that a JSON object states, with its arguments under `key`.

    Raises:
      ToolCallError: it has other keys or types, or is not within the bounds.
    """
    if not isinstance(value, dict) or set(value) != {"name", key}:
        raise ToolCallError(f'a tool call has exactly the keys "name" and "{key}"')
    if not isinstance(value["name"], str) or not isinstance(value[key], dict):
        raise ToolCallError(f'"name" must be a string and "{key}" an object')
    return within_bounds(ToolCall(value["name"], value[key]))


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value at a position of a text, and its end.

    Raises:
      ToolCallError: there is none, or an object in it has a key twice.
    """
    try:
        return _DECODER.raw_decode(text, _SPACE.search(text, start).end())
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"a tool call needs a JSON value: {error}") from None


def read_llama(text: str) -> Iterator[ToolCall]:
    """Yields the calls of `{"name": ..., "parameters": {...}}` objects, Llama 3's form, in order.

    The objects are the whole text, or all of it after the first `<|python_tag|>`, separated by
    white space and `;`. `<think>...</think>` at the start is skipped. A text that does not start
    with `{` is a message without calls.

    Raises:
      ToolCallError: an object violates the form or the bounds above, there is other text, or a
        `<think>` is not closed.
    """
    source = skip_thoughts(text).strip()
    if not source.startswith("{"):
        source = source.partition(PYTHON_TAG)[2].strip()
    position = 0
    while source.startswith("{") and position < len(source):
        try:
            value, position = _DECODER.raw_decode(source, position)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"a tool call must be one JSON object: {error}") from None
        yield call_of_object(value, "parameters")
        position = _GAP.search(source, position).end()


def render_python(calls: Iterable[ToolCall]) -> str:
    """Writes calls as the Python list `[name(argument=value), ...]`; `parse_python` reads it back.

    Raises:
      ValueError: this form cannot express a call, such as an argument named `from` or a set.
    """
    calls = tuple(calls)
    text = f"[{', '.join(map(write_call, calls))}]"
    try:
        if parse_python(text) == calls:
            return text
        reason = "that would read as other calls"
    except ToolCallError as error:
        reason = str(error)
    raise ValueError(f"render_python: got {calls!r}; not allowed: {reason}.")


def parse_python(text: str) -> tuple[ToolCall, ...]:
    """Parses `[name(argument=value), ...]`, BFCL's prompting format, in order.

    As in the official decoder, white space and backticks around the list are ignored, a missing
    outer bracket is added, so that `a(), b()` is valid, and names may be dotted. As in its handler
    of Qwen, `<think>...</think>` at the start is skipped. Other text around the list is rejected.
    Values are literals: quoted text, numbers, True, False, None, lists, tuples, dicts. The official
    decoder also evaluates arithmetic and takes names for strings, which is rejected here. It drops
    positional arguments, which are kept here: its reference answers contain them.

    A text without anything that resembles a call is a message without calls: ().

    Raises:
      ToolCallError: a text that resembles a call (`name(` at the start or after a bracket; `name(`
        followed by a literal, `argument=` or `)` anywhere) violates the form or the bounds above,
        or a `<think>` is not closed.
    """
    source = skip_thoughts(text).strip("` \t\r\n")
    try:
        return tuple(map(_read_call, _read_list(source)))
    except ToolCallError:
        if _CALL_LIKE.search(source):
            raise
        return ()


# Matches start at a bracket or the text's start, so that not every letter of a long word is tried.
_CALL_LIKE = re.compile(
    r"""(?:\A\(*|\[)\s*[^\W\d][\w.]*\(|\w\(\s*(?:[)'"\[{]|-?\d|[^\W\d]\w*\s*=)"""
)


def _read_list(source: str) -> list[ast.expr]:
    if len(source) > MAX_CHARS:
        raise ToolCallError(f"the calls must fit in {MAX_CHARS} characters")
    opening, closing = "[" * (source[:1] != "["), "]" * (source[-1:] != "]")
    form = "the calls must be one list [name(argument=value), ...] and nothing else"
    try:
        tree = _parse(_STRING.sub(_keep_backslashes, opening + source + closing))
    except SyntaxError as error:
        # Python's message would refer to a bracket that the model did not write.
        raise ToolCallError(form if opening or closing else f"{form}: {error.msg}") from None
    except ValueError:  # a lone surrogate, which no source can contain
        raise ToolCallError(f"{form}: a character is not text") from None
    except (MemoryError, RecursionError):
        raise ToolCallError(f"{form}: it is nested too deep") from None
    if not isinstance(tree.body, ast.List):
        raise ToolCallError(form)
    return tree.body.elts


def _parse(source: str) -> ast.Expression:
    # Python 3.11 counts the depth of a tree over all threads: two threads that build trees at once
    # get a SystemError if the garbage collector runs (python/cpython#106905).
    with _PARSING:
        return ast.parse(source, mode="eval")


_PARSING = threading.Lock()

# A comment (quotes in it open no string) or a string; an unclosed string ends where Python's lexer
# gives up, so that no end is searched twice.
_STRING = re.compile(
    r"""#[^\n]*"""
    r"""|'''(?:[^\\]|\\.)*?(?:'''|\Z)|\"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\Z)"""
    r"""|'(?:[^\\'\n]|\\.)*'?|"(?:[^\\"\n]|\\.)*"?""",
    re.DOTALL,
)
_BACKSLASH = re.compile(r"""\\([\n\r\\'"abfnrtvxNuU0-7])|\\""")


def _keep_backslashes(match: re.Match[str]) -> str:
    # Python reads "\d" as "\\d" with a warning that depends on the process's settings: rewrite it.
    token = match.group()
    if match.string[match.start() - 1] in "rR":  # at least the list's bracket precedes it
        return token
    return _BACKSLASH.sub(lambda escape: escape.group() if escape.group(1) else r"\\", token)


def read_lines(text: str) -> Iterator[ToolCall]:
    """Yields Python calls `name(argument=value)`, one in each statement, in order.

    Values are literals as in `parse_python`, whose list of calls is allowed too.

    Raises:
      ToolCallError: a statement is no call, or a call violates the form or the bounds.
    """
    if len(text) > MAX_CHARS:
        raise ToolCallError(f"the calls must fit in {MAX_CHARS} characters")
    for one in _statements(text):
        yield from map(_read_call, _read_list(one))


def _statements(text: str) -> Iterator[str]:
    """The statements of a text in Python, without comments after them.

    `ast.parse` of several statements would open a file of the source's name for its errors.
    """
    lines = io.StringIO(text).readlines()  # at \n alone, as Python's
    start_of = [0, *itertools.accumulate(map(len, lines))]
    begin = end = 0
    try:
        for token in tokenize.generate_tokens(iter([*lines, ""]).__next__):
            place = start_of[token.end[0] - 1] + token.end[1]
            if token.type == tokenize.NEWLINE or token.exact_type == tokenize.SEMI:
                yield text[begin:end].strip()
                begin = place
            elif token.type not in (tokenize.COMMENT, tokenize.NL):
                end = place
    except (tokenize.TokenError, SyntaxError) as error:
        reason = error.args[0]
        raise ToolCallError(
            f"the code must be calls name(argument=value), one a line: {reason}"
        ) from None


def parse_literal(text: str) -> Any:
    """Returns the value of a Python literal, as in `parse_python`.

    Raises:
      ToolCallError: it is none.
    """
    try:
        return _read_value(_parse(_STRING.sub(_keep_backslashes, f"({text})")).body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolCallError(f"{text[:80]!r} is no literal of Python: {error}") from None


def write_call(call: ToolCall) -> str:
    """Writes a call as Python; not every one can be read back (see `render_python`)."""
    named = [f"{name}={value!r}" for name, value in call.arguments.items()]
    return f"{call.name}({', '.join([*map(repr, call.positional), *named])})"


def _read_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ToolCallError("every element of the list must be a call name(argument=value)")
    if any(word.arg is None for word in node.keywords):
        raise ToolCallError("** is not allowed: name each argument")
    try:
        positional = tuple(map(_read_value, node.args))
        named = [(str(word.arg), _read_value(word.value)) for word in node.keywords]
    except RecursionError:
        raise ToolCallError("the values are nested too deep") from None
    return within_bounds(ToolCall(_read_name(node.func), no_duplicates(named), positional))


def _read_name(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ToolCallError("a tool is called by its name")
    return ".".join([node.id, *reversed(parts)])


def _read_value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value if not isinstance(value, bool) else _refuse(node)
        case ast.List(elts=parts):
            return [_read_value(part) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(_read_value(part) for part in parts)
        case ast.Dict(keys=keys, values=values):
            if any(isinstance(key, ast.List | ast.Tuple | ast.Dict) for key in keys):
                raise ToolCallError("a dict's keys must be texts, numbers, True, False or None")
            pairs = zip(map(_read_value, keys), map(_read_value, values), strict=True)
            return no_duplicates(list(pairs))
        case _:
            return _refuse(node)


_JSON_NAMES = {"true": "True", "false": "False", "null": "None"}
_REMEDIES: dict[type, str] = {
    ast.Name: "put a text in quotes",
    ast.Call: "give a call's result instead of the call",
    ast.BinOp: "give the result instead of the arithmetic",
    ast.JoinedStr: "an f-string is none",
    ast.Set: "use a list instead of a set",
    ast.Starred: "* is not allowed",
}


def _refuse(node: ast.expr | None) -> NoReturn:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        raise ToolCallError(f"{node.id} is not Python: write {_JSON_NAMES[node.id]}")
    remedy = _REMEDIES.get(type(node), "use no other expression")
    raise ToolCallError(
        "a value must be a text in quotes, a number, True, False, None, or a list, tuple or dict"
        f" of these: {remedy}"
    )


def parse_fenced(text: str, language: str = "python") -> str | None:
    """Returns the code of the only block in a text, as in AppWorld's ReAct format.

    A fence is a line that starts with at least three backticks. The opening fence names the
    language exactly (AppWorld does not accept `py` or `Python` either); the closing fence has only
    backticks, at least as many, so that a longer fence can contain shorter ones. Text around the
    block is allowed, and `<think>...</think>` at the start is skipped; a `</think>` without
    `<think>` inside a block is code. AppWorld's agent runs the first block and ignores the rest;
    here a second block is rejected, since the model would assume that it was run.

    Args:
      language: the word after the opening backticks.

    Returns:
      The lines between the fences, joined by newlines; None if there is no fence.

    Raises:
      ToolCallError: the block has another language, is not closed or is empty, or a fence follows.
    """
    visible = skip_thoughts(text)
    if not marks_thoughts(text) and _within_block(text[: len(text) - len(visible)]):
        visible = text
    lines = visible.replace("\r\n", "\n").split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("```")), None)
    if start is None:
        return None
    tag = lines[start].lstrip("`")
    if tag.strip() != language:
        raise ToolCallError(f"the first block must open with a line ```{language}")
    shortest = len(lines[start]) - len(tag)
    ends = (i for i in range(start + 1, len(lines)) if _closes(lines[i], shortest))
    end = next(ends, None)
    if end is None:
        raise ToolCallError("the code block must be closed by a line ```")
    code = "\n".join(lines[start + 1 : end])
    if not code.strip():
        raise ToolCallError("the code block is empty")
    if any(line.startswith("```") for line in lines[end + 1 :]):
        raise ToolCallError(
            "one code block is allowed; around code with ``` lines, use a longer ````"
        )
    return code


def _within_block(before: str) -> bool:
    """Whether a text ends within a block; fences alternately open and close blocks."""
    return sum(line.startswith("```") for line in before.split("\n")) % 2 == 1


def _closes(line: str, shortest: int) -> bool:
    fence = line.rstrip()
    return len(fence) >= shortest and not fence.strip("`")


_DECODER = json.JSONDecoder(object_pairs_hook=no_duplicates)
_GAP = re.compile(r"[\s;]*")  # between two objects
