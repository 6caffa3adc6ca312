"""Optimizers by name, and the update that skips gradients that are not finite."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.configuration.optimizer_schema import Optimizer, ParameterGroup
from seeupo_jax.configuration.user_code import import_attribute, listed, located
from seeupo_jax.learner.optimization.muon import muon
from seeupo_jax.learner.optimization.parameter_groups import REST, labels
from seeupo_jax.learner.optimization.schedule import by_iteration, step_warmup
from seeupo_jax.policy.architecture import SELECTION_BIAS
from seeupo_jax.types import CriticState, TrainState

T = TypeVar("T")


def make_optimizer(config: Optimizer, *, total_steps: int) -> optax.GradientTransformation:
    """Builds the configured optimizer behind a clip of the gradient's global norm.

    Args:
      config: `name` is an optax function (`adamw`, `contrib.muon`) or a user's `module:function`
        with a `learning_rate` parameter; `kwargs` are its other keyword arguments. The learning
        rate is a number, or with a schedule or a warm-up a function of the optimizer's steps,
        which within an iteration changes by `warmup_steps` alone: see `schedule.py`. Parameters of
        `groups` have an optimizer of their own; the clip is by the norm of all gradients together.
      total_steps: optimizer steps that the whole run takes at the most.

    Returns:
      One object for equal configurations, so that programs of it are compiled once.

    Raises:
      ValueError: an unknown name, a keyword it does not take, a result that is no
        GradientTransformation, an optimizer that needs more than gradients and parameters, or a
        warm-up as long as the run.
    """
    _check_warmup(config, total_steps)
    key = _key(config)
    if key is None:
        return _chain(config)
    if key not in _MADE:
        _MADE[key] = _chain(config)
    return _MADE[key]


_MADE: dict[str, optax.GradientTransformation] = {}


def _key(config: Optimizer) -> str | None:
    """A key of equal optimizers; None: a user's function may have changed."""
    parts = (config, *config.groups)
    values = [value for part in parts for value in part.kwargs.values()]
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    user_defined = any(":" in part.name for part in parts if part.name is not None)
    return repr(config) if plain and not user_defined else None


def _chain(config: Optimizer) -> optax.GradientTransformation:
    """The optimizers of the groups and of the rest, behind the clip."""
    optimizer = _named(config, "config.optimizer")
    by_name = {
        str(index): _named(_own_choices(config, index), f"config.optimizer.groups[{index}]")
        for index, _ in _trained(config)
    }
    if by_name:
        by_group = functools.partial(labels, config.groups)
        optimizer = optax.partition(by_name | {REST: optimizer}, by_group)
    clip = optax.identity()  # keeps the state's structure, so a run can resume with another clip
    if config.max_grad_norm is not None:
        clip = optax.clip_by_global_norm(config.max_grad_norm)
    return optax.chain(clip, optimizer)


def _trained(config: Optimizer) -> list[tuple[int, ParameterGroup]]:
    """The groups that train, with their indices.

    Raises:
      ValueError: a frozen one has an optimizer of its own.
    """
    for index, group in enumerate(config.groups):
        choices = dataclasses.replace(group, pattern="", frozen=False)
        if group.frozen and choices != ParameterGroup():
            raise ValueError(
                f"config.optimizer.groups[{index}].frozen: got True with an optimizer of its own;"
                " allowed: pattern as the only other field."
            )
    return [(index, group) for index, group in enumerate(config.groups) if not group.frozen]


def _own_choices(config: Optimizer, index: int) -> Optimizer:
    """The options of a group; those that it does not set are the other parameters'."""
    group = config.groups[index]
    name = config.name if group.name is None else group.name
    rate = config.learning_rate if group.learning_rate is None else group.learning_rate
    kwargs = {**(config.kwargs if name == config.name else {}), **group.kwargs}
    return dataclasses.replace(config, name=name, learning_rate=rate, kwargs=kwargs)


def _named(config: Optimizer, field: str) -> optax.GradientTransformation:
    """The optimizer of a name, without groups and clip; `field` is named in errors."""
    build = _find(config.name, field)
    if build.__module__ == optax.contrib.schedule_free.__module__:
        raise _schedule_free([config], field)
    _check_keywords(config.name, build, config.kwargs, field)

    def make(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        if config.name == "contrib.muon":
            return muon(config.kwargs, config.learning_rate, rate)
        return build(learning_rate=rate, **config.kwargs)

    rate: optax.ScalarOrSchedule = step_warmup(config)
    follows = config.schedule != "constant" or config.warmup_iterations > 0
    if not follows and not config.warmup_steps:
        rate = config.learning_rate  # a few optax optimizers take a number only
    try:
        optimizer = make(rate)
    except (Exception, SystemExit) as error:  # of a user's function
        raise ValueError(
            f"{field}: {config.name} {'failed on' if ':' in config.name else 'refuses'}"
            f" kwargs={dict(config.kwargs)!r} with schedule={config.schedule}:"
            f" {located(error)}."
        ) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"{field}.name: {config.name} returned a {type(optimizer).__name__}; allowed:"
            " a function that returns an optax.GradientTransformation."
        )
    if follows:
        optimizer = by_iteration(make, rate)
    # A user's own function may know the names of the parameters: `try_optimizer` has them.
    if ":" not in config.name:
        shapes = {"matrix": (4, 4), "vector": (5,)}  # without a first axis in common
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        _try_abstractly([config], optimizer, params, field)
    return optimizer


