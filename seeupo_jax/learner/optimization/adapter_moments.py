"""An optimizer for each of the adapters per turn: a step moves those of its own turns alone.

Each has moments, counts of steps, a clip by its own gradient's norm and weight decay of its own, as
if it were a policy by itself. Axes beyond the legend in `types.py`: here K is of adapters.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax


@functools.lru_cache(maxsize=16)  # one object for equal ones: programs of it are compiled once
def per_adapter(
    optimizer: optax.GradientTransformation, adapters: int, axis: int
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with a state for each of so many adapters; `update` also takes `active_K`.

    `active_K` is bool [K]: the state and the parameters of any other adapter keep every bit. Every
    leaf of the state has K entries, on the axis of the parameters' or on its last one.

    Args:
      axis: of the adapters in the parameters.
    """

    def axes(state: Any) -> Any:
        """The axis of the adapters in each leaf of the states of one of them."""
        return jax.tree.map(lambda leaf: min(axis, leaf.ndim), state)

    def one(tree: Any) -> Any:
        """The shapes of one adapter's part."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype), tree
        )

    def init(params: Any) -> Any:
        of_state = axes(jax.eval_shape(optimizer.init, one(params)))
        return jax.vmap(optimizer.init, axis, of_state, axis_size=adapters)(params)

    def update(
        grads: Any, state: Any, params: Any = None, *, active_K: jax.Array
    ) -> tuple[Any, Any]:
        of_state = axes(jax.eval_shape(optimizer.init, one(params)))
        updates, stepped = jax.vmap(optimizer.update, (axis, of_state, axis), (axis, of_state))(
            grads, state, params
        )

        def keep(new: jax.Array, old: jax.Array, at: int) -> jax.Array:
            shape = [1] * new.ndim
            shape[at] = adapters
            return jnp.where(active_K.reshape(shape), new, old)

        # Of the two zeros only -0 leaves the sign of a parameter that is -0.
        still = jax.tree.map(lambda x: jnp.full_like(x, -0.0), updates)
        updates = jax.tree.map(functools.partial(keep, at=axis), updates, still)
        return updates, jax.tree.map(keep, stepped, state, of_state)

    return optax.GradientTransformationExtraArgs(init, update)
