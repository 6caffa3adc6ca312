"""The file of an evaluation's episodes, from which a stopped evaluation resumes.

JSON lines. The first is `{"settings": {...}}`, all settings that affect an episode; every other
one is an `EvaluationEpisode`, appended as soon as it is over. An episode whose environment failed
is played again by the next evaluation, so a later line of the same task and member replaces an
earlier one.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seeupo_jax.durable_files import make_folder, sync_file, sync_folder
from seeupo_jax.errors import name_file
from seeupo_jax.parallel.file_lock import exclusive
from seeupo_jax.tasks.json_rows import read_object
from seeupo_jax.tasks.row_list import short
from seeupo_jax.trajectories.json_lines import plain, to_line
from seeupo_jax.trajectories.policy_fingerprint import (
    FINGERPRINT,
    check_fingerprint,
    may_be_same,
    shown,
)
from seeupo_jax.types import Trajectory


@dataclass(frozen=True)
class EvaluationEpisode:
    """One line of the file.

    task_id, member: which task, and which of its k episodes, from 0.
    score: the environment's, in [0, 1]; 1 is success. reward: as training maximises it.
    stop: done | max_turns | max_tokens | env_error | timeout.
    failed: the environment failed; the episode is left out of all statistics.
    turns: messages of the policy.
    messages: the whole conversation, `{"role": ..., "content": ...}` each, in order.
    info: the environment's last counters and labels, and `failure`: why it failed.
    labels: of the task, if its environment is `Labelled`.
    rewards: by name, before their weights, as `Trajectory.rewards`.
    """

    task_id: str
    member: int
    score: float
    reward: float
    stop: str
    failed: bool
    turns: int
    messages: Sequence[Mapping[str, str]]
    info: Mapping[str, Any]
    labels: Mapping[str, str]
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.task_id, self.member

    @property
    def success(self) -> float:
        """1 or 0; NaN where the environment failed."""
        return math.nan if self.failed else float(self.score >= 1)


# The fields of an episode, and their types after JSON.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "task_id": (str,),
    "member": (int,),
    "score": (int, float),
    "reward": (int, float),
    "stop": (str,),
    "failed": (bool,),
    "turns": (int,),
    "messages": (list,),
    "info": (dict,),
    "labels": (dict,),
    "rewards": (dict,),
}
_BEGINNING = b'{"settings":'
_LATER = (FINGERPRINT, "chat.")  # settings, by how their names begin, that old files lack


def to_episode(trajectory: Trajectory, labels: Mapping[str, str]) -> EvaluationEpisode:
    """An episode of a trajectory: all but its tokens."""
    info = dict(trajectory.info)
    return EvaluationEpisode(
        task_id=trajectory.task_id,
        member=info.pop("member"),
        score=float(info.pop("score")),
        reward=float(trajectory.reward),
        stop=trajectory.stop,
        failed=trajectory.failed,
        turns=trajectory.turns,
        messages=trajectory.messages,
        info=info,
        labels=dict(labels),
        rewards=dict(trajectory.rewards),
    )


class EpisodeFile:
    """The file, open for one evaluation at a time; a context that closes it.

    Args:
      path: made, with its folder, if it is not there. A last line that a kill cut short is removed.
      settings: texts, numbers and lists of them by name. The file's must be the same; a fingerprint
        must be such that `may_be_same`, and is not compared where either has none.
      others: files of processes that this evaluation does not have, as `process_files` gives them.
        Their episodes of the same settings that this file lacks are copied into it.

    Attributes:
      played: the episodes that need not be played again, by task and member.

    Raises:
      ValueError: other settings, a line that is no episode, or another evaluation at work.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], others: Sequence[Path] = ()):
        self.path = path
        self.played: dict[tuple[str, int], EvaluationEpisode] = {}
        make_folder(path.parent)
        with name_file(path), contextlib.ExitStack() as opened:
            opened.enter_context(exclusive(path.with_name(f".{path.name}.lock"), f"got {path}"))
            self._file = opened.enter_context(path.open("a+b"))
            sync_folder(path.parent)
            self._begin(settings)
            for episode in _of_others(others, plain(settings, finite=False)):
                if episode.key not in self.played:
                    self.add(episode)
            self._opened = opened.pop_all()

    def add(self, episode: EvaluationEpisode) -> None:
        """Appends an episode; it is in the file when this returns, on the disk after `close`."""
        self._append(asdict(episode))
        self._take(episode)

    def close(self) -> None:
        """Waits until all lines are on the disk; the command reports figures only after that."""
        with name_file(self.path), self._opened:
            self._file.flush()
            sync_file(self.path)

    def __enter__(self) -> EpisodeFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, settings: Mapping[str, Any]) -> None:
        self._file.seek(0)
        complete, end, _ = (content := self._file.read()).rpartition(b"\n")
        saved, lines = _read(self.path, content)
        given = plain(settings, finite=False)
        if saved is not None:
            _check(self.path, saved, given)
        for episode in _episodes(self.path, lines):
            self._take(episode)
        self._file.truncate(len(complete + end))  # now that it is known to be ours
        if saved is None:
            self._append({"settings": settings})

    def _take(self, episode: EvaluationEpisode) -> None:
        if not episode.failed:
            self.played[episode.key] = episode

    def _append(self, line: Mapping[str, Any]) -> None:
        # An environment's `info` may hold values that are no JSON: their text is kept.
        with name_file(self.path):
            self._file.write(to_line(plain(line, finite=False), finite=False))
            self._file.flush()


