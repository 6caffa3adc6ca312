"""Conversations of gpt-oss: as openai-harmony renders and parses them, and as actions go on."""

import copy
import functools
import json

import chat_cases as cases
import pytest
from format_cases import HARMONY as OWN
from places import SUPPORT
from training_template_cases import SYSTEM, THANKS, USER, play

from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.calls import HistoryMessage, ModelCall
from seeupo_jax.agents.lineages import Lineages
from seeupo_jax.configuration import schema
from seeupo_jax.envs.thoughts import thoughts_end
from seeupo_jax.envs.tool_calls import ToolCall, skip_thoughts
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy.files.chat.call_ids import as_function
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.template_knowledge import knows_thoughts, resolve_format
from seeupo_jax.rollout.engine.grammar import Grammars

HARMONY = TOOL_FORMATS["harmony"]
# Made by openai-harmony with the real tokenizer, independently of any chat template.
TWIN = json.loads((SUPPORT / "chat_templates/harmony.json").read_text())
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALLED = f"{THOUGHT}<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
CALL = CALLED + '{"name": "x"}'
FINAL = f"{THOUGHT}<|channel|>final<|message|>There."
RESULT = {"role": "tool", "content": "7"}


@functools.cache
def make(template=None):
    library = copy.copy(cases.library("gptoss"))
    library.chat_template = OWN
    chat = schema.Chat(template=template)
    # As the model's generation_config.json has them.
    generation = {"eos_token_id": [200002, 199999, 200012]}
    return HuggingFaceTokenizer(library, chat, generation=generation, where="gpt-oss")


@pytest.mark.parametrize("case", TWIN["conversations"], ids=lambda case: case["name"])
def test_a_conversation_has_the_tokens_of_openai_s_library(case):
    tools = TWIN["tools"] if case["tools"] else ()
    assert make().begin(case["messages"], tools).tokens == case["tokens"]


@pytest.mark.parametrize("case", TWIN["actions"], ids=lambda case: case["text"][-40:])
def test_an_action_is_read_as_by_openai_s_library(case):
    tokenizer, text = make(), make().text(case["tokens"])
    assert (
        text + ("<|call|>" if case["text"].endswith("<|call|>") else "<|return|>") == (case["text"])
    )
    assert tokenizer.action(text) == case["tokens"]
    parts = case["messages"]
    thoughts = [part["text"] for part in parts if part["channel"] == "analysis"]
    said = [p["text"] for p in parts if p["channel"] != "analysis" and not p["recipient"]]
    calls = tuple(
        ToolCall(part["recipient"].removeprefix("functions."), json.loads(part["text"]))
        for part in parts
        if part["recipient"]
    )
    form = AnswerForm(HARMONY, thoughts_apart=True)
    assert form.parse(text) == ("\n\n".join(thoughts), "".join(said), calls)
    # Environments read what follows the thoughts.
    if not calls:
        assert skip_thoughts(text) == "".join(said)


def test_thoughts_that_are_cut_short_are_all_of_an_action():
    cut = THOUGHT.partition("<|end|>")[0]
    assert thoughts_end(cut) == len(cut) and thoughts_end(THOUGHT + CALL[:9]) == len(
        THOUGHT.partition("<|start|>")[0]
    )


def test_return_and_call_end_an_action_and_end_does_not():
    assert set(TWIN["ends"]) <= set(make().end_ids)
    assert make().begin([USER], ()).say({"role": "assistant", "content": "Hi"})[-1] == 200002
    end = cases.library("gptoss").convert_tokens_to_ids("<|end|>")
    assert end not in make().end_ids


def test_the_template_tells_the_format_and_that_there_are_thoughts():
    for template in (None, "keep_thoughts"):
        assert resolve_format("auto", make(template)) is HARMONY
        assert knows_thoughts(make(template)) and not make(template).unwritten


@pytest.mark.parametrize(
    ("content", "more", "text"),
    [
        ("Hi", {}, "<|channel|>final<|message|>Hi"),
        ("Hi", {"reasoning_content": "Hm."}, f"{THOUGHT}<|channel|>final<|message|>Hi"),
        ("<think>\nHm.\n</think>\n\nHi", {}, f"{THOUGHT}<|channel|>final<|message|>Hi"),
        (FINAL, {}, FINAL),
        (CALL, {}, CALL),
        (
            "",
            {"tool_calls": [as_function(ToolCall("find", {"n": 1}))], "reasoning_content": "Hm."},
            f'{THOUGHT} to=functions.find<|channel|>commentary json<|message|>{{"n": 1}}',
        ),
    ],
)
def test_a_message_to_learn_from_is_an_action(content, more, text):
    conversation = make().begin([USER], (cases.TOOL,))
    action = conversation.say({"role": "assistant", "content": content, **more})
    assert make().text(action) == text
    assert action[-1] == (200012 if "to=" in text else 200002)


