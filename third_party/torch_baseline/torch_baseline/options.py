"""The options of a sweep, read from the configuration file of a training run.

Only the fields of a sweep are read. An option that is not implemented here is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_baseline.advantage import SCALES

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Algorithm:
    """How a sweep goes; `docs/algorithms.md` of the project says what each choice means."""

    order: str = "reverse"
    cumulative_ratio: bool = True
    scale: str = "batch"
    advantage_clip: float | None = 3.0
    ratio: str = "geometric"
    old_policy: str = "iteration"
    normalize_by: str = "all"
    weight_clip: float | None = 0.2
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    kl_coef: float = 0.002
    inner_epochs: int = 1


@dataclass(frozen=True)
class Optimizer:
    """kwargs: keyword arguments by optax's names."""

    name: str = "adam"
    learning_rate: float = 3e-4
    schedule: str = "constant"
    warmup_iterations: int = 0
    warmup_steps: int = 0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class Options:
    """Options of a sweep.

    iterations: of the whole run, for schedules. total_steps: maximal number of its optimizer steps.
    dtype: of activations; parameters are float32, and bfloat16 is by autocast.
    null_turns: a turn's batch also has the trajectories without that turn, as in the reference
      implementation. They change no number.
    microbatch_tokens: maximum for one forward pass, including padding.
    share_prefixes: compute the common prefix of a group's samples once per pass, with rows of
      several samples and a tree-shaped attention mask.
    compile: the layers, with `torch.compile`.
    checkpointing: recompute activations in the backward pass.
    """

    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    temperature: float = 1.0
    seed: int = 0
    iterations: int = 60
    total_steps: int = 360
    dtype: str = "float32"
    null_turns: bool = False
    microbatch_tokens: int = 8192
    share_prefixes: bool = False
    compile: bool = False
    checkpointing: bool = False


Check = tuple[str, Callable[[Any], bool]]


def _number(low: float, *, strict: bool = False, whole: bool = False, none: bool = False) -> Check:
    kinds = int if whole else (int, float)
    words = f"a {'whole ' if whole else ''}number {'>' if strict else '>='} {low}"

    def fits(value: Any) -> bool:
        if value is None:
            return none
        good = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
        return good and (value > low if strict else value >= low)

    return words + (", or none" if none else ""), fits


def _one_of(*names: str) -> Check:
    return "one of " + ", ".join(names), lambda value: value in names


# Field of the configuration -> default and what is allowed; the defaults of a training run.
FIELDS: dict[str, tuple[Any, Check]] = {
    "iterations": (60, _number(0, whole=True)),
    "seed": (0, _number(0, whole=True)),
    "model.dtype": ("float32", _one_of(*DTYPES)),
    "rollout.max_turns": (6, _number(1, whole=True)),
    "rollout.temperature": (1.0, _number(0, strict=True)),
    "rollout.top_p": (None, ("none or 1", lambda value: value in (None, 1))),
    "algorithm.order": ("reverse", _one_of("reverse", "forward", "random")),
    "algorithm.cumulative_ratio": (True, ("True or False", lambda value: isinstance(value, bool))),
    "algorithm.scale": ("batch", _one_of(*SCALES)),
    "algorithm.advantage_clip": (3.0, _number(0, strict=True, none=True)),
    "algorithm.ratio": ("geometric", _one_of("geometric", "product", "token")),
    "algorithm.old_policy": ("iteration", _one_of("iteration", "turn")),
    "algorithm.normalize_by": ("all", _one_of("all", "active")),
    "algorithm.weight_clip": (0.2, _number(0, strict=True, none=True)),
    "algorithm.clip_low": (0.2, _number(0, none=True)),
    "algorithm.clip_high": (0.2, _number(0, none=True)),
    "algorithm.kl_coef": (0.002, _number(0)),
    "algorithm.inner_epochs": (1, _number(1, whole=True)),
    "optimizer.name": ("adam", _one_of("adam", "adamw", "sgd")),
    "optimizer.learning_rate": (3e-4, _number(0, strict=True)),
    "optimizer.schedule": ("constant", _one_of("constant", "linear", "cosine")),
    "optimizer.warmup_iterations": (0, _number(0, whole=True)),
    "optimizer.warmup_steps": (0, _number(0, whole=True)),
    "optimizer.kwargs": ({}, ("a dict", lambda value: isinstance(value, Mapping))),
    "optimizer.max_grad_norm": (1.0, _number(0, strict=True, none=True)),
}
# What other choices a training run has, of which there is only one here.
FIXED: dict[str, Any] = {
    "teacher.path": None,
    "teacher.server": None,
    "roles": (),
    "lora.rank": 0,
    "lora.path": None,
    "rollout.top_k": None,  # which, like top_p and grammar, makes context of forced tokens
    "rollout.grammar": None,
    "env.timeout_as": "failure",
    "algorithm.custom_order": (),
    "algorithm.turns_per_update": 1,
    "algorithm.advantage": "grae",
    "algorithm.estimator.baseline": "mean",
    "algorithm.objective": "clipped",
    "algorithm.clip_dual": None,
    "algorithm.loss_aggregation": "action",
    "algorithm.kl_in": "loss",
    "algorithm.kl_estimate": "k3",
    "algorithm.importance": None,
    "algorithm.router_replay": "none",
    "algorithm.critic.kind": "none",
    "algorithm.minibatches_per_turn": 1,
    "algorithm.entropy_coef": 0.0,
    "algorithm.covariance.kind": "none",
    "algorithm.mask_above": None,
    "algorithm.truncated": "keep",
    "algorithm.overlong": None,
    "algorithm.kl_control": None,
    "algorithm.reference": None,
    "algorithm.moments": "shared",
    "algorithm.forks.kind": "none",
    "optimizer.decay_iterations": 0,
    "optimizer.groups": (),
    "optimizer.ema": None,
}
# Fields without effect on a sweep with the options above.
UNREAD = (
    "refresh",
    "dynamic_sampling",
    "tau_pos",
    "tau_neg",
)
_SEEUPO = {
    "order": "reverse",
    "custom_order": (),
    "turns_per_update": 1,
    "cumulative_ratio": True,
    "advantage": "grae",
    "estimator": {"baseline": "mean"},
    "scale": "batch",
    "objective": "clipped",
    "ratio": "geometric",
    "loss_aggregation": "action",
    "kl_in": "loss",
    "critic": {"kind": "none"},
    "mask_above": None,
    "forks": {"kind": "none"},
}
RECIPES: dict[str, dict[str, Any]] = {
    "seeupo": _SEEUPO,
    "seeupo_forward": _SEEUPO | {"order": "forward"},
    "seeupo_random": _SEEUPO | {"order": "random"},
    "seeupo_unweighted": _SEEUPO | {"cumulative_ratio": False},
    "seeupo_group_std": _SEEUPO | {"scale": "group"},
    "seeupo_noscale": _SEEUPO | {"scale": "none"},
}


