"""Tasks as folders in Harbor's form: an instruction, an environment and a verifier in each."""

from __future__ import annotations

import hashlib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.user_code import expand_home
from seeupo_jax.tasks.dockerfiles import Container, read_dockerfile

TRAIN = "train"  # the split of folders that are in no folder of a split
SETTINGS, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "environment/Dockerfile"
VERIFIER, SOLUTION = "tests/test.sh", "solution/solve.sh"
_LABELS = ("difficulty", "category")  # of [metadata]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_REFUSED = {"docker-compose.yaml": "several containers", "docker-compose.yml": "several containers"}
_BUNDLED = "package:"  # prefix of a folder that ships with the package


def find_folder(tasks: str) -> Path:
    """The folder of `config.tasks`, which is harbor:FOLDER or harbor:package:NAME."""
    name = tasks.partition(":")[2]
    if name.startswith(_BUNDLED):
        return Path(__file__).parents[1] / "assets" / name.removeprefix(_BUNDLED)
    return expand_home(name)


@dataclass(frozen=True)
class TaskFolder:
    """A task in Harbor's form.

    folder: its place. instruction: what the agent is asked.
    agent_timeout_s, verifier_timeout_s, build_timeout_s: limits of time.
    cpus, memory_mib, storage_mib: limits of its environment.
    image: that it names; None: the one that its Dockerfile makes.
    container: what its Dockerfile makes without an image; None: it is not read.
    variables, verifier_variables, solution_variables: of the environment, and of two of its uses.
    digest: of the files of its environment.
    """

    folder: Path
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    build_timeout_s: float
    cpus: float
    memory_mib: int
    storage_mib: int
    image: str | None
    container: Container | None
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]
    solution_variables: Mapping[str, str]
    labels: Mapping[str, str]
    digest: str


class TaskFolders:
    """The tasks of a folder, by split; an agent's `AgentTasks`.

    FOLDER/TASK is a task of the split `train`, FOLDER/SPLIT/TASK one of that split.

    Args:
      folder: the place.
      local: whether Dockerfiles are followed without an image.

    Attributes:
      folder: the place, absolute.

    Raises:
      ValueError: there is no task, or one that is not in the form; one sentence with its folder.
    """

    def __init__(self, folder: Path, *, local: bool):
        folder = folder.absolute()
        if not folder.is_dir():
            raise ValueError(
                f"config.tasks: got harbor:{folder}, which is no folder; allowed: one."
            )
        self._splits = {
            split: {place.name: _read_task(place, local=local) for place in places}
            for split, places in _find(folder).items()
        }
        if not self._splits:
            raise ValueError(
                f"config.tasks: got harbor:{folder}, which has no task; allowed: a folder of"
                f" TASK/{SETTINGS} or SPLIT/TASK/{SETTINGS}."
            )
        self.folder = folder
        self._labels = {
            name: task.labels for of in self._splits.values() for name, task in of.items()
        }

    def task(self, task_id: str, split: str) -> TaskFolder:
        return self._splits[split][task_id]

    def task_ids(self, split: str) -> Sequence[str]:
        if split not in self._splits:
            raise ValueError(
                f"config.tasks: {self.folder}: got the split {split!r}, of which it has no task;"
                f" allowed: {', '.join(self._splits)}."
            )
        return list(self._splits[split])

    def labels(self, task_id: str) -> Mapping[str, str]:
        return self._labels[task_id]

    def reference(self, task_id: str) -> None:
        return None

    def data(self, task_id: str, split: str) -> Mapping[str, Any]:
        """What the agent's program is told: the instruction."""
        return {"instruction": self.task(task_id, split).instruction}

    def close(self) -> None:
        """No effect: nothing is open."""

    def without_solution(self) -> list[Path]:
        """The folders of tasks that have no solution."""
        tasks = (task for of in self._splits.values() for task in of.values())
        return [task.folder for task in tasks if not (task.folder / SOLUTION).is_file()]

    @property
    def count(self) -> Mapping[str, int]:
        """The number of tasks of each split."""
        return {split: len(tasks) for split, tasks in self._splits.items()}

    @property
    def verifier_timeout_s(self) -> float:
        """The longest time limit of a verifier."""
        return max(t.verifier_timeout_s for of in self._splits.values() for t in of.values())


def _find(folder: Path) -> dict[str, list[Path]]:
    """The places of the tasks by split, both in the order of their names."""
    if (folder / SETTINGS).is_file():
        return {TRAIN: [folder]}
    places = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    found = {TRAIN: [each for each in places if _is_task(each)]}
    for split in (each for each in places if each not in found[TRAIN]):
        inside = [each for each in sorted(split.iterdir()) if _is_task(each)]
        found[split.name] = [*found.get(split.name, []), *inside]
    found = {split: tasks for split, tasks in found.items() if tasks}
    seen = dict[str, Path]()
    for place in (each for tasks in found.values() for each in tasks):
        if place.name in seen:
            raise ValueError(
                f"config.tasks: got two folders of the task {place.name!r}, {seen[place.name]} and"
                f" {place}; allowed: one of each name."
            )
        seen[place.name] = place
    return found


