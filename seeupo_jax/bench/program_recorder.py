"""What a sweep gave to its compiled programs, and the FLOPs that they did with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.learner.learner import Program
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.planning.program_flops import Flops, Passes, Trips, count
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.kernels.attention import Past, Tree, tree_mask_of
from seeupo_jax.policy.kernels.fused import tree_blocks
from seeupo_jax.policy.kernels.tree_attention import block_for
from seeupo_jax.policy.kernels.tree_mask import visited_blocks
from seeupo_jax.policy.network import LOGITS_AT_ONCE, TOKENS_AT_ONCE
from seeupo_jax.types import NO_TARGET, TurnBatch

PROGRAMS = ("score", "turn_step", "refresh")  # of a learner


@dataclass(frozen=True)
class Call:
    """One execution: the program, the shapes of its arguments, and what of them decides its work.

    continued: None without a refresh in it.
    """

    name: str
    program: Program
    shapes: tuple[Any, ...]
    batch: TurnBatch
    continued: RefreshBatch | None

    @property
    def positions(self) -> int:
        """Of tokens that went through the network, padding included."""
        _, R, L = self.batch.tokens_MRL.shape
        rows = int(self.batch.microbatches) * R * L
        if self.continued is None:
            return rows
        *_, C = self.continued.tokens_MQRC.shape
        return rows + int(np.sum(self.continued.chunks_M)) * R * C


class Recorder:
    """Stands between a learner and its programs, and writes down calls while it is asked to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._recording = False

    def through(self, name: str, program: Program) -> Program:
        """What a learner calls for a program: its `through`."""
        return functools.partial(self._call, name, program) if name in PROGRAMS else program

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Records the calls meanwhile."""
        self.calls, self._recording = [], True
        try:
            yield self.calls
        finally:
            self._recording = False

    def _call(self, name: str, program: Program, *arguments: Any) -> Any:
        if self._recording:
            shapes = jax.tree.map(_shape, arguments)
            batch, *rest = arguments[1:3]
            continued = rest[0] if name == "turn_step" else None
            self.calls.append(Call(name, program, shapes, batch, continued))
        return program(*arguments)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    # Laid out as it was: the program that ran is not traced again.
    where = x.sharding if isinstance(x, jax.Array) else None
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=where)


def flops(calls: list[Call], arch: Architecture, platform: str) -> dict[str, Flops]:
    """Of all calls together, by program; each program is traced once a shape."""
    traced: dict[Any, Any] = {}
    total = dict.fromkeys(PROGRAMS, Flops())
    for call in calls:
        leaves, tree = jax.tree.flatten(call.shapes)
        key = (call.name, tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in traced:
            bound = call.program
            traced[key] = bound.func.trace(*bound.args, *call.shapes).jaxpr
        done = count(traced[key], trips(call, arch, platform), platform)
        total[call.name] = total[call.name].plus(done)
    return total


def trips(call: Call, arch: Architecture, platform: str = "cpu") -> Trips:
    """How often the loops of an execution run; windows are not counted."""
    batch, more, M = call.batch, call.continued, int(call.batch.microbatches)
    rows = [Tree(batch.depth_MRL[m], batch.end_MRL[m]) for m in range(M)]
    trees = [(tree, None) for tree in rows]
    passes = _passes(trees, [batch.target_MRX[m] for m in range(M)], arch, platform)
    if more is None:
        return Trips(M, passes)
    chunks = [(m, q) for m in range(M) for q in range(int(more.chunks_M[m]))]
    below = [
        (Tree(more.depth_MQRC[m, q], more.end_MQRC[m, q]), Past((), rows[m], more.at_MQRC[m, q]))
        for m, q in chunks
    ]
    targets = [more.target_MQRC[m, q] for m, q in chunks]
    return Trips(M, passes, len(chunks) / M if M else 0.0, _passes(below, targets, arch, platform))


def _passes(
    trees: list[tuple[Tree, Past | None]], targets: list[Any], arch: Architecture, platform: str
) -> Passes:
    """Of these microbatches or chunks, on average."""
    if not trees:
        return Passes(0.0, 0.0)
    block, blocks = block_for(arch.heads, arch.longest), tree_blocks(platform, arch.dtype)
    visits = np.concatenate([_visited(*tree, block, block).reshape(-1) for tree in trees])
    pairs: tuple[float, float] | tuple[None, None] = None, None
    if blocks is not None:  # of the platform's kernel, held by queries and by keys
        held, met = blocks
        by_queries = np.mean([_visited(*tree, held, met).sum() for tree in trees])
        pairs = float(by_queries), float(np.mean([_visited(*t, met, held).sum() for t in trees]))
    return Passes(float(visits.mean()), _predicting(targets, arch), *pairs)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _visited(tree: Tree, past: Past | None, block: int, key_block: int) -> jax.Array:
    """Blocks of keys that each block of queries meets, [rows, blocks of queries]."""
    return visited_blocks(tree_mask_of(tree, past), block=block, key_block=key_block).sum(2)


def _predicting(targets: list[Any], arch: Architecture) -> float:
    """The share of the chunks of tokens, as `network.token_logp` cuts them, that predict any."""
    at_once = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // arch.vocab_size))
    found = []
    for target_RX in targets:
        flat = np.asarray(target_RX).reshape(-1)
        chunks = -(-flat.size // at_once)
        chunk = -(-flat.size // chunks)
        padded = np.pad(flat, (0, chunks * chunk - flat.size), constant_values=NO_TARGET)
        found += (padded.reshape(chunks, chunk) != NO_TARGET).any(1).tolist()
    return float(np.mean(found))
