"""The warm start: demonstrations as a rollout would record them, batches, and imitation."""

import functools
import itertools

import chat_cases
import jax
import learner_cases as cases
import numpy as np
import numpy_model as model
import optax
import pytest
from flax import nnx
from rollout_cases import make_worker

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Demonstration, StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.learner.batching import Rows, Shapes, all_actions, lay_out, turn_batch
from seeupo_jax.learner.warm_start import Batches, imitate, to_segments, train_stage
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.chat_template import HuggingFaceTokenizer
from seeupo_jax.policy.files.tokenizer import train_tokenizer
from seeupo_jax.policy.network import split
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.types import CONTEXT

WORDS = ("red", "green", "blue", "find", "take")
TOOLS = ({"name": "find", "parameters": {"properties": {"colour": {}}, "required": ["colour"]}},)
# Two messages answer the first action; the last one answers the last action and is never read.
MESSAGES = (
    ("system", "find the colour"),
    ("user", "take red"),
    ("assistant", "find red"),
    ("tool", "red blue"),
    ("user", "take blue"),
    ("assistant", "take blue"),
    ("tool", "green"),
    ("assistant", "blue"),
    ("user", "red"),
)


def demonstration(*messages):
    messages = messages if messages else MESSAGES
    return Demonstration(tuple({"role": r, "content": c} for r, c in messages), TOOLS)


@functools.cache
def tokenizer():
    chat = schema.Chat(system=True, tools="signatures")
    texts = [content for _, content in MESSAGES]
    return train_tokenizer(texts, WORDS, vocab_size=276, chat=chat)


class Replay:
    """An environment that answers as a demonstration's did."""

    def __init__(self, demonstration):
        messages = demonstration.messages
        actions = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        ends = [*actions[1:], len(messages)]
        self.actions = [messages[i]["content"] for i in actions]
        self._first, self._tools = messages[: actions[0]], demonstration.tools
        self._answers = [messages[i + 1 : end] for i, end in zip(actions, ends, strict=True)]
        self._turn = 0

    def reset(self, task_id, seed):
        return self._first, self._tools

    def step(self, text):
        turn, self._turn = self._turn, self._turn + 1
        assert text == self.actions[turn]
        return StepResult(self._answers[turn], 0.5, done=self._turn == len(self.actions))

    def score(self):
        return 1.0

    def close(self):
        pass


class Recital:
    """A sampler of one row that says a demonstration's actions."""

    rows = 1

    def __init__(self, actions):
        self._actions = actions

    concurrency, busy, poll_interval_s = 1, False, None

    def begin(self, params, **numbers):
        self._asked = []

    def owns(self, group):
        return True

    def fits(self, context):
        return True

    def submit(self, turn):
        self._asked.append(turn)

    def step(self, unfinished, stop=False):
        asked, self._asked = self._asked, []
        actions = [(turn.key, tokenizer().action(self._actions[turn.turn])) for turn in asked]
        done = [Action(key, tokens, [0.0] * len(tokens)) for key, tokens in actions]
        return done if unfinished else None

    def release(self, key):
        pass

    def usage(self):
        return {}

    def seconds(self):
        return {}


@pytest.mark.parametrize("last", [len(MESSAGES), len(MESSAGES) - 1], ids=["answered", "unanswered"])
def test_a_demonstration_is_what_a_rollout_of_it_records(last):
    shown = demonstration(*MESSAGES[:last])
    pool = EnvPool(lambda: Replay(shown), 1, workers=1, timeout_s=60)
    engine = Recital(Replay(shown).actions)
    worker = make_worker(engine, pool, tokenizer(), max_turns=5)
    numbers = CollectionOptions(seed=0, iteration=1)
    collected = collect(worker, None, group_requests(["t"], 1), numbers)
    pool.close()
    (trajectory,) = collected.trajectories
    (recorded,) = trajectory.segments
    assert trajectory.stop == "done"
    (made,) = to_segments(shown, tokenizer())
    for name in ("tokens_L", "turn_L", "logp_L"):
        one, two = getattr(made, name), getattr(recorded, name)
        np.testing.assert_array_equal(one, two, err_msg=name)
        assert one.dtype == two.dtype, name


def test_turns_are_the_actions_with_their_end_tokens_and_nothing_else():
    (segment,) = to_segments(demonstration(), tokenizer())
    (end,) = tokenizer().end_ids
    header = tokenizer().observation([])
    actions = ["find red", "take blue", "blue"]
    for turn, text in enumerate(actions):
        (where,) = np.nonzero(segment.turn_L == turn)
        tokens = segment.tokens_L[where].tolist()
        assert tokens == [*tokenizer().action(text)] and tokens[-1] == end
        assert where.tolist() == list(range(where[0], where[-1] + 1))
        assert segment.tokens_L[where[0] - 1 : where[0]].tolist() == header
        assert segment.turn_L[where[0] - 1] == CONTEXT
    assert set(segment.turn_L) == {CONTEXT, 0, 1, 2}
    assert segment.turn_L[-1] == 2  # nothing after the last action


def test_two_actions_in_a_row_are_two_turns():
    pair = (("user", "red"), ("assistant", "find red"), ("assistant", "blue"))
    (segment,) = to_segments(demonstration(*pair), tokenizer())
    first, second = (tokenizer().action(text) for text in ("find red", "blue"))
    header = tokenizer().observation([])
    count = len(first) + len(header) + len(second)
    assert segment.tokens_L[-count:].tolist() == [*first, *header, *second]
    assert segment.turn_L[-count:].tolist() == [0] * len(first) + [CONTEXT] + [1] * len(second)


