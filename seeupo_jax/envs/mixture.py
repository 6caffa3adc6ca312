"""`mixture`: several environments in one run, each with its weight."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seeupo_jax import envs
from seeupo_jax.configuration.user_code import NAMES, is_name, shown
from seeupo_jax.envs import Environment
from seeupo_jax.envs.base import (
    ENVIRONMENT,
    Demonstration,
    Killable,
    Message,
    StepResult,
    TaskShare,
    Tool,
)
from seeupo_jax.envs.snapshot import fork, has_fork
from seeupo_jax.envs.tasks import list_task_shares, task_labels, task_reference
from seeupo_jax.envs.validation import first_role, has_demonstrations, reset_episode


@dataclass(frozen=True)
class MixtureComponent:
    """One environment of a mixture.

    name, options: as in `config.env`.
    weight: its share of the groups that training samples, relative to the other environments.
    label: its name in task ids and metrics; None: `name` without its module.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight: float = 1.0
    label: str | None = None


class Mixture(Killable):
    """Several environments as one.

    The task `LABEL:TASK` is the task TASK of one environment, with its messages, tools, rewards,
    score and labels, and the additional label `env=LABEL`. A split interleaves the tasks of all
    environments: any first tasks are in proportion to the weights.

    Args:
      parts: the environments by label.
      made: environments that exist already, by label; the others are made when they are used.
      playing: the label of the environment that plays the current episode.
    """

    def __init__(
        self,
        parts: Mapping[str, MixtureComponent],
        made: Mapping[str, Environment],
        playing: str | None = None,
    ):
        self._parts, self._made, self._playing = parts, dict(made), playing

    def task_shares(self, split: str) -> list[TaskShare]:
        """Returns the tasks of each environment with its weight, which its own parts divide."""
        shares: list[TaskShare] = []
        for label, part in self._parts.items():
            own = list_task_shares(self._part(label), split)
            total = sum(share.weight for share in own)
            for share in own:
                name = f"{label}:{share.name}" if share.name else label
                task_ids = [f"{label}:{task_id}" for task_id in share.task_ids]
                shares.append(TaskShare(name, part.weight * (share.weight / total), task_ids))
        return shares

    def task_ids(self, split: str) -> list[str]:
        shares = self.task_shares(split)
        sizes = [len(share.task_ids) for share in shares]
        order = _interleaved(sizes, [share.weight for share in shares])
        return [shares[part].task_ids[index] for part, index in order]

    def reset(
        self, task_id: str, seed: int, episode_seed: int | None = None
    ) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        environment, part_task = self._find(task_id)
        self._playing = task_id.partition(":")[0]
        return reset_episode(environment, part_task, seed, episode_seed)

    def step(self, text: str) -> StepResult:
        step = self._running().step(text)
        if not isinstance(step, StepResult) or not step.role_rewards:
            return step
        # Baselines of roles are of each environment apart.
        return dataclasses.replace(step, info={ENVIRONMENT: self._playing, **step.info})

    def score(self) -> float:
        return self._running().score()

    @property
    def role(self) -> str:
        """The role that acts first in the episode."""
        return first_role(self._running())

    @property
    def finish(self) -> Callable[[str], float | None] | None:
        """The `finish` of the episode's environment, which the trainer calls; None: it has none."""
        return getattr(self._running(), "finish", None)

    def close(self) -> None:
        """Closes all environments, even if one fails to close."""
        with contextlib.ExitStack() as closing:
            for environment in self._made.values():
                closing.callback(environment.close)

    def kill(self) -> None:
        """Ends the running calls of killable environments; any thread may call it."""
        for environment in [*self._made.values()]:
            if isinstance(environment, Killable):
                environment.kill()

    def labels(self, task_id: str) -> dict[str, str]:
        environment, part_task = self._find(task_id)
        label = task_id.partition(":")[0]
        return {ENVIRONMENT: label} | task_labels(environment, part_task) | {ENVIRONMENT: label}

    def reference(self, task_id: str) -> str | None:
        environment, part_task = self._find(task_id)
        return task_reference(environment, part_task)

    def _find(self, task_id: str) -> tuple[Environment, str]:
        """Returns a task's environment and its task id there."""
        label, colon, part_task = task_id.partition(":")
        if not colon or label not in self._parts:
            allowed = ", ".join(f"{name}:TASK" for name in self._parts)
            raise ValueError(f"mixture task: got {shown(task_id)}; allowed: {allowed}.")
        return self._part(label), part_task

    def _part(self, label: str) -> Environment:
        if label not in self._made:
            part = self._parts[label]
            self._made[label] = envs.make(part.name, **part.options)
        return self._made[label]

    def _running(self) -> Environment:
        if self._playing is None:
            raise ValueError("mixture: reset() must come before step() and score().")
        return self._made[self._playing]


class ForkingMixture(Mixture):
    """A mixture whose environments can all be copied in the middle of an episode."""

    def fork(self) -> Mixture:
        """Makes another mixture in the same state of the same episode."""
        return type(self)(self._parts, {self._playing: fork(self._running())}, self._playing)


