"""The tests of a row, in the forms of MBPP, HumanEval, APPS and LiveCodeBench."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ValueTest:
    """An expression whose value has to equal one of these; they stay outside of its process.

    lists: whether tuples count as lists, as in JSON.
    """

    expression: str
    allowed: tuple[Any, ...]
    lists: bool = False


@dataclass(frozen=True)
class StatementTest:
    """Statements that must not raise."""

    statements: str


@dataclass(frozen=True)
class PipeTest:
    """A standard input, and the standard output that a program has to write."""

    given: str
    wanted: str


@dataclass(frozen=True)
class CodeTests:
    """Tests of one kind: calls, or pairs of input and output. after: runs before the calls."""

    calls: tuple[ValueTest | StatementTest, ...] = ()
    pipes: tuple[PipeTest, ...] = ()
    after: str = ""


def read_tests(value: Any, entry_point: str | None) -> CodeTests:
    """Reads the tests of a row.

    Args:
      value: asserts, a list of texts or a text, which may define `check(candidate)`; a mapping of
        `inputs` and `outputs`, with `fn_name` for calls; a list of mappings of `input` and
        `output`, with `testtype`; or the JSON of these.
      entry_point: name of the function to test; None: the tests name it.

    Raises:
      ValueError: it is none of these; the text says what is wrong.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _from_json(value)
    if isinstance(value, str):
        return _from_source(value, entry_point)
    if isinstance(value, Mapping):
        return _from_lists(value, entry_point)
    if isinstance(value, Sequence) and value and all(isinstance(each, str) for each in value):
        after, calls = [], list[ValueTest | StatementTest]()
        for source in value:
            calls += map(_read_statement, _parse(source).body)
        return CodeTests(tuple(calls), after="\n".join(after))
    if isinstance(value, Sequence) and value and all(isinstance(each, Mapping) for each in value):
        return _from_pairs(value, entry_point)
    raise ValueError("it is no list of tests, no text and no mapping")


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # Python may begin with a bracket


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test is no Python: {error}") from None


def _read_statement(node: ast.stmt) -> ValueTest | StatementTest:
    """A test of one statement: of `assert CALL == LITERAL` the value is compared outside."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
        left, right = node.test.left, node.test.comparators
        if len(right) == 1 and isinstance(node.test.ops[0], ast.Eq):
            try:
                return ValueTest(ast.unparse(left), (ast.literal_eval(right[0]),))
            except (ValueError, TypeError, RecursionError):
                pass  # no literal
    return StatementTest(ast.unparse(node))


def _from_source(source: str, entry_point: str | None) -> CodeTests:
    """Tests of a text: those of `check(candidate)` one by one where it has only asserts."""
    body = _parse(source).body
    check = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check is None:
        if not any(isinstance(node, ast.Assert) for node in body):
            raise ValueError("it has no assert and no check(candidate)")
        first = next(i for i, node in enumerate(body) if isinstance(node, ast.Assert))
        after = "\n".join(map(ast.unparse, body[:first]))
        return CodeTests(tuple(map(_read_statement, body[first:])), after=after)
    if entry_point is None:
        raise ValueError("it defines check(candidate), which needs the option entry_point")
    parameters = [each.arg for each in check.args.args]
    asserts = [node for node in check.body if isinstance(node, ast.Assert)]
    others = [n for n in check.body if not isinstance(n, ast.Assert | ast.Pass) and not _is_text(n)]
    if len(parameters) != 1 or others or not asserts:
        return CodeTests((StatementTest(f"check({entry_point})"),), after=source)
    rest = [ast.unparse(node) for node in body if node is not check]
    after = "\n".join([*rest, f"{parameters[0]} = {entry_point}"])
    return CodeTests(tuple(map(_read_statement, asserts)), after=after)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _from_lists(value: Mapping[str, Any], entry_point: str | None) -> CodeTests:
    """Tests as in APPS, whose outputs of calls may lie in one more list."""
    given, wanted = value.get("inputs"), value.get("outputs")
    if not _are_lists(given, wanted):
        raise ValueError("its inputs and outputs are no lists of the same length above 0")
    name = value.get("fn_name") or entry_point
    if name is None:
        return CodeTests(pipes=_pipes(given, wanted))
    calls = []
    for arguments, output in zip(given, wanted, strict=True):
        if not isinstance(arguments, list):
            raise ValueError("an input of a call is no list of arguments")
        inner = output[:1] if isinstance(output, list) and len(output) == 1 else []
        calls.append(_call(name, arguments, (output, *inner)))
    return CodeTests(tuple(calls), after=_find(name))


def _from_pairs(value: Sequence[Mapping[str, Any]], entry_point: str | None) -> CodeTests:
    """Tests as in LiveCodeBench, whose calls have a line of JSON for each argument."""
    pairs = [(each.get("input"), each.get("output")) for each in value]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise ValueError("a test lacks an input or output that is a text")
    kinds = {each.get("testtype", "stdin") for each in value}
    if kinds == {"stdin"}:
        return CodeTests(pipes=_pipes(*zip(*pairs, strict=True)))
    if kinds != {"functional"} or entry_point is None:
        raise ValueError(
            "its testtype is neither stdin, nor functional with the option entry_point"
        )
    try:
        calls = [
            _call(entry_point, [json.loads(each) for each in given.split("\n")], (json.loads(out),))
            for given, out in pairs
        ]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a functional test is no JSON: {error}") from None
    return CodeTests(tuple(calls), after=_find(entry_point))


def _are_lists(given: Any, wanted: Any) -> bool:
    are_lists = isinstance(given, list) and isinstance(wanted, list)
    return are_lists and len(given) == len(wanted) > 0


def _pipes(given: Sequence[Any], wanted: Sequence[Any]) -> tuple[PipeTest, ...]:
    """Some rows of APPS have a list of lines in place of a text."""
    texts = [
        ["\n".join(map(str, t)) if isinstance(t, list) else t for t in ts] for ts in (given, wanted)
    ]
    if not all(isinstance(text, str) for each in texts for text in each):
        raise ValueError("an input or output is no text")
    return tuple(map(PipeTest, *texts))


def _call(name: str, arguments: Sequence[Any], allowed: tuple[Any, ...]) -> ValueTest:
    return ValueTest(f"{name}({', '.join(map(repr, arguments))})", allowed, lists=True)


def _find(name: str) -> str:
    """Code that also finds a function that is a method of `Solution`."""
    if not name.isidentifier():
        raise ValueError(f"the name of the function is {name!r}")
    own = f"{name!r} not in globals() and 'Solution' in globals()"
    return f"if {own}:\n    {name} = Solution().{name}"
