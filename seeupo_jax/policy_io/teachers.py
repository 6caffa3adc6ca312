"""Loads the teachers of a run, and checks that they read the policy's tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from seeupo_jax.configuration.model_schema import Chat, Lora
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.teacher_schema import POLICY, REFERENCE, Teacher, is_server
from seeupo_jax.learner.state_layout import to_pinned_host
from seeupo_jax.learner.teacher import TeacherModel
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.teacher_server import TeacherServer


def load_teachers(config: Config, policy: build.Policy, *, shapes: bool) -> list[TeacherModel]:
    """The teachers of a configuration, on the policy's mesh, or waiting in the host's memory.

    Args:
      shapes: whether parameters are shape structs, and no weights are read.

    Raises:
      ValueError: a model that cannot be read, or with other tokens than the policy's.
    """
    check_given(config)
    check_top_k(config.teacher, policy.network.arch)
    teachers = list[TeacherModel]()
    hint: dict[str, Any] = {}
    if config.teacher.hint is not None and policy.tokenizer is not None and not shapes:
        start, tokens = (policy.tokenizer.encode(text) for text in ("", config.teacher.hint))
        check_hint(config, policy.mesh, len(tokens))
        hint = {"hint": tuple(tokens[len(start) :]), "start": tuple(start)}
    for label, path in config.teacher.places.items():
        if path in (REFERENCE, POLICY):
            teachers.append(TeacherModel(label, moves=path == POLICY, **hint))
            continue
        if is_server(path):
            server = TeacherServer(path, field_of(config.teacher, label))
            teachers.append(TeacherModel(label, ask=server.score, **hint))
            continue
        if policy.tokenizer is not None and not shapes:
            check_tokens(field_of(config.teacher, label), path, policy.tokenizer)
        own = as_policy(config, path)
        made = (
            build.abstract_policy(own, policy.mesh)
            if shapes
            else build.load_policy(own, path, policy.mesh)
        )
        params = made[0].merged(made[1])
        waiting = to_pinned_host(params) if config.offload.teacher else params
        teachers.append(TeacherModel(label, made[0].network, waiting, **hint))
    return teachers


def check_given(config: Config) -> None:
    """ValueError: there is neither an advantage of rewards nor a teacher to learn from."""
    if config.algorithm.advantage == "zero" and not (config.teacher.given and config.teacher.coef):
        raise ValueError(
            f"config.teacher.path: got {config.teacher.path} and coef={config.teacher.coef:g} with"
            " algorithm.advantage=zero; allowed: path, server or by_task, and a coef > 0,"
            " since nothing else is learned from."
        )


def check_top_k(teacher: Teacher, policy: Architecture) -> None:
    """ValueError: the policy has too few tokens for any to be left beside the likeliest ones."""
    if teacher.top_k is not None and teacher.top_k >= policy.tokens:
        raise ValueError(
            f"config.teacher.top_k: got {teacher.top_k} with a policy of {policy.tokens} tokens;"
            f" allowed: 1 to {policy.tokens - 1}, which leaves one for all others."
        )


def check_hint(config: Config, mesh: jax.sharding.Mesh, tokens: int) -> None:
    """ValueError: a hint of so many tokens, and the longest conversation, are too long together."""
    whole = config.rollout.max_context + tokens
    longest = {"rows, config.batching.buckets": build.build_shapes(config, mesh, 1).lengths[-1]}
    for label, path in config.teacher.places.items():
        if not is_server(path):
            own = as_policy(config, path) if path in config.teacher.models else config
            name = f"positions of {field_of(config.teacher, label)}"
            longest[name] = build.architecture_of(own, mesh).max_positions
    for name, most in longest.items():
        if whole > most:
            raise ValueError(
                f"config.teacher.hint: got a text of {tokens} tokens, {whole} with"
                f" rollout.max_context={config.rollout.max_context}; allowed: at most {most} tokens"
                f" together, the {name}."
            )


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
    check_given(config)
    if config.teacher.top_k is not None:
        check_top_k(config.teacher, build.architecture_of(config, mesh))
    for label, path in config.teacher.places.items():
        field = field_of(config.teacher, label)
        if is_server(path):
            _check_server(TeacherServer(path, field), tokenizer)
        if path not in config.teacher.models:
            continue
        own = as_policy(config, path)
        try:
            build.check_network(own, mesh)
        except ValueError as error:
            raise ValueError(f"{field}={path}: {error}") from error
        build.check_one_adapter(path, field, "a model of one policy")
        if tokenizer is not None:
            check_tokens(field, path, tokenizer)
    if tokenizer is not None and config.teacher.hint is not None:
        check_hint(config, mesh, len(tokenizer.encode(config.teacher.hint)))


def _check_server(server: TeacherServer, tokenizer: Tokenizer | None) -> None:
    if jax.process_count() > 1:
        raise ValueError(
            f"{server.field}: got {server.url} with {jax.process_count()} processes; allowed: a"
            " model folder, since all processes must read the same numbers to the bit."
        )
    if tokenizer is not None:
        server.check(_tokens(tokenizer))


def field_of(teacher: Teacher, label: str | None) -> str:
    """The name of the field that has the path or the URL of the teacher of some tasks."""
    if label is not None:
        return f"config.teacher.by_task[{label}]"
    return (
        "config.teacher.server"
        if teacher.path is None and teacher.server
        else "config.teacher.path"
    )


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