def test_a_demonstration_has_a_segment_for_every_history_that_the_template_rewrites():
    chat = schema.Chat(template_kwargs={"enable_thinking": False})
    small = chat_cases.small_library()
    thinker = HuggingFaceTokenizer(small, chat, generation={}, where="the small one")
    shown = demonstration(
        ("user", "red"), ("assistant", "find"), ("user", "is"), ("assistant", "A")
    )
    first, second = to_segments(shown, thinker)
    for turn, (segment, text) in enumerate([(first, "find"), (second, "A")]):
        action = thinker.action(text)
        before = thinker.begin(shown.messages[: 2 * turn + 1], TOOLS).tokens
        assert segment.tokens_L.tolist() == before + action
        assert segment.turn_L.tolist() == [CONTEXT] * len(before) + [turn] * len(action)
    shapes = Shapes((256, 512), action=16, rows=2, trajectories=2)
    batch = next(iter(Batches([shown] * 4, thinker, shapes, batch_size=2, seed=0)))
    # Two demonstrations, four rows: each action once a demonstration.
    tokens = [len(thinker.action(text)) for text in ("find", "A")] * 2
    assert sorted(batch.mask_PA.sum(axis=1).tolist()) == sorted(tokens)
    assert batch.microbatches == 2


@functools.cache
def demonstrations():
    """Forty that differ in their words and in length."""
    made = []
    for i in range(40):
        said = " ".join([WORDS[i % 5]] * (1 + i // 5))
        made.append(demonstration(("user", said), ("assistant", WORDS[i % 3])))
    return made


SHAPES = Shapes((16, 48), action=16, rows=2, trajectories=2)


def batches(seed=3, shapes=SHAPES):
    return Batches(demonstrations(), tokenizer(), shapes, batch_size=2, seed=seed)


def first(made, count):
    return list(itertools.islice(made, count))


def test_batches_are_the_same_whenever_they_are_iterated():
    made = batches()
    for one, two in zip(first(made, 20), first(made, 20), strict=True):
        cases.assert_trees_equal(one, two)


def rows_of(batch):
    """The demonstrations of a batch, those of a row one after the other."""
    length = batch.tokens_MRL.shape[-1]
    rows = zip(
        batch.tokens_MRL.reshape(-1, length), batch.depth_MRL.reshape(-1, length), strict=True
    )
    parts = [part for t, d in rows for part in np.split(t, np.flatnonzero(d == 0)[1:])]
    return [part.tolist() for part in parts if part.any()]


def test_every_demonstration_comes_once_an_epoch_in_an_order_of_the_seed():
    def shown(seed):
        return [row for batch in first(batches(seed), 80) for row in rows_of(batch)]

    # 80 batches of 2: five whole blocks, four whole epochs.
    every = [to_segments(d, tokenizer())[0].tokens_L.tolist() for d in demonstrations()]
    assert sorted(shown(3)) == sorted(every * 4)
    assert shown(3) != shown(4)


def test_rows_of_a_batch_are_of_similar_length():
    lengths = [list(map(len, rows_of(b))) for b in first(batches(), 16)]
    assert max(abs(one - two) for one, two in lengths) <= 2  # a word and its space
    assert lengths != sorted(lengths)


def test_the_loss_is_the_mean_over_action_tokens_alone():
    """Against the NumPy twin: value, and gradients by a step of plain gradient descent."""
    rows = Rows.of(cases.ragged())
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
    state = cases.new_state(sgd)
    params, _, got = imitate(network, sgd, state.params, state.opt_state, batch)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    for name, value in cases.weights_of(cases.host(params)).items():
        np.testing.assert_allclose(value, weights[name] - grads[name], atol=1e-5, err_msg=name)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_stage_learns_its_demonstrations():
    arch = Architecture(
        vocab_size=tokenizer().vocab_size,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_width=24,
    )
    network, params = split(Transformer(arch, nnx.Rngs(0)))
    stage = schema.WarmStartStage(steps=80, learning_rate=0.03)
    shapes = Shapes((48,), action=8, rows=2, trajectories=2)
    seen = []
    on_step = lambda step, loss: seen.append((step, loss))  # noqa: E731
    train_stage(network, params, stage, batches(shapes=shapes), on_step=on_step)
    steps, losses = zip(*seen, strict=True)
    assert steps == tuple(range(1, 81))
    assert losses[0]() > 4 and np.mean([loss() for loss in losses[-5:]]) < 1.5


def test_demonstrations_longer_than_the_longest_row_are_cut_and_counted():
    roles = ("user", "assistant", "tool", "assistant")
    contents = ("a", "b", "c" * 60, "d")
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))
    shapes = Shapes((24,), action=8, rows=2, trajectories=2)
    cut = Batches([Demonstration(messages)] * 4, tokenizer(), shapes, batch_size=2, seed=0)
    batch = next(iter(cut))
    first_action = len(tokenizer().action("b"))
    assert batch.mask_PA.sum(axis=1).tolist() == [first_action, first_action]
    assert cut.counts["cut"] == 2


def test_prompts_that_fill_the_longest_row_are_told():
    full = batches(shapes=Shapes((3,), action=8, rows=2, trajectories=2))
    with pytest.raises(ValueError, match="begin with more than 3 tokens"):
        next(iter(full))
