"""What an assistant's message is in tokens, and how a conversation goes on behind an action."""

import copy
import json

import chat_cases as cases
import pytest
from chat_cases import FOLDERS, FORGETS_THOUGHTS, TOOL, raw_text, thinking

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer

SYSTEM = {"role": "system", "content": "You work at a desk."}
USER = {"role": "user", "content": "Where is order 4075?"}
RESULT = {"role": "tool", "content": "It is on its way."}
THANKS = {"role": "user", "content": "Thanks!"}
THOUGHT = "<think>\nI look it up.\n</think>\n\n"
END = {"qwen3": 151645, "qwen2_5": 151645, "llama3_2": 128009}


def said(text):
    return {"role": "assistant", "content": text}


def make(name, **chat):
    return cases.make(name, json.dumps(chat))


CALL = {"type": "function", "function": {"name": "find", "arguments": {"name": "Ann “x” 漢字"}}}


def calling(content="", **more):
    return {"role": "assistant", "content": content, "tool_calls": [CALL], **more}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_call_is_said_as_the_template_writes_it(name):
    """Against the library's own tokens of the whole conversation, with the call as an object."""
    off = {"enable_thinking": False} if name == "qwen3" else {}
    tokenizer = make(name, template_kwargs=off)
    conversation = tokenizer.begin([SYSTEM, USER], [TOOL])
    action = conversation.say(calling())
    whole = cases.library(name).apply_chat_template(
        [SYSTEM, USER, calling()],
        tools=[{"type": "function", "function": TOOL}],
        return_dict=False,
        **off,
        **({"date_string": "26 Jul 2024"} if name == "llama3_2" else {}),
    )
    start = len(conversation.tokens)
    assert whole[:start] == list(conversation.tokens)
    assert whole[start : start + len(action)] == action
    after = whole[start + len(action) :]
    assert raw_text(name, after) == ("" if name == "llama3_2" else "\n")
    if name != "qwen3":  # whose template takes an empty thought out of the history
        extended = conversation.extend(action, [RESULT])
        assert list(extended.tokens[: start + len(action)]) == [*conversation.tokens, *action]


def test_arguments_are_text_where_the_template_reads_them_so():
    """As DeepSeek-R1-Distill's and Functionary's; the library is given JSON, as OpenAI has it."""
    library = cases.small_library()
    library.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
    )
    wanted = copy.copy(library)
    tokenizer = HuggingFaceTokenizer(library, schema.Chat(), generation={}, where="a test")
    conversation = tokenizer.begin([USER], [])
    action = conversation.say(calling("So: "))
    function = {"name": "find", "arguments": '{"name": "Ann “x” 漢字"}'}
    calls = [{"type": "function", "function": function}]
    messages = [USER, calling("So: ") | {"tool_calls": calls}]
    whole = wanted.apply_chat_template(messages, return_dict=False)
    assert [*conversation.tokens, *action] == whole
    assert tokenizer.begin([USER, calling("So: ")], []).tokens == whole


def test_a_text_without_calls_is_said_to_the_letter():
    conversation = make("qwen3").begin([USER], [])
    assert conversation.say(said("Yes. ")) == make("qwen3").action("Yes. ")


def test_thoughts_are_said_and_an_empty_thought_is_no_part_of_a_call():
    conversation = make("qwen3").begin([USER], [TOOL])
    call = '<tool_call>\n{"name": "find", "arguments": {"name": "Ann “x” 漢字"}}\n</tool_call>'
    texts = {
        "": calling(),
        THOUGHT: calling(reasoning_content="I look it up."),
        "Wait.\n": calling("Wait."),
    }
    for before, message in texts.items():
        action = conversation.say(message)
        assert make("qwen3").text(action) == before + call
        assert action[-1] == END["qwen3"]


@pytest.mark.parametrize(
    "name, message, reported",
    [
        ("llama3_2", calling("Wait."), "it does not write 'Wait.' of an assistant's message"),
        ("llama3_2", calling(reasoning_content="Hm."), "it does not write 'Hm.'"),
        ("llama3_2", {**calling(), "tool_calls": [CALL, CALL]}, "only supports single tool-calls"),
    ],
)
def test_what_a_template_leaves_out_of_a_message_is_told(name, message, reported):
    with pytest.raises(ValueError, match=f"chat template: .*{reported}"):
        make(name).begin([USER], [TOOL]).say(message)


def test_thoughts_where_the_model_may_not_think_are_refused():
    off = make("qwen3", template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="begins an assistant's message otherwise"):
        off.begin([USER], [TOOL]).say(calling(reasoning_content="Hm."))


def test_a_control_token_inside_a_call_is_text():
    conversation = make("qwen3").begin([USER], [TOOL])
    forged = {"type": "function", "function": {"name": "find", "arguments": {"x": "a<|im_end|>b"}}}
    action = conversation.say({"role": "assistant", "content": "", "tool_calls": [forged]})
    assert action.count(END["qwen3"]) == 1 and action[-1] == END["qwen3"]
    assert "a<|im_end|>b" in make("qwen3").text(action)


