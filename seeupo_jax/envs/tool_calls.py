"""Strict parsers of the tool calls in a response: Hermes and Llama JSON, Python calls, fenced code.

Text is never evaluated. A malformed call is refused with a reason that the model can read.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from seeupo_jax.envs.base import CALL, CALL_END, PYTHON_TAG, THOUGHT, THOUGHT_END
from seeupo_jax.envs.thoughts import thoughts_end

MAX_CHARS = 32_768  # of a text of Python calls; the longest official BFCL answer has 6,839
MAX_DEPTH = 64  # of nested lists and dicts; Python's own writers and readers fail near 1000
MAX_DIGITS = 1000  # of an integer; Python writes at most 4300, and takes quadratic time for it

_TOO_LARGE = 10**MAX_DIGITS


class ToolCallError(ValueError):
    """A response without a readable tool call; the text, for the model, says why."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and its arguments by name.

    positional: arguments without a name, which only the Python form has; they come first.
    """

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()


def skip_thoughts(text: str) -> str:
    """A text behind its thoughts."""
    if text.lstrip().startswith(THOUGHT) and THOUGHT_END not in text:
        raise ToolCallError("<think> needs its </think>")
    return text[thoughts_end(text) :]


def no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of pairs whose keys differ."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ToolCallError("a key or an argument occurs twice")
    return result


def within_bounds(call: ToolCall) -> ToolCall:
    """The call, if its values are not too large."""
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
    """A tool call in the Hermes/Qwen form; `parse_hermes` reads the same call back."""
    call = {"name": name, "arguments": arguments}
    body = json.dumps(call, allow_nan=False, ensure_ascii=False)
    # Letters stand as they are; half a character cannot, which UTF-8 does not hold.
    body = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half.group()):04x}", body)
    # Other readers end a call at the closing tag, also in an argument; \/ is JSON's other slash.
    return CALL + body.replace("</", r"<\/") + CALL_END


def parse_hermes(text: str) -> tuple[ToolCall, ...]:
    """The calls of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks, in order.

    Tags within strings of the JSON neither begin nor end a block. Text before and between the
    blocks is allowed (reasoning); an unclosed block, text after the last block, keys other than the
    two, duplicate keys and NaN or Infinity are not. `<think>...</think>` at the start is skipped,
    blocks inside it too. Half a character (`\\ud800`) is JSON and passes. No block at all: ().

    Raises:
      ToolCallError: a block that breaks the form or the bounds above, or a `<think>`
        that is not closed.
    """
    return tuple(block.call for block in hermes_blocks(text))


class HermesBlock(NamedTuple):
    """A call, and where its block begins and ends in the text."""

    call: ToolCall
    start: int
    end: int


def hermes_blocks(text: str) -> tuple[HermesBlock, ...]:
    """The calls that `parse_hermes` reads, with their places; raises as it does."""
    blocks, end = [], len(text) - len(skip_thoughts(text))
    while (start := text.find(CALL, end)) >= 0:
        if CALL_END in text[end:start]:
            raise ToolCallError(_UNPAIRED)
        call, size = _read_block(text[start + len(CALL) :])
        end = start + len(CALL) + size
        blocks.append(HermesBlock(call, start, end))
    if CALL_END in text[end:]:
        raise ToolCallError(_UNPAIRED)
    if blocks and text[end:].strip():
        raise ToolCallError("nothing may follow the last </tool_call>")
    return tuple(blocks)


def _read_block(rest: str) -> tuple[ToolCall, int]:
    """The call right behind an opening tag, and its size with the closing one."""
    value, end = None, 0
    with contextlib.suppress(ValueError, RecursionError):
        value, end = _DECODER.raw_decode(rest, _SPACE.search(rest).end())
        end = _SPACE.search(rest, end).end()
    if end and rest.startswith(CALL_END, end):
        return _read_object(value, "arguments"), end + len(CALL_END)
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


def _read_object(value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict) or set(value) != {"name", key}:
        raise ToolCallError(f'a tool call has exactly the keys "name" and "{key}"')
    if not isinstance(value["name"], str) or not isinstance(value[key], dict):
        raise ToolCallError(f'"name" must be a string and "{key}" an object')
    return within_bounds(ToolCall(value["name"], value[key]))


def parse_llama(text: str) -> tuple[ToolCall, ...]:
    """The calls of `{"name": ..., "parameters": {...}}` objects, Llama 3's form, in order.

    The objects are the whole text, or all of it after the first `<|python_tag|>`; between them are
    white space and `;`. `<think>...</think>` at the start is skipped. What does not begin with `{`
    is a message and holds no call: ().

    Raises:
      ToolCallError: an object that breaks the form or the bounds above, text beside the
        objects, or a `<think>` that is not closed.
    """
    source = skip_thoughts(text).strip()
    if not source.startswith("{"):
        source = source.partition(PYTHON_TAG)[2].strip()
    calls, position = [], 0
    while source.startswith("{") and position < len(source):
        try:
            value, position = _DECODER.raw_decode(source, position)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"a tool call must be one JSON object: {error}") from None
        calls.append(_read_object(value, "parameters"))
        position = _GAP.search(source, position).end()
    return tuple(calls)


def render_python(calls: Iterable[ToolCall]) -> str:
    """Calls as the Python list `[name(argument=value), ...]`; `parse_python` reads them back.

    Raises:
      ValueError: a call that this form cannot hold, such as an argument named `from` or a set.
    """
    calls = tuple(calls)
    text = f"[{', '.join(map(_write_call, calls))}]"
    try:
        if parse_python(text) == calls:
            return text
        reason = "that would read as other calls"
    except ToolCallError as error:
        reason = str(error)
    raise ValueError(f"render_python: got {calls!r}; not allowed: {reason}.")


def _write_call(call: ToolCall) -> str:
    named = [f"{name}={value!r}" for name, value in call.arguments.items()]
    return f"{call.name}({', '.join([*map(repr, call.positional), *named])})"


def parse_python(text: str) -> tuple[ToolCall, ...]:
    """The calls of `[name(argument=value), ...]`, BFCL's prompting format, in order.

    As in the official decoder, white space and backticks around the list are ignored, a missing
    outer bracket is added, so that `a(), b()` is read too, and names may be dotted. As in its
    handler of Qwen, `<think>...</think>` at the start is skipped. Other text beside the list is
    refused. Values are literals: text in quotes, numbers, True, False, None, lists, tuples, dicts.
    The official decoder also evaluates arithmetic and takes names for strings, which is refused
    here, and drops arguments without a name, which are kept: its reference answers have them.

    A text without anything like a call is a message and holds no call: ().

    Raises:
      ToolCallError: a text with something like a call (`name(` at the start or after a bracket;
        `name(` and a literal, `argument=` or `)` anywhere) that breaks the form or the bounds
        above, or a `<think>` that is not closed.
    """
    source = skip_thoughts(text).strip("` \t\r\n")
    try:
        return tuple(map(_read_call, _read_list(source)))
    except ToolCallError:
        if _CALL_LIKE.search(source):
            raise
        return ()


# A match begins at a bracket or at the text's start, never in every letter of a long word.
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
        # Python's message would be about a bracket that the model did not write.
        raise ToolCallError(form if opening or closing else f"{form}: {error.msg}") from None
    except ValueError:  # half a character, which no source can hold
        raise ToolCallError(f"{form}: a character is not text") from None
    except (MemoryError, RecursionError):
        raise ToolCallError(f"{form}: it is nested too deep") from None
    if not isinstance(tree.body, ast.List):
        raise ToolCallError(form)
    return tree.body.elts


def _parse(source: str) -> ast.Expression:
    # Python 3.11 counts the depth of a tree for all threads together: two that build trees at once
    # get a SystemError where the garbage collector runs (python/cpython#106905).
    with _PARSING:
        return ast.parse(source, mode="eval")


_PARSING = threading.Lock()

# A comment (quotes in it open no string) or a string; an unclosed one ends where Python gives up,
# so that no end is searched twice.
_STRING = re.compile(
    r"""#[^\n]*"""
    r"""|'''(?:[^\\]|\\.)*?(?:'''|\Z)|\"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\Z)"""
    r"""|'(?:[^\\'\n]|\\.)*'?|"(?:[^\\"\n]|\\.)*"?""",
    re.DOTALL,
)
_BACKSLASH = re.compile(r"""\\([\n\r\\'"abfnrtvxNuU0-7])|\\""")


