"""Loads the teachers of a run, and checks that they read the policy's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from seeupo_jax.configuration.model_schema import Chat, Lora
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.teacher_schema import REFERENCE
from seeupo_jax.learner.state_layout import to_pinned_host
from seeupo_jax.learner.teacher import TeacherModel
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io import build


def load_teachers(config: Config, policy: build.Policy, *, shapes: bool) -> list[TeacherModel]:
    """The teachers of a configuration, on the policy's mesh, or waiting in the host's memory.

    Args:
      shapes: whether parameters are shape structs, and no weights are read.

    Raises:
      ValueError: a model that cannot be read, or with other tokens than the policy's.
    """
    teachers = []
    for label, path in config.teacher.places.items():
        if path == REFERENCE:
            teachers.append(TeacherModel(label))
            continue
        if policy.tokenizer is not None and not shapes:
            check_tokens(field_of(label), path, policy.tokenizer)
        own = as_policy(config, path)
        made = build.abstract_policy(own, policy.mesh) if shapes else build.load_policy(own, path)
        params = made[0].merged(made[1])
        waiting = to_pinned_host(params) if config.offload.teacher else params
        teachers.append(TeacherModel(label, made[0].network, waiting))
    return teachers


def as_policy(config: Config, path: str) -> Config:
    """The configuration of a run whose policy is the teacher at a path: without adapters."""
    dtype = config.teacher.dtype
    model = dataclasses.replace(
        config.model, path=path, dtype=dtype, param_dtype=dtype, remat="none"
    )
    optimizer = dataclasses.replace(config.optimizer, groups=())
    return dataclasses.replace(config, model=model, lora=Lora(), chat=Chat(), optimizer=optimizer)


def check_teachers(config: Config, mesh: jax.sharding.Mesh, tokenizer: Tokenizer | None) -> None:
    """Whether the teachers go with the mesh, the lengths and the policy's tokenizer.

    Args:
      tokenizer: the policy's; None: it is made by the run, or is not here.

    Raises:
      ValueError: one sentence with the teacher, what was got and what is allowed.
    """
    for field, path in _places(config):
        own = as_policy(config, path)
        try:
            build.check_network(own, mesh)
        except ValueError as error:
            raise ValueError(f"{field}={path}: {error}") from error
        if tokenizer is not None:
            check_tokens(field, path, tokenizer)


def _places(config: Config) -> Iterator[tuple[str, str]]:
    for label, path in config.teacher.places.items():
        if path != REFERENCE:
            yield field_of(label), path


def field_of(label: str | None) -> str:
    """The name of the field that has the path of a teacher of some tasks."""
    return "config.teacher.path" if label is None else f"config.teacher.by_task[{label}]"


def check_tokens(field: str, path: str, tokenizer: Tokenizer) -> None:
    """Checks that every id of the policy is the same token of the teacher; it may have more.

    Raises:
      ValueError: it has no tokenizer, or another one.
    """
    own, taught = read_tokenizer(path), _tokens(tokenizer)
    if own is None:
        raise ValueError(f"{field}: got {path}, which has no tokenizer; allowed: one that has.")
    teaching = _tokens(own)
    wrong = [token for token, content in taught.items() if teaching.get(token) != content]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"{field}: got {path}, whose tokens are others than the policy's at {len(wrong)} of"
            f" {len(taught)} ids, as {teaching.get(first)!r} instead of {taught[first]!r} at"
            f" {first}; allowed: a model with the policy's tokenizer, which may have more tokens."
        )


def _tokens(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of each token, by id."""
    contents: Any = tokenizer.token_bytes()
    return {token: contents[token] for token in sorted(tokenizer.ids)}
