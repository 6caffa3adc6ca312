"""The trajectories of a run on disk: gzip JSON lines, a shard per iteration and split.

`docs/trajectories.md` describes a record. This module does not need jax.
"""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from seeupo_jax.configuration.user_code import expand_home
from seeupo_jax.durable_files import write_atomically
from seeupo_jax.tasks.json_rows import read_object
from seeupo_jax.trajectories.json_lines import to_line

FOLDER = "trajectories"
SCHEMA = 1
TRAIN = "train"

_LOGGER = logging.getLogger(__name__)
_NAME = re.compile(r"(?P<kind>train|eval_(?P<split>.+))_(?P<iteration>[0-9]{6,})\.jsonl\.gz")
_COMPRESSION = 6
_NUMBER = (int, float)

# The fields of a record, and their types after JSON.
FIELDS: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "split": (str,),
    "evaluation": (bool,),
    "iteration": (int,),
    "group": (int,),
    "member": (int,),
    "task_id": (str,),
    "seed": (int,),
    "labels": (dict,),
    "stop": (str,),
    "failed": (bool,),
    "failure": (str, type(None)),
    "reward": (*_NUMBER, type(None)),
    "score": (*_NUMBER, type(None)),
    "success": (bool, type(None)),
    "turns": (int,),
    "turn_rewards": (list,),
    "rewards": (dict,),
    "named_turn_rewards": (dict,),
    "policy_version": (int, type(None)),
    "advantage": (*_NUMBER, type(None)),
    "weights": (list,),
    "info": (dict,),
    "messages": (list,),
    "segments": (list,),
}
_NUMBERS = (*_NUMBER, type(None))
# The lists of a segment, all of one length, and of a record, with the types of their elements.
SEGMENT_FIELDS: Mapping[str, tuple[type, ...]] = {
    "tokens": (int,),
    "turn": (int,),
    "text": (str,),
    "logp": _NUMBERS,
    "trainer_logp": _NUMBERS,
    "entropy": _NUMBERS,
}
_MIXED: Mapping[str, tuple[type, ...]] = {"version": (int,)}  # where it is not `policy_version`
_LISTS = {"turn_rewards": _NUMBERS, "weights": _NUMBERS}


class TrajectoryFile(NamedTuple):
    """One file: the rollouts of an iteration, or an evaluation after it; sorts as they are read."""

    iteration: int
    split: str
    evaluation: bool

    @property
    def kind(self) -> str:
        """The part of its name that files of other iterations share."""
        return f"eval_{quote(self.split, safe='')}" if self.evaluation else TRAIN

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.iteration:06d}.jsonl.gz"

    def path(self, workdir: str | Path) -> Path:
        return Path(workdir) / FOLDER / self.name


def evaluation_label(split: str) -> str:
    """The label of an evaluation on a split, next to the labels of training splits."""
    return f"eval_{split}" if split == TRAIN else split


def find_shards(workdir: str | Path) -> list[TrajectoryFile]:
    """The shards of a run, in order; [] where there are none."""
    folder = Path(workdir) / FOLDER
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    matches = (match for name in names if (match := _NAME.fullmatch(name)))
    return sorted(
        TrajectoryFile(int(m["iteration"]), unquote(m["split"] or TRAIN), m["split"] is not None)
        for m in matches
    )


