"""Runs a program and then tests of it, in a confined process; see `code`. Standard library only.

Standard input holds `token`, `before` and `after` (code that runs before and after the program) and
`tests`, each with a kind: `value`, an expression whose value is answered, or `run`, statements that
must not raise. Each answer is a line with the token, the test's number, a word and a text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

PROGRAM = -1  # the number of an answer about the program itself
VALUE, PASSED, RAISED = "value", "passed", "raised"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def plain(value: Any) -> Any:
    """A value of Python's own types, which compare as Python does, whatever a class overrides.

    Raises:
      TypeError: it has another type.
    """
    if type(value) in _PLAIN:
        return value
    for kind, convert in _CONVERTERS.items():
        if isinstance(value, kind):
            return convert(value)
    if hasattr(value, "dtype") and type(value.item()) in _PLAIN:  # a scalar of NumPy
        return value.item()
    raise TypeError(f"a value of the class {type(value).__name__} is compared with no literal")


_CONVERTERS: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: {plain(key): plain(each) for key, each in dict.items(value)},
    list: lambda value: [plain(each) for each in list.__iter__(value)],
    tuple: lambda value: tuple(plain(each) for each in tuple.__iter__(value)),
    set: lambda value: {plain(each) for each in set.__iter__(value)},
    frozenset: lambda value: {plain(each) for each in frozenset.__iter__(value)},
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}


def main() -> None:
    """Runs the program whose file is the argument."""
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    token, tests = request["token"], request["tests"]
    write, to_ascii, to_plain, run = os.write, ascii, plain, exec  # a program may replace names

    def answer(number: int, word: str, text: str) -> None:
        data = f"{token} {number} {word} {text}\n".encode("ascii")
        while data:
            data = data[write(answers, data) :]

    names: dict[str, Any] = {"__name__": "program"}  # a guard for scripts does not run
    with open(sys.argv[1], "rb") as file:
        source = file.read()
    number = PROGRAM
    try:
        for part in (request["before"], source, request["after"]):
            run(compile(part, "program.py", "exec"), names)
    except BaseException as error:  # SystemExit, too
        answer(PROGRAM, RAISED, _described(error))
        return
    for number, (kind, test) in enumerate(tests):
        try:
            if kind == VALUE:
                answer(number, VALUE, to_ascii(to_plain(eval(test, names))))
            else:
                run(test, names)
                answer(number, PASSED, "")
        except BaseException as error:
            answer(number, RAISED, _described(error))


def _described(error: BaseException) -> str:
    try:
        return ascii([type(error).__name__, str(error)[:300]])
    except BaseException:  # of a class of the program's
        return ascii([type(error).__name__, ""])
