"""How a token is drawn: temperature, top-k, top-p, and each conversation's own random numbers."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.algorithms.importance_options import Importance
from seeupo_jax.parallel.mesh import axis_parts, per_shard
from seeupo_jax.policy.network import VOCAB


class Sampling(NamedTuple):
    """The static options of sampling; hashable.

    entropy_tokens: number of first tokens of each action whose entropy is computed.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    max_tokens: int
    end_ids: tuple[int, ...]
    entropy_tokens: int = 0


class Streams(NamedTuple):
    """The seeds of an action's random numbers, which do not depend on its batch.

    seed: of the run. iteration_R: or any other number that keeps two collections apart.
    task_R, member_R, turn_R: whose action it is, and which.
    """

    seed: jax.Array
    iteration_R: jax.Array
    task_R: jax.Array
    member_R: jax.Array
    turn_R: jax.Array


def task_number(task_id: str) -> int:
    """A task's number for `Streams`; the same on every machine."""
    return zlib.crc32(task_id.encode())


def branch_chance(seed: int, iteration: int, task: int, member: int, turn: int) -> float:
    """Uniform in [0, 1), on the host: decides whether an episode branches at a turn."""
    numbers = np.random.SeedSequence([seed, iteration, task, member], spawn_key=(turn,))
    return float(np.random.default_rng(numbers).random())


def stream_keys(streams: Streams, step_R: jax.Array) -> jax.Array:
    """One random key per row, for the token of this number of its action."""

    def key(*numbers: jax.Array) -> jax.Array:
        key = jax.random.key(streams.seed)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    _, *numbers_R = streams
    return jax.vmap(key)(*numbers_R, step_R)


def filter_logits(logits_NV: jax.Array, *, top_k: int | None, top_p: float | None) -> jax.Array:
    """Logits with -inf outside the k likeliest tokens and outside the nucleus of mass p.

    The nucleus is the smallest set of likeliest tokens whose mass reaches p; it is taken after
    top-k and always holds the likeliest token (Holtzman et al., arXiv:1904.09751).
    """
    V = logits_NV.shape[1]
    if top_k is not None and top_k < V:
        kth = jax.lax.top_k(logits_NV, top_k)[0][:, -1:]
        logits_NV = jnp.where(logits_NV >= kth, logits_NV, -jnp.inf)
    if top_p is not None and top_p < 1:
        order = jnp.argsort(-logits_NV, axis=1)
        p = jax.nn.softmax(jnp.take_along_axis(logits_NV, order, axis=1), axis=1)
        mass_before = jnp.cumsum(p, axis=1) - p
        in_top_p = (mass_before < top_p).at[:, 0].set(True)
        rows = jnp.arange(logits_NV.shape[0])[:, None]
        keep_NV = jnp.zeros_like(in_top_p).at[rows, order].set(in_top_p)
        logits_NV = jnp.where(keep_NV, logits_NV, -jnp.inf)
    return logits_NV


def truncation_note(
    *, top_k: int | None, top_p: float | None, grammar: str | None, constraints: bool = False
) -> str | None:
    """A sentence where tokens are drawn from less than the whole softmax; None where not.

    Args:
      constraints: whether calls may constrain their answers.
    """
    limits = {"top_k": top_k, "top_p": None if top_p == 1 else top_p, "grammar": grammar}
    set_ = [f"{name}={value}" for name, value in limits.items() if value is not None]
    said = [f"config.rollout.{', '.join(set_)}"] if set_ else []
    said += ["config.agent.constraints=True"] if constraints else []
    if not said:
        return None
    return (
        f"{', '.join(said)}: tokens are drawn from a subset of the softmax whose"
        " gradient is taken, which biases updates; forced tokens are left out"
        " (sweep/forced_fraction), and logp/sampler_trainer_gap_mean measures the cut-off mass"
    )


def quantization_note(quantize: str, importance: Importance | None, *, ahead: bool) -> str | None:
    """A warning if rounded matrices draw the tokens and nothing corrects for it; else None.

    Args:
      ahead: whether the previous policy samples; ratios are then to the sampler's own
        log-probabilities, which corrects for the rounding as importance weights do.
    """
    if quantize == "none" or importance is not None or ahead:
        return None
    return (
        f"config.rollout.quantize={quantize}: tokens are drawn from a slightly different policy"
        " (logp/sampler_trainer_gap_mean); config.algorithm.importance.clip=2 weighs them for it"
    )