def _is_task(place: Path) -> bool:
    if (place / SETTINGS).is_file():
        return True
    if (place / INSTRUCTION).is_file():
        raise ValueError(f"config.tasks: {place}: got no {SETTINGS}; allowed: a file.")
    return False


def _read_task(folder: Path, *, local: bool) -> TaskFolder:
    for name in (INSTRUCTION, VERIFIER):
        if not (folder / name).is_file():
            raise ValueError(f"config.tasks: {folder}: got no {name}; allowed: a file.")
    for name, what in _REFUSED.items():
        if (folder / "environment" / name).exists():
            raise ValueError(
                f"config.tasks: {folder}: got environment/{name} ({what}); allowed: {DOCKERFILE},"
                " one container."
            )
    try:
        settings = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        instruction = (folder / INSTRUCTION).read_text(encoding="utf-8")
        return _of_settings(folder, _Reader(settings), instruction, local)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"config.tasks: {folder}: got a file that cannot be read ({error}); allowed: UTF-8,"
            f" and TOML in {SETTINGS}."
        ) from None
    except _Refused as refused:
        raise ValueError(f"config.tasks: {folder}/{SETTINGS}: {refused}.") from None
    except ValueError as error:
        raise ValueError(f"config.tasks: {error}") from None


def _of_settings(folder: Path, read: _Reader, instruction: str, local: bool) -> TaskFolder:
    read.check_absent("steps", "multi_step", "environment.mcp_servers", "environment.healthcheck")
    if read.number("environment.gpus", 0, least=0):
        raise _Refused("environment.gpus: got a GPU; allowed: 0")
    image = read.text("environment.docker_image")
    has_file = (folder / DOCKERFILE).is_file()
    if not has_file and (image is None or local):
        raise ValueError(
            f"{folder}: got no {DOCKERFILE}; allowed: a file, or environment.docker_image with"
            " config.sandbox.runtime=docker or podman."
        )
    return TaskFolder(
        folder=folder,
        instruction=instruction,
        agent_timeout_s=read.number("agent.timeout_sec", 600.0),
        verifier_timeout_s=read.number("verifier.timeout_sec", 600.0),
        build_timeout_s=read.number("environment.build_timeout_sec", 600.0),
        cpus=read.number("environment.cpus", 1),
        memory_mib=read.size("environment.memory_mb", "environment.memory", 2048),
        storage_mib=read.size("environment.storage_mb", "environment.storage", 10240),
        image=None if local else image,
        container=read_dockerfile(folder / DOCKERFILE) if local else None,
        variables=read.variables("environment.env"),
        verifier_variables=read.variables("verifier.env"),
        solution_variables=read.variables("solution.env"),
        labels={n: text for n in _LABELS if (text := read.text(f"metadata.{n}")) is not None},
        digest=digest_of(folder / "environment"),
    )


def digest_of(folder: Path) -> str:
    """A digest of the names and contents of a folder's files."""
    found = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        found.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()


class _Refused(Exception):
    """A setting that is not allowed; the text says which, what was got and what is allowed."""


class _Reader:
    """Reads values of nested settings by their dotted names."""

    def __init__(self, settings: Mapping[str, Any]):
        self._settings = settings

    def _get(self, name: str) -> Any:
        value: Any = self._settings
        *groups, leaf = name.split(".")
        for depth, group in enumerate(groups):
            value = value.get(group, {})
            if not isinstance(value, Mapping):
                place = ".".join(groups[: depth + 1])
                raise _Refused(f"{place}: got {value!r}; allowed: a table")
        return value.get(leaf)

    def check_absent(self, *names: str) -> None:
        for name in names:
            if self._get(name):
                raise _Refused(f"{name}: got it; allowed: none, which this version does not play")

    def number(self, name: str, default: float, *, least: float = math.ulp(0.0)) -> float:
        value = self._get(name)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least <= value < 1e9
        ):
            allowed = "at least 0" if least == 0 else "above 0"
            raise _Refused(f"{name}: got {value!r}; allowed: a number {allowed}")
        return value

    def text(self, name: str) -> str | None:
        value = self._get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise _Refused(f"{name}: got {value!r}; allowed: a text")
        return value

    def size(self, name: str, old: str, default: int) -> int:
        """MiB of a field, or of its older form such as 2G."""
        text = self.text(old)
        if text is None:
            return math.ceil(self.number(name, default))
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise _Refused(f"{old}: got {text!r}; allowed: a number with K, M or G, such as 2G")
        return max(1, math.ceil(float(match[1]) * _MIB[match[2].upper()]))

    def variables(self, name: str) -> dict[str, str]:
        value = self._get(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise _Refused(f"{name}: got {value!r}; allowed: a table of texts")
        return {each: self._filled(f"{name}.{each}", text) for each, text in value.items()}

    def _filled(self, name: str, text: str) -> str:
        """A text in which ${NAME} and ${NAME:-DEFAULT} are variables of this process."""

        def fill(match: re.Match[str]) -> str:
            found = os.environ.get(match[1], match[2])
            if found is None:
                raise _Refused(f"{name}: got {text!r}; allowed: variables that are set here")
            return found

        return _VARIABLE.sub(fill, text)