def read_options(path: str | Path, overrides: Sequence[str] = (), **own: Any) -> Options:
    """The options that a configuration file and overrides on top of it stand for.

    Args:
      overrides: `field.sub=value` each.
      own: fields of `Options` that no configuration has, such as `compile`.

    Raises:
      ValueError: a wrong value, or a choice that is not implemented here.
    """
    given = dict(_override(text) for text in overrides)
    values = _flat(_read_file(Path(path)))
    recipe = given.get("recipe", values.get("recipe", "seeupo"))
    if recipe not in RECIPES:
        raise ValueError(f"config.recipe: got {recipe!r}; allowed here: {', '.join(RECIPES)}.")
    parts = _flat({"algorithm": RECIPES[recipe]})
    # A recipe of the command line overrides the file; the file overrides its own recipe.
    values = values | parts if "recipe" in given else parts | values
    return from_flat(values | given, **own)


def from_flat(values: Mapping[str, Any], **own: Any) -> Options:
    """Options of a configuration's fields by their full names; keys of no matter are not read.

    Raises:
      ValueError: as `read_options`.
    """
    if (alias := "algorithm.pool_mean") in values:  # another name of it
        values = {**values, "algorithm.normalize_by": values[alias]}
        values = {name: value for name, value in values.items() if name != alias}
    for name in values:
        group, _, leaf = name.partition(".")
        section = name.rpartition(".")[0]
        if section in FIXED:  # an option of what is not implemented here
            raise ValueError(
                f"config.{name}: got {values[name]!r}; allowed here: config.{section}="
                f"{FIXED[section]!r}."
            )
        known = name in FIELDS or name in FIXED or leaf in UNREAD
        if group in ("algorithm", "optimizer") and not known:
            raise ValueError(f"config.{name}: got {values[name]!r}; allowed: a field of {group}.")
    for name, only in FIXED.items():
        got = values.get(name, only)
        got = "none" if got is None and only == "none" else got
        if got != only and not (only == () and got == []):
            raise ValueError(f"config.{name}: got {got!r}; allowed here: {only!r}.")
    read = {name: _checked(name, values) for name in FIELDS}

    def part(kind: type) -> Any:
        group = kind.__name__.lower()
        names = [f.name for f in dataclasses.fields(kind)]
        return kind(**{name: read[f"{group}.{name}"] for name in names})

    algorithm = part(Algorithm)
    steps = read["iterations"] * read["rollout.max_turns"] * algorithm.inner_epochs
    return Options(
        algorithm=algorithm,
        optimizer=part(Optimizer),
        temperature=read["rollout.temperature"],
        seed=read["seed"],
        iterations=read["iterations"],
        total_steps=max(1, steps),
        dtype=read["model.dtype"],
        **own,
    )


def _checked(name: str, values: Mapping[str, Any]) -> Any:
    default, (allowed, fits) = FIELDS[name]
    value = values.get(name, default)
    if value is None and isinstance(default, str):
        value = "none"  # the name of a choice
    if not fits(value):
        raise ValueError(f"config.{name}: got {value!r}; allowed here: {allowed}.")
    return value


def _override(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--config.{text}: expected --config.KEY=VALUE.")
    words = {"none": None, "true": True, "false": False}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _flat(values: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Nested values by dotted names; a mapping that is itself a field's value stays whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{group}{key}"
        nested = isinstance(value, Mapping) and name not in FIELDS
        flat |= _flat(value, f"{name}.") if nested else {name: value}
    return flat


def _read_file(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config: no file {path}.")
    spec = importlib.util.spec_from_file_location("torch_baseline_config_file", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--config: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"--config: {path} has no function get_config().")
    values = module.get_config()
    return values.to_dict() if hasattr(values, "to_dict") else values
