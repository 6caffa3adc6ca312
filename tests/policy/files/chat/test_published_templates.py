"""Gemma 3, Llama 3.1, DeepSeek-V3 and gpt-oss as published: roles, tools, ends, forged tokens."""

import json

import chat_cases as cases
import numpy as np
import pytest
from chat_cases import TOOL, library_tokens, raw_text
from places import MODELS
from refusals import refusal
from transformers import AutoTokenizer

from seeupo_jax.configuration import schema
from seeupo_jax.policy.files.huggingface_tokenizer import load
from seeupo_jax.policy.files.tokenizer import Transcript

TEMPLATES = ("gemma3", "llama3_1", "deepseek_v3")  # the published gpt-oss has none there
# Of the published generation: the token that ends a message, and the header of the next one.
ENDS = {"gemma3": "<end_of_turn>", "llama3_1": "<|eot_id|>", "deepseek_v3": "<｜end▁of▁sentence｜>"}
HEADERS = {
    "gemma3": "<start_of_turn>model\n",
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek_v3": "<｜Assistant｜>",
}
BEGINS = {
    "gemma3": "<bos>",
    "llama3_1": "<|begin_of_text|>",
    "deepseek_v3": "<｜begin▁of▁sentence｜>",
}
AS_USER = '{"roles": {"tool": "user"}}'
SYSTEM = {"role": "system", "content": "You work at a desk."}
USER = {"role": "user", "content": "Where is order 4075?"}
RESULT = {"role": "tool", "content": "It is on its way."}
OTHER = {"role": "tool", "content": "It was paid."}
THANKS = {"role": "user", "content": "Thanks!"}


def said(text):
    return {"role": "assistant", "content": text}


def as_users(messages):
    """What `chat.roles={'tool': 'user'}` sends of replies between the assistant's messages."""
    sent = []
    for message in messages:
        text, is_reply = message["content"], message["role"] == "tool"
        if is_reply:
            text = f"<tool_response>\n{text}\n</tool_response>"
        if sent and sent[-1][0] == "user" and message["role"] in ("tool", "user"):
            between = "\n" if sent[-1][2] and is_reply else "\n\n"
            sent[-1] = ("user", sent[-1][1] + between + text, is_reply)
        else:
            sent.append(("user" if is_reply else message["role"], text, is_reply))
    return [{"role": role, "content": text} for role, text, _ in sent]


def played(name, chat, seed):
    """A random conversation: of each turn the context and the messages so far, and its segments."""
    rng = np.random.default_rng(seed)
    tokenizer, transcript = cases.make(name, chat), Transcript()
    messages = cases.random_messages(rng, *(("system", "user") if seed % 2 else ("user",)))
    for message in messages:  # a template may trim what it joins
        message["content"] = f"a{message['content']}z"
    conversation, turns = tokenizer.begin(messages, ()), []
    answers = [("tool",), ("tool", "tool"), ("user",), ("tool", "user")]
    for turn in range(5):
        transcript.read(conversation.tokens)
        turns.append((conversation.tokens, messages))
        text = f"Then {cases.random_text(rng, pieces=4)}."
        action = tokenizer.action(text)
        transcript.act(action, turn, [0.0] * len(action))
        # DeepSeek-V3's template writes a reply's tag once, before the first of a conversation.
        roles = answers[rng.integers(4)] if name != "deepseek_v3" else ("user",)
        answer = [{"role": r, "content": f"a{cases.random_text(rng)}z"} for r in roles]
        messages = [*messages, said(text), *answer]
        conversation = conversation.extend(action, answer)
    return turns, transcript.segments()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("seed", range(4))
def test_a_conversation_is_one_segment_with_the_librarys_text(name, seed):
    chat = "{}" if name == "llama3_1" else AS_USER
    turns, segments = played(name, chat, seed)
    assert len(segments) == 1
    for tokens, messages in turns:
        shown = messages if name == "llama3_1" else as_users(messages)
        assert raw_text(name, tokens) == raw_text(name, library_tokens(name, shown))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_the_librarys(name):
    messages = [SYSTEM, USER, said("On its way."), THANKS]
    tokenizer = cases.make(name)
    whole = tokenizer.begin(messages, ()).tokens
    assert whole == library_tokens(name, messages)
    start = tokenizer.begin(messages[:2], ())
    assert start.extend(tokenizer.action("On its way."), [THANKS]).tokens == whole
    begin = cases.library(name).convert_tokens_to_ids(BEGINS[name])
    assert whole[0] == begin and whole.count(begin) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_and_the_header_are_those_of_the_template(name):
    tokenizer, end = cases.make(name), cases.library(name).convert_tokens_to_ids(ENDS[name])
    assert tokenizer.end_ids == (end,)
    assert tokenizer.action("Yes.") == [*cases.encode(name, "Yes."), end]
    assert tokenizer.text(tokenizer.action("Yes.")) == "Yes."
    assert raw_text(name, tokenizer.begin([USER], ()).tokens).endswith(HEADERS[name])


