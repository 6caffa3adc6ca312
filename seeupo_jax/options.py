"""Declarations of options: which values a field allows, in words that errors and pages show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# Keys of a field's metadata.
CHECK = "check"  # (predicate, allowed values in words)
SECTION = "section"  # Section
ALIAS = "alias"  # another name of the field
OPTIONAL = "optional"  # whether the field is a section that may be none


def checked(default: Any, allowed: str, check: Callable[[Any], bool]) -> Any:
    """A field whose values must pass a check; `allowed` describes them in errors."""
    return dataclasses.field(default=default, metadata={CHECK: (check, allowed)})


def required(allowed: str, check: Callable[[Any], bool]) -> Any:
    """A field without a default, whose values must pass a check."""
    return dataclasses.field(metadata={CHECK: (check, allowed)})


def choice(default: str, *others: str, alias: str | None = None) -> Any:
    """A field of one of these names; `alias` is another name of the field."""
    names = (default, *others)
    check = (lambda value: value in names, "one of " + ", ".join(names))
    more = {} if alias is None else {ALIAS: alias}
    return dataclasses.field(default=default, metadata={CHECK: check, **more})


def at_least(low: float, default: Any) -> Any:
    """A field of numbers not below `low`."""
    return checked(default, f"a number >= {low}", lambda value: value >= low)


def above(low: float, default: Any, *, most: float = float("inf")) -> Any:
    """A field of numbers above `low`, up to `most`."""
    bound = "" if most == float("inf") else f" and <= {most}"
    return checked(default, f"a number > {low}{bound}", lambda value: low < value <= most)


def within(low: float, high: float, default: Any) -> Any:
    """A field of numbers from `low` to `high`."""
    return checked(default, f"a number from {low} to {high}", lambda value: low <= value <= high)


@dataclasses.dataclass(frozen=True)
class Section:
    """A group of fields whose dataclass is selected by a name.

    by: the field that has the name: `kind` of the group itself, or a field next to the group.
    names: all names, the default first.
    find: the dataclass of a name.
    """

    by: str
    names: Callable[[], Iterable[str]]
    find: Callable[[str], type]

    @property
    def inside(self) -> bool:
        """Whether the group itself has the name."""
        return self.by == "kind"

    def having(self, option: str) -> list[str]:
        """Names of the dataclasses with an option."""
        return [name for name in self.names() if option in names_of(self.find(name))]


class Setting(NamedTuple):
    """The other options that an option has to go with.

    turns: at most, of a trajectory. ahead: whether the policy before samples and ratios are to it.
    teacher: whether the reference policy is a teacher.
    """

    algorithm: Any
    turns: int
    ahead: bool
    teacher: bool = False

    @property
    def steps(self) -> int:
        """Optimizer steps of an iteration at most."""
        algorithm = self.algorithm
        parallel = algorithm.order == "parallel"
        steps = 1 if parallel else -(-self.turns // algorithm.span(self.turns))
        return steps * algorithm.inner_epochs * algorithm.minibatches_per_turn


class Group:
    """A dataclass of options that belong together, a section of `config.algorithm`."""

    def check(self, setting: Setting) -> None:
        """Checks that the options go with the others.

        Raises:
          ValueError: one sentence with the field, what was got and what is allowed.
        """


def kinds(*classes: type) -> Any:
    """A field of one of these dataclasses, the first by default; each has a field `kind`."""
    by_name: Mapping[str, type] = {vars(each)["kind"]: each for each in classes}
    section = Section("kind", lambda: by_name, by_name.__getitem__)
    return dataclasses.field(default=classes[0](), metadata={SECTION: section})


def section(by: str, names: Callable[[], Iterable[str]], find: Callable[[str], type]) -> Any:
    """A field of the dataclass that the field `by` selects; None: with all defaults."""
    return dataclasses.field(default=None, metadata={SECTION: Section(by, names, find)})


def optional() -> Any:
    """A field of a group of fields or none, which is the default."""
    return dataclasses.field(default=None, metadata={OPTIONAL: True})


def names_of(options: Any) -> tuple[str, ...]:
    """Names of a dataclass's fields."""
    return tuple(field.name for field in dataclasses.fields(options))


def refused(field: str, got: object, allowed: str) -> ValueError:
    """The error of an option of `config.algorithm` that does not go with the others."""
    return ValueError(f"config.algorithm.{field}: got {got}; allowed: {allowed}.")
