"""Answers that are Python programs, run against the tests of a row."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from seeupo_jax.configuration.user_code import escaped, in_one_line
from seeupo_jax.envs.checkers.answer_harness import PASSED, PROGRAM, RAISED, VALUE
from seeupo_jax.envs.checkers.checker import (
    RIGHT,
    Checker,
    CheckResult,
    check_option,
    expected_value,
    is_count,
    is_number,
    needed_column,
    refused_value,
    wrong,
)
from seeupo_jax.envs.checkers.code_tests import (
    CodeTests,
    PipeTest,
    StatementTest,
    ValueTest,
    read_tests,
)
from seeupo_jax.envs.checkers.fenced import last_fenced
from seeupo_jax.envs.checkers.sandbox import Limits, Run, check_sandbox, run_program

_MIB = 2**20
_ANSWER = re.compile(r"(\w+) (-?\d{1,9}) (\w+) (.*)")
_ROOM = 1000  # characters of a value's text beyond four times those of the expected one
_LANGUAGES = ("", "python", "python3", "py")
_SCORES = ("all", "share")
_FAILURES = {"timeout": "it took too long", "output": "it wrote too much output"}


class _Outcome(NamedTuple):
    """passed: whether a test passed. reason: why it did not, without what was expected."""

    passed: bool
    reason: str = ""


class Code(Checker):
    """The share of a row's tests that the program in an answer's last code block passes.

    Args:
      answer_column: of the tests, as `read_tests` takes them.
      entry_point: the column with the name of the function to test, or None.
      setup: the column with code that runs before the program, or None.
      score: `all`, 1 if every test passes and else 0, or `share`, the share that passes.
      timeout_s: for all calls of a row, and for each pair of input and output, in seconds.
      memory_mib: limit of the program's address space.
      output_mib: limit of the output of one run.
    """

    def __init__(
        self,
        answer_column: str | None,
        *,
        entry_point: str | None = None,
        setup: str | None = None,
        score: str = "all",
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        output_mib: int = 4,
    ):
        self._column = needed_column("code", answer_column)
        for name, value in (("entry_point", entry_point), ("setup", setup)):
            check_option(
                name, value, "a column, or none", lambda v: v is None or isinstance(v, str)
            )
        check_option("score", score, ", ".join(_SCORES), lambda v: v in _SCORES)
        check_option("timeout_s", timeout_s, "a number > 0", lambda v: is_number(v) and v > 0)
        lowest = "an integer >= 128"  # Python and NumPy
        check_option("memory_mib", memory_mib, lowest, lambda v: is_count(v) and v >= 128)
        check_option("output_mib", output_mib, "an integer >= 1", lambda v: is_count(v) and v >= 1)
        check_sandbox()
        self._entry_point, self._setup, self._shared = entry_point, setup, score == "share"
        self._limits = Limits(timeout_s, memory_mib * _MIB, output_mib * _MIB)

    def check(self, answer_text: str, row: Mapping[str, Any]) -> CheckResult:
        tests = self._tests(row)
        program = last_fenced(answer_text, _LANGUAGES)
        if program is None:
            return wrong("Your answer has no closed code block: put the program between ``` lines.")
        if tests.pipes:
            program = f"{self._before(row)}\n{program}" if self._before(row) else program
            outcomes = [*self._run_pipes(program, tests.pipes)]
        else:
            outcomes = self._run_calls(program, self._before(row), tests)
        count = len(tests.pipes) or len(tests.calls)
        passed = sum(each.passed for each in outcomes)
        if passed == count:
            return RIGHT
        number, first = next((n, each) for n, each in enumerate(outcomes, 1) if not each.passed)
        message = f"Your program fails test {number} of {count}: {first.reason}."
        return CheckResult(passed / count if self._shared else 0.0, message)

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._tests(row)

    def _tests(self, row: Mapping[str, Any]) -> CodeTests:
        value = expected_value(row, self._column)
        name = None
        if self._entry_point is not None:
            name = expected_value(row, self._entry_point)
        try:
            return read_tests(value, name)
        except ValueError as error:
            raise refused_value(self._column, value, f"tests ({error})") from None

    def _before(self, row: Mapping[str, Any]) -> str:
        return "" if self._setup is None else str(row.get(self._setup) or "")

    def _run_pipes(self, program: str, tests: tuple[PipeTest, ...]) -> Iterator[_Outcome]:
        """The outcome of each test; without shares, only up to the first that fails."""
        for test in tests:
            run = run_program(program, test.given.encode("utf-8", "surrogatepass"), self._limits)
            outcome = _pipe_outcome(run, test.wanted)
            yield outcome
            if not outcome.passed and not self._shared:
                return

    def _run_calls(self, program: str, before: str, tests: CodeTests) -> list[_Outcome]:
        token = secrets.token_hex(16)
        sources = [
            (VALUE, test.expression) if isinstance(test, ValueTest) else ("run", test.statements)
            for test in tests.calls
        ]
        request = {"token": token, "before": before, "after": tests.after, "tests": sources}
        run = run_program(program, json.dumps(request).encode(), self._limits, harness=True)
        answers = _read_answers(run.stdout, token)
        if answers is None:
            return [_Outcome(False, "it wrote into the results of its tests")]
        ended = _FAILURES.get(run.failure, "it ended before its tests did")
        if PROGRAM in answers:
            ended = f"it raised {_raised(answers[PROGRAM][1], with_text=True)}"
        missing = _Outcome(False, ended)
        return [
            _call_outcome(test, *answers[number]) if number in answers else missing
            for number, test in enumerate(tests.calls)
        ]


def _read_answers(output: bytes, token: str) -> dict[int, tuple[str, str]] | None:
    """Words and texts of the answers by number; None: a line is not the harness's."""
    answers: dict[int, tuple[str, str]] = {}
    for line in output.decode("ascii", "replace").split("\n")[:-1]:  # a last one may be cut
        parts = _ANSWER.fullmatch(line)
        if parts is None or parts[1] != token or int(parts[2]) in answers:
            return None
        answers[int(parts[2])] = (parts[3], parts[4])
    return answers


