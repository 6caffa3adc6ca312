"""The policy as pure functions of its parameters: what the learner and the sampler run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from seeupo_jax.parallel.mesh import RULES, axis_parts, per_shard
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import KeyValues
from seeupo_jax.policy.kernels.derivatives import RECOMPUTE
from seeupo_jax.policy.token_statistics import (
    STATISTICS,
    UNLIKELY,
    ChunkSoftmax,
    TopTokens,
    forward_kl_from,
    top_tokens,
)
from seeupo_jax.policy.transformer import Computed, Transformer
from seeupo_jax.types import NO_TARGET

# Logits that a device holds at once: 2**24 float32 are 64 MiB. Tokens come in chunks of at most
# these, and of few tokens, since a chunk without a target is skipped.
LOGITS_AT_ONCE, TOKENS_AT_ONCE = 2**24, 128
VOCAB, LENGTH = RULES["vocab"], RULES["length"]
ADAPTER = "lora_"  # how the names of adapters' parameters begin


@dataclass(frozen=True)
class Network:
    """A transformer without its parameters; hashable, so programs are compiled once per network."""

    arch: Architecture
    graph: nnx.GraphDef

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.arch, self.graph))

    def __hash__(self) -> int:
        return self._hash  # each call of a program asks for it; the graph's takes 3 ms

    def bind(self, params: Any) -> Transformer:
        """The module with these parameters in it."""
        return nnx.merge(self.graph, nnx.State(params))

    def logical_axes(self) -> Any:
        """The logical axis names of every parameter: a tree of tuples, shaped as the parameters."""
        return _copy(_shapes(self.arch)[2])


def abstract_network(arch: Architecture) -> tuple[Network, Any]:
    """The network of an architecture, and the shapes of its parameters; nothing is allocated."""
    network, shapes, _ = _shapes(arch)
    return network, _copy(shapes)


class _OneKey:
    """Stands for `nnx.Rngs` where only shapes matter.

    Tracing the counter of a stream takes time that grows with the square of the number of layers.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


