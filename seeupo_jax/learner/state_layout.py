"""The layout of the training state: devices of the mesh, and device or host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from seeupo_jax.configuration.schema import Offload
from seeupo_jax.learner.step.critic import HEAD_AXES
from seeupo_jax.parallel.mesh import param_shardings, sharding
from seeupo_jax.types import CriticState, TrainState

HOST = "pinned_host"  # the host memory that devices copy from and to by themselves


class AuxiliaryModel(Protocol):
    """A model that trains with the policy: a value function, or one that scores turns."""

    @property
    def optimizer(self) -> optax.GradientTransformation: ...

    def trunk(self, tree: Any) -> Any: ...

    def init(self, params: Any) -> CriticState: ...


def state_layout(
    mesh: jax.sharding.Mesh,
    optimizer: optax.GradientTransformation,
    params: Any,
    offload: Offload,
    critic: AuxiliaryModel | None = None,
    ema: bool = False,
    scorer: AuxiliaryModel | None = None,
) -> TrainState:
    """Shardings of the training state between steps.

    Leaves of the optimizer's state for a parameter (of its shape, at its path) have the parameter's
    sharding, in the host's memory with `offload.optimizer`; so has the average of the parameters.
    The other leaves are small and replicated.

    Args:
      params: tree of arrays or shape structs with shardings.
      critic, scorer: the value function and the model that scores turns; their own transformers
        have the policy's shardings.
      ema: whether there is an average.
    """
    replicated, placed = sharding(mesh, ()), jax.tree.map(lambda leaf: leaf.sharding, params)
    opt_state = _moments(optimizer, params, offload, replicated)
    auxiliary = (
        None if model is None else _auxiliary_layout(mesh, model, params, offload)
        for model in (critic, scorer)
    )
    critic_state, scorer_state = auxiliary
    average = jax.tree.map(lambda leaf: _waiting(leaf, offload), params) if ema else None
    return TrainState(
        placed, opt_state, replicated, replicated, critic_state, average, scorer_state
    )


def _auxiliary_layout(
    mesh: jax.sharding.Mesh, model: AuxiliaryModel, params: Any, offload: Offload
) -> CriticState:
    """Shardings of the state of an auxiliary model."""
    shapes = jax.eval_shape(model.init, params).params
    axes = {name: HEAD_AXES[name] for name in shapes["head"]}
    head = param_shardings(mesh, axes, shapes["head"])
    trunk = jax.tree.map(lambda leaf: leaf.sharding, model.trunk(params))
    placed = {"head": head, "trunk": trunk}
    structs = jax.tree.map(_struct, shapes, placed)
    return CriticState(placed, _moments(model.optimizer, structs, offload, sharding(mesh, ())))


def _moments(
    optimizer: optax.GradientTransformation,
    params: Any,
    offload: Offload,
    replicated: jax.sharding.Sharding,
) -> Any:
    """Shardings of an optimizer's state."""
    parameter_of = _parameters(params)

    def follow(path: Any, leaf: Any) -> jax.sharding.Sharding:
        param = parameter_of(path, leaf)
        return replicated if param is None else _waiting(param, offload)

    return jax.tree_util.tree_map_with_path(follow, jax.eval_shape(optimizer.init, params))


def _parameters(params: Any) -> Callable[[Any, Any], Any | None]:
    """From a leaf of an optimizer's state to the parameter that it belongs to; None: to none."""
    paths = {tuple(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}

    def parameter_of(path: Any, leaf: Any) -> Any | None:
        ends = (paths.get(tuple(path[start:])) for start in range(len(path)))
        param = next((param for param in ends if param is not None), None)
        return None if param is None or param.shape != leaf.shape else param

    return parameter_of


def undivided_bytes(state: TrainState) -> int:
    """Bytes of the optimizer's state that belong to no parameter, which every device holds."""
    parameter_of = _parameters(state.params)
    return sum(
        leaf.size * leaf.dtype.itemsize
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if parameter_of(path, leaf) is None
    )


def _waiting(param: Any, offload: Offload) -> jax.sharding.Sharding:
    """The sharding of a parameter's numbers that only the optimizer needs."""
    return param.sharding.with_memory_kind(HOST) if offload.optimizer else param.sharding


def _struct(x: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


@dataclass(frozen=True)
class HashableShardings:
    """A hashable tree of shardings: a program is compiled once for equal ones."""

    leaves: tuple[jax.sharding.Sharding, ...]
    structure: Any

    @classmethod
    def of(cls, shardings: Any) -> HashableShardings:
        leaves, structure = jax.tree.flatten(shardings)
        return cls(tuple(leaves), structure)

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)


def make_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    layout: TrainState,
    critic: AuxiliaryModel | None = None,
    scorer: AuxiliaryModel | None = None,
) -> TrainState:
    """The state before the first step, created in its layout, with a copy of the parameters."""
    return _make_state(optimizer, critic, HashableShardings.of(layout), scorer)(params)


