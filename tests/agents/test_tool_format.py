"""Sampled text is divided into content and calls, in one go or piece by piece, and written back."""

import json
import random

import chat_cases
import pytest

from seeupo_jax.agents.tool_format import (
    TOOL_FORMATS,
    ContentSplitter,
    choose_format,
    template_writes,
)
from seeupo_jax.envs.base import PYTHON_TAG
from seeupo_jax.envs.tool_calls import ToolCall

FIND = ToolCall("find", {"name": "x </tool_call> <|python_tag|>", "n": [1, 2.5, None]})
REPLY = ToolCall("reply", {})
HERMES_FIND = (
    '<tool_call>{"name": "find", "arguments": {"name":'
    r' "x <\/tool_call> <|python_tag|>", "n": [1, 2.5, null]}}</tool_call>'
)
LLAMA_FIND = (
    '{"name": "find", "parameters": {"name": "x </tool_call> <|python_tag|>", "n": [1, 2.5, null]}}'
)
LLAMA_REPLY = '{"name": "reply", "parameters": {}}'
HERMES_REPLY = '<tool_call>{"name": "reply", "arguments": {}}</tool_call>'
THOUGHTS = f"<think>{HERMES_REPLY}</think>"

READ = {
    "hermes": [
        ("Hello \n", "Hello \n", ()),
        ("", "", ()),
        (HERMES_FIND, "", (FIND,)),
        (f"I look.\n{HERMES_FIND}\n{HERMES_REPLY}\n", "I look.", (FIND, REPLY)),
        (f"a{HERMES_REPLY}b{HERMES_FIND}", "ab", (REPLY, FIND)),
        (f"{THOUGHTS}\n\n{HERMES_FIND}", THOUGHTS, (FIND,)),
        (f"\n{THOUGHTS}\nx", f"\n{THOUGHTS}\nx", ()),
        # Behind a header that opens the thoughts, as that of DeepSeek-R1's distillates.
        (f"{HERMES_REPLY}?</think>\n{HERMES_FIND}", f"{HERMES_REPLY}?</think>", (FIND,)),
        (f"{HERMES_REPLY}</think>{HERMES_FIND}", "</think>", (REPLY, FIND)),
    ],
    "llama": [
        ("Hello \n", "Hello \n", ()),
        (LLAMA_FIND, "", (FIND,)),
        (f"\n{LLAMA_FIND}; {LLAMA_REPLY}\n", "", (FIND, REPLY)),
        (f"<|python_tag|>{LLAMA_FIND}", "", (FIND,)),
        (f"I look. <|python_tag|>{LLAMA_REPLY}\n{LLAMA_FIND}", "I look.", (REPLY, FIND)),
        (f"<think>{{}}</think>\n{LLAMA_REPLY}", "<think>{}</think>", (REPLY,)),
        (f"{{}}?\n</think>\n{LLAMA_REPLY}", "{}?\n</think>", (REPLY,)),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
    ],
}
MALFORMED = {
    "hermes": [
        HERMES_FIND[:-5],
        f"{HERMES_FIND}<tool_call>{{</tool_call>",
        f"{HERMES_FIND} and then",
        '<tool_call>{"name": "f", "parameters": {}}</tool_call>',
        r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>',
        f"<think>{HERMES_FIND}",
    ],
    "llama": [
        LLAMA_FIND[:-1],
        f"{LLAMA_FIND} and then",
        f"{LLAMA_FIND}; []",
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {}, "name": "g"}',
        '{"name": "f", "parameters": {"x": NaN}}',
        '{"name": "f", "parameters": {"x": 1e999}}',
        r'{"name": "f", "parameters": {"x": "\ud800"}}',
        '{"name": "f", "parameters": ' + '{"x": ' * 70 + "1" + "}" * 71,
        '{"name": "f", "parameters": ' + '{"x": ' * 5000,
        f"<think>{LLAMA_FIND}",
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *case) for name, cases in READ.items() for case in cases],
)
def test_a_text_is_content_and_calls(name, text, content, calls):
    assert choose_format(name).parse(text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts]
)
def test_a_malformed_call_stays_content(name, text):
    assert choose_format(name).parse(text) == (text, ())


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("content", ["", "I look.", "<think>Which?</think>"])
@pytest.mark.parametrize("calls", [(), (FIND,), (REPLY, FIND)])
def test_what_is_written_is_read_back(name, content, calls):
    tool_format = choose_format(name)
    assert tool_format.parse(tool_format.render(content, calls)) == (content, calls)


