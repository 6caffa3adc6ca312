"""FLOPs of our programs by their formulas, from an architecture and the shapes of a pass.

Of all devices together; only matrix products count, a multiply-add as two. The rest (norms,
softmax, rotations, the optimizer) grows with a width instead of its square.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import QUERIES_AT_LEAST, SCORES_AT_ONCE
from seeupo_jax.policy.kernels.fused import select_kernel
from seeupo_jax.policy.kernels.gated_delta import CHUNK
from seeupo_jax.policy.kernels.tree_kernels import BLOCK as TREE_BLOCK

_SPLASH_BLOCKS = range(128, 512 + 1, 128)  # as `policy/kernels/fused.py` cuts queries and keys
# Matrix products of attention, forwards and backwards: the fused kernels for TPU make the scores
# anew in each of their two backward passes.
_ATTENTION_BACKWARD = {"xla": 2.0, "cudnn": 2.5, "splash": 3.5, "trees": 3.5}


@dataclass(frozen=True)
class Pass:
    """A pass over rows: each computes `new` tokens after `past` known ones, logits at `head`.

    trees: whether rows hold token trees; otherwise sequences, which a fused kernel may take.
    cached: whether the known ones are in the sampler's cache.
    """

    rows: int
    new: int
    past: int = 0
    head: int = 0
    trees: bool = False
    cached: bool = False


def parameters(arch: Architecture, *, active: bool = False) -> int:
    """The number of parameters of a network, with adapters.

    Args:
      active: count only the experts that one token is routed to.
    """
    tables = (1 if arch.tied else 2) * arch.vocab_size * arch.width
    return tables + arch.width + sum(_layer(arch, i, active) for i in range(arch.layers))


def gathered_parameters(arch: Architecture, mesh: Mapping[str, int]) -> float:
    """Parameters that a device multiplies by, once gathered over the axes that only store them.

    `tensor` cuts every matrix but those that latents come from, `expert` those of experts; norms
    and routers count as matrices do.

    Args:
      mesh: sizes of the mesh's axes by name.
    """
    layers = sum(map(arch.is_sparse, range(arch.layers)))
    experts = layers * _experts(arch, arch.moe.experts) if layers else 0
    of_latents = [math.prod(_of_attention(arch)[name]) for name in _whole(arch)]
    whole = arch.layers * sum(of_latents)
    dense = parameters(arch) - experts - whole
    return whole + (dense + experts / mesh["expert"]) / mesh["tensor"]


def six_nd(arch: Architecture, tokens: int) -> int:
    """The usual estimate of training on so many tokens: 6 FLOPs per token and active parameter."""
    return 6 * parameters(arch, active=True) * tokens


def forward_flops(arch: Architecture, work: Pass, *, computed: bool = False) -> float:
    """FLOPs of a pass forwards.

    Args:
      computed: False counts what the result needs: of attention, the keys that a query sees. True
        counts what our programs multiply: of attention, what the kernel for whole rows does not
        skip.
    """
    kernel = _kernel(arch, work)
    mixed = _attention(arch, work, kernel, computed) + _states(arch, work, computed)
    return _projections(arch, work) + mixed + _head(arch, work)


def turn_step_flops(
    arch: Architecture,
    rows: int,
    length: int,
    action: int,
    *,
    trees: bool = True,
    each: int = 1,
    refresh: int = 0,
    chunks: int = 1,
    critic: str = "none",
    computed: bool = False,
) -> float:
    """FLOPs of a sweep's step on one turn: forwards, backwards, and the refresh of weights.

    Args:
      rows: of all microbatches. length, action: tokens of a row, and of its actions.
      trees: whether rows hold token trees.
      each: conversations of a row, equally long, whose attention is counted apart.
      refresh: tokens of a chunk by which a row is continued for the refresh; 0 without one.
      chunks: of each row.
      critic: the value function's kind; a `model` is stepped too, a `head` is next to nothing.
      computed: False counts what the result needs, were each row one sequence. True counts what our
        programs multiply: what is computed again in the backward pass too, attention as its kernel
        does it, and logits as if all of a row were actions (where few are, fewer are computed).
        With adapters a little more, since the first layer's backward pass ends early.
    """
    new = length // each
    work = Pass(rows * each, new, head=new if computed and action else action, trees=trees)
    kernel = _kernel(arch, work)
    projections, head = _projections(arch, work), _head(arch, work)
    attention = _attention(arch, work, kernel, computed)
    adapters = _adapters(arch, work)
    trained = 2 if arch.lora is None else 1  # of frozen matrices only their input's gradient
    backward = trained * (projections - adapters + head) + 2 * adapters
    if computed:
        backward += _ATTENTION_BACKWARD[kernel] * attention + _recomputed(
            arch, work, kernel, attention
        )
    else:
        backward += 2 * attention
    states = _states(arch, work, computed)
    backward += (3 if computed else 2) * states  # a chunk's products are computed again
    after = Pass(rows * chunks, refresh, new, head=refresh if computed else action)
    refreshed = forward_flops(arch, after, computed=computed) if refresh else 0.0
    # A transformer of the policy's architecture, without logits.
    if critic == "model":
        critic_flops = turn_step_flops(
            arch, rows, length, 0, trees=trees, each=each, computed=computed
        )
    else:
        critic_flops = 0.0
    return projections + attention + states + head + backward + refreshed + critic_flops


def scorer_step_flops(
    arch: Architecture,
    kind: str,
    rows: int,
    length: int,
    *,
    trees: bool = True,
    each: int = 1,
    computed: bool = False,
) -> float:
    """FLOPs of a step of the model that scores turns, on all of an iteration's rows.

    Args:
      kind: a `policy` has logits, a `model` next to none; a `head` only reads what a pass forwards
        makes.
      each: as of `turn_step_flops`.
    """
    if kind == "head":
        work = Pass(rows * each, length // each, trees=trees)
        return forward_flops(arch, work, computed=computed)
    action = length if kind == "policy" else 0
    return turn_step_flops(arch, rows, length, action, trees=trees, each=each, computed=computed)


def _kernel(arch: Architecture, work: Pass) -> str:
    """The kernel of attention that a pass of this shape uses."""
    if work.past or (work.trees and arch.attention != "splash"):
        return "xla"
    if work.trees:
        return "trees"
    kernel, _ = select_kernel(
        arch.attention,
        length=work.new,
        head_dim=arch.head_dim,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        dtype=arch.dtype,
        cap=arch.attention_cap is not None,
        sinks=arch.sinks,
    )
    return "xla" if kernel == "all_pairs" else kernel


def _matrices(arch: Architecture, layer: int) -> dict[str, tuple[int, int]]:
    """The shapes of a layer's projections by their names; of experts, those of the shared one."""
    D, F = arch.width, arch.moe.shared_width if arch.is_sparse(layer) else arch.mlp_width
    shapes = _of_attention(arch)
    if arch.is_recurrent(layer):
        delta = arch.delta
        values = delta.value_heads * delta.value_dim
        # The first two are one matrix in some families, the third two in others.
        shapes = {"in_proj_qkv": (D, delta.channels), "in_proj_z": (D, values)}
        shapes |= {"in_proj_ba": (D, 2 * delta.value_heads), "out_proj": (values, D)}
    if F:
        shapes |= {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
    return shapes


def _of_attention(arch: Architecture) -> dict[str, tuple[int, int]]:
    """The shapes of attention's projections by their names."""
    D, q, latent = arch.width, arch.heads * arch.head_dim, arch.latent
    if latent is None:
        kv, q_and_gate = arch.kv_heads * arch.head_dim, (1 + arch.attention_gate) * q
        return {"q_proj": (D, q_and_gate), "k_proj": (D, kv), "v_proj": (D, kv), "o_proj": (q, D)}
    # The absorbed form multiplies queries and results by the parts of kv_b_proj: as many products.
    shapes = {
        "kv_a_proj_with_mqa": (D, latent.cached_dim),
        "kv_b_proj": (latent.kv_rank, arch.heads * (latent.nope_dim + latent.value_dim)),
        "o_proj": (arch.heads * latent.value_dim, D),
    }
    if latent.q_rank is None:
        return {"q_proj": (D, q)} | shapes
    return {"q_a_proj": (D, latent.q_rank), "q_b_proj": (latent.q_rank, q)} | shapes


def _whole(arch: Architecture) -> tuple[str, ...]:
    """Attention's projections to what all heads share."""
    if arch.latent is None:
        return ()
    return tuple(x for x in ("q_a_proj", "kv_a_proj_with_mqa") if x in arch.latent.projections)


def _layer(arch: Architecture, layer: int, active: bool) -> int:
    """Parameters of a layer."""
    matrices, biases = _matrices(arch, layer), _biases(arch)
    count = sum(math.prod(shape) for shape in matrices.values())
    count += sum(shape[1] for name, shape in matrices.items() if biases.get(name))
    count += sum(_low_rank(arch, layer, matrices).values())
    if arch.is_sparse(layer):
        experts = arch.moe.per_token if active else arch.moe.experts
        count += _router(arch) + _experts(arch, experts) + _expert_low_rank(arch, experts)
    count += _norms(arch, layer)
    if arch.is_recurrent(layer):  # its convolution, and a decay's two numbers a head
        return count + arch.delta.channels * arch.delta.conv + 2 * arch.delta.value_heads
    return count + (arch.heads if arch.sinks else 0)


def _norms(arch: Architecture, layer: int) -> int:
    """Parameters of a layer's norms."""
    count = 2 * (arch.input_norms + arch.output_norms) * arch.width
    if arch.is_recurrent(layer):
        return count + arch.delta.value_dim
    if arch.latent is not None:
        return count + (arch.latent.q_rank or 0) + arch.latent.kv_rank
    if not arch.qk_norm:
        return count
    heads = arch.heads + arch.kv_heads if arch.joint_qk_norm else 2
    return count + heads * arch.head_dim


def _experts(arch: Architecture, count: int) -> int:
    """Parameters of so many experts of a layer."""
    D, F = arch.width, arch.moe.mlp_width
    return count * (3 * D * F + (2 * F + D if arch.moe.biases else 0))


def _expert_low_rank(arch: Architecture, count: int) -> int:
    """Parameters of the adapters of so many experts of a layer; gate and up read one factor."""
    lora = arch.expert_adapters
    if lora is None:
        return 0
    D, F = arch.width, arch.moe.mlp_width
    sizes = {"gate_proj": D + F, "up_proj": F, "down_proj": F + D}
    return count * lora.total_rank * sum(sizes[name] for name in sizes if name in lora.targets)


def _router(arch: Architecture) -> int:
    """Parameters of a layer's router, and of the gate of the expert that all tokens use."""
    moe = arch.moe
    count = arch.width * (moe.experts + moe.shared_gate)
    return count + moe.experts * (moe.selection_bias + moe.biases)


def _biases(arch: Architecture) -> dict[str, bool]:
    biased = ("q_proj", "k_proj", "v_proj") if arch.latent is None else _whole(arch)
    qkv = dict.fromkeys(biased, arch.qkv_bias)
    mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), arch.mlp_bias)
    return qkv | mlp | {"o_proj": arch.out_bias}


