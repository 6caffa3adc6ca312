"""The teachers in a configuration: models that score what the policy samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.fields import mapping_field, path_field
from seeupo_jax.options import at_least, checked, choice, within

REFERENCE, POLICY = "reference", "policy"  # as a path: parameters that the run itself has


def is_server(place: str) -> bool:
    """Whether a teacher is behind a server, not in a file."""
    return place.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Teacher:
    """A model whose log-probabilities enter advantages or the loss, or none."""

    path: str | None = path_field()
    """A model folder, a .gguf file or package:NAME; reference: the reference policy, earlier
    weights of the run; policy: the policy itself, with a hint; none: no teacher."""
    hint: str | None = checked(None, "a text", bool)
    """Text before the teacher's contexts, which the policy does not see; names of control tokens in
    it are these tokens."""
    server: str | None = checked(None, "http://HOST:PORT/v1 or https://...", is_server)
    """Instead of path: an OpenAI-compatible server whose /completions gives the log-probabilities
    of prompts, as seeupo-serve and vLLM do; SEEUPO_TEACHER_KEY is its key."""
    coef: float = within(0, 100, 1.0)
    """Coefficient of log(teacher / policy) of each token in its advantage, or with top_k of its
    divergence in the loss; 0: it is only logged."""
    discount: float = within(0, 1, 0.0)
    """Discount per token of log(teacher / policy) of later tokens; 0: each token has its own."""
    top_k: int | None = at_least(1, None)
    """Instead of the advantage, the loss gets coef x KL(teacher || policy) of each sampled token's
    distribution, over the teacher's so many likeliest tokens and all others as one."""
    dtype: str = choice("bfloat16", "float32")
    """Type of the teacher's parameters and activations."""
    by_task: Mapping[str, Any] = mapping_field(
        "a dict from LABEL=VALUE of tasks to paths or URLs",
        lambda v: all(
            "=" in str(key).strip("=") and isinstance(v[key], str) and v[key] for key in v
        ),
    )
    """Teachers of tasks that have a label, such as {'env=order_desk': 'models/desk'}: paths, or
    URLs of servers. path or server is that of all others; none: these have no teacher."""

    @property
    def places(self) -> dict[str | None, str]:
        """The path or URL of each teacher by the label of its tasks; None: of all other tasks."""
        other = self.server if self.path is None else self.path
        return {**self.by_task, **({} if other is None else {None: other})}

    @property
    def models(self) -> set[str]:
        """The paths of teachers that are loaded from files."""
        own = (REFERENCE, POLICY)
        return {each for each in self.places.values() if each not in own and not is_server(each)}

    @property
    def given(self) -> bool:
        """Whether there is any teacher."""
        return bool(self.places)

    @property
    def reads_reference(self) -> bool:
        """Whether the reference policy is a teacher."""
        return REFERENCE in self.places.values()


def check_teacher(teacher: Teacher, algorithm: Any, temperature: float) -> None:
    """Checks that a teacher's options are read, and go with the algorithm.

    Args:
      temperature: of the rollout.

    Raises:
      ValueError: one sentence with the field, what was got and what is allowed.
    """
    if teacher.path is not None and teacher.server is not None:
        raise ValueError(
            f"config.teacher.server: got {teacher.server} with path={teacher.path}; allowed: one of"
            " the two."
        )
    if teacher.hint is None and POLICY in teacher.places.values():
        raise ValueError(
            "config.teacher.hint: got none with the policy as its teacher; allowed: a text, since"
            " it would say the same of the same context."
        )
    if temperature != 1 and any(map(is_server, teacher.places.values())):
        raise ValueError(
            f"config.rollout.temperature: got {temperature:g} with a server as teacher; allowed: 1,"
            " at which servers score prompts."
        )
    if teacher.top_k is not None and any(map(is_server, teacher.places.values())):
        raise ValueError(
            f"config.teacher.top_k: got {teacher.top_k} with a server as teacher; allowed: none,"
            " since servers are asked for the log-probabilities of the policy's tokens alone."
        )
    if teacher.top_k is not None and teacher.discount != 0:
        raise ValueError(
            f"config.teacher.discount: got {teacher.discount:g} with top_k={teacher.top_k};"
            " allowed: 0, since a token's divergence is of its own distribution."
        )
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