@functools.cache  # asked for by every part of a run
def _shapes(arch: Architecture) -> tuple[Network, Any, Any]:
    """The network, its parameters' shapes, and the names of their axes."""
    model = nnx.eval_shape(lambda: Transformer(arch, _OneKey()))
    _, state = nnx.split(model)

    def is_param(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    names = jax.tree.map(lambda p: p.get_metadata("logical"), state, is_leaf=is_param)
    return *split_model(model), nnx.to_pure_dict(names)


def _copy(tree: Any) -> Any:
    return {key: _copy(node) if isinstance(node, dict) else node for key, node in tree.items()}


def split_trainable(network: Network, params: Any) -> tuple[Any, Any]:
    """Splits a tree shaped as the parameters into the trained and the frozen part.

    With adapters the trained part is the adapters; without them it is everything.
    """
    return (params, {}) if network.arch.lora is None else _part(params)


def join_params(params: Any, frozen: Any) -> Any:
    """Joins the two parts of `split_trainable`."""
    if not (isinstance(params, dict) and isinstance(frozen, dict)):
        return params
    both = {key: join_params(params[key], frozen[key]) for key in params.keys() & frozen.keys()}
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


def split_model(model: Transformer) -> tuple[Network, Any]:
    """A module as its network and its parameters (a nested dict of arrays)."""
    graph, state = nnx.split(model)
    return Network(model.arch, graph), nnx.to_pure_dict(state)


def hidden(
    network: Network, params: Any, tokens_RL: jax.Array, **rows: Any
) -> tuple[jax.Array, Sequence[KeyValues]]:
    """Hidden states [R, L, D] and keys and values; see `Transformer.hidden`."""
    return network.bind(params).hidden(tokens_RL, **rows)


def compute(network: Network, params: Any, tokens_RL: jax.Array, **rows: Any) -> Computed:
    """See `Transformer.compute`."""
    return network.bind(params).compute(tokens_RL, **rows)


def token_logp(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    *,
    temperature: float,
) -> jax.Array:
    """log π(target | hidden), float32 [R, A], of the softmax of logits / temperature.

    The softmax is over the ids that a token has (`Architecture.unassigned`), as the sampler's is.
    Where the target is `NO_TARGET`, the result is undefined.

    Every device computes its own rows and its own part of the vocabulary, in successive chunks of
    tokens, and skips chunks without a target. It never holds the logits of all its tokens: the
    backward pass recomputes them.
    """
    return _predict(network, params, hidden_RAD, target_RA, temperature)[0]


def token_logp_and_entropy(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    *,
    temperature: float,
) -> tuple[jax.Array, jax.Array]:
    """`token_logp`, and the entropy in nats of the distribution that each is of."""
    return _predict(network, params, hidden_RAD, target_RA, temperature, "entropy")


def token_logp_and_statistics(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    *,
    temperature: float,
) -> tuple[jax.Array, ...]:
    """`token_logp_and_entropy`, and the sum of the squared probabilities of each distribution.

    That sum is the probability that two draws are equal (collision probability), in (0, 1].
    """
    names = ("entropy", "collision")
    return _predict(network, params, hidden_RAD, target_RA, temperature, *names)


def token_logp_and_forward_kl(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    teacher_top_RAK: jax.Array,
    teacher_top_logp_RAJ: jax.Array,
    *,
    temperature: float,
    entropy: bool = False,
) -> tuple[jax.Array, ...]:
    """`token_logp`, any entropy, and the forward KL divergence from a teacher of each distribution.

    Args:
      teacher_top_RAK, teacher_top_logp_RAJ: as of `token_logp_and_top`, or `UNTAUGHT`.

    Returns: float32 [R, A] each; the divergence is `distillation.forward_kl` over the K tokens and
      all others.
    """
    names = ("entropy",) if entropy else ()
    teacher = (teacher_top_RAK, teacher_top_logp_RAJ)
    return _predict(network, params, hidden_RAD, target_RA, temperature, *names, teacher=teacher)


def token_logp_and_top(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    *,
    temperature: float,
    count: int,
    among: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`token_logp`, and the likeliest tokens of the distribution that each is of.

    Args:
      count: K. among: the architecture whose tokens they are chosen from; it has more than K.

    Returns: float32 [R, A]; int32 [R, A, K], the likeliest first; float32 [R, A, K + 1], their
      log-probabilities, and as the last that of all other tokens together.
    """
    top = TopTokens(count, among)
    return _predict(network, params, hidden_RAD, target_RA, temperature, top=top)


def _predict(
    network: Network,
    params: Any,
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    temperature: float,
    *statistics: str,
    teacher: tuple[jax.Array, ...] = (),
    top: TopTokens | None = None,
) -> tuple[jax.Array, ...]:
    """`token_logp`, and what `_chunk_logp` finds besides, in its order."""
    predict = functools.partial(
        _chunk_logp, network.arch, temperature, axis_parts("vocab") > 1, statistics, top
    )
    local = functools.partial(_token_logp, predict)
    tokens = ("rows", "length")
    inputs = [(*tokens, "embed"), tokens, ("vocab", "embed"), *((*tokens, None) for _ in teacher)]
    run = per_shard(local, inputs, tokens)
    return run(hidden_RAD, target_RA, network.bind(params).head_VD(hidden_RAD.dtype), *teacher)


def _token_logp(
    predict: Callable[..., tuple[jax.Array, ...]],
    hidden_RAD: jax.Array,
    target_RA: jax.Array,
    head_VD: jax.Array,
    *teacher: jax.Array,
) -> tuple[jax.Array, ...]:
    """`token_logp` on one device, by `predict` of one chunk of tokens after the other."""
    (R, A, _), V = hidden_RAD.shape, head_VD.shape[0]
    at_once = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // V))
    chunks = -(-R * A // at_once)
    chunk = -(-R * A // chunks)  # of equal size: less than one token per chunk is padding
    pad = chunks * chunk - R * A

    def chunked(x_RAE: jax.Array) -> jax.Array:
        """A row [E] of numbers of every token, by chunk."""
        x_XE = jnp.pad(x_RAE.reshape(R * A, -1), ((0, pad), (0, 0)))
        return x_XE.reshape(chunks, chunk, x_XE.shape[1])

    target_CX = jnp.pad(target_RA.reshape(R * A), (0, pad), constant_values=NO_TARGET)
    # The chunks' gradients are summed in float32, whatever the products' dtype.
    wide_VD = head_VD.astype(jnp.float32)
    of_tokens = chunked(hidden_RAD), target_CX.reshape(chunks, chunk), tuple(map(chunked, teacher))
    out = _by_chunk(predict, wide_VD, *of_tokens)
    whole = (x.reshape(-1, *x.shape[2:])[: R * A] for x in out)
    return tuple(x.reshape(R, A, *x.shape[1:]) for x in whole)


def _chunk_logp(
    arch: Architecture,
    temperature: float,
    cut: bool,
    statistics: tuple[str, ...],
    top: TopTokens | None,
    wide_VD: jax.Array,
    hidden_XD: jax.Array,
    target_X: jax.Array,
    teacher: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """`token_logp` of tokens whose logits are held at once, and statistics of their distributions.

    cut: other devices have the rest of the vocabulary. statistics: none, `entropy`, or that and
      `collision`. teacher: of which the divergence is found after these, or nothing. top: the
      likeliest tokens that are found at last; None: none.
    """
    V = wide_VD.shape[0]
    word_V = jnp.arange(V) + (jax.lax.axis_index(VOCAB) * V if cut else 0)

    def over_parts(reduce: Callable, x: jax.Array) -> jax.Array:
        return reduce(x, VOCAB) if cut else x

    head_VD = wide_VD.astype(hidden_XD.dtype)
    product = jnp.einsum("xd,vd->xv", hidden_XD, head_VD, preferred_element_type=jnp.float32)
    logits, unassigned_V = arch.logits(product) / temperature, None
    if arch.unassigned:
        unassigned_V = jnp.asarray(arch.unassigned_V())[word_V]
        logits = jnp.where(unassigned_V[None, :], UNLIKELY, logits)
    of_target = jnp.where(target_X[:, None] == word_V[None, :], logits, 0).sum(axis=1)
    peak = over_parts(jax.lax.pmax, jax.lax.stop_gradient(logits.max(axis=1)))
    total = over_parts(jax.lax.psum, jnp.exp(logits - peak[:, None]).sum(axis=1))
    logp_X = over_parts(jax.lax.psum, of_target) - peak - jnp.log(total)
    if not (statistics or teacher or top):
        return (logp_X,)
    # Behind a barrier: fusion with the above would change the log-probability's last bit.
    product, peak, total = jax.lax.optimization_barrier((product, peak, total))
    below = arch.logits(product) / temperature - peak[:, None]
    softmax = ChunkSoftmax(below, total, unassigned_V, word_V, VOCAB if cut else None)
    found = [logp_X, *(STATISTICS[name](softmax) for name in statistics)]
    if teacher:
        found.append(forward_kl_from(softmax, *teacher))
    if top is not None:
        found += top_tokens(softmax, top, arch.vocab_size)
    return tuple(found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_chunk(
    predict: Callable[..., tuple[jax.Array, ...]],
    wide_VD: jax.Array,
    hidden_CXD: jax.Array,
    target_CX: jax.Array,
    teacher_CX: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """`predict` of one chunk after the other; 0, without work, for chunks without a target.

    Its derivative is written by hand: JAX's own would write and sum a gradient of the whole head
    for every chunk, also zeros. A sweep of a small model on CPU took 4% longer.
    """

    def of_chunk(chunk: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        shapes = jax.eval_shape(predict, wide_VD, *chunk)

        def zeros(*_: Any) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)

        return jax.lax.cond(_any(chunk[1]), predict, zeros, wide_VD, *chunk)

    return jax.lax.map(of_chunk, (hidden_CXD, target_CX, teacher_CX))


def _any(target_X: jax.Array) -> jax.Array:
    return (target_X != NO_TARGET).any()


def _by_chunk_forward(
    predict: Callable[..., tuple[jax.Array, ...]],
    wide_VD: CustomVJPPrimal,
    hidden_CXD: CustomVJPPrimal,
    target_CX: CustomVJPPrimal,
    teacher_CX: tuple[CustomVJPPrimal, ...],
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    arrays = wide_VD.value, hidden_CXD.value, target_CX.value, tuple(x.value for x in teacher_CX)
    # A frozen head (of a policy with adapters) has no derivative.
    return _by_chunk(predict, *arrays), (*arrays, () if wide_VD.perturbed else None)


def _by_chunk_backward(
    predict: Callable[..., tuple[jax.Array, ...]],
    residuals: tuple[Any, ...],
    d_out: tuple[Any, ...],
) -> tuple[jax.Array | None, jax.Array, None, None]:
    wide_VD, hidden_CXD, target_CX, teacher_CX, trains = residuals

    def zero(d: Any) -> jax.Array:
        return jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d

    def work(
        d_wide_VD: Any, hidden_XD: jax.Array, target_X: jax.Array, teacher: Any, d_out: Any
    ) -> Any:

        def of_chunk(wide_VD: jax.Array, hidden_XD: jax.Array) -> Any:
            return predict(wide_VD, hidden_XD, target_X, teacher)

        with jax.named_scope(RECOMPUTE):
            if trains is None:
                _, back = jax.vjp(functools.partial(of_chunk, wide_VD), hidden_XD)
            else:
                _, back = jax.vjp(of_chunk, wide_VD, hidden_XD)
        *of_head, d_XD = back(d_out)
        return jax.tree.map(jnp.add, d_wide_VD, *of_head), d_XD

    def add(d_wide_VD: Any, chunk: tuple[Any, ...]) -> Any:

        def idle(
            d_wide_VD: jax.Array, hidden_XD: jax.Array, *_: Any
        ) -> tuple[jax.Array, jax.Array]:
            return d_wide_VD, jnp.zeros_like(hidden_XD)

        return jax.lax.cond(_any(chunk[1]), work, idle, d_wide_VD, *chunk)

    start = None if trains is None else jnp.zeros_like(wide_VD)
    chunks = hidden_CXD, target_CX, teacher_CX, tuple(map(zero, d_out))
    d_wide_VD, d_hidden_CXD = jax.lax.scan(add, start, chunks)
    return d_wide_VD, d_hidden_CXD, None, None


_by_chunk.defvjp(_by_chunk_forward, _by_chunk_backward, symbolic_zeros=True)


def gather_positions(x_RLD: jax.Array, position_RA: jax.Array) -> jax.Array:
    """Rows' entries at positions: [R, A, D], with A cut over the devices that L is cut over."""
    cut, A = axis_parts("length"), position_RA.shape[1]
    position_RA = jnp.pad(position_RA, ((0, 0), (0, -A % cut)))
    run = per_shard(
        _pick if cut == 1 else _pick_from_parts,
        [("rows", "blocks", "embed"), ("rows", None)],
        ("rows", "length", "embed"),
    )
    return run(x_RLD, position_RA)[:, :A]


def _pick(x_RLD: jax.Array, position_RA: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_RLD, position_RA[:, :, None], axis=1)


def _pick_from_parts(x_RLD: jax.Array, position_RA: jax.Array) -> jax.Array:
    """Each device contributes its part of the rows, and receives its part of the positions."""
    L = x_RLD.shape[1]
    own_RA = position_RA - jax.lax.axis_index(LENGTH) * L
    inside_RA = (own_RA >= 0) & (own_RA < L)
    picked = jnp.where(inside_RA[:, :, None], _pick(x_RLD, own_RA.clip(0, L - 1)), 0)
    return jax.lax.psum_scatter(picked, LENGTH, scatter_dimension=1, tiled=True)
