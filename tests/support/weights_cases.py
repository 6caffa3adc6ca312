"""Policies of every kind that is published, on a trainer's mesh, and what a worker has of them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.optimizer_schema import ParameterGroup
from seeupo_jax.learner.optimization.parameter_groups import split_trained
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy.architecture import Architecture, DeltaNet, LoraAdapters, Moe
from seeupo_jax.policy.lora import with_adapters
from seeupo_jax.policy.network import Network, abstract_network
from seeupo_jax.rollout.weights.reading import ReadPolicy, read_version
from seeupo_jax.rollout.weights.versions import newest_version

SIZES = {"vocab_size": 32, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 24}
MOE = Moe(4, 2, 8, normalize=True, scores="sigmoid", selection_bias=True)
DELTA = DeltaNet((0,), key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv=4)
LORA = LoraAdapters(2, 4.0, ("q_proj", "down_proj"))
FROZEN = (ParameterGroup("embedding", frozen=True), ParameterGroup("*norm*", frozen=True))
# Name -> the architecture, the adapters, the groups, and whether the sampler rounds to 8 bits.
POLICIES: dict[str, tuple[Architecture, LoraAdapters | None, tuple[ParameterGroup, ...], bool]] = {
    "bfloat16": (Architecture(**SIZES, layers=2, dtype="bfloat16"), None, (), False),
    "float32": (Architecture(**SIZES, layers=2, tied=False), None, (), False),
    "bfloat16 parameters": (
        Architecture(**SIZES, layers=2, param_dtype="bfloat16"),
        None,
        (),
        False,
    ),
    "stacked": (
        Architecture(**SIZES, layers=3, dtype="bfloat16", scan_layers=True),
        None,
        (),
        False,
    ),
    "int8": (Architecture(**SIZES, layers=2, dtype="bfloat16"), None, (), True),
    "experts": (Architecture(**SIZES, layers=1, dtype="bfloat16", moe=MOE), None, (), False),
    "recurrent": (Architecture(**SIZES, layers=2, dtype="bfloat16", delta=DELTA), None, (), False),
    "adapters": (Architecture(**SIZES, layers=2, dtype="bfloat16"), LORA, (), False),
    "stacked adapters": (
        Architecture(**SIZES, layers=2, dtype="bfloat16", scan_layers=True),
        LORA,
        (),
        False,
    ),
    "frozen": (Architecture(**SIZES, layers=2, dtype="bfloat16"), None, FROZEN, False),
}
TRAINING = schema.Mesh(data=1, fsdp=2, tensor=2)


def trainers(name: str, devices: Any = None) -> tuple[Network, Any, Any]:
    """A policy's network, and its parameters that train and that do not, on a trainer's mesh."""
    arch, lora, groups, _ = POLICIES[name]
    network, shapes = abstract_network(arch) if lora is None else with_adapters(arch, lora)
    rng = np.random.default_rng(0)

    def fill(path: Any, x: Any) -> np.ndarray:
        is_norm = path[-1].key == "scale"
        values = is_norm + rng.normal(size=x.shape) * (0.2 if is_norm else 0.35)
        return np.asarray(values, x.dtype)

    params = jax.tree_util.tree_map_with_path(fill, shapes)
    mesh = make_mesh(TRAINING, jax.devices()[:4] if devices is None else devices)
    where = param_shardings(mesh, network.logical_axes(), params)

    def place(x: np.ndarray, there: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, there, lambda index: x[index])

    return network, *split_trained(groups, network, jax.tree.map(place, params, where))


policy = functools.cache(trainers)


def read_as_worker(
    name: str, folder: Path, sizes: schema.Mesh, devices: Any
) -> tuple[ReadPolicy, jax.sharding.Mesh]:
    """What a worker reads of the newest version, and its mesh."""
    arch, lora, groups, _ = POLICIES[name]
    network, shapes = abstract_network(arch) if lora is None else with_adapters(arch, lora)
    mesh, (shapes, _) = make_mesh(sizes, devices), split_trained(groups, network, shapes)
    return read_version(folder / str(newest_version(folder)), network, shapes, mesh), mesh


def unstacked(network: Network) -> tuple[Network, Any]:
    """The same network, whose layers are not stacked, and the shapes of its parameters."""
    return abstract_network(dataclasses.replace(network.arch, scan_layers=False))
