"""Generated sums: rows for the environment `prompts`, without a file."""

from __future__ import annotations

import random
from typing import Any


def additions(
    *, tasks: int = 2000, test_tasks: int = 200, digits: int = 2, seed: int = 0
) -> list[dict[str, Any]]:
    """Returns distinct sums of two numbers, as rows with `question`, `answer` and `split`.

    Args:
      tasks, test_tasks: rows of the split train and of the split test.
      digits: of each number at most, 1 to 6.
      seed: of the draw.

    Raises:
      ValueError: there are fewer such sums, or an argument is out of its range.
    """
    if digits not in range(1, 7):
        raise ValueError(f"additions digits: got {digits!r}; allowed: 1 to 6.")
    numbers, wanted = 10**digits, {"train": tasks, "test": test_tasks}
    for name, count in wanted.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"additions {name} tasks: got {count!r}; allowed: a number >= 1.")
    if sum(wanted.values()) > numbers**2:
        got = f"{tasks} tasks and {test_tasks} test_tasks of {digits} digits"
        raise ValueError(f"additions: got {got}; allowed: at most {numbers**2:,} together.")
    drawn = random.Random(seed).sample(range(numbers**2), sum(wanted.values()))
    splits = ["train"] * tasks + ["test"] * test_tasks
    return [
        {"question": f"{a} + {b}", "answer": str(a + b), "split": split}
        for (a, b), split in zip((divmod(pair, numbers) for pair in drawn), splits, strict=True)
    ]