def _schedule_free(parts: Sequence[Optimizer], field: str) -> ValueError:
    names = " or ".join(dict.fromkeys(repr(part.name) for part in parts))
    return ValueError(
        f"{field}.name: got {names}, which trains other parameters than those to sample from and to"
        " evaluate; allowed: an optimizer that does not, such as adamw with config.optimizer.ema."
    )


def try_optimizer(config: Optimizer, params: Any, *, total_steps: int) -> None:
    """Traces the state, and a user's own functions' step, so that a mistake fails at once.

    Args:
      params: shapes of the parameters that train, a tree like theirs.
      total_steps: as of `make_optimizer`.

    Raises:
      ValueError: the step fails, or no checkpoint can hold the state; one sentence.
    """
    parts = [config, *(_own_choices(config, index) for index, _ in _trained(config))]
    optimizer = make_optimizer(config, total_steps=total_steps)
    if user_defined := [part for part in parts if ":" in part.name]:
        _try_abstractly(user_defined, optimizer, params, "config.optimizer")
    arrays, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(optimizer.init, params))
    empty = [jax.tree_util.keystr(path) for path, array in arrays if 0 in array.shape]
    if empty:
        names = " or ".join(dict.fromkeys(repr(part.name) for part in parts))
        raise ValueError(
            f"config.optimizer.name: got {names}, whose state has arrays without elements, such as"
            f" {empty[0]}, which checkpoints cannot hold; allowed: another optimizer of these"
            " parameters, or groups that have one."
        )


def _check_warmup(config: Optimizer, total_steps: int) -> None:
    warmup = config.warmup_steps
    if warmup and warmup >= total_steps:
        raise ValueError(
            f"config.optimizer.warmup_steps: got {warmup}; allowed: fewer than the run's"
            f" {total_steps} optimizer steps."
        )


def apply_update(
    optimizer: optax.GradientTransformation,
    grads: Any,
    state: TrainState,
    critic_optimizer: optax.GradientTransformation | None = None,
    critic_grads: Any = None,
    *,
    streamed: bool = False,
    active_K: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Applies one optimizer step, or none of it when a gradient is not finite.

    A value function has an optimizer of its own, so that each gradient is clipped by its own norm.

    Args:
      grads: gradients of the loss to minimise, a tree like `state.params`.
      critic_optimizer, critic_grads: of `state.critic`; None where there is none.
      streamed: see `select_or_cond`.
      active_K: as of `per_adapter`, for an optimizer that it made; None for any other.

    Returns:
      The next state (`step` + 1; or the same bits with `skipped` + 1) and float32 scalars:
      `grad_norm`, the global norm before clipping, and `update_skipped`, 0 or 1; with a value
      function `critic_grad_norm` too.
    """
    grad_norm = _norm(grads)
    finite, norms = jnp.isfinite(grad_norm), {"grad_norm": grad_norm}
    if critic_optimizer is not None:
        norms["critic_grad_norm"] = _norm(critic_grads)
        finite &= jnp.isfinite(norms["critic_grad_norm"])

    of_step = {} if active_K is None else {"active_K": active_K}

    def applied(state: TrainState) -> TrainState:
        state = _stepped(optimizer, grads, state, **of_step)
        if critic_optimizer is not None:
            critic = _stepped(critic_optimizer, critic_grads, state.critic)
            state = state._replace(critic=critic)
        return state._replace(step=state.step + 1)

    def skipped(state: TrainState) -> TrainState:
        return state._replace(skipped=state.skipped + 1)

    state = select_or_cond(
        finite, lambda: applied(state), lambda: skipped(state), streamed=streamed
    )
    return state, norms | {"update_skipped": 1.0 - finite.astype(jnp.float32)}


def select_or_cond(
    condition: jax.Array, step: Callable[[], T], unchanged: Callable[[], T], *, streamed: bool
) -> T:
    """The result of `step` if a condition holds, else that of `unchanged`.

    Args:
      streamed: whether the optimizer's state is streamed from the host's memory. A branch (`cond`)
        would hold all of the old and the new state at once; a selection leaf by leaf streams each
        leaf alone. Otherwise a branch is used: it updates donated buffers in place, where a
        selection copies most of them.
    """
    if streamed:
        return jax.tree.map(functools.partial(jax.lax.select, condition), step(), unchanged())
    return jax.lax.cond(condition, step, unchanged)


def step_if_finite(
    optimizer: optax.GradientTransformation, grads: Any, state: CriticState, *, streamed: bool
) -> tuple[CriticState, jax.Array, jax.Array]:
    """An auxiliary model after one step; unchanged if a gradient is not finite.

    Args:
      streamed: see `select_or_cond`.

    Returns: its state; the global norm before clipping; 1.0 where the step was skipped.
    """
    norm = _norm(grads)
    finite = jnp.isfinite(norm)
    stepped = functools.partial(_stepped, optimizer, grads, state)
    state = select_or_cond(finite, stepped, lambda: state, streamed=streamed)
    return state, norm, 1.0 - finite.astype(jnp.float32)


def _norm(grads: Any) -> jax.Array:
    """The global norm, in float32: a sum of squares in bfloat16 soon stops growing."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def _stepped(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, **of_step: Any
) -> Any:
    """A `TrainState`, or a `CriticState`, with its own parameters stepped.

    Selection biases of experts stay: their gradients are 0, but weight decay would move them.
    """
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params, **of_step)

    def kept(path: Any, old: jax.Array, new: jax.Array) -> jax.Array:
        return old if path and getattr(path[-1], "key", None) == SELECTION_BIAS else new

    params = optax.apply_updates(state.params, updates)
    params = jax.tree_util.tree_map_with_path(kept, state.params, params)
    return state._replace(params=params, opt_state=opt_state)


