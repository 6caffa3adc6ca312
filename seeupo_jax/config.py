"""The configuration: frozen dataclasses from an `ml_collections` file and the command line.

Every field states what it allows; a misspelt key, a wrong type or an impossible value raises one
sentence with the key's full name, what was got and what is allowed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_collections

_CHECK = "check"  # metadata key: (predicate, what is allowed in words)


def _field(default: Any, allowed: str, check: Callable[[Any], bool]) -> Any:
    return dataclasses.field(default=default, metadata={_CHECK: (check, allowed)})


def _choice(default: str, *others: str) -> Any:
    names = (default, *others)
    return _field(default, "one of " + ", ".join(names), lambda value: value in names)


def _at_least(low: float, default: Any) -> Any:
    return _field(default, f"a number >= {low}", lambda value: value >= low)


def _above(low: float, default: Any) -> Any:
    return _field(default, f"a number > {low}", lambda value: value > low)


def _within(low: float, high: float, default: Any) -> Any:
    return _field(default, f"a number from {low} to {high}", lambda value: low <= value <= high)


@dataclass(frozen=True)
class Model:
    """The policy network. `path` loads one; without it the sizes below make one from nothing."""

    path: str | None = None  # a folder with config.json, safetensors, tokenizer; or package:NAME
    vocab_size: int = _at_least(1, 512)
    width: int = _at_least(1, 128)
    layers: int = _at_least(1, 4)
    heads: int = _at_least(1, 4)
    kv_heads: int = _at_least(1, 4)
    head_dim: int = _field(32, "an even number >= 2", lambda v: v >= 2 and v % 2 == 0)
    mlp_width: int = _at_least(1, 384)
    rope_theta: float = _above(0, 10_000.0)
    qk_norm: bool = True
    qkv_bias: bool = False
    tied: bool = True
    dtype: str = _choice("float32", "bfloat16")  # of activations; parameters stay float32
    scan_layers: bool = False
    remat: str = _choice("none", "full", "dots")


@dataclass(frozen=True)
class Chat:
    """How conversations become tokens for a tokenizer made here."""

    system: bool = True  # keep the environment's system message
    tools: str = _choice("none", "signatures", "json")


@dataclass(frozen=True)
class Env:
    name: str = "order_desk"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workers: int = _at_least(1, 8)  # threads that step environments
    timeout_s: float = _above(0, 60.0)  # of one environment call


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes; -1 takes the devices that are left."""

    data: int = _field(-1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)
    fsdp: int = _field(1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)
    tensor: int = _field(1, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)


@dataclass(frozen=True)
class Algorithm:
    """SeeUPO's choices (design of the paper's §4; defaults are its practice)."""

    order: str = _choice("reverse", "forward", "random", "custom")
    custom_order: tuple[int, ...] = ()  # for order=custom: turns, first to be updated first
    baseline: str = _choice("mean", "leave_one_out")
    scale: str = _choice("batch", "none", "group")
    advantage_clip: float | None = _above(0, 3.0)
    ratio: str = _choice("geometric", "product", "token")
    old_policy: str = _choice("iteration", "turn")
    pool_mean: str = _choice(
        "all", "active"
    )  # divide by N, or by the trajectories that have the turn
    weight_clip: float | None = _above(0, 0.2)  # M's factors stay in [1 - it, 1 + it]; none: Eq. 8
    clip_low: float | None = _at_least(0, 0.2)
    clip_high: float | None = _at_least(0, 0.2)
    kl_coef: float = _at_least(0, 0.002)
    inner_epochs: int = _at_least(1, 1)
    minibatches_per_turn: int = _at_least(1, 1)
    turns_per_update: int = _at_least(1, 1)
    refresh: str = _choice("auto", "fused", "separate")


@dataclass(frozen=True)
class Optimizer:
    """An optax optimizer: `adamw`, `contrib.muon`, or a user's own `module:function`."""

    name: str = "adam"
    learning_rate: float = _above(0, 3e-4)
    schedule: str = _choice("constant", "linear", "cosine")
    warmup_steps: int = _at_least(0, 0)
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_grad_norm: float | None = _above(0, 1.0)


