"""Generated sums: rows for the environment `prompts`, without a file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def additions(
    *,
    tasks: int = 2000,
    validation_tasks: int = 0,
    test_tasks: int = 200,
    digits: Sequence[int] = (2, 2),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Returns distinct sums, as rows with `question` ("47 + 8 ="), `answer` and `split`.

    Args:
      tasks, validation_tasks, test_tasks: rows of the splits train, validation and test.
      digits: of each number at most; as many numbers are added.
      seed: of the draw.

    Raises:
      ValueError: there are fewer such sums, or an argument is out of its range.
    """
    counts = {"tasks": tasks, "validation_tasks": validation_tasks, "test_tasks": test_tasks}
    for name, count in counts.items():
        least = 0 if name == "validation_tasks" else 1
        if type(count) is not int or count < least:
            raise ValueError(
                f"additions {name}: got {count!r}; allowed: a whole number >= {least}."
            )
    valid = len(digits) > 1 and all(type(each) is int and each > 0 for each in digits)
    if not valid or sum(digits) > 9:
        raise ValueError(
            f"additions digits: got {digits!r}; allowed: two or more whole numbers >= 1, together"
            " at most 9."
        )
    limits = [10**each for each in digits]
    size, wanted = 10 ** sum(digits), sum(counts.values())
    if wanted > size:
        given = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
        raise ValueError(
            f"additions: got {given}; allowed with digits={tuple(digits)}: at most {size:,}"
            " together."
        )
    splits = ["train"] * tasks + ["validation"] * validation_tasks + ["test"] * test_tasks
    drawn = random.Random(seed).sample(range(size), wanted)
    return [_row(number, limits, split) for number, split in zip(drawn, splits, strict=True)]


def _row(number: int, limits: Sequence[int], split: str) -> dict[str, Any]:
    """The sum of a number: its groups of digits are what is added."""
    terms = []
    for limit in reversed(limits):
        number, term = divmod(number, limit)
        terms.insert(0, term)
    question = f"{' + '.join(map(str, terms))} ="
    return {"question": question, "answer": str(sum(terms)), "split": split}
