"""The policy as pure functions of its parameters: what the learner and the sampler run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.attention import KeyValues
from seeupo_jax.policy.transformer import Transformer

# Logits held at once: 2**24 float32 are 64 MiB. Larger heads work through the tokens in chunks.
LOGITS_AT_ONCE = 2**24
ADAPTER = "lora_"  # how the names of adapters' parameters begin


@dataclass(frozen=True)
class Network:
    """A transformer without its parameters; hashable, so programs are compiled once per network."""

    arch: Architecture
    graph: nnx.GraphDef

    def bind(self, params: Any) -> Transformer:
        """The module with these parameters in it."""
        return nnx.merge(self.graph, nnx.State(params))

    def logical_axes(self) -> Any:
        """The logical axis names of every parameter: a tree of tuples, shaped as the parameters."""
        _, state = nnx.split(nnx.eval_shape(lambda: Transformer(self.arch, nnx.Rngs(0))))
        is_param = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
        names = jax.tree.map(lambda p: p.get_metadata("logical"), state, is_leaf=is_param)
        return nnx.to_pure_dict(names)


def abstract(arch: Architecture) -> tuple[Network, Any]:
    """The network of an architecture, and the shapes of its parameters; nothing is allocated."""
    return split(nnx.eval_shape(lambda: Transformer(arch, nnx.Rngs(0))))


def trainable(network: Network, params: Any) -> tuple[Any, Any]:
    """A tree shaped as the parameters, as what training changes and what it leaves alone.

    With adapters those are the adapters and all the rest; without them everything and nothing.
    """
    return (params, {}) if network.arch.lora is None else _part(params)


def join(params: Any, frozen: Any) -> Any:
    """Puts the two parts of `trainable` together again."""
    if not (isinstance(params, dict) and isinstance(frozen, dict)):
        return params
    both = {key: join(params[key], frozen[key]) for key in params.keys() & frozen.keys()}
    return {**frozen, **params, **both}


def _part(tree: Any) -> tuple[Any, Any]:
    adapters, rest = {}, {}
    for key, node in tree.items():
        if str(key).startswith(ADAPTER):
            adapters[key] = node
        elif isinstance(node, dict):
            inner, outer = _part(node)
            adapters |= {key: inner} if inner else {}
            rest |= {key: outer} if outer else {}
        else:
            rest[key] = node
    return adapters, rest


def for_sampling(network: Network, params: Any) -> tuple[Network, Any]:
    """The same policy as a sampler wants it: layers side by side, matrices of the compute dtype.

    Decoding reads every matrix once a token: from a stack of layers it would first copy each out,
    and float32 ones of a bfloat16 policy would be read at twice the size. No value changes, since
    every use converts to the compute dtype first; norms, which compute in float32, stay as they
    are. The parameters come back themselves where nothing is to be done.
    """
    arch = network.arch
    if arch.scan_layers:
        network, _ = abstract(dataclasses.replace(arch, scan_layers=False))
    elif jax.tree.all(jax.tree.map(lambda x: x.dtype == arch.dtype, params)):
        return network, params
    return network, _for_sampling(arch, params)


@functools.partial(jax.jit, static_argnums=0)
def _for_sampling(arch: Architecture, params: Any) -> Any:
    def convert(path: Any, x: jax.Array) -> jax.Array:
        return x if path[-1].key == "scale" else x.astype(arch.dtype)

    params = jax.tree_util.tree_map_with_path(convert, params)
    if not arch.scan_layers:
        return params
    layer = lambda i: jax.tree.map(lambda x: x[i], params["layers"])  # noqa: E731
    return params | {"layers": {i: layer(i) for i in range(arch.layers)}}


def split(model: Transformer) -> tuple[Network, Any]:
    """A module as its network and its parameters (a nested dict of arrays)."""
    graph, state = nnx.split(model)
    return Network(model.arch, graph), nnx.to_pure_dict(state)


def hidden(
    network: Network,
    params: Any,
    tokens_RL: jax.Array,
    past: Sequence[KeyValues] = (),
    past_length_R: jax.Array | None = None,
) -> tuple[jax.Array, Sequence[KeyValues]]:
    """Hidden states [R, L, D] and keys and values; see `Transformer.hidden`."""
    return network.bind(params).hidden(tokens_RL, past=past, past_length_N=past_length_R)


def token_logp(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    *,
    temperature: float,
) -> jax.Array:
    """log π(target | hidden), float32 [R, A], of the softmax of logits / temperature.

    The logits of all tokens are never held at once: chunks of tokens are computed one after the
    other and again in the backward pass.
    """
    R, A, D = hidden_RAD.shape
    head_VD = network.bind(params).head_VD(hidden_RAD.dtype)

    def logp(hidden_XD: jax.Array, target_X: jax.Array) -> jax.Array:
        logits = jnp.einsum("xd,vd->xv", hidden_XD, head_VD, preferred_element_type=jnp.float32)
        logits = logits / temperature
        chosen = jnp.take_along_axis(logits, target_X[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=1)

    chunk = max(1, LOGITS_AT_ONCE // head_VD.shape[0])
    flat_hidden, flat_target = hidden_RAD.reshape(R * A, D), target_RA.reshape(R * A)
    if R * A <= chunk:
        return logp(flat_hidden, flat_target).reshape(R, A)
    chunks = -(-R * A // chunk)
    pad = chunks * chunk - R * A
    flat_hidden = jnp.pad(flat_hidden, ((0, pad), (0, 0))).reshape(chunks, chunk, D)
    flat_target = jnp.pad(flat_target, (0, pad)).reshape(chunks, chunk)
    out = jax.lax.map(lambda xs: jax.checkpoint(logp)(*xs), (flat_hidden, flat_target))
    return out.reshape(-1)[: R * A].reshape(R, A)


def pick(x_RLD: jax.Array, position_RA: jax.Array) -> jax.Array:
    """Rows' entries at positions: [R, A, D]."""
    return jnp.take_along_axis(x_RLD, position_RA[:, :, None], axis=1)
