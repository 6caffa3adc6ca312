"""Turns a file, overrides or plain values into a validated configuration, and back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias, cast

from seeupo_jax.configuration.agent_schema import check_agent
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.config_file import given_values, read_values
from seeupo_jax.configuration.fields import assign, build, own_names, parse, type_of
from seeupo_jax.configuration.layers import layered, without
from seeupo_jax.configuration.reward import Judge, check_rewards
from seeupo_jax.configuration.role_schema import check_roles
from seeupo_jax.configuration.rules.adapter_rules import check_adapters
from seeupo_jax.configuration.rules.algorithm_rules import (
    check_choices,
    check_weights,
    unread_fields,
)
from seeupo_jax.configuration.rules.asynchronous_rules import check_asynchronous
from seeupo_jax.configuration.rules.server_rules import check_servers
from seeupo_jax.configuration.sandbox_schema import check_sandboxed_tasks
from seeupo_jax.configuration.schema import Config, Curriculum, recipe_fields
from seeupo_jax.configuration.teacher_schema import check_teacher
from seeupo_jax.configuration.user_code import shown

ConfigSource: TypeAlias = "Config | Mapping[str, Any] | str | os.PathLike[str]"


def load_config(source: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    """Reads `get_config()` of a file or `package:NAME` and applies `field.sub=value` overrides.

    A recipe among the overrides replaces the file's fields of `algorithm` that it sets, and those
    that nothing reads with it; the other overrides take precedence over both, a later one over an
    earlier one.

    Args:
      source: a file's path, `package:NAME`, `module:function` that returns what `get_config`
        does, what that returned, or a configuration that is made already.
      overrides: such as `iterations=3`, as they follow `--config.` in a command.

    Raises:
      ValueError: no such file, one that fails, or a key or value that is not allowed.
    """
    _check_overrides(overrides)
    located = isinstance(source, str | os.PathLike)
    values = read_values(os.fspath(source)) if located else given_values(source)
    given = [_override(text) for text in overrides]
    if isinstance(values.get("algorithm"), Mapping):
        values["algorithm"] = own_names(Algorithm, values["algorithm"], "config.algorithm")
    if given and isinstance(values.get("algorithm"), Algorithm):
        values = given_values(from_dict(values))  # it agrees with its recipe
    below: Any = values.get("algorithm", {})
    recipes = [value for key, value in given if key == "recipe"]
    if recipes and isinstance(below, Mapping):
        own = cast("Mapping[str, Any]", below)
        has_sections = any(isinstance(value, Mapping) for value in own.values())
        usual = recipe_fields(values.get("recipe", Config.recipe)) if has_sections else {}
        values["algorithm"] = without(own, recipe_fields(recipes[-1]), usual)
    for key, value in given:
        assign(values, key, value)
    algorithm = values.get("algorithm")
    if recipes and isinstance(algorithm, Mapping):
        values["algorithm"] = _without_unread(
            cast("Mapping[str, Any]", algorithm), recipe_fields(recipes[-1]), _of_algorithm(given)
        )
    return from_dict(values)


def _of_algorithm(given: Sequence[tuple[str, Any]]) -> set[str]:
    """Fields of `algorithm` that overrides give, each by itself or in a dict of them."""
    names: set[str] = set()
    for key, value in given:
        group, _, rest = key.partition(".")
        if key == "algorithm":
            whole: Mapping[str, Any] = (
                cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
            )
            names = {*own_names(Algorithm, whole, "config.algorithm")}
        elif group == "algorithm":
            names.add(rest.partition(".")[0])
    return names


def _without_unread(
    algorithm: Mapping[str, Any], recipe: Mapping[str, Any], given: Container[str]
) -> dict[str, Any]:
    """Fields of `algorithm`, but of those that nothing reads with this recipe only the given."""
    built = build(Algorithm, layered(recipe, algorithm), "config.algorithm")
    unread = unread_fields(built, recipe)
    algorithm = own_names(Algorithm, algorithm, "config.algorithm")
    return {name: x for name, x in algorithm.items() if name not in unread or name in given}


def _check_overrides(given: Any) -> None:
    if isinstance(given, Sequence) and not isinstance(given, str):
        if all(isinstance(text, str) for text in cast("Sequence[object]", given)):
            return
    raise ValueError(
        f'overrides: got {shown(given)}; allowed: a sequence of texts, as ["iterations=3"].'
    )


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--config.{text[:200]}: expected --config.KEY=VALUE.")
    group, _, leaf = key.partition(".")
    if group == "algorithm" and leaf:  # by its own name, so that it replaces the file's
        (leaf,) = own_names(Algorithm, {leaf: value}, "config.algorithm")
        key = f"{group}.{leaf}"
    return key, parse(value, f"config.{key}", type_of(Config, key))


def from_dict(values: Mapping[str, Any]) -> Config:
    """Builds a validated `Config`; keys that are not given are the recipe's, or the defaults.

    Raises:
      ValueError: a key or a value that is not allowed, or values that do not go together.
    """
    values, made_of = dict(values), None
    algorithm: Any = values.get("algorithm", {})
    recipe = values.get("recipe", Config.recipe)
    fields = recipe_fields(recipe)
    if isinstance(algorithm, Mapping):
        values["algorithm"], made_of = layered(fields, cast("Mapping[str, Any]", algorithm)), recipe
    config = build(Config, values, "config", _made_of=made_of)
    _check_combination(config, fields)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested values, for JSON and for checkpoints."""
    values = dataclasses.asdict(config)
    del values["_made_of"]
    return values