def _find(name: str, field: str) -> Callable[..., Any]:
    """The function that an optimizer's name stands for."""
    if ":" in name:
        return import_attribute(name, f"{field}.name", "function", callable)
    names = _optax_optimizers()
    if name not in names:
        by_last_word = {full.rpartition(".")[2]: full for full in names}
        words = difflib.get_close_matches(name.rpartition(".")[2], by_last_word, n=3)
        near = " or ".join(by_last_word[word] for word in words)
        hint = f"did you mean {near}?" if near else f"optax has {', '.join(names)}."
        raise ValueError(
            f"{field}.name: got {name!r}; allowed: an optax optimizer or module:function; {hint}"
        )
    return names[name]


def _optax_optimizers() -> dict[str, Callable[..., Any]]:
    """Every public function of optax and optax.contrib that takes a learning rate, by its name."""
    spaces: dict[str, ModuleType] = {"": optax, "contrib.": optax.contrib}
    return {
        prefix + name: function
        for prefix, space in spaces.items()
        for name, function in vars(space).items()
        if inspect.isfunction(function)
        and not name.startswith(("_", "scale_by_"))
        and "learning_rate" in inspect.signature(function).parameters
    }


def _check_keywords(
    name: str, build: Callable[..., Any], kwargs: Mapping[str, Any], field: str
) -> None:
    parameters = inspect.signature(build).parameters.values()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if "learning_rate" not in named and not open_ended:
        raise ValueError(
            f"{field}.name: {name} has no parameter learning_rate; it has"
            f" {listed(named, 'it takes no argument by name')}."
        )
    named.pop("learning_rate", None)
    if "learning_rate" in kwargs:
        raise ValueError(
            f"{field}.kwargs: got learning_rate; allowed: it belongs in {field}.learning_rate."
        )
    wrong = [key for key in kwargs if key not in named]
    if wrong and not open_ended:
        raise ValueError(
            f"{field}.kwargs: {name} takes no {wrong[0]!r}; allowed:"
            f" {listed(named, 'learning_rate is all that it takes')}."
        )
    missing = [key for key, p in named.items() if p.default is p.empty and key not in kwargs]
    if missing:
        raise ValueError(f"{field}.kwargs: {name} needs {', '.join(missing)}.")


def _try_abstractly(
    parts: Sequence[Optimizer], optimizer: optax.GradientTransformation, params: Any, field: str
) -> None:
    """Traces a step of the optimizer of these parts, so that a wrong keyword value fails at once.

    Args:
      params: shapes of parameters.
      field: named in errors.

    Raises:
      ValueError: the step fails, or the optimizer's state is a schedule-free one's.
    """

    def step(params: Any) -> Any:
        state = CriticState(params, optimizer.init(params))
        return step_if_finite(optimizer, params, state, streamed=False)

    try:
        state, *_ = jax.eval_shape(step, params)
    except (Exception, SystemExit) as error:
        texts = dict.fromkeys(f"{part.name} with kwargs={dict(part.kwargs)!r}" for part in parts)
        raise ValueError(
            f"{field}: {', '.join(texts)} and schedule={parts[0].schedule} cannot take a step from"
            f" gradients and parameters alone: {located(error)}."
        ) from error

    def schedule_free(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState)

    if any(map(schedule_free, jax.tree.leaves(state.opt_state, is_leaf=schedule_free))):
        raise _schedule_free(parts, field)
