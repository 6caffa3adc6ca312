"""Demonstrations and conversations as a rollout would record them."""

import chat_cases
import numpy as np
import pytest
from imitation_cases import MESSAGES, TOOLS, demonstration, tokenized, tokenizer
from rollout_cases import Saying, make_worker

from seeupo_jax.configuration import schema
from seeupo_jax.envs.base import Demonstration, StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.learner.imitation.action_segments import Tokenized, to_segments
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.types import CONTEXT


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


class Recital(Saying):
    """A sampler of one row that says a demonstration's actions."""

    concurrency = 1

    def __init__(self, actions):
        self._actions = actions

    def fits(self, context):
        return True

    def said(self, turn):
        tokens = tokenizer().action(self._actions[turn.turn])
        return Action(turn.key, tokens, [0.0] * len(tokens))


@pytest.mark.parametrize("last", [len(MESSAGES), len(MESSAGES) - 1], ids=["answered", "unanswered"])
def test_a_demonstration_is_what_a_rollout_of_it_records(last):
    shown = demonstration(*MESSAGES[:last])
    pool = EnvPool(lambda: Replay(shown), 1, workers=1, timeout_s=60)
    engine = Recital(Replay(shown).actions)
    worker = make_worker(engine, pool, tokenizer(), max_turns=5)
    numbers = CollectionOptions(seed=0)
    collected = collect(worker, None, group_requests(["t"], 1, 1), numbers)
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


@pytest.mark.parametrize("weight, train_on", [(0, "all"), (1, "last")])
def test_an_action_of_weight_0_or_one_before_the_last_is_context(weight, train_on):
    pair = demonstration(
        *(("user", "red"), ("assistant", "find red"), ("tool", "blue"), ("assistant", "blue"))
    )
    pair.messages[1]["weight"] = weight
    ((segment,),) = tokenized([pair], train_on=train_on)
    first, second = (tokenizer().action(text) for text in ("find red", "blue"))
    before = len(segment.tokens_L) - len(second)
    assert segment.turn_L.tolist() == [CONTEXT] * before + [1] * len(second)
    begun = tokenizer().begin(pair.messages[:1], TOOLS).tokens + first
    assert segment.tokens_L[: len(begun)].tolist() == begun
    assert segment.tokens_L[before:].tolist() == second


@pytest.mark.exhaustive
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
    ((only,),) = Tokenized([shown], thinker, train_on="last")
    assert only.tokens_L.tolist() == second.tokens_L.tolist()


USER = {"role": "user", "content": "Where is order 4075?"}
FIRST = {"role": "assistant", "content": "Whose?"}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"name": "Ann"}}}
RESULT = {"role": "tool", "content": "Lost."}
THOUGHT, SAID = "<think>\nI look it up.\n</think>\n\n", "Lost, I fear."


@pytest.mark.exhaustive
@pytest.mark.parametrize("train_on, trained", [("all", [0, 2]), ("last", [2])])
def test_text_beside_a_call_is_context_as_the_library_renders_it(train_on, trained):
    """Llama's template leaves that text out; a message with it is not trained."""
    calls = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    messages = [USER, FIRST, USER, calls, RESULT, {"role": "assistant", "content": SAID}]
    shown = Demonstration(tuple(messages[:3] + [calls | {"weight": 0}] + messages[4:]), ())
    (segment,) = to_segments(shown, chat_cases.make("llama3_2"), train_on)
    before = [chat_cases.library_tokens("llama3_2", messages[:place]) for place in (1, 5)]
    texts = [chat_cases.encode("llama3_2", text + "<|eot_id|>") for text in ("Whose?", SAID)]
    assert segment.tokens_L.tolist() == before[1] + texts[1]
    turn_L = np.full(len(segment.tokens_L), CONTEXT)
    for turn, context, text in zip([0, 2], before, texts, strict=True):
        if turn in trained:
            turn_L[len(context) : len(context) + len(text)] = turn
    assert segment.turn_L.tolist() == turn_L.tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight, train_on", [(0, "all"), (1, "last")])
def test_only_a_trained_message_needs_the_thought_that_the_header_opens(weight, train_on):
    library, thinker = chat_cases.thinking(chat_cases.FORGETS_THOUGHTS)
    messages = [USER, FIRST, USER]
    answer = {"role": "assistant", "content": THOUGHT + SAID}
    shown = Demonstration((USER, FIRST | {"weight": weight}, USER, answer), ())
    (segment,) = to_segments(shown, thinker, train_on)
    before = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    said = chat_cases.encode("qwen3", THOUGHT.removeprefix("<think>\n") + SAID + "<|im_end|>")
    assert segment.tokens_L.tolist() == before + said
    assert segment.turn_L.tolist() == [CONTEXT] * len(before) + [1] * len(said)


def test_a_segment_ends_with_the_last_trained_message():
    answers = [("assistant", "find red"), ("tool", "blue"), ("assistant", "blue")]
    shown = demonstration(("user", "red"), *answers)
    shown.messages[-1]["weight"] = 0
    (segment,) = to_segments(shown, tokenizer())
    assert segment.tokens_L[-1] == tokenizer().end_ids[0] and segment.turn_L[-1] == 0
