"""Tasks of prompts: rows of files in splits, each with a stable id, a prompt and its data."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seeupo_jax.tasks.chat_messages import prompt_messages
from seeupo_jax.tasks.records import (
    FUNCTION,
    KINDS,
    TFDS,
    function_records,
    is_function,
    open_records,
    source_splits,
)
from seeupo_jax.tasks.row_list import Records, Row, short
from seeupo_jax.tasks.tables import columns_of
from seeupo_jax.tasks.templates import RowTemplate, value_of

_LOGGER = logging.getLogger(__name__)
_FILE = "prompts file"  # names the source in errors
TEST_SHARE = 0.1  # of rows without splits
TRAIN, TEST = "train", "test"


@dataclass(frozen=True)
class PromptColumns:
    """Which columns of a row are what.

    prompt: a text or a list of messages. answer: what a checker compares with; None: no column.
    system: text of a system message before the prompt. template: the prompt's text, filled from
    columns, in place of the column `prompt`. split: the column of the splits' names.
    """

    prompt: str | None
    answer: str | None
    system: str | None
    template: RowTemplate | None
    split: str

    def named(self) -> dict[str, str]:
        """The columns that must be there, with the option that names each."""
        inside = () if self.template is None else self.template.columns
        named = {"prompt": self.prompt, "answer": self.answer}
        given = {column: option for option, column in named.items() if column is not None}
        return {**dict.fromkeys(inside, "template"), **given}


class Prompt(NamedTuple):
    """A task. row: its columns. place: where it lies, in errors."""

    messages: tuple[dict[str, str], ...]
    answer: Any
    row: Row
    place: str


class _Listing(NamedTuple):
    """Task ids by split; checked: the splits whose rows were checked, each with what checked it."""

    ids: Mapping[str, Sequence[str]]
    checked: set[tuple[str, str]]


class PromptTasks:
    """The tasks of one source, or of one for each split.

    Objects for the same unchanged source share its rows and its listing. An id is `SPLIT/ROW-HASH`;
    the hash is of the row's content, so a task of a file that was changed is not found.

    Args:
      file: a source (`records.KINDS`, or a function of rows), or a source for each split.
      options: of the function.
      test_share: of the rows that are the split test, for a single source without splits.
      seed: of the draw of these rows. empty: error or skip, for rows without a prompt or answer.

    Raises:
      ValueError: a source cannot be read, or lacks a column; one sentence.
    """

    def __init__(
        self,
        file: str | Mapping[str, str],
        columns: PromptColumns,
        *,
        options: Mapping[str, Any],
        test_share: float | None = None,
        seed: int = 0,
        empty: str = "error",
    ):
        self._columns, self._empty, self._seed = columns, empty, seed
        self._sources = _open_sources(file, options)
        for records in self._sources.values():
            _check_columns(records, columns)
        has_splits = None not in self._sources or columns.split in columns_of(self._sources[None])
        if has_splits and test_share is not None:
            raise ValueError(
                f"prompts test_share: got {test_share} for {file!r}, which has splits of its own;"
                " allowed: none."
            )
        self._share = TEST_SHARE if test_share is None else test_share

    def ids(
        self, split: str, check: Callable[[Prompt], None] | None = None, key: str = ""
    ) -> Sequence[str]:
        """The task ids of a split.

        Args:
          check: called once per process with each task; its ValueError is the row's. key: of it.

        Raises:
          ValueError: there is no such split, or a row is invalid.
        """
        sources = tuple(self._sources.items())
        listing = _list(sources, self._columns, self._share, self._seed, self._empty)
        if split not in listing.ids:
            raise ValueError(
                f"prompts split: got {split!r}; allowed: {', '.join(listing.ids)}, which"
                f" {_named(sources)} has, or a file for each split:"
                " file={'train': FILE, 'test': FILE}."
            )
        if check is not None and (split, key) not in listing.checked:
            for task_id in listing.ids[split]:
                self._check(task_id, check)
            listing.checked.add((split, key))
        return listing.ids[split]

    def _check(self, task_id: str, check: Callable[[Prompt], None]) -> None:
        prompt = self.find(task_id)
        try:
            check(prompt)
        except ValueError as error:
            raise ValueError(f"{prompt.place}: {error}") from None

    def find(self, task_id: str) -> Prompt:
        """The task of an id. Raises ValueError: there is none, or its row is another now."""
        split, _, rest = task_id.rpartition("/")
        number, _, digest = rest.partition("-")
        records = self._sources.get(split, self._sources.get(None))
        known = records is not None and bool(split and digest) and number.isdecimal()
        if records is None or not known or int(number) >= len(records):
            raise ValueError(f"prompts task: got {task_id!r}; allowed: an id of task_ids(split).")
        row = records[int(number)]
        if _digest(row) != digest:
            raise ValueError(
                f"{records.where(int(number))}: got another row than that of the task {task_id!r};"
                " allowed: a file that stays as it is until the run is complete."
            )
        return _prompt(row, records.where(int(number)), self._columns)


def _open_sources(
    file: str | Mapping[str, str], options: Mapping[str, Any]
) -> dict[str | None, Records]:
    """The rows of each split; of a source without splits under None."""
    if isinstance(file, Mapping) and file:
        pairs = [(f"{_FILE}[{split!r}]", split, source) for split, source in file.items()]
        return {split: _open(source, field, options, split) for field, split, source in pairs}
    if not isinstance(file, str) or not file:
        raise ValueError(f"{_FILE}: got {file!r}; allowed: {KINDS}, {FUNCTION}, or one per split.")
    splits = () if is_function(file) else source_splits(file, _FILE)
    if not splits:
        return {None: _open(file, _FILE, options, None)}
    return {split: _open(file, _FILE, options, split) for split in splits}


def _open(source: str, field: str, options: Mapping[str, Any], split: str | None) -> Records:
    if not isinstance(source, str):
        raise ValueError(f"{field}: got {source!r}; allowed: {KINDS}, or {FUNCTION}.")
    if is_function(source):
        records = function_records(source, options, field)
    elif options:
        raise ValueError(f"prompts file_options: got {options!r}; allowed: none, with {source}.")
    elif source.startswith(TFDS):
        records = _open_tfds(source, field, split)
    else:
        records = open_records(source, field, split)
    if not len(records):
        raise ValueError(f"{field}: {source} has no row; allowed: at least one.")
    return records


_open_tfds = functools.lru_cache(maxsize=64)(open_records)  # a prepared dataset does not change


def _check_columns(records: Records, columns: PromptColumns) -> None:
    """ValueError where the first row lacks a column that an option names."""
    first = records[0]
    for column, option in columns.named().items():
        if column not in first and column.partition(".")[0] not in first:
            raise ValueError(
                f"{records.where(0)}: got no column {column!r}, which the option {option} names;"
                f" allowed: {', '.join(first)}."
            )


@functools.lru_cache(maxsize=64)
def _list(
    sources: tuple[tuple[str | None, Records], ...],
    columns: PromptColumns,
    share: float,
    seed: int,
    empty: str,
) -> _Listing:
    """Task ids by split; reads every row once, and warns of what is left out or doubled."""
    ids: dict[str, list[str]] = {}
    bad = _BadRows()
    for split, records in sources:
        good = _read(records, columns, bad)
        if split is not None:
            names = [split] * len(good)
        elif columns.split in columns_of(records):
            names = [_split_name(records, task.number, columns.split) for task in good]
        else:
            names = _drawn(good, share, seed)
        for name, task in zip(names, good, strict=True):
            bad.count_prompt(name, task.prompt)
            ids.setdefault(name, []).append(f"{name}/{task.number}-{task.digest}")
    rows = sum(len(records) for _, records in sources)
    bad.report(_named(sources), rows, columns, empty)
    return _Listing(ids, set())


def _named(sources: Sequence[tuple[str | None, Records]]) -> str:
    """The sources, as errors name them."""
    places = (records.where(0).rpartition(", ")[0].partition(": ")[2] for _, records in sources)
    return ", ".join(dict.fromkeys(places))


class _Task(NamedTuple):
    """A valid row: its number, and hashes of all of it and of its prompt."""

    number: int
    digest: str
    prompt: bytes


def _read(records: Records, columns: PromptColumns, bad: _BadRows) -> list[_Task]:
    tasks = []
    for number in range(len(records)):
        row, where = records[number], records.where(number)
        prompt = _prompt(row, where, columns)
        if _is_empty(prompt, columns):
            bad.empty.append(where)
            continue
        text = json.dumps(prompt.messages).encode()
        tasks.append(_Task(number, _digest(row), hashlib.blake2b(text, digest_size=8).digest()))
    return tasks


def _prompt(row: Row, where: str, columns: PromptColumns) -> Prompt:
    if columns.template is not None:
        value: Any = columns.template.fill(row, where)
    else:
        value = value_of(row, str(columns.prompt))
    messages = () if value is None else prompt_messages(value, f"{where}: {columns.prompt}")
    if columns.system is not None and messages:
        if messages[0]["role"] == "system":
            raise ValueError(
                f"{where}: got a prompt with a system message and the option system; allowed: one"
                " of them."
            )
        messages = ({"role": "system", "content": columns.system}, *messages)
    answer = None if columns.answer is None else value_of(row, columns.answer)
    return Prompt(messages, answer, row, where)


def _is_empty(prompt: Prompt, columns: PromptColumns) -> bool:
    """Whether there is nothing to ask, or nothing to compare an answer with."""
    asked = any(m["content"].strip() for m in prompt.messages if m["role"] != "system")
    answer = prompt.answer.strip() if isinstance(prompt.answer, str) else prompt.answer
    return not asked or (columns.answer is not None and answer in (None, "", []))


class _BadRows:
    """Rows that are left out, and prompts that occur twice."""

    def __init__(self) -> None:
        self.empty: list[str] = []
        self._splits: dict[bytes, set[str]] = {}
        self._repeated = 0

    def count_prompt(self, split: str, prompt: bytes) -> None:
        splits = self._splits.setdefault(prompt, set())
        self._repeated += split in splits
        splits.add(split)

    def report(self, source: str, rows: int, columns: PromptColumns, empty: str) -> None:
        """Warns with the figures. Raises ValueError where empty rows are an error, or all are."""
        if self.empty:
            got = f"{len(self.empty):,} of {rows:,} rows of {source} have no prompt"
            got += "" if columns.answer is None else f" or no {columns.answer}"
            got += f" (the first: {self.empty[0]})"
            if empty == "error" or len(self.empty) == rows:
                raise ValueError(f"prompts: {got}; allowed: none, or with empty='skip' some.")
            _LOGGER.warning("prompts: %s; they are left out.", got)
        if self._repeated:
            text = "prompts: %s rows of %s repeat a prompt of their split."
            _LOGGER.warning(text, f"{self._repeated:,}", source)
        shared = sum(TRAIN in splits and len(splits) > 1 for splits in self._splits.values())
        if shared:
            text = "prompts: %s prompts of the split train of %s are also in another split."
            _LOGGER.warning(text, f"{shared:,}", source)


def _split_name(records: Records, number: int, column: str) -> str:
    name = records[number].get(column)
    if not isinstance(name, str) or not name:
        where = records.where(number)
        raise ValueError(f"{where}: got {short(name)} as {column}; allowed: a split's name.")
    return name


def _drawn(tasks: Sequence[_Task], share: float, seed: int) -> list[str]:
    """A split for each task: the share with the smallest hashes of seed and row is the test."""
    count = min(max(1, round(share * len(tasks))), len(tasks) - 1) if share else 0

    def drawn(place: int) -> bytes:
        text = f"{seed} {tasks[place].prompt.hex()} {tasks[place].number}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    tests = set(sorted(range(len(tasks)), key=drawn)[:count])
    return [TEST if place in tests else TRAIN for place in range(len(tasks))]


def _digest(row: Row) -> str:
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