def read_trajectories(
    workdir: str | Path,
    *,
    split: str | None = None,
    iterations: Collection[int] | None = None,
    evaluation: bool | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of a run, one at a time, in order of (iteration, split, group, member).

    A file that is cut off, as after a copy that broke off, gives its complete records; a file that
    the run has removed since the call gives none. Both log a sentence.

    Args:
      workdir: the run's folder, or a copy of it.
      split: `train`, or an evaluation's; None: all.
      iterations: those to read; None: all.
      evaluation: False: rollouts of training; True: episodes of evaluations, also of those on split
        `train`; None: both.

    Raises:
      ValueError: no such folder; a line that is no record, with its file, what was got and what is
        allowed.
    """
    # Now, while the rest of it waits for the first record.
    folder = expand_home(workdir).absolute()
    if not folder.is_dir():
        raise ValueError(f"workdir: got {workdir}; allowed: the folder of a run.")
    if not isinstance(iterations, Collection | None):
        raise ValueError(f"iterations: got {iterations!r}; allowed: a collection of numbers.")
    shards = [
        shard
        for shard in find_shards(folder)
        if split in (None, shard.split)
        and evaluation in (None, shard.evaluation)
        and (iterations is None or shard.iteration in iterations)
    ]
    return (record for shard in shards for record in _read_present(shard.path(folder)))


def read_shard(
    path: Path, log: Callable[[str], None] = _LOGGER.warning
) -> Iterator[dict[str, Any]]:
    """The records of one file; see `read_trajectories`."""
    number, evaluation = 0, not path.name.startswith(f"{TRAIN}_")
    try:
        with gzip.open(path, "rb") as file:
            if not path.stat().st_size:
                raise EOFError("it is empty")
            for number, line in enumerate(map(_ended, file), 1):
                yield _record(line, f"{path} line {number}", evaluation)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        log(f"{path}: the rest after {number} lines cannot be read ({error}).")


def _read_present(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file; of one that is not there any more, none."""
    try:
        yield from read_shard(path)
    except FileNotFoundError:
        _LOGGER.warning("%s: it has been removed since the files were listed.", path)


def pack_shard(records: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of a file with these records; the same records give the same bytes."""
    pack = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, 31)  # 31: gzip's frame, without a time
    parts = [pack.compress(to_line(record)) for record in records]
    return b"".join([*parts, pack.flush()])


def write_shard(workdir: str | Path, shard: TrajectoryFile, data: bytes) -> None:
    """Writes a file atomically in its place, replacing an earlier one."""
    write_atomically(shard.path(workdir), data)


def _ended(line: bytes) -> bytes:
    if not line.endswith(b"\n"):
        raise EOFError("its last line has no end")
    return line


def _record(line: bytes, where: str, evaluation: bool) -> dict[str, Any]:
    # Fields that earlier versions did not write.
    record = {"rewards": {}, "named_turn_rewards": {}, "evaluation": evaluation} | read_object(
        line, where, "a record, a JSON object"
    )
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"{where}: schema: got {record.get('schema')!r}; allowed: {SCHEMA}, which this version"
            " of seeupo_jax reads."
        )
    for name, allowed in FIELDS.items():
        if name not in record:
            raise ValueError(f"{where}: got no {name}; allowed: {', '.join(FIELDS)}.")
        if type(record[name]) not in allowed:
            got = str(record[name])[:60]
            raise ValueError(f"{where}: {name}: got {got}; allowed: {_names(allowed)}.")
    _check_lists(record, _LISTS, where)
    for segment in record["segments"]:
        if not isinstance(segment, dict) or not segment.keys() >= SEGMENT_FIELDS.keys():
            got = ", ".join(segment) if isinstance(segment, dict) else str(segment)[:60]
            raise ValueError(f"{where}: segments: got {got}; allowed: {', '.join(SEGMENT_FIELDS)}.")
        if type(segment.get("role", "")) is not str:
            got = str(segment["role"])[:60]
            raise ValueError(f"{where}: segments: role: got {got}; allowed: a text.")
        fields = {**SEGMENT_FIELDS, **(_MIXED if "version" in segment else {})}
        _check_lists(segment, fields, f"{where}: segments")
        if len({len(segment[name]) for name in fields}) > 1:
            got = ", ".join(f"{len(segment[name])} {name}" for name in fields)
            raise ValueError(f"{where}: segments: got {got}; allowed: as many of each.")
    return record


def _check_lists(
    values: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: str
) -> None:
    """Raises ValueError where one of these fields is no list, or has other elements."""
    for name, allowed in fields.items():
        value = values[name]
        if not isinstance(value, list) or not set(map(type, value)) <= set(allowed):
            got, kinds = str(value)[:60], _names(allowed)
            raise ValueError(f"{where}: {name}: got {got}; allowed: a list, each {kinds}.")


def _names(allowed: Iterable[type]) -> str:
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