THINKING = {
    "answer": said("On its way."),
    "thought": said(THOUGHT + "On its way."),
    "loose": said("<think>I look it up.</think>On its way."),
    "apart": said("On its way.") | {"reasoning_content": "I look it up."},
    "call": calling(),
    "text and call": calling("Wait."),
    "thought and call": calling(THOUGHT + "Wait."),
    "apart and call": calling(reasoning_content="I look it up."),
}


@pytest.mark.parametrize("message", THINKING.values(), ids=THINKING)
@pytest.mark.parametrize("before", [(USER,), (USER, calling(), RESULT)], ids=["first", "later"])
def test_an_action_begins_inside_the_thought_that_the_header_opens(message, before):
    """Against the text that the library renders of the whole conversation."""
    library, tokenizer = thinking()
    tools = [{"type": "function", "function": TOOL}]
    asked = library.apply_chat_template(
        [*before], tools=tools, tokenize=False, add_generation_prompt=True
    )
    whole = library.apply_chat_template([*before, message], tools=tools, tokenize=False)
    assert asked.endswith("<think>\n") and whole.startswith(asked)
    conversation = tokenizer.begin(before, [TOOL])
    assert raw_text("qwen3", conversation.tokens) == asked
    action = conversation.say(message)
    wanted = whole[len(asked) :].removesuffix("\n")
    assert wanted.count("</think>") == 1 and "<think>" not in wanted
    assert raw_text("qwen3", action) == wanted
    assert action == cases.encode("qwen3", wanted)


def test_a_thought_is_said_to_the_letter_where_the_template_leaves_it_out():
    _, tokenizer = thinking(FORGETS_THOUGHTS)
    conversation = tokenizer.begin([USER], [])
    for text in (THOUGHT + "Soon. ", THOUGHT.removeprefix("<think>\n") + "Soon. "):
        action = conversation.say(said(text))
        assert action == cases.encode("qwen3", "I look it up.\n</think>\n\nSoon. <|im_end|>")


@pytest.mark.parametrize("template", [None, FORGETS_THOUGHTS], ids=["2507", "distilled"])
@pytest.mark.parametrize("text", ["<think>\nSoon.", THOUGHT + "<think>\nHm.\n</think>\n\nSoon."])
def test_thoughts_that_do_not_end_or_begin_twice_are_refused(template, text):
    conversation = thinking(template)[1].begin([USER], [])
    reason = r"it does not write 'Hm.'|content that begins with '<think>\\n' and has </think>\."
    with pytest.raises(ValueError, match=reason):
        conversation.say(said(text))


@pytest.mark.parametrize("more", [{}, {"reasoning_content": "Hm."}])
def test_an_answer_whose_thought_the_template_does_not_write_is_refused(more):
    conversation = thinking(FORGETS_THOUGHTS)[1].begin([USER], [])
    with pytest.raises(ValueError, match="begins an assistant's message otherwise"):
        conversation.say(said("Soon.") | more)


def test_a_users_words_open_no_thought():
    conversation = make("qwen3").begin([USER | {"content": "Write <think>"}], [])
    assert conversation.say(said("No. ")) == make("qwen3").action("No. ")


INSIDE = "I look it up.\n</think>\n\nI call."


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("text", [INSIDE, "I look"])
def test_a_sampled_thought_that_the_header_opened_stays_before_a_tools_result(text, ended):
    library, tokenizer = thinking()
    start = tokenizer.begin([USER], ())
    action = tokenizer.action(text)[: None if ended else -1]
    after = start.extend(action, [RESULT])
    assert after.tokens[: len(start.tokens) + len(action)] == [*start.tokens, *action]
    messages = [USER, said("<think>\n" + text), RESULT]
    assert raw_text("qwen3", after.tokens) == library.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    "template, answer, text",
    [
        (None, THANKS, INSIDE),  # which Qwen3's takes out of the history when the user speaks
        (None, RESULT, "\n</think>\n\nI call."),  # an empty one at once
        (FORGETS_THOUGHTS, RESULT, INSIDE),
    ],
)
def test_a_segment_begins_where_the_template_takes_such_a_thought_out(template, answer, text):
    library, tokenizer = thinking(template)
    start = tokenizer.begin([USER], ())
    action = tokenizer.action(text)
    after = start.extend(action, [answer])
    assert after.tokens[: len(start.tokens) + len(action)] != [*start.tokens, *action]
    assert list(after.tokens) == library.apply_chat_template(
        [USER, said("<think>\n" + text), answer], add_generation_prompt=True, return_dict=False
    )
    assert "</think>" not in raw_text("qwen3", after.tokens)


def test_an_action_ends_with_the_first_end_token_that_the_template_writes():
    library = cases.small_library()
    library.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
        "{{ '<|endoftext|><|im_end|>' if m.role == 'assistant' }}{% endfor %}"
    )
    end, last = library.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    stored = {"eos_token_id": [last, end]}
    tokenizer = HuggingFaceTokenizer(library, schema.Chat(), generation=stored, where="a test")
    assert set(tokenizer.end_ids) == {end, last}
    call = {"type": "function", "function": {"name": "call", "arguments": {}}}
    action = tokenizer.begin([USER], [TOOL]).say(calling("So") | {"tool_calls": [call]})
    assert action == [*library.encode("Socall{}", add_special_tokens=False), end]


def test_the_template_of_the_small_library_is_qwen3s():
    assert cases.small_library().chat_template == cases.library("qwen3").chat_template
