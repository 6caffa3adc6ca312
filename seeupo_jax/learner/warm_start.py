"""Supervised training on demonstrations, action tokens only: a policy from nothing."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.learner.batching import Rows, Shapes, all_actions, lay_out, turn_batch
from seeupo_jax.learner.step.rows import microbatch, row_logp
from seeupo_jax.policy.files.tokenizer import Tokenizer, Transcript
from seeupo_jax.policy.network import Network
from seeupo_jax.types import NO_TARGET, Segment, TurnBatch

BLOCK = 16  # batches sorted by length together


def to_segments(demonstration: Demonstration, tokenizer: Tokenizer) -> tuple[Segment, ...]:
    """A demonstration as the tokens that a rollout of the same conversation would have.

    Returns: one segment, unless the chat template rewrites history.
    """
    messages = demonstration.messages
    roles = [message["role"] for message in messages]
    start = roles.index("assistant")
    conversation = tokenizer.begin(messages[:start], demonstration.tools)
    transcript, turn = Transcript(), 0
    while start < len(messages):
        transcript.read(conversation.tokens)
        action = tokenizer.action(messages[start]["content"])
        transcript.act(action, turn, [0.0] * len(action))
        end = start + 1
        while end < len(messages) and roles[end] != "assistant":
            end += 1
        if end < len(messages):
            conversation = conversation.extend(action, messages[start + 1 : end])
        turn, start = turn + 1, end
    return transcript.segments()


@dataclass(frozen=True)
class Batches:
    """Endless batches of demonstrations in a seeded order, the same whenever they are iterated.

    A batch has `batch_size` demonstrations, and a row for each of their segments. Rows of one batch
    have similar lengths: each block of 16 batches is sorted by length before it is cut, and the
    batches of a block come in random order.
    """

    demonstrations: Sequence[Demonstration]
    tokenizer: Tokenizer
    shapes: Shapes
    batch_size: int
    seed: int
    counts: Counter[str] = field(default_factory=Counter)  # `cut`: longer than the longest row

    def __iter__(self) -> Iterator[TurnBatch]:
        import grain  # what only uses `to_segments` goes without it

        source = grain.MapDataset.source(self.demonstrations).shuffle(seed=self.seed).repeat()
        for block in itertools.count():
            start = block * BLOCK * self.batch_size
            indices = range(start, start + BLOCK * self.batch_size)
            shown = [to_segments(source[i], self.tokenizer) for i in indices]
            shown.sort(key=lambda segments: max(len(s.tokens_L) for s in segments))
            order = np.random.default_rng((self.seed, block)).permutation(BLOCK)
            for index in order:
                first = index * self.batch_size
                batch = shown[first : first + self.batch_size]
                yield self._pad([segment for segments in batch for segment in segments])

    def _pad(self, segments: Sequence[Segment]) -> TurnBatch:
        limit = self.shapes.lengths[-1]
        self.counts["cut"] += sum(len(s.tokens_L) > limit for s in segments)
        cut = [Segment(s.tokens_L[:limit], s.turn_L[:limit], s.logp_L[:limit]) for s in segments]
        rows = Rows(
            tuple(s.tokens_L for s in cut),
            tuple(s.turn_L for s in cut),
            tuple(s.logp_L for s in cut),
            np.arange(len(cut), dtype=np.int32),
            np.arange(len(cut), dtype=np.int32),
            len(cut),
            1 + max(int(s.turn_L.max()) for s in cut),
        )
        pieces = all_actions(rows)
        if not pieces:
            raise ValueError(
                f"warm start: all {len(segments)} demonstrations of a batch begin with more than"
                f" {limit} tokens; allowed: prompts below config.rollout.max_context."
            )
        action = self.shapes.allowed(max(piece.position_A.size for piece in pieces))[0]
        layout = lay_out(rows, pieces, self.shapes)
        return turn_batch(rows, layout, self.shapes, {}, action=action)


@functools.partial(
    jax.jit, static_argnames=("network", "optimizer"), donate_argnames=("params", "opt_state")
)
def imitate(
    network: Network,
    optimizer: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    batch: TurnBatch,
) -> tuple[Any, Any, jax.Array]:
    """One step on the mean negative log-likelihood of the action tokens; returns it too (nats)."""

    def loss(params: Any, row: TurnBatch) -> jax.Array:
        logp_RX, *_ = row_logp(network, params, row, 1.0)
        return -jnp.sum(jnp.where(row.target_MRX == NO_TARGET, 0.0, logp_RX))

    def body(index: jax.Array, carry: Any) -> Any:
        new = jax.value_and_grad(loss)(params, microbatch(batch, index))
        return jax.tree.map(jnp.add, carry, new)

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, grads = jax.lax.fori_loop(0, batch.microbatches, body, zeros)
    tokens = batch.mask_PA.sum()
    grads = jax.tree.map(lambda g: g / tokens, grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, total / tokens


def stage_optimizer(stage: schema.WarmStartStage) -> optax.GradientTransformation:
    """AdamW with a short rise and a cosine fall to a twentieth of the learning rate."""
    rise = max(1, min(200, stage.steps // 10))
    peak = stage.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, rise, stage.steps, peak / 20)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train_stage(
    network: Network,
    params: Any,
    stage: schema.WarmStartStage,
    batches: Batches,
    *,
    on_step: Callable[[int, Callable[[], float]], None],
) -> Any:
    """Runs one stage and returns the parameters; `params` are donated.

    Args:
      on_step: called after every step with the steps done and a function that gives the loss.
    """
    optimizer = stage_optimizer(stage)
    opt_state = jax.jit(optimizer.init)(params)
    for step, batch in zip(range(stage.steps), batches, strict=False):
        params, opt_state, loss = imitate(network, optimizer, params, opt_state, batch)
        on_step(step + 1, lambda loss=loss: float(loss))
    return params