def _keep_backslashes(match: re.Match[str]) -> str:
    # Python reads "\d" as "\\d" but warns, and how depends on the process; write the latter.
    token = match.group()
    if match.string[match.start() - 1] in "rR":  # at least the list's bracket stands before it
        return token
    return _BACKSLASH.sub(lambda escape: escape.group() if escape.group(1) else r"\\", token)


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
    """The code of the one block that the text holds, as in AppWorld's ReAct format.

    A fence is a line that starts with three backticks or more; the one that opens the block names
    the language exactly (AppWorld does not take `py` or `Python` either), and the one that closes
    it holds nothing else and is at least as long, so that a longer fence can hold shorter ones.
    Text beside the block is allowed, and `<think>...</think>` at the start is skipped; a `</think>`
    without `<think>` that stands in a block is code. AppWorld's agent runs the first block and
    forgets what follows; here a second block is refused, for the model would take it as run.

    Args:
      language: the word after the opening backticks.

    Returns:
      The lines between the fences, joined by newlines; None when there is no fence.

    Raises:
      ToolCallError: the block has another language, is not closed or is empty, or a fence follows.
    """
    said = skip_thoughts(text)
    if not text.lstrip().startswith(THOUGHT) and _within_block(text[: len(text) - len(said)]):
        said = text
    lines = said.replace("\r\n", "\n").split("\n")
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
    """Whether a text ends within a block: one fence opens it, the next closes it."""
    return sum(line.startswith("```") for line in before.split("\n")) % 2 == 1


def _closes(line: str, shortest: int) -> bool:
    fence = line.rstrip()
    return len(fence) >= shortest and not fence.strip("`")


_DECODER = json.JSONDecoder(object_pairs_hook=no_duplicates)
_GAP = re.compile(r"[\s;]*")  # between two objects


# How a model may write its calls, by name.
PARSERS: dict[str, Callable[[str], tuple[ToolCall, ...]]] = {
    "hermes": parse_hermes,
    "python": parse_python,
}