def test_a_message_with_two_calls_is_no_action():
    calls = [as_function(ToolCall("find", {}))] * 2
    text = f"{CALL}<|call|><|start|>assistant{CALL}"
    for message in ({"content": "", "tool_calls": calls}, {"content": text}):
        with pytest.raises(ValueError, match="got several tool calls .*; allowed: one, since a"):
            make().begin([USER], ()).say({"role": "assistant", **message})


def test_with_thoughts_kept_an_episode_with_calls_is_one_segment():
    replies, texts = [RESULT, THANKS, RESULT, THANKS], [CALL, FINAL, CALL, FINAL]
    actions = [make().action(text) for text in texts]
    (segment,), conversation = play(make("keep_thoughts"), actions, replies)
    for turn, action in enumerate(actions):
        assert segment.tokens_L[segment.turn_L == turn].tolist() == action
    assert conversation.text.count("Hm.") == 4
    # The model's own writes calls otherwise than it samples them, and removes earlier thoughts.
    segments, conversation = play(make(), actions, replies)
    assert len(segments) == 4 and conversation.text.count("Hm.") == 0
    # A call that was cut short, one that is none, and a text without a channel.
    for text in (CALLED + '{"name"', THOUGHT, f"{CALLED}[]"):
        action = make().action(text)
        for end in ([], [action[-1]]):
            segments, _ = play(make("keep_thoughts"), [action[:-1] + end] * 2, [THANKS, RESULT])
            assert len(segments) == 1


def test_without_thoughts_the_training_template_writes_what_the_models_own_does():
    call = [as_function(ToolCall("find", {"name": "x"}))]
    history = [SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": call}, RESULT]
    history += [{"role": "assistant", "content": "There."}, THANKS]
    for count in (1, 2, 4, 6):
        for tools in ((), (cases.TOOL,)):
            conversations = [
                make(name).begin(history[:count], tools) for name in (None, "keep_thoughts")
            ]
            assert conversations[0].tokens == conversations[1].tokens
    for case in TWIN["conversations"]:
        tools = TWIN["tools"] if case["tools"] else ()
        if case["name"] != "earlier answer" and case["name"] != "answered call":
            kept = make("keep_thoughts").begin(case["messages"], tools)
            assert kept.tokens == case["tokens"]


def test_a_tool_s_message_that_answers_no_call_is_the_user_s():
    history = [USER, {"role": "assistant", "content": "There."}, RESULT]
    asked = [*history[:2], {"role": "user", "content": "7"}]
    assert make().begin(history, ()).tokens == make().begin(asked, ()).tokens


def test_a_clients_history_goes_on_with_its_calls_and_with_or_without_thoughts():
    asked, tools = (HistoryMessage("user", "go"),), (cases.TOOL,)
    result = HistoryMessage("tool", "7")
    lineages = Lineages(make("keep_thoughts"), HARMONY)
    turn = lineages.begin(lineages.read(ModelCall(asked, tools)))
    action = make().action(CALL)
    answer = HistoryMessage("assistant", "", (ToolCall("find", {"name": "x"}),), "Hm.")
    lineages.act(turn, action, [0.0] * len(action), answer)
    for thoughts in ("Hm.", ""):
        sent = HistoryMessage("assistant", "", answer.calls, thoughts)
        read = lineages.read(ModelCall((*asked, sent, result), tools))
        context = turn.read.conversation.tokens
        assert read.parent is turn
        assert read.conversation.tokens[: len(context) + len(action)] == [*context, *action]
    # A history of another origin: the same tokens, since calls are written as they are sampled.
    other = Lineages(make("keep_thoughts"), HARMONY).read(
        ModelCall((*asked, answer, result), tools)
    )
    assert other.parent is None
    assert other.conversation.tokens == read.conversation.tokens


@pytest.mark.exhaustive
def test_a_grammar_of_calls_ends_with_either_end_token():
    tokenizer = make()
    grammars = Grammars("tool_calls", tokenizer, 200_019, HARMONY)
    for text in (CALLED.replace("find", cases.TOOL["name"]) + '{"name": "x"}', FINAL):
        matcher = grammars.begin((cases.TOOL,))
        for token in tokenizer.action(text):
            matcher.accept(token)