def read_played(path: Path, settings: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Task and member of the episodes that would not be played again; nothing is changed.

    Args:
      path: process 0's file; those of other processes are read too.

    Raises:
      ValueError: other settings than those given, or a line that is no episode.
    """
    given = plain(settings, finite=False)
    episodes = [*_of_others(process_files(path, 1), given, given)]
    if path.exists():
        saved, lines = _read(path, _content(path))
        if saved is not None:
            _check(path, saved, given, given)
        episodes += _episodes(path, lines)
    return {episode.key for episode in episodes if not episode.failed}


def read_episodes(
    path: Path,
) -> tuple[dict[str, Any] | None, dict[tuple[str, int], EvaluationEpisode]]:
    """The settings of a file, None where it has none yet, and its episodes, the last of each.

    Raises:
      ValueError: a line that is no episode.
    """
    saved, lines = _read(path, _content(path))
    return saved, {each.key: each for each in _episodes(path, lines)}


def process_file(path: Path, number: int) -> Path:
    """The file of a process of an evaluation whose process 0 has this one."""
    return path.with_name(f"{path.stem}-process{number}{path.suffix}") if number else path


def process_files(path: Path, first: int) -> list[Path]:
    """Those files of `process_file` that are there, from a number on, in their order."""
    name = re.compile(rf"{re.escape(path.stem)}-process([1-9]\d*){re.escape(path.suffix)}")
    found = ((name.fullmatch(file.name), file) for file in path.parent.glob("*-process*"))
    numbered = sorted((int(match[1]), file) for match, file in found if match)
    return [file for number, file in numbered if number >= first]


def _of_others(
    paths: Sequence[Path], given: Mapping[str, Any], names: Iterable[str] | None = None
) -> Iterator[EvaluationEpisode]:
    """Episodes of the same settings that need not be played again.

    Args:
      names: of the settings that are compared; None: all.
    """
    for path in paths:
        saved, lines = _read(path, _content(path))
        try:
            _check(path, {} if saved is None else saved, given, names)
        except ValueError:  # of another evaluation
            continue
        yield from (episode for episode in _episodes(path, lines) if not episode.failed)


def _content(path: Path) -> bytes:
    with name_file(path):
        return path.read_bytes()


def _read(path: Path, content: bytes) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The settings, None where a kill cut them short, and the lines of the episodes.

    Raises:
      ValueError: it does not begin with settings, or a line is none of JSON, or a fingerprint is
        none.
    """
    complete, _, rest = content.rpartition(b"\n")
    rest = rest.rstrip(b"\0")  # a file may have grown, and a power cut kept its bytes from the disk
    lines = [
        read_object(line, f"{path} line {number}", "an episode, a JSON object")
        for number, line in enumerate(complete.splitlines(), 1)
    ]
    if lines and isinstance(settings := lines[0].get("settings"), dict):
        if settings.get(FINGERPRINT) is not None:
            check_fingerprint(settings[FINGERPRINT], f"{path} line 1")
        return settings, lines[1:]
    if lines or not _BEGINNING.startswith(rest[: len(_BEGINNING)]):
        raise ValueError(
            f"{path}: got {short(content.decode(errors='replace'))}; allowed: a file of an"
            " evaluation's episodes, which begins with their settings, or none there."
        )
    return None, []


def _episodes(path: Path, lines: Sequence[dict[str, Any]]) -> Iterator[EvaluationEpisode]:
    """The episodes that follow the settings."""
    for number, line in enumerate(lines, 2):
        # Files from before rewards had names have none.
        values: dict[str, Any] = {"rewards": {}} | line
        if values.keys() != _TYPES.keys():
            raise ValueError(f"{path} line {number}: got no episode; allowed: one a line.")
        for name, value in values.items():
            if type(value) not in _TYPES[name]:
                allowed = " or ".join(kind.__name__ for kind in _TYPES[name])
                raise ValueError(
                    f"{path} line {number}: {name}: got {short(value)}; allowed: {allowed}."
                )
        yield EvaluationEpisode(**values)


def _check(
    path: Path,
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    names: Iterable[str] | None = None,
) -> None:
    """ValueError where the settings of a file are others; `names`: those compared, None: all."""
    names = dict.fromkeys((*given, *saved)) if names is None else names
    saved, given = dict(saved), dict(given)
    before, now = saved.pop(FINGERPRINT, None), given.pop(FINGERPRINT, None)
    if before is not None and now is not None and not may_be_same(before, now):
        saved[FINGERPRINT], given[FINGERPRINT] = shown(before), shown(now)
    for name in names:
        if name.startswith(_LATER) and name not in saved:
            continue
        if name not in saved or name not in given or saved[name] != given[name]:
            raise ValueError(
                f"{name}: got {given.get(name)!r}; allowed: {saved.get(name)!r}, with which the"
                f" episodes in {path} were played; move that file away to play others."
            )