def _low_rank(
    arch: Architecture, layer: int, matrices: Mapping[str, tuple[int, int]]
) -> dict[str, int]:
    """Parameters of the adapters of a layer's projections."""
    lora = arch.layer_adapters(layer)
    adapted = () if lora is None else lora.targets
    rank = 0 if lora is None else lora.total_rank
    return {name: rank * sum(matrices[name]) for name in matrices if name in adapted}


def _projections(arch: Architecture, work: Pass) -> float:
    """FLOPs of all layers' matrices, adapters and experts included; each is used once per token."""
    used = 0
    for layer in range(arch.layers):
        matrices = _matrices(arch, layer)
        used += sum(math.prod(shape) for shape in matrices.values())
        used += sum(_low_rank(arch, layer, matrices).values())
        if arch.is_sparse(layer):
            each = 3 * arch.moe.mlp_width + 1  # and the sum of the experts' results
            used += arch.width * (arch.moe.experts + arch.moe.per_token * each)
            used += arch.width * arch.moe.shared_gate
            used += _expert_low_rank(arch, arch.moe.per_token)
    return 2.0 * work.rows * work.new * used


def _adapters(arch: Architecture, work: Pass) -> float:
    ranks = sum(
        sum(_low_rank(arch, layer, _matrices(arch, layer)).values()) for layer in range(arch.layers)
    )
    if arch.moe is not None:
        sparse = sum(map(arch.is_sparse, range(arch.layers)))
        ranks += sparse * _expert_low_rank(arch, arch.moe.per_token)
    return 2.0 * work.rows * work.new * ranks


