"""The sampler: many conversations decoded together, with a KV cache that lives across turns."""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax import config
from seeupo_jax.policy.attention import KeyValues
from seeupo_jax.policy.network import Network
from seeupo_jax.policy.transformer import new_cache


class Sampling(NamedTuple):
    """What is fixed about sampling; hashable."""

    temperature: float
    top_k: int | None
    top_p: float | None
    max_tokens: int
    end_ids: tuple[int, ...]


class Streams(NamedTuple):
    """What a trajectory's random numbers derive from: nothing that its batch shares or shifts.

    seed: of the run. iteration: or any other number that keeps two collections apart.
    task_N, member_N: who the trajectory is. turn: which turn is sampled.
    """

    seed: jax.Array
    iteration: jax.Array
    task_N: jax.Array
    member_N: jax.Array
    turn: jax.Array


class Sampled(NamedTuple):
    """One turn of every row. tokens_NA, logp_NA: valid up to count_N, the end token included."""

    tokens_NA: np.ndarray
    logp_NA: np.ndarray
    count_N: np.ndarray


def task_number(task_id: str) -> int:
    """A task's number for `Streams`; the same on every machine."""
    return zlib.crc32(task_id.encode())


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
        before = jnp.cumsum(p, axis=1) - p
        kept = (before < top_p).at[:, 0].set(True)
        rows = jnp.arange(logits_NV.shape[0])[:, None]
        keep_NV = jnp.zeros_like(kept).at[rows, order].set(kept)
        logits_NV = jnp.where(keep_NV, logits_NV, -jnp.inf)
    return logits_NV