def _call_outcome(test: ValueTest | StatementTest, word: str, text: str) -> _Outcome:
    if word == RAISED:
        # The text of an error of a test's own statements may have what is expected.
        return _Outcome(False, f"it raised {_raised(text, isinstance(test, ValueTest))}")
    if isinstance(test, StatementTest):
        return _Outcome(word == PASSED, "its results cannot be read")
    # Reading a text takes a hundred times its memory.
    if len(text) > 4 * max(map(len, map(ascii, test.allowed))) + _ROOM:
        return _Outcome(False, "it returned a value that is too long")
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _Outcome(False, "it returned a value that cannot be compared")
    value = _as_lists(value) if test.lists else value
    allowed = map(_as_lists, test.allowed) if test.lists else test.allowed
    return _Outcome(any(value == each for each in allowed), "it returned a wrong value")


def _as_lists(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_lists(each) for each in value]
    return {k: _as_lists(v) for k, v in value.items()} if isinstance(value, dict) else value


def _raised(text: str, with_text: bool) -> str:
    """An error of a program's, from a harness's answer."""
    try:
        name, said = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return "an error"
    shown = f"{name}: {said}" if with_text and said else str(name)
    return in_one_line(escaped(shown), 200)


def _pipe_outcome(run: Run, wanted: str) -> _Outcome:
    if run.failure:
        return _Outcome(False, _FAILURES[run.failure])
    if run.code != 0:
        last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        said = in_one_line(escaped(last), 200) or f"exit code {run.code}"
        return _Outcome(False, f"it ended with an error, {said}")
    equal = _same_output(run.stdout.decode(errors="replace"), wanted)
    return _Outcome(equal, "its output is wrong")


def _same_output(got: str, wanted: str) -> bool:
    """Whether two outputs have the same lines, but for white space at their ends.

    Lines may also have the same numbers, as LiveCodeBench compares: 1.50 equals 1.5.
    """
    lines = [[line.strip() for line in text.strip().split("\n")] for text in (got, wanted)]
    if len(lines[0]) != len(lines[1]):
        return False
    return all(a == b or _same_numbers(a, b) for a, b in zip(*lines, strict=True))


def _same_numbers(got: str, wanted: str) -> bool:
    try:
        numbers = [[Decimal(word) for word in line.split()] for line in (got, wanted)]
        return numbers[0] == numbers[1]
    except (InvalidOperation, ValueError):
        return False