def draw(
    logits_NV: jax.Array, keys_N: jax.Array, sampling: Sampling, *, masked: bool = False
) -> tuple[jax.Array, jax.Array]:
    """A token per row and its log-probability under the distribution that it was drawn from.

    Where top-k, top-p or a mask leave one candidate this is exactly 0, which marks the token as
    forced: the learner leaves it out. masked: whether logits may be -inf.
    """
    logits = filter_logits(
        logits_NV / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    token_N = pick(logits, jax.vmap(jax.random.uniform)(keys_N))
    logp_N = logp_of(logits, token_N)
    if masked or sampling.top_k is not None or sampling.top_p is not None:
        alone_N = jnp.isfinite(logits).sum(axis=1) == 1
        logp_N = jnp.where(alone_N, 0.0, logp_N)
    return token_N, logp_N


def logp_of(logits_NV: jax.Array, token_N: jax.Array) -> jax.Array:
    """Log-probabilities of tokens, one per row: float32 [N]."""
    drawn_N = jnp.take_along_axis(logits_NV, token_N[:, None], axis=1)[:, 0]
    return drawn_N - jax.nn.logsumexp(logits_NV, axis=1)


def pick(logits_NV: jax.Array, u_N: jax.Array) -> jax.Array:
    """The tokens at which the distributions' cumulative sums pass u: int32 [N].

    By inversion a token takes one random number, where a Gumbel's maximum takes one a candidate.
    Sums are over the parts of the vocabulary that devices hold, over blocks of a part, and over the
    tokens of a block.

    Args:
      logits_NV: float32; -inf: never picked.
      u_N: uniform in [0, 1).
    """
    return per_shard(_pick, (("rows", "vocab"), ("rows",)), ("rows",))(logits_NV, u_N)


def _pick(logits_NV: jax.Array, u_N: jax.Array) -> jax.Array:
    (N, V), cut = logits_NV.shape, axis_parts("vocab") > 1
    top_N = logits_NV.max(axis=1)
    top_N = jax.lax.pmax(top_N, VOCAB) if cut else top_N
    weight_NV = jnp.exp(logits_NV - top_N[:, None])
    block = math.isqrt(V - 1) + 1
    count = -(-V // block)
    weight_NBC = jnp.pad(weight_NV, ((0, 0), (0, count * block - V))).reshape(N, count, block)
    sum_NB = weight_NBC.sum(axis=2)
    own_N = sum_NB.sum(axis=1)
    sum_NS = jax.lax.all_gather(own_N, VOCAB, axis=1) if cut else own_N[:, None]
    wanted_N = u_N * sum_NS.sum(axis=1)
    part_N, before_part_N = _passed(sum_NS, wanted_N)
    block_N, before_block_N = _passed(sum_NB, wanted_N - before_part_N)
    weight_NC = jnp.take_along_axis(weight_NBC, block_N[:, None, None], axis=1)[:, 0]
    place_N, _ = _passed(weight_NC, wanted_N - before_part_N - before_block_N)
    token_N = block_N * block + place_N
    if not cut:
        return token_N
    here = jax.lax.axis_index(VOCAB)
    return jax.lax.psum(jnp.where(part_N == here, here * V + token_N, 0), VOCAB)


def _passed(weight_NX: jax.Array, wanted_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first entry above 0 at which the running sum exceeds `wanted`, and the sum before it.

    Sums are rounded: if none exceeds it, the last entry above 0.
    """
    X = weight_NX.shape[1]
    index_1X = jnp.arange(X)[None, :]
    # A cumulative sum as a product: as a scan it takes a CPU a second to compile.
    earlier_XX = jnp.arange(X)[:, None] < index_1X
    before_NX = jnp.matmul(weight_NX, earlier_XX.astype(jnp.float32), precision="highest")
    some_NX = weight_NX > 0
    passes_NX = some_NX & (before_NX + weight_NX > wanted_N[:, None])
    last_N = jnp.where(some_NX, index_1X, 0).max(axis=1)
    place_N = jnp.where(passes_NX, index_1X, last_N[:, None]).min(axis=1)
    return place_N, jnp.take_along_axis(before_NX, place_N[:, None], axis=1)[:, 0]


def relative_entropy(logits_NV: jax.Array, sampling: Sampling, tokens: int) -> jax.Array:
    """-Σ p log p / log(tokens) of the distributions that `draw` draws from: float32 [N], 0 to 1.

    tokens: the most that have a probability: V, without ids that no token has.
    """
    logits = filter_logits(
        logits_NV / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    logp_NV = jax.nn.log_softmax(logits, axis=1)
    # 0 log 0 is 0, also where a token is left out.
    each_NV = jnp.where(jnp.isfinite(logp_NV), jnp.exp(logp_NV) * logp_NV, 0.0)
    return -each_NV.sum(axis=1) / math.log(tokens)