@functools.lru_cache(maxsize=16)
def _make_state(
    optimizer: optax.GradientTransformation,
    critic: AuxiliaryModel | None,
    shardings: HashableShardings,
    scorer: AuxiliaryModel | None,
) -> Callable[[Any], TrainState]:
    fresh = _fresh(optimizer, critic, shardings.tree, scorer)
    return jax.jit(fresh, out_shardings=shardings.tree)


def abstract_state(
    optimizer: optax.GradientTransformation,
    params: Any,
    layout: TrainState,
    critic: AuxiliaryModel | None = None,
    scorer: AuxiliaryModel | None = None,
) -> TrainState:
    """Shapes and shardings of the result of `make_state`, without using a device."""
    shapes = jax.eval_shape(_fresh(optimizer, critic, layout, scorer), params)
    return jax.tree.map(_struct, shapes, layout)


def _fresh(
    optimizer: optax.GradientTransformation,
    critic: AuxiliaryModel | None,
    layout: TrainState,
    scorer: AuxiliaryModel | None,
) -> Callable[[Any], TrainState]:
    """The state before the first step; an average of the weights starts at the parameters."""

    def fresh(params: Any) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        # Copied: the state is donated, and its parameters may be the reference policy's too.
        copied = jax.tree.map(jnp.copy, params)
        auxiliary = (None if model is None else model.init(params) for model in (critic, scorer))
        critic_state, scorer_state = auxiliary
        ema = None if layout.ema is None else jax.tree.map(_wide, params)
        opt_state = optimizer.init(params)
        return TrainState(copied, opt_state, zero, zero, critic_state, ema, scorer_state)

    return fresh


def _wide(param: jax.Array) -> jax.Array:
    """A copy in float32: bfloat16 would lose an update of less than 1/256 of a number."""
    return param.astype(jnp.float32, copy=True)


def average(params: Any, ema: Any, decay: jax.Array | float) -> Any:
    """The average of the parameters after one more iteration; see `TrainState.ema`.

    `decay * ema + (1 - decay) * params`, in float32. `ema` may lie in the host's memory.
    """
    return jax.tree.map(
        lambda mean, param: mean + (1 - decay) * (param.astype(jnp.float32) - mean),
        on_device(ema),
        params,
    )


def final_params(state: TrainState) -> Any:
    """The parameters to evaluate and export: their average where there is one."""
    if state.ema is None:
        return state.params
    return jax.tree.map(
        lambda mean, param: jax.device_put(mean, param.sharding).astype(param.dtype),
        state.ema,
        state.params,
    )


def to_pinned_host(params: Any) -> Any:
    """Parameters (or shape structs) in host memory, with the sharding that they have on devices."""
    there = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(HOST), params)
    if all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        return jax.tree.map(lambda leaf, where: leaf.update(sharding=where), params, there)
    return jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=there)(params)


def on_device(tree: Any) -> Any:
    """Inside a program: copies leaves in the host's memory to the devices."""

    def bring(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, jax.memory.Space.Device) if _waits(leaf) else leaf

    return jax.tree.map(bring, tree)


def in_host_memory(tree: Any) -> bool:
    """Inside a program: whether a leaf of a tree is in the host's memory."""
    return any(map(_waits, jax.tree.leaves(tree)))


def _waits(leaf: jax.Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def check_offload(offload: Offload, device: jax.Device) -> None:
    """ValueError where the device has no pinned host memory to offload to."""
    wanted = [name for name, enabled in vars(offload).items() if enabled]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if wanted and HOST not in kinds:
        raise ValueError(
            f"config.offload.{wanted[0]}: got True on {device.platform}, whose devices have the"
            f" memories {', '.join(kinds)} and no {HOST}; allowed: False."
        )