def _check_combination(config: Config, recipe: Mapping[str, Any]) -> None:
    """Checks that involve several fields; `recipe`: the fields of its recipe."""
    algorithm, rollout, model = config.algorithm, config.rollout, config.model
    check_choices(
        algorithm,
        max_turns=rollout.max_turns,
        ahead=rollout.max_lag > 0,
        teacher=config.teacher.reads_reference,
        recipe=recipe,
    )
    if rollout.group_size == 1 and algorithm.grouped:
        raise ValueError(
            "config.rollout.group_size: got 1 with"
            f" config.algorithm.advantage={algorithm.advantage}, which compares the rewards of a"
            " task's trajectories; allowed: a number >= 2."
        )
    check_teacher(config.teacher, algorithm, rollout.temperature)
    check_rewards(config.rewards)
    check_weights(algorithm, config.rewards)
    check_agent(config.agent, rollout.grammar, task_folders=config.tasks is not None)
    check_sandboxed_tasks(config.tasks, config.sandbox, config.agent)
    check_roles(config.roles, algorithm)
    if config.judge != Judge() and algorithm.forks.kind != "candidates":
        raise ValueError(
            f"config.judge: got one with algorithm.forks.kind={algorithm.forks.kind}; allowed:"
            " none, unless forks.kind=candidates, whose actions it judges."
        )
    if config.optimizer.warmup_steps and algorithm.moments == "turn":
        raise ValueError(
            f"config.optimizer.warmup_steps: got {config.optimizer.warmup_steps} with"
            " algorithm.moments=turn; allowed: 0, since each turn counts its own steps:"
            " warmup_iterations is the same for all."
        )
    if config.optimizer.warmup_steps and algorithm.estimator_entry.scored:
        raise ValueError(
            f"config.optimizer.warmup_steps: got {config.optimizer.warmup_steps} with"
            f" algorithm.advantage={algorithm.advantage}; allowed: 0, since the model that scores"
            " turns counts its own steps: warmup_iterations is the same for both."
        )
    if rollout.max_action_tokens >= rollout.max_context:
        raise ValueError(
            f"config.rollout.max_action_tokens: got {rollout.max_action_tokens}; allowed: a number"
            f" < max_context={rollout.max_context}."
        )
    if config.env.memory_mib is not None and config.env.isolation == "thread":
        raise ValueError(
            f"config.env.memory_mib: got {config.env.memory_mib}; allowed: none, unless"
            " config.env.isolation=process."
        )
    check_adapters(config)
    if model.heads % model.kv_heads:
        raise ValueError(
            f"config.model.kv_heads: got {model.kv_heads}; allowed: a divisor of"
            f" heads={model.heads}."
        )
    _check_curriculum(config.curriculum)
    check_asynchronous(config)
    check_servers(config)
    buckets = config.batching.buckets
    rising = list(buckets) == sorted(set(buckets)) and min(buckets, default=1) > 0
    if buckets and (not rising or buckets[-1] < rollout.max_context):
        raise ValueError(
            f"config.batching.buckets: got {buckets}; allowed: rising lengths > 0, the last at"
            f" least rollout.max_context={rollout.max_context}."
        )


def _check_curriculum(curriculum: Curriculum) -> None:
    reads = {"none": ("by",), "variance": ("by", "floor", "memory")}
    for name, value in vars(curriculum).items():
        unread = name not in reads.get(curriculum.by, vars(curriculum))
        if unread and value != vars(Curriculum())[name]:
            raise ValueError(
                f"config.curriculum.{name}: got {value} with by={curriculum.by!r}, which does not"
                f" read it; allowed: {vars(Curriculum())[name]}, or another config.curriculum.by."
            )
    if curriculum.low > curriculum.high:
        raise ValueError(
            f"config.curriculum.low: got {curriculum.low}; allowed: a number <="
            f" high={curriculum.high}."
        )