@dataclass(frozen=True)
class Rollout:
    tasks: int = _at_least(1, 16)  # B, tasks an iteration
    group_size: int = _at_least(2, 8)  # G, trajectories a task
    max_turns: int = _at_least(1, 6)
    max_action_tokens: int = _at_least(1, 32)
    max_context: int = _at_least(2, 256)  # tokens a conversation may reach
    temperature: float = _above(0, 1.0)
    top_k: int | None = _at_least(1, None)
    top_p: float | None = _within(0, 1, None)


@dataclass(frozen=True)
class Batching:
    """Shapes of the sweep's programs."""

    microbatch_rows: int = _at_least(1, 32)
    buckets: tuple[
        int, ...
    ] = ()  # row lengths to pad to; empty: multiples of an eighth of max_context


@dataclass(frozen=True)
class WarmStartStage:
    steps: int = _at_least(1, 1000)
    learning_rate: float = _above(0, 3e-3)
    demonstrations: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class WarmStart:
    """Supervised training on demonstrations, action tokens only, before the first iteration."""

    stages: tuple[WarmStartStage, ...] = ()
    batch_size: int = _at_least(1, 64)
    output: str | None = None  # also save the warm policy to this folder


@dataclass(frozen=True)
class Evaluation:
    every: int = _at_least(0, 10)  # iterations between evaluations; 0: only before and after
    split: str = "test"
    tasks: int = _at_least(1, 64)
    k: int = _at_least(1, 4)  # episodes a task
    temperature: float | None = _above(0, None)  # none: the training temperature
    extra_splits: tuple[str, ...] = ()  # also evaluated before and after


@dataclass(frozen=True)
class Checkpoint:
    every: int = _at_least(0, 10)  # iterations between checkpoints; 0: only the last
    keep: int = _at_least(1, 2)


@dataclass(frozen=True)
class Telemetry:
    trackers: tuple[str, ...] = ("tensorboard",)
    display: str = _choice("auto", "rich", "plain")