def _head(arch: Architecture, work: Pass) -> float:
    return 2.0 * work.rows * work.head * arch.vocab_size * arch.width


def _attention(arch: Architecture, work: Pass, kernel: str, computed: bool) -> float:
    """Scores, and the sums of values that they weigh: 2 FLOPs a pair, head and channel of each.

    Of latents, a key's value is narrower; computed it is as wide as the key, and in the sampler
    both are as wide as what the cache has.
    """
    windows = (arch.window(layer) for layer in range(arch.layers) if not arch.is_recurrent(layer))
    count = _COMPUTED[kernel] if computed else _seen
    pairs = sum(count(work.new, work.past, window) for window in windows)
    channels = 2 * arch.head_dim
    if arch.latent is not None and not computed:
        channels = arch.head_dim + arch.latent.value_dim
    elif work.cached:
        channels = 2 * arch.cached_dim
    return 2.0 * work.rows * arch.heads * channels * pairs


def _states(arch: Architecture, work: Pass, computed: bool) -> float:
    """Of recurrent layers their convolutions, and the gated delta rule: three products of a vector
    and a state a token and head; computed in chunks there are those of pairs of tokens, too."""
    if arch.delta is None:
        return 0.0
    delta, layers = arch.delta, sum(map(arch.is_recurrent, range(arch.layers)))
    k, v, chunk = delta.key_dim, delta.value_dim, min(CHUNK, work.new)
    of_head = 6 * k * v
    if computed and work.new > 1:
        of_head += chunk * (4 * k + 3 * v + 2 * chunk)
    of_token = delta.value_heads * of_head + 2 * delta.channels * delta.conv
    return 1.0 * work.rows * work.new * layers * of_token