STRINGS = ("</tool_call>", "<tool_call>", "<tool_call>{}</tool_call>", '"', "\\", "\n", "; {}", "é")


def random_value(rng, depth=0):
    kind = rng.choice(("text", "number", "list", "object") if depth < 3 else ("text", "number"))
    if kind == "text":
        return "".join(rng.choices(STRINGS, k=rng.randint(0, 4)))
    if kind == "number":
        return rng.choice([None, True, -1, 2.5, 10**20])
    values = [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == "list":
        return values
    return {"".join(rng.choices(STRINGS, k=2)) + str(i): each for i, each in enumerate(values)}


WRITTEN = {"hermes": ("arguments", "<tool_call>{}{}{}</tool_call>"), "llama": ("parameters", "{1}")}


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_a_tag_within_a_string_of_a_call_neither_begins_nor_ends_one(name, seed):
    """Against JSON's own writer, which escapes neither tag."""
    rng, (key, form) = random.Random(seed), WRITTEN[name]
    for _ in range(200):
        calls, texts = [], []
        for _ in range(rng.randint(1, 3)):
            arguments = {"a": random_value(rng), "b": random_value(rng)}
            calls.append(ToolCall("".join(rng.choices(STRINGS, k=2)), arguments))
            body = json.dumps({"name": calls[-1].name, key: arguments}, ensure_ascii=False)
            texts.append(form.format(rng.choice(("", "\n ")), body, rng.choice(("", " \n"))))
        content = rng.choice(("", "I look."))
        between = (PYTHON_TAG if content else "", ";") if name == "llama" else ("", "\n")
        text = content + between[0] + between[1].join(texts)
        assert choose_format(name).parse(text) == (content, tuple(calls))
        splitter = ContentSplitter(choose_format(name))
        assert "".join(map(splitter.feed, text)) + splitter.rest(content) == content


PIECES = "<think> </think> <tool _call> </tool_call> <|python_tag|> { } [] a < </ <| <t ;".split()
PIECES += [" ", "\n", HERMES_FIND, HERMES_REPLY, LLAMA_FIND, LLAMA_REPLY]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_shown_while_it_is_sampled_is_the_content(name):
    tool_format, rng, called, early = choose_format(name), random.Random(0), 0, 0
    for _ in range(3000):
        text = "".join(rng.choices(PIECES, k=rng.choice((1, 2, 3, 7))))
        content, calls = tool_format.parse(text)
        splitter, shown = ContentSplitter(tool_format), ""
        while text:
            cut = rng.randint(1, 12)
            shown += splitter.feed(text[:cut])
            text = text[cut:]
            assert content.startswith(shown)
        called += bool(calls)
        early += bool(shown)
        assert shown + splitter.rest(content) == content
    assert called > 100 and early > 1000


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_content_is_shown_at_once(name):
    splitter = ContentSplitter(choose_format(name))
    pieces = ["I", " look", " <b", "> up"]
    assert [splitter.feed(piece) for piece in pieces] == pieces


def test_an_unknown_format_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="got 'mistral'; allowed: hermes, llama"):
        choose_format("mistral")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_whose_header_opens_a_thought_writes_calls_as_it_does_without(name):
    plain, thinking = chat_cases.make("qwen3"), chat_cases.thinking()[1]
    for tokenizer in (plain, thinking):
        assert template_writes(tokenizer, TOOL_FORMATS[name]) == (name == "hermes")