def draw(
    logits_NV: jax.Array, keys_N: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """A token a row and its log-probability under the distribution that it was drawn from."""
    logits = filter_logits(
        logits_NV / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    token_N = jax.vmap(jax.random.categorical)(keys_N, logits)
    chosen = jnp.take_along_axis(logits, token_N[:, None], axis=1)[:, 0]
    return token_N, chosen - jax.nn.logsumexp(logits, axis=1)


def stream_keys(streams: Streams) -> jax.Array:
    """One random key a row."""

    def key(task: jax.Array, member: jax.Array) -> jax.Array:
        key = jax.random.key(streams.seed)
        for number in (streams.iteration, task, member, streams.turn):
            key = jax.random.fold_in(key, number)
        return key

    return jax.vmap(key)(streams.task_N, streams.member_N)


@functools.partial(jax.jit, static_argnames=("network", "sampling"), donate_argnames="cache")
def sample_turn(
    network: Network,
    sampling: Sampling,
    params: Any,
    cache: list[KeyValues],
    chunk_NL: jax.Array,
    start_N: jax.Array,
    length_N: jax.Array,
    streams: Streams,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], list[KeyValues]]:
    """Appends a chunk to every row's cache by prefill, then decodes until every row's end token.

    Args:
      chunk_NL: new context tokens; start_N: the position of the first; length_N: how many are real
        (0: the row takes no part and its cache stays as it is).

    Returns: (tokens [N, A], logp [N, A], count [N]) and the cache. The last token sampled is not in
      the cache: it starts the next chunk, and after the last turn it is never computed.
    """
    model = network.bind(params)
    nowhere = cache[0].k.shape[1]
    offset_L = jnp.arange(chunk_NL.shape[1])[None, :]
    position_NL = jnp.where(offset_L < length_N[:, None], start_N[:, None] + offset_L, nowhere)
    with jax.named_scope("rollout/prefill"):
        hidden, cache = model.extend(chunk_NL, position_NL, cache)
    last = jnp.maximum(length_N - 1, 0)[:, None, None]
    hidden_N1D = jnp.take_along_axis(hidden, last, axis=1)
    keys_N = stream_keys(streams)
    head_VD = model.head_VD(hidden.dtype)
    end_ids = jnp.asarray(sampling.end_ids)

    def sample(step: jax.Array, hidden_N1D: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_NV = jnp.einsum(
            "nd,vd->nv", hidden_N1D[:, 0], head_VD, preferred_element_type=jnp.float32
        )
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_N, step)
        return draw(logits_NV, keys, sampling)

    def record(step, hidden_N1D, tokens_NA, logp_NA, count_N, alive_N):
        token_N, logp_N = sample(step, hidden_N1D)
        tokens_NA = tokens_NA.at[:, step].set(jnp.where(alive_N, token_N, 0))
        logp_NA = logp_NA.at[:, step].set(jnp.where(alive_N, logp_N, 0.0))
        ended_N = (token_N[:, None] == end_ids[None, :]).any(axis=1)
        return tokens_NA, logp_NA, count_N + alive_N, alive_N & ~ended_N

    def body(carry):
        step, cache, *rows = carry
        tokens_NA, _, _, alive_N = rows
        previous_N1 = tokens_NA[:, step - 1][:, None]
        position_N = jnp.where(alive_N, start_N + length_N + step - 1, nowhere)
        hidden_N1D, cache = model.extend(previous_N1, position_N[:, None], cache)
        return step + 1, cache, *record(step, hidden_N1D, *rows)

    def unfinished(carry):
        step, *_, alive_N = carry
        return (step < sampling.max_tokens) & alive_N.any()

    shape = (chunk_NL.shape[0], sampling.max_tokens)
    empty = (jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(shape[0], jnp.int32))
    with jax.named_scope("rollout/decode"):
        first = record(0, hidden_N1D, *empty, length_N > 0)
        out = jax.lax.while_loop(unfinished, body, (jnp.int32(1), cache, *first))
    _, cache, tokens_NA, logp_NA, count_N, _ = out
    return (tokens_NA, logp_NA, count_N), cache


class Engine:
    """Samples turns for a fixed number of rows; holds their cache and their unfed last tokens."""

    def __init__(
        self,
        network: Network,
        rollout: config.Rollout,
        end_ids: tuple[int, ...],
        *,
        rows: int,
        cache_sharding: jax.sharding.Sharding | None = None,
    ):
        self.network, self.rows, self.max_context = network, rows, rollout.max_context
        self.sampling = Sampling(
            rollout.temperature, rollout.top_k, rollout.top_p, rollout.max_action_tokens, end_ids
        )
        self._cache_sharding = cache_sharding
        self._cache: list[KeyValues] = []
        self._position_N = np.zeros(rows, np.int32)
        self._unfed: list[list[int]] = []

    def start(self) -> None:
        """Forgets every conversation; rows begin empty."""
        if not self._cache:
            cache = new_cache(self.network.arch, self.rows, self.max_context)
            self._cache = jax.device_put(cache, self._cache_sharding)
        self._position_N = np.zeros(self.rows, np.int32)
        self._unfed = [[] for _ in range(self.rows)]

    def rewind(self, row: int, length: int) -> None:
        """Forgets what a row holds beyond its first `length` tokens; 0 empties it.

        What the cache has beyond is never seen: a query attends to positions up to its own, and
        each of these is written again before.
        """
        cached = int(self._position_N[row])
        self._unfed[row] = self._unfed[row][: max(0, length - cached)]
        self._position_N[row] = min(length, cached)

    def fits(self, row: int, context: list[int]) -> bool:
        """Whether the row can take this context and a full action after it."""
        used = self._position_N[row] + len(self._unfed[row]) + len(context)
        return bool(used + self.sampling.max_tokens <= self.max_context)

    def turn(self, params: Any, contexts: list[list[int]], streams: Streams) -> Sampled:
        """Appends each row's new context and samples its next action.

        Args:
          contexts: new context tokens a row; an empty one leaves the row out. Each must `fits`.
        """
        chunks = [
            self._unfed[row] + context if context else [] for row, context in enumerate(contexts)
        ]
        length_N = np.array([len(chunk) for chunk in chunks], np.int32)
        chunk_NL = np.zeros((self.rows, chunk_bucket(int(length_N.max()))), np.int32)
        for row, chunk in enumerate(chunks):
            chunk_NL[row, : len(chunk)] = chunk
        out, self._cache = sample_turn(
            self.network,
            self.sampling,
            params,
            self._cache,
            chunk_NL,
            self._position_N,
            length_N,
            streams,
        )
        sampled = Sampled(*jax.device_get(out))
        for row in np.flatnonzero(length_N):
            count = sampled.count_N[row]
            self._position_N[row] += length_N[row] + count - 1
            self._unfed[row] = [int(sampled.tokens_NA[row, count - 1])]
        return sampled


def chunk_bucket(length: int) -> int:
    """The compiled chunk length that holds `length` tokens: 16, 24, 32, 48, 64, 96, ..."""
    size = 16
    while size < length:
        power_of_two = size & (size - 1) == 0
        size = size * 3 // 2 if power_of_two else size * 4 // 3
    return size
