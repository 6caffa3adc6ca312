"""The metrics of a run as a table: a row per iteration."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

from seeupo_jax.configuration.user_code import listed
from seeupo_jax.metrics.metrics_log import read_metrics

Value = float | int | str | None
Row = dict[str, Value]


class History(Sequence[Row]):
    """Rows in order of their iterations, each a dict of metrics by name; 0 is before training.

    `history[-1]["rollout/success_rate"]` is a value of the last row, `history["sweep/kl"]` a
    column: a value for each row, None where it has none. `docs/metrics.md` lists the names.
    """

    def __init__(self, rows: Sequence[Row]):
        self._rows = tuple(rows)

    @property
    def columns(self) -> list[str]:
        """The names of all metrics in order of appearance; `iteration` is the first."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    @overload
    def __getitem__(self, key: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> History: ...
    @overload
    def __getitem__(self, key: str) -> list[Value]: ...

    def __getitem__(self, key: SupportsIndex | slice | str) -> Row | History | list[Value]:
        if isinstance(key, slice):
            return History(self._rows[key])
        if isinstance(key, SupportsIndex):
            return self._rows[key]
        if key not in self.columns:
            there = listed(self.columns, "nothing is recorded")
            raise KeyError(f"{key}: no such metric; there are: {there}.")
        return [row.get(key) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"<History of {len(self)} rows, {len(self.columns)} columns>"

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame` with iterations as its index; pandas is your own.

        Raises:
          ImportError: pandas is not installed.
        """
        frame = importlib.import_module("pandas").DataFrame(list(self), columns=self.columns)
        return frame.set_index("iteration") if self.columns else frame


def read_history(workdir: str | Path) -> History:
    """The table of WORKDIR/metrics.jsonl; an evaluation lies in the row of its iteration.

    A metric of both, such as `time/compile_s`, is added up.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in read_metrics(workdir):
        row = rows.setdefault(line["iteration"], {})
        for name, value in line.items():
            row[name] = row[name] + value if name in row and name.startswith("time/") else value
    return History([rows[iteration] for iteration in sorted(rows)])
