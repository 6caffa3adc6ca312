"""Batches of conversations, and a step on their mean loss."""

import dataclasses
import functools
import itertools

import chat_cases
import imitation_cases
import jax
import learner_cases as cases
import numpy as np
import numpy_model as model
import optax
import pytest
from flax import nnx
from imitation_cases import SHAPES, batches, demonstration, demonstrations, tokenizer

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.learner.batching import SegmentBatch, Shapes, all_actions, lay_out, turn_batch
from seeupo_jax.learner.imitation.action_segments import Tokenized, to_segments
from seeupo_jax.learner.imitation.imitation_batches import Batches, pack
from seeupo_jax.learner.imitation.imitation_step import Imitation
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy.transformer import Transformer

APART = dataclasses.replace(SHAPES, share=False)  # no token stands for two conversations


def first(made, count):
    return list(itertools.islice(made, count))


def test_batches_are_the_same_whenever_they_are_iterated():
    made = batches()
    for one, two in zip(first(made, 20), first(made, 20), strict=True):
        cases.assert_trees_equal(one, two)


def rows_of(batch):
    """The demonstrations of a batch, those of a row one after the other."""
    batch = batch.rows
    length = batch.tokens_MRL.shape[-1]
    rows = zip(
        batch.tokens_MRL.reshape(-1, length), batch.depth_MRL.reshape(-1, length), strict=True
    )
    parts = [part for t, d in rows for part in np.split(t, np.flatnonzero(d == 0)[1:])]
    return [part.tolist() for part in parts if part.any()]


def test_every_demonstration_comes_once_an_epoch_in_an_order_of_the_seed():
    def shown(seed):
        return [row for batch in first(batches(seed, APART), 80) for row in rows_of(batch)]

    # 80 batches of 2: five whole blocks, four whole epochs.
    every = [to_segments(d, tokenizer())[0].tokens_L.tolist() for d in demonstrations()]
    assert sorted(shown(3)) == sorted(every * 4)
    assert shown(3) != shown(4)


def test_rows_of_a_batch_are_of_similar_length_only_where_blocks_are_sorted():
    def lengths(block):
        made = batches(shapes=APART, block=block)
        return [list(map(len, rows_of(batch))) for batch in first(made, 16)]

    assert max(abs(one - two) for one, two in lengths(16)) <= 2  # a word and its space
    assert lengths(16) != sorted(lengths(16))
    assert sum(abs(one - two) > 2 for one, two in lengths(1)) >= 8


def test_a_step_is_on_the_mean_over_action_tokens_alone_and_moves_the_average_after_it():
    """Against the NumPy twin: value, and gradients by a step of plain gradient descent."""
    rows = SegmentBatch.of(cases.ragged())
    pieces = all_actions(rows)
    layout = lay_out(rows, pieces, cases.SHAPES, cases.SHAPES.lengths[-1:])
    batch = turn_batch(rows, layout, cases.SHAPES, {}, action=32)
    network, start = cases.policy()
    weights = cases.weights_of(start)
    arch = model.Architecture(cases.ARCH.head_dim, cases.ARCH.rope.theta, cases.ARCH.norm_eps)
    tokens = sum(piece.position_A.size for piece in pieces)
    loss, grads = 0.0, {}
    for piece in pieces:
        logp_L, backward = model.token_logps(weights, rows.tokens[piece.segment], arch, 1.0)
        loss -= logp_L[piece.position_A].sum() / tokens
        slope_L = np.zeros(len(logp_L))
        slope_L[piece.position_A] = -1 / tokens
        backward(slope_L, grads)

    sgd = optax.sgd(1.0)
    imitation, average = Imitation(network, sgd, ema=0.75), cases.jittered(start, 1.0)
    state = cases.new_state(sgd)._replace(ema=cases.new_state(sgd, average).params)
    np.testing.assert_allclose(imitation.loss(state.params, batch) / tokens, loss, rtol=1e-5)
    after, metrics = imitation.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    averages = cases.weights_of(average), cases.weights_of(cases.host(after.ema))
    for name, value in cases.weights_of(cases.host(after.params)).items():
        np.testing.assert_allclose(value, weights[name] - grads[name], atol=1e-5, err_msg=name)
        old, new = (each[name] for each in averages)
        np.testing.assert_allclose(new, 0.75 * old + 0.25 * value, atol=1e-6, err_msg=name)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert (after.step, metrics["update_skipped"]) == (1, 0)


