"""Policies whose parameters are those of a NumPy twin, and the way back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model

from seeupo_jax.policy.files.parameter_names import leaf_at, stored_parameters
from seeupo_jax.policy.files.placement import load_params
from seeupo_jax.policy.network import abstract_network

SIZES = "vocab_size width layers heads kv_heads head_dim mlp_width qk_norm qkv_bias tied".split()


class InMemory:
    """Tensors by name, as `from_pretrained` reads them from files."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def read(self, name, index):
        return self.tensors[name][index]


def numpy_weights(arch, seed=0):
    """The twin's weights, as random as they are there."""
    return numpy_model.random_weights(seed, **{key: getattr(arch, key) for key in SIZES})


def twin_arch(arch):
    """What the twin needs to know of an architecture."""
    return numpy_model.Architecture(arch.head_dim, arch.rope.theta, arch.norm_eps)


def network_of(tensors, arch):
    """The network of an architecture, and parameters with these values."""
    network, shapes = abstract_network(arch)
    stored = list(stored_parameters(arch, shapes))
    axes = network.logical_axes()
    return network, load_params(InMemory(tensors), stored, shapes, axes, None, "float32")


@functools.cache
def random_network(arch):
    """The network of an architecture, and random parameters on the host, none of them trivial.

    Drawn by NumPy: JAX would compile a program for every shape.
    """
    network, shapes = abstract_network(arch)
    rng = np.random.default_rng(9)

    def draw(path, leaf):
        if path[-1].key == "scale":
            mean = 1.0
        else:
            fan_in = leaf.shape[-1 if path[-1].key in ("embedding", "head") else -2 :][0]
            mean = rng.normal(size=leaf.shape) * fan_in**-0.5 if leaf.ndim > 1 else 0.0
        return np.float32(mean + 0.2 * rng.normal(size=leaf.shape))

    return network, jax.tree_util.tree_map_with_path(draw, shapes)


def tensors_of(params, arch):
    """Parameters, or gradients by them, under the names and in the orientation of files."""
    rows = {}
    for stored in stored_parameters(arch, params):
        leaf = leaf_at(params, stored.path)
        leaf = leaf if stored.layer is None else leaf[stored.layer]
        for name, part in zip(stored.names, leaf if stored.grouped else [leaf], strict=True):
            part = np.asarray(part.T if stored.transposed else part)
            rows.setdefault(name, {})[stored.first_row] = part
    return {
        name: parts[None]
        if None in parts
        else np.concatenate([parts[row] for row in sorted(parts)])
        for name, parts in rows.items()
    }


def assert_same_tree(got, wanted):
    """Trees of equal arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(jnp.asarray, wanted))