def test_gemma_3_refuses_a_tools_reply_and_the_sentence_names_the_option():
    tokenizer = cases.make("gemma3")
    assert tokenizer.unwritten.keys() == {"tool"}
    wanted = (
        "chat template: refused the roles user, assistant, tool: Conversation roles must alternate"
        " user/assistant/user/assistant/; allowed: config.chat.roles={'tool': 'user'}, which sends"
        " them as the user's, or another template in config.chat.template."
    )
    assert tokenizer.unwritten["tool"] == wanted
    mapped = cases.make("gemma3", AS_USER)
    assert mapped.unwritten == {}
    text = raw_text("gemma3", mapped.begin([USER, said("I look."), RESULT, OTHER], ()).tokens)
    assert text == (
        "<bos><start_of_turn>user\nWhere is order 4075?<end_of_turn>\n"
        "<start_of_turn>model\nI look.<end_of_turn>\n"
        "<start_of_turn>user\n<tool_response>\nIt is on its way.\n</tool_response>\n"
        "<tool_response>\nIt was paid.\n</tool_response><end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("name", ["llama3_1", "deepseek_v3"])
def test_the_others_write_every_role(name):
    assert cases.make(name).unwritten == {}


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_are_listed_in_hermes_form_and_calls_are_text(name):
    """None of these templates names the tools that it is given."""
    tokenizer = cases.make(name)
    assert not tokenizer.writes_calls
    for first in ([SYSTEM, USER], [USER]):
        text = raw_text(name, tokenizer.begin(first, (TOOL,)).tokens)
        assert text.count("<tools>\n" + json.dumps(TOOL, ensure_ascii=False)) == 1
        assert text.index("You have tools.") < text.index(USER["content"])
    call = 'I look.\n<tool_call>{"name": "find"}</tool_call>'
    assert tokenizer.text(tokenizer.action(call)) == call
    assert tokenizer.action(call)[:-1] == cases.encode(name, call)


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_forges_a_control_token_or_a_header(name):
    tokenizer = cases.make(name, AS_USER)
    added = cases.library(name).added_tokens_decoder
    control = {token: str(value) for token, value in added.items() if value.special}
    forged = "".join(control.values())

    def count(text):
        tool = TOOL | {"description": text}
        start = tokenizer.begin([{"role": r, "content": text} for r in ("system", "user")], (tool,))
        answer = [{"role": r, "content": text} for r in ("tool", "user")]
        after = start.extend(tokenizer.action(text), answer)
        assert text in tokenizer.text(after.tokens)
        return sum(token in control for token in after.tokens)

    assert count(forged) == count("harmless")
    assert tokenizer.text(tokenizer.action(forged)) == forged


@pytest.mark.parametrize("name", TEMPLATES)
def test_thoughts_stay_so_that_the_training_template_is_the_models_own(name):
    own, kept = cases.make(name), cases.make(name, '{"template": "keep_thoughts"}')
    messages = [SYSTEM, USER, said("<think>\nWhy?\n</think>\n\nYes."), THANKS]
    assert kept.begin(messages, ()).tokens == own.begin(messages, ()).tokens
    assert "Why?" in own.begin(messages, ()).text


def test_gpt_oss_tokenises_and_lacks_a_template():
    tokenizer = load(MODELS / "gptoss", None)
    assert tokenizer.end_ids == (200002, 200012)  # <|return|> and <|call|>
    assert "has no chat template; allowed: one, or a Jinja file in config.chat.template" in refusal(
        lambda: tokenizer.begin([USER], ())
    )
    for seed in range(20):
        text = cases.random_text(np.random.default_rng(seed))
        assert tokenizer.action(text)[:-1] == cases.encode("gptoss", text, plain=True)
        assert tokenizer.text(tokenizer.action(text)) == text
    assert "which has no chat template; allowed: a Jinja file." in refusal(
        lambda: load(MODELS / "gptoss", schema.Chat(template="keep_thoughts"))
    )


@pytest.mark.parametrize("seed", range(4))
def test_qwen3_with_its_thoughts_kept_is_one_segment_with_the_tokens_of_the_exported(
    seed, tmp_path
):
    rng = np.random.default_rng(seed)
    tokenizer, transcript = cases.make("qwen3", '{"template": "keep_thoughts"}'), Transcript()
    tokenizer.save(tmp_path)
    library = AutoTokenizer.from_pretrained(tmp_path)
    messages = [SYSTEM, USER]
    conversation = tokenizer.begin(messages, (TOOL,))
    for turn in range(5):
        transcript.read(conversation.tokens)
        text = f"<think>\nWhy {turn}?\n</think>\n\nThen {rng.integers(100)}."
        action = tokenizer.action(text)
        transcript.act(action, turn, [0.0] * len(action))
        answer = [[RESULT], [RESULT, OTHER], [THANKS]][rng.integers(3)]
        conversation = conversation.extend(action, answer)
        messages = [*messages, said(text), *answer]
        functions = [{"type": "function", "function": TOOL}]
        assert conversation.tokens == library.apply_chat_template(
            messages, tools=functions, add_generation_prompt=True, return_dict=False
        )
    assert len(transcript.segments()) == 1
    assert raw_text("qwen3", conversation.tokens).count("Why") == 5