class DemonstratingMixture(Mixture):
    """A mixture whose environments all have demonstrations."""

    def demonstrations(self, split: str, **options: Any) -> Sequence[Demonstration]:
        """Returns the demonstrations of all environments, evenly interleaved.

        Args:
          options: by label, the options of each environment's `demonstrations`.
        """
        wrong = [
            k
            for k, option in options.items()
            if k not in self._parts or not isinstance(option, Mapping)
        ]
        if wrong:
            raise ValueError(
                f"mixture demonstrations: got options {options[wrong[0]]!r} for {wrong[0]!r};"
                f" allowed: {', '.join(self._parts)}, each with a dict of options."
            )
        demonstrations = [
            made.demonstrations(split, **options.get(label, {}))
            for label in self._parts
            if has_demonstrations(made := self._part(label))
        ]
        return _Interleaved(demonstrations)

    def vocabulary(self) -> Sequence[str]:
        """Returns the words of all environments."""
        makers = filter(has_demonstrations, map(self._part, self._parts))
        return tuple(dict.fromkeys(word for made in makers for word in made.vocabulary()))


class _ForkingDemonstratingMixture(DemonstratingMixture, ForkingMixture):
    """A mixture whose environments all have demonstrations and can be copied."""


class _Interleaved(Sequence[Demonstration]):
    def __init__(self, parts: Sequence[Sequence[Demonstration]]):
        sizes = [len(part) for part in parts]
        self._parts, self._order = parts, _interleaved(sizes, sizes)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Demonstration:
        part, place = self._order[index]
        return self._parts[part][place]


def make_mixture(environments: Sequence[Mapping[str, Any]]) -> Mixture:
    """Makes a mixture; it has demonstrations and can be copied if all its environments do and can.

    Args:
      environments: at least one; each is a dict with the fields of `MixtureComponent`.

    Raises:
      ValueError: an environment cannot be made, or two have the same label.
    """
    parts = read_components(environments)
    made = {label: envs.make(part.name, **part.options) for label, part in parts.items()}
    shown_how = all(map(has_demonstrations, made.values()))
    return _KINDS[shown_how, all(map(has_fork, made.values()))](parts, made)


# The class, by whether all environments have demonstrations and whether all can be copied.
_KINDS: dict[tuple[bool, bool], type[Mixture]] = {
    (False, False): Mixture,
    (True, False): DemonstratingMixture,
    (False, True): ForkingMixture,
    (True, True): _ForkingDemonstratingMixture,
}


def _interleaved(sizes: Sequence[int], weights: Sequence[float]) -> list[tuple[int, int]]:
    """Returns pairs of a part and an index in it; any first pairs are in proportion to weights."""
    every = itertools.chain.from_iterable(
        (((index + 0.5) / weight, part, index) for index in range(size))
        for part, (size, weight) in enumerate(zip(sizes, weights, strict=True))
        if size
    )
    return [(part, index) for _, part, index in sorted(every)]


def read_components(environments: Any) -> dict[str, MixtureComponent]:
    """Returns the components by label; raises as `make_mixture`."""
    where = "env.options.environments"
    if not isinstance(environments, list | tuple) or not environments:
        allowed = 'a list of dicts, such as [{"name": "order_desk", "weight": 2.0}]'
        raise ValueError(f"{where}: got {shown(environments)}; allowed: {allowed}.")
    parts: dict[str, MixtureComponent] = {}
    for number, each in enumerate(environments):
        label, part = _read_part(each, f"{where}[{number}]")
        if label in parts:
            raise ValueError(
                f"{where}[{number}].label: got {label!r}, the label of an earlier one; allowed: a"
                " different label."
            )
        parts[label] = part
    return parts


def _read_part(fields: Any, where: str) -> tuple[str, MixtureComponent]:
    """Returns a component and its label."""
    names = [each.name for each in dataclasses.fields(MixtureComponent)]
    if not isinstance(fields, Mapping) or "name" not in fields or not fields.keys() <= set(names):
        raise ValueError(
            f"{where}: got {shown(fields)}; allowed: a dict with name, and optionally"
            f" {', '.join(names[1:])}."
        )
    part = MixtureComponent(**fields)
    if not isinstance(part.name, str):
        raise ValueError(f"{where}.name: got {shown(part.name)}; allowed: a text.")
    if not isinstance(part.options, Mapping):
        raise ValueError(f"{where}.options: got {shown(part.options)}; allowed: a dict.")
    number = isinstance(part.weight, int | float) and not isinstance(part.weight, bool)
    if not number or not 0 < part.weight < math.inf:
        raise ValueError(f"{where}.weight: got {shown(part.weight)}; allowed: a number > 0.")
    label = part.name.rpartition(":")[2] if part.label is None else part.label
    if not is_name(label):
        raise ValueError(f"{where}.label: got {shown(label)}; allowed: {NAMES}.")
    return label, part