@dataclass(frozen=True)
class Config:
    iterations: int = _at_least(0, 60)
    seed: int = _within(0, 2**32 - 1, 0)
    recipe: str = "seeupo"
    log_checksum: bool = False
    model: Model = Model()
    chat: Chat = Chat()
    env: Env = Env()
    mesh: Mesh = Mesh()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    rollout: Rollout = Rollout()
    batching: Batching = Batching()
    warm_start: WarmStart = WarmStart()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    telemetry: Telemetry = Telemetry()


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    recipes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Reads a config file's `get_config()` and applies `field.sub=value` overrides.

    Args:
      recipes: the table of recipes; the chosen one's fields of `algorithm` go below the file's.

    Raises:
      ValueError: no such file, no `get_config`, or a key or value that is not allowed.
    """
    values = _read_file(Path(path))
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ValueError(f"--config.{override}: expected --config.KEY=VALUE.")
        _assign(values, key, _parse(text))
    recipe = values.get("recipe", Config.recipe)
    if recipes is not None and recipe not in recipes:
        raise ValueError(f"config.recipe: got {recipe!r}; allowed: {', '.join(recipes)}.")
    if recipes is not None:
        values["algorithm"] = {**recipes[recipe], **values.get("algorithm", {})}
    return from_dict(values)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Builds a validated `Config`; keys that are not given keep their defaults."""
    config = _build(Config, values, "config")
    _check_together(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain nested values, for JSON and for checkpoints."""
    return dataclasses.asdict(config)


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config: no file {path}.")
    spec = importlib.util.spec_from_file_location("seeupo_jax_config_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"--config: {path} has no function get_config().")
    values = module.get_config()
    return values.to_dict() if isinstance(values, ml_collections.ConfigDict) else dict(values)


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for depth, parent in enumerate(parents):
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            name = ".".join(parents[: depth + 1])
            raise ValueError(f"config.{key}: config.{name} is a value, not a group of fields.")
    values[leaf] = value


def _parse(text: str) -> Any:
    """A Python literal where it is one, `none` as None, any other text as itself."""
    if text.lower() == "none":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def _build(cls: type, values: Mapping[str, Any], name: str) -> Any:
    if dataclasses.is_dataclass(values):
        values = dataclasses.asdict(values)
    if not isinstance(values, Mapping):
        raise ValueError(f"{name}: got {values!r}; allowed: a group of fields.")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name}.{key}: no such field;{hint} allowed: {', '.join(fields)}.")
    built = {
        key: _convert(value, hints[key], fields[key], f"{name}.{key}")
        for key, value in values.items()
    }
    return cls(**built)


def _convert(value: Any, hint: Any, field: dataclasses.Field, name: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    (expected,) = [option for option in options if option is not type(None)]
    if value is None and expected is str:
        value = "none"  # an override's `none` where it is the name of a choice
    value = _as_type(value, expected, name)
    check, allowed = field.metadata.get(_CHECK, (lambda _: True, ""))
    if not check(value):
        none = ", or none" if type(None) in options else ""
        raise ValueError(f"{name}: got {value!r}; allowed: {allowed}{none}.")
    return value


def _as_type(value: Any, expected: Any, name: str) -> Any:
    if dataclasses.is_dataclass(expected):
        return _build(expected, value, name)
    origin = typing.get_origin(expected) or expected
    if origin is tuple and isinstance(value, list | tuple):
        (item, _) = typing.get_args(expected)
        return tuple(_as_type(v, item, f"{name}[{i}]") for i, v in enumerate(value))
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    right_type = isinstance(value, origin) and (expected is bool or not isinstance(value, bool))
    if expected is float and right_type:
        right_type = value == value and abs(value) != float("inf")
    if not right_type:
        words = {
            tuple: "a tuple",
            float: "a finite number",
            int: "a whole number",
            str: "a text",
            bool: "True or False",
        }.get(origin, "a dict")
        raise ValueError(f"{name}: got {value!r} ({type(value).__name__}); allowed: {words}.")
    return value


def _check_together(config: Config) -> None:
    """Checks that no single field can make."""
    algorithm, rollout, model = config.algorithm, config.rollout, config.model
    turns = rollout.max_turns
    if algorithm.order == "custom" and sorted(algorithm.custom_order) != list(range(turns)):
        raise ValueError(
            f"config.algorithm.custom_order: got {algorithm.custom_order}; allowed for"
            f" order=custom: every turn from 0 to {turns - 1} once (rollout.max_turns={turns})."
        )
    if algorithm.order != "custom" and algorithm.custom_order:
        raise ValueError(
            f"config.algorithm.custom_order: got {algorithm.custom_order} with"
            f" order={algorithm.order}; allowed: () unless order=custom."
        )
    if algorithm.order == "custom" and algorithm.turns_per_update > 1:
        raise ValueError(
            f"config.algorithm.turns_per_update: got {algorithm.turns_per_update} with"
            " order=custom; allowed: 1."
        )
    if algorithm.refresh == "fused" and not fused_refresh_applies(algorithm):
        raise ValueError(
            "config.algorithm.refresh: got 'fused'; allowed with order=reverse, inner_epochs=1 and"
            " minibatches_per_turn=1 only: use 'auto' or 'separate'."
        )
    if rollout.max_action_tokens >= rollout.max_context:
        raise ValueError(
            f"config.rollout.max_action_tokens: got {rollout.max_action_tokens}; allowed: a number"
            f" < max_context={rollout.max_context}."
        )
    if model.heads % model.kv_heads:
        raise ValueError(
            f"config.model.kv_heads: got {model.kv_heads}; allowed: a divisor of"
            f" heads={model.heads}."
        )
    buckets = config.batching.buckets
    rising = list(buckets) == sorted(set(buckets)) and min(buckets, default=1) > 0
    if buckets and (not rising or buckets[-1] < rollout.max_context):
        raise ValueError(
            f"config.batching.buckets: got {buckets}; allowed: rising lengths > 0, the last at"
            f" least rollout.max_context={rollout.max_context}."
        )


def fused_refresh_applies(algorithm: Algorithm) -> bool:
    """Whether turn t's step can also refresh the weight of turn t+1 (one step a turn, reverse)."""
    single = algorithm.inner_epochs == 1 and algorithm.minibatches_per_turn == 1
    return algorithm.order == "reverse" and single
