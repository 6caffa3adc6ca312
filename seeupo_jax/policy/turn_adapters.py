"""Adapters per turn (`LoraAdapters.per_turn`) as models with one adapter each, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from seeupo_jax.parallel.distributed import place
from seeupo_jax.parallel.mesh import param_shardings
from seeupo_jax.policy.network import abstract_network, join_params, split_model, split_trainable
from seeupo_jax.policy.transformer import Transformer


def stack_adapters(
    models: Sequence[Transformer], mesh: jax.sharding.Mesh | None = None
) -> Transformer:
    """The first model, with the adapters of all of them as those of its turns.

    Args:
      models: with one adapter for all turns each, alike but for its numbers.
      mesh: where the adapters go; None: they stay.
    """
    parts = [split_trainable(*split_model(model)) for model in models]
    arch, frozen = models[0].arch, parts[0][1]
    lora = replace(arch.lora, per_turn=len(models))
    network, _ = abstract_network(replace(arch, lora=lora))

    def stack(*leaves: jax.Array) -> jax.Array:
        return jnp.stack(leaves, axis=arch.adapter_axis)

    adapters = jax.tree.map(stack, *(each for each, _ in parts))
    if mesh is not None:
        logical_axes, _ = split_trainable(network, network.logical_axes())
        where = param_shardings(mesh, logical_axes, adapters)
        adapters = jax.tree.map(place, adapters, where)
    return network.bind(join_params(adapters, frozen))


def adapter_of(model: Transformer, number: int) -> Transformer:
    """The model with one of its turns' adapters, for all turns."""
    network, params = split_model(model)
    adapters, frozen = split_trainable(network, params)

    def pick(leaf: jax.Array) -> jax.Array:
        return jnp.take(leaf, number, axis=network.arch.adapter_axis)

    lora = replace(network.arch.lora, per_turn=0)
    alone, _ = abstract_network(replace(network.arch, lora=lora))
    return alone.bind(join_params(jax.tree.map(pick, adapters), frozen))