def _seen(new: int, past: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    if window is None:
        return new * past + new * (new + 1) // 2
    return sum(min(past + i + 1, window) for i in range(new))


def _all(new: int, past: int, window: int | None) -> int:
    return new * (past + new)


def _of_splash(new: int, past: int, window: int | None) -> int:
    return _in_blocks(new, window, max(size for size in _SPLASH_BLOCKS if new % size == 0))


def _of_trees(new: int, past: int, window: int | None) -> int:
    """Pairs as if a row were one sequence, the upper bound: branches do not see each other."""
    return _in_blocks(new, window, TREE_BLOCK)


def _in_blocks(new: int, window: int | None, block: int) -> int:
    """Pairs in the blocks that a kernel does not skip: those where any query sees any key."""
    far = new if window is None else window
    count = sum(
        (key + 1) * block - 1 > query * block - far
        for query in range(-(-new // block))
        for key in range(query + 1)
    )
    return count * block**2


_COMPUTED = {"xla": _all, "splash": _of_splash, "cudnn": _seen, "trees": _of_trees}


def _recomputed(arch: Architecture, work: Pass, kernel: str, attention: float) -> float:
    """FLOPs that the backward pass recomputes, forwards.

    These are all products of a layer but its last (the projection down, or the sum over a token's
    experts), which no gradient needs; all logits; and the scores of chunks of queries. Whether
    attention runs in chunks is decided as if one device had all rows: few devices have so few that
    it would differ.
    """
    sparse = [arch.is_sparse(layer) for layer in range(arch.layers)]
    last = sum(arch.moe.per_token if moe else arch.mlp_width for moe in sparse) * arch.width
    layers = _projections(arch, work) - 2.0 * work.rows * work.new * last
    # The results of our own kernels are kept by their name; "xla" are plain products.
    recomputed = {
        "none": 0.0,
        "dots": attention if kernel in ("splash", "cudnn") else 0.0,
        "attention": layers + (0.0 if kernel == "trees" else attention),
        "full": layers + attention,
    }[arch.remat]
    at_once = SCORES_AT_ONCE // (work.rows * arch.heads * (work.past + work.new))
    if kernel == "xla" and work.new > max(QUERIES_AT_LEAST, at_once):
        recomputed += attention / 2
    return recomputed + _head(arch, work)