ALIKE = [("system", "find the colour"), ("user", "take red"), ("assistant", "find red")]


def test_how_conversations_are_packed_does_not_change_a_step():
    """Shared prefixes, with equal first actions; rows of their own; one row a microbatch."""
    ends = (["tool", "red"], ["tool", "blue green"], ["user", "take blue"])
    shown = [demonstration(*ALIKE, end, ("assistant", "blue")) for end in ends]
    # The same conversation again: every token of it counts twice.
    segments = [to_segments(each, tokenizer()) for each in (*shown, shown[0])]
    packed = {
        "shared": Shapes((96,), action=96, rows=2, trajectories=4),
        "apart": Shapes((96,), action=96, rows=2, trajectories=4, share=False),
        "rows": Shapes((48,), action=48, rows=1, trajectories=4, share=False),
    }
    sgd, results = optax.sgd(1.0), {}
    for name, shapes in packed.items():
        batch = pack(segments, shapes)
        state = cases.new_state(sgd, small_policy()[1])
        after, metrics = Imitation(small_policy()[0], sgd).step(state, batch.rows)
        results[name] = cases.host(after.params), float(metrics["loss"]), batch
    params, loss, shared = results["shared"]
    for own, own_loss, batch in results.values():
        assert own_loss == pytest.approx(loss, rel=1e-6)
        cases.assert_trees_close(own, params, 1e-6)
        assert (batch.trained, batch.tokens) == (shared.trained, shared.tokens)
    assert shared.computed < shared.tokens / 2
    assert results["apart"][2].computed == shared.tokens
    assert int(results["rows"][2].rows.microbatches) > 1


@functools.cache
def small_policy():
    arch = Architecture(
        vocab_size=tokenizer().vocab_size,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_width=24,
    )
    return split_model(Transformer(arch, nnx.Rngs(0)))


def test_demonstrations_longer_than_the_longest_row_are_cut_and_counted():
    roles = ("user", "assistant", "tool", "assistant")
    contents = ("a", "b", "c" * 60, "d")
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))
    shapes = Shapes((24,), action=8, rows=2, trajectories=2)
    cut = imitation_cases.tokenized([Demonstration(messages)] * 32, limit=24)
    batch = next(iter(Batches(cut, shapes, batch_size=2, seed=0)))
    first_action = len(tokenizer().action("b"))
    assert batch.rows.mask_PA.sum(axis=1).tolist() == [first_action, first_action]
    assert cut.counts["cut"] == 2


def test_prompts_that_fill_the_longest_row_are_told():
    full = batches(shapes=Shapes((3,), action=8, rows=2, trajectories=2), limit=3)
    with pytest.raises(ValueError, match="begin with more than 3 tokens"):
        next(iter(full))


@pytest.mark.parametrize("block", [1, 16])
def test_batches_resume_where_they_were_left(block):
    made = batches(block=block)
    for number in (0, 3, 16, 21):
        wanted = first(made, number + 2)[number:]
        for one, two in zip(wanted, first(made.after(number), 2), strict=True):
            cases.assert_trees_equal(one, two)


def test_a_held_out_conversation_comes_once_in_its_order():
    rows = [row for batch in batches(shapes=APART).in_order() for row in rows_of(batch)]
    every = [to_segments(d, tokenizer())[0].tokens_L.tolist() for d in demonstrations()]
    assert sorted(rows) == sorted(every)


def test_a_segment_for_each_rewritten_history_is_a_row_of_its_own_action():
    chat = schema.Chat(template_kwargs={"enable_thinking": False})
    small = chat_cases.small_library()
    thinker = HuggingFaceTokenizer(small, chat, generation={}, where="the small one")
    shown = demonstration(
        ("user", "red"), ("assistant", "find"), ("user", "is"), ("assistant", "A")
    )
    shapes = Shapes((256, 512), action=16, rows=2, trajectories=2)
    batch = next(iter(Batches(Tokenized([shown] * 4, thinker), shapes, batch_size=2, seed=0)))
    # Two conversations, four rows: each action once a conversation.
    tokens = [len(thinker.action(text)) for text in ("find", "A")] * 2
    assert sorted(batch.rows.mask_PA.sum(axis=1).tolist()) == sorted(tokens)
    assert batch.rows.microbatches == 1  # both conversations are the same tokens, computed once
    assert batch.computed * 3 < batch.tokens
