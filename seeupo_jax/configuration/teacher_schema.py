"""The teachers in a configuration: models that score what the policy samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.fields import mapping_field, path_field
from seeupo_jax.options import choice, within

REFERENCE, POLICY = "reference", "policy"  # as a path: parameters that the run itself has


@dataclass(frozen=True)
class Teacher:
    """A model whose log-probabilities of the policy's tokens enter advantages, or none."""

    path: str | None = path_field()
    """A model folder, a .gguf file or package:NAME; reference: the reference policy, earlier
    weights of the run; none: no teacher."""
    coef: float = within(0, 100, 1.0)
    """Coefficient of log(teacher / policy) of each token in its advantage; 0: it is only logged."""
    discount: float = within(0, 1, 0.0)
    """Discount per token of log(teacher / policy) of later tokens; 0: each token has its own."""
    dtype: str = choice("bfloat16", "float32")
    """Type of the teacher's parameters and activations."""
    by_task: Mapping[str, Any] = mapping_field(
        "a dict from LABEL=VALUE of tasks to paths",
        lambda v: all(
            "=" in str(key).strip("=") and isinstance(v[key], str) and v[key] for key in v
        ),
    )
    """Teachers of tasks that have a label, such as {'env=order_desk': 'models/desk'}; path is that
    of all others, none: these have no teacher."""

    @property
    def places(self) -> dict[str | None, str]:
        """The path of each teacher by the label of its tasks; None: of all other tasks."""
        others = {} if self.path is None else {None: self.path}
        return {**self.by_task, **others}

    @property
    def given(self) -> bool:
        """Whether there is any teacher."""
        return bool(self.places)

    @property
    def reads_reference(self) -> bool:
        """Whether the reference policy is a teacher."""
        return REFERENCE in self.places.values()


def check_teacher(teacher: Teacher, algorithm: Any) -> None:
    """Checks that a teacher's options are read, and go with the algorithm.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    if teacher.given:
        if algorithm.dynamic_sampling:
            raise ValueError(
                f"config.algorithm.dynamic_sampling: got {algorithm.dynamic_sampling} with"
                " config.teacher; allowed: 0, since a teacher's term is learned from where the"
                " rewards of a group are equal, too."
            )
        return
    usual = Teacher()
    for name, value in vars(teacher).items():
        if value != vars(usual)[name]:
            raise ValueError(
                f"config.teacher.{name}: got {value!r} without a teacher, so that nothing reads it;"
                f" allowed: {vars(usual)[name]!r}, unless config.teacher.path is set."
            )
