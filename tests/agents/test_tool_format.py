"""Sampled text is divided into content and calls, in one go or piece by piece, and written back."""

import json
import os
import random

import chat_cases
import pytest

from seeupo_jax.agents.answer_form import AnswerForm, AnswerSplitter, Shown
from seeupo_jax.configuration import agent_schema
from seeupo_jax.envs.base import PYTHON_TAG
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS, choose_format
from seeupo_jax.policy.files.template_knowledge import template_writes

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


def tool(called, **types):
    """A tool whose arguments have these schemas."""
    return {"name": called, "description": "", "parameters": {"properties": types}}


TOOLS = (tool("find", name={"type": "string"}, n={"type": "array"}), tool("reply"))
QWEN_FIND = (
    "<tool_call>\n<function=find>\n<parameter=name>\nx </tool_call> <|python_tag|>\n</parameter>\n"
    "<parameter=n>\n[1, 2.5, null]\n</parameter>\n</function>\n</tool_call>"
)
QWEN_REPLY = "<tool_call>\n<function=reply>\n</function>\n</tool_call>"
GLM_FIND = (
    "<tool_call>find\n<arg_key>name</arg_key>\n<arg_value>x </tool_call> <|python_tag|></arg_value>"
    "\n<arg_key>n</arg_key>\n<arg_value>[1, 2.5, null]</arg_value>\n</tool_call>"
)
GLM_REPLY = "<tool_call>reply\n</tool_call>"
ARGUMENTS = '{"name": "x </tool_call> <|python_tag|>", "n": [1, 2.5, null]}'
MISTRAL = (
    f'[TOOL_CALLS][{{"name": "find", "arguments": {ARGUMENTS}}}, '
    '{"name": "reply", "arguments": {}}]'
)
V3_FIND = (
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
)
V3_REPLY = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>reply\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_FIND = f"<｜tool▁call▁begin｜>find<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
KIMI_FIND = (
    f"<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
)
KIMI_REPLY = "<|tool_call_begin|>functions.reply:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
HARMONY_FIND = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>" + ARGUMENTS
HARMONY_REPLY = "<|channel|>commentary to=functions.reply <|constrain|>json<|message|>{}"
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Which?<|end|><|start|>assistant"
GEMMA = "```tool_code\nfind(name='x </tool_call> <|python_tag|>', n=[1, 2.5, None])\nreply()\n```"

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
    # Each as the models' templates or makers write them: Qwen3-Coder's and Qwen3.5's templates,
    # GLM-4.6's and 4.7's, Mistral's v7 and v13, DeepSeek-V3's and V3.1's, Kimi-K2's guide to tool
    # calls, Llama 3.1's prompt for custom tools, Google's page on function calls with Gemma.
    "qwen3_coder": [
        ("Hello \n", "Hello \n", ()),
        (f"I look.\n\n{QWEN_FIND}\n{QWEN_REPLY}\n", "I look.", (FIND, REPLY)),
        (
            f"<think>\n{QWEN_REPLY}\n</think>\n\n{QWEN_FIND}",
            f"<think>\n{QWEN_REPLY}\n</think>",
            (FIND,),
        ),
        ("<tool_call><function=reply></function></tool_call>", "", (REPLY,)),
    ],
    "glm": [
        ("Hello \n", "Hello \n", ()),
        (f"I look.\n{GLM_FIND}\n{GLM_REPLY}\n", "I look.", (FIND, REPLY)),
        (GLM_FIND.replace("\n", ""), "", (FIND,)),
        (f"<think></think>\n{GLM_REPLY}", "<think></think>", (REPLY,)),
    ],
    "llama_function": [
        ("Hello \n", "Hello \n", ()),
        (f"<function=find>{ARGUMENTS}</function>", "", (FIND,)),
        (
            f"I look. <function=find>{ARGUMENTS}</function>\n<function=reply>{{}}</function>",
            "I look.",
            (FIND, REPLY),
        ),
    ],
    "mistral": [
        ("Hello \n", "Hello \n", ()),
        (MISTRAL, "", (FIND, REPLY)),
        (f"I look.{MISTRAL.replace('][{', '] [{')}", "I look.", (FIND, REPLY)),
        ('[TOOL_CALLS] [{"name": "reply", "arguments": {}, "id": "abcdefghi"}]', "", (REPLY,)),
    ],
    "mistral_args": [
        ("Hello \n", "Hello \n", ()),
        (
            f"I look.[TOOL_CALLS]find[ARGS]{ARGUMENTS}[TOOL_CALLS]reply[ARGS]{{}}",
            "I look.",
            (FIND, REPLY),
        ),
        ("[TOOL_CALLS]reply[CALL_ID]abcdefghi[ARGS]{}", "", (REPLY,)),
        (
            "[THINK][TOOL_CALLS]find[/THINK]I look.[TOOL_CALLS]reply[ARGS]{}",
            "[THINK][TOOL_CALLS]find[/THINK]I look.",
            (REPLY,),
        ),
    ],
    "deepseek_v3": [
        ("Hello \n", "Hello \n", ()),
        (
            f"I look.<｜tool▁calls▁begin｜>{V3_FIND}\n{V3_REPLY}<｜tool▁calls▁end｜>",
            "I look.",
            (FIND, REPLY),
        ),
    ],
    "deepseek_v31": [
        ("Hello \n", "Hello \n", ()),
        (
            f"I look.<｜tool▁calls▁begin｜>{V31_FIND}{V31_FIND}<｜tool▁calls▁end｜>",
            "I look.",
            (FIND, FIND),
        ),
        (
            f"Thoughts\n</think>\n<｜tool▁calls▁begin｜>{V31_FIND}<｜tool▁calls▁end｜>",
            "Thoughts\n</think>",
            (FIND,),
        ),
    ],
    "kimi": [
        ("Hello \n", "Hello \n", ()),
        (
            f"I look.<|tool_calls_section_begin|>{KIMI_FIND}{KIMI_REPLY}<|tool_calls_section_end|>",
            "I look.",
            (FIND, REPLY),
        ),
        (
            "<|tool_calls_section_begin|>\n<|tool_call_begin|>reply:12<|tool_call_argument_begin|>"
            " {} <|tool_call_end|><|tool_calls_section_end|>",
            "",
            (REPLY,),
        ),
    ],
    "gemma": [
        ("Hello \n", "Hello \n", ()),
        ("```python\nreply()\n```", "```python\nreply()\n```", ()),
        (f"I look.\n{GEMMA}", "I look.", (FIND, REPLY)),
        ("```tool_code\n[reply(), reply()]\n```\n", "", (REPLY, REPLY)),
        ("```tool_code\nfind('x </tool_call> <|python_tag|>', n=[1, 2.5, None])\n```", "", (FIND,)),
    ],
    # As OpenAI's page on harmony has it, and as openai-harmony 0.0.8 renders it.
    "harmony": [
        ("Hello \n", "Hello \n", ()),
        ("<|channel|>final<|message|>Hello \n", "Hello \n", ()),
        (HARMONY_FIND, "", (FIND,)),
        (f"{HARMONY_THOUGHT}{HARMONY_FIND}", "<think>Which?</think>", (FIND,)),
        (
            f"{HARMONY_THOUGHT}<|channel|>final<|message|>I look.",
            "<think>Which?</think>I look.",
            (),
        ),
        (
            f"{HARMONY_THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            + HARMONY_REPLY,
            "<think>Which?</think>I look.",
            (REPLY,),
        ),
        (
            " to=functions.find<|channel|>commentary <|constrain|>json<|message|>" + ARGUMENTS,
            "",
            (FIND,),
        ),
        ("to=functions.reply<|channel|>commentary json<|message|>{}", "", (REPLY,)),
        (f"{HARMONY_REPLY}<|call|><|start|>assistant{HARMONY_FIND}", "", (REPLY, FIND)),
        ("<|channel|>analysis<|message|>Whi", "<think>Whi", ()),
        (f"{HARMONY_THOUGHT * 2}{HARMONY_REPLY}", "<think>Which?\n\nWhich?</think>", (REPLY,)),
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
    "qwen3_coder": [
        QWEN_FIND[:-5],
        f"{QWEN_FIND} and then",
        QWEN_FIND.replace("</function>", ""),
        QWEN_FIND.replace("</parameter>\n</function>", "</function>"),
        QWEN_FIND.replace("=n>", "=name>"),
        HERMES_FIND,
        f"{QWEN_FIND}\n<tool_call>\n",
        f"<think>{QWEN_FIND}",
    ],
    "glm": [
        GLM_FIND[:-5],
        f"{GLM_FIND} and then",
        GLM_FIND.replace("<arg_value>[", "["),
        GLM_FIND.replace("<arg_key>n<", "<arg_key>name<"),
        "<tool_call></tool_call>",
        HERMES_FIND,
    ],
    "llama_function": [
        "<function=find>{}",
        "<function=find>[]</function>",
        "<function=>{}</function>",
        f"<function=find>{ARGUMENTS}</function> and then",
        '<function=find>{"x": 1, "x": 2}</function>',
    ],
    "mistral": [
        MISTRAL[:-1],
        f"{MISTRAL} and then",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS]{"name": "reply", "arguments": {}}',
        '[TOOL_CALLS][{"name": "reply", "arguments": {}, "x": 1}]',
        "[TOOL_CALLS]reply[ARGS]{}",
    ],
    "mistral_args": [
        MISTRAL,
        "[TOOL_CALLS]reply",
        "[TOOL_CALLS]reply[ARGS]{} and then",
        "[TOOL_CALLS]reply[ARGS][]",
    ],
    "deepseek_v3": [
        f"<｜tool▁calls▁begin｜>{V3_FIND}",
        f"<｜tool▁calls▁begin｜>{V31_FIND}<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{V3_FIND}<｜tool▁calls▁end｜> and then",
    ],
    "deepseek_v31": [
        f"<｜tool▁calls▁begin｜>{V31_FIND}",
        f"<｜tool▁calls▁begin｜>{V3_FIND}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{V31_FIND}<｜tool▁calls▁end｜> and then",
    ],
    "kimi": [
        f"<|tool_calls_section_begin|>{KIMI_FIND}",
        f"<|tool_calls_section_begin|>{KIMI_FIND[:-4]}<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        f"<|tool_calls_section_begin|>{KIMI_FIND.replace(':0', '')}<|tool_calls_section_end|>",
    ],
    "gemma": [
        "```tool_code\nreply()",
        "```tool_code\n```",
        "```tool_code\nx = reply()\n```",
        "```tool_code\nreply(x=reply())\n```",
        "```tool_code\nreply(1)\n```",  # it has no parameter
        f"{GEMMA}\nand then",
    ],
}
# Channels are divided also where a call is malformed, which then is content: text and content.
MALFORMED_HARMONY = [
    (HARMONY_FIND[:-1], HARMONY_FIND[:-1]),
    (f"{HARMONY_FIND} and then", f"{HARMONY_FIND} and then"),
    (HARMONY_FIND.replace("functions.", "browser."),) * 2,
    (HARMONY_FIND.replace("functions.find", "functions."),) * 2,
    (HARMONY_REPLY.replace("{}", "[]"),) * 2,
    (
        f"{HARMONY_THOUGHT}<|channel|>final<|message|>Hi<|end|><|start|>assistant{HARMONY_REPLY}",
        f"<think>Which?</think>Hi<|end|><|start|>assistant{HARMONY_REPLY}",
    ),
    (f"{HARMONY_THOUGHT}{HARMONY_FIND[:-1]}", f"<think>Which?</think>{HARMONY_FIND[:-1]}"),
    (
        f"{HARMONY_REPLY}<|call|><|start|>assistant<|channel|>final<|message|>Hi",
        f"{HARMONY_REPLY}<|call|><|start|>assistant<|channel|>final<|message|>Hi",
    ),
    (f"{HARMONY_THOUGHT}<|chan", "<think>Which?</think><|chan"),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *case) for name, cases in READ.items() for case in cases],
)
def test_a_text_is_content_and_calls(name, text, content, calls):
    assert choose_format(name).parse(text, TOOLS) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts]
)
def test_a_malformed_call_stays_content(name, text):
    assert choose_format(name).parse(text, TOOLS) == (text, ())


@pytest.mark.parametrize(("text", "content"), MALFORMED_HARMONY)
def test_a_malformed_call_of_harmony_stays_content_behind_the_thoughts(text, content):
    assert choose_format("harmony").parse(text, TOOLS) == (content, ())


def test_without_tools_channels_are_divided_and_calls_are_content():
    form = AnswerForm(choose_format("harmony"), thoughts_apart=True).with_tools(())
    final = f"{HARMONY_THOUGHT}<|channel|>final<|message|>Hi"
    assert form.parse(final) == ("Which?", "Hi", ())
    assert form.parse(HARMONY_THOUGHT + HARMONY_REPLY) == ("Which?", HARMONY_REPLY, ())
    assert form.shown(final) == Shown("Which?", "Hi")


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("content", ["", "I look.", "<think>Which?</think>"])
@pytest.mark.parametrize("calls", [(), (FIND,), (REPLY, FIND)])
def test_what_is_written_is_read_back(name, content, calls):
    tool_format = choose_format(name)
    assert tool_format.parse(tool_format.render(content, calls), TOOLS) == (content, calls)


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_of_a_message_that_is_cut_the_complete_calls_count(name):
    tool_format, calls = choose_format(name), (FIND, REPLY, FIND)
    content = "" if name == "llama" else "I look."
    text = tool_format.render(content, calls)
    # Where the first calls end: up to there other messages are the same.
    ends = [
        len(os.path.commonprefix([text, tool_format.render(content, (*calls[:n], other))]))
        for n in (1, 2)
        for other in (ToolCall("x", {}),)
    ]
    for end in range(len(text)):
        said, found = tool_format.parse(text[:end], TOOLS, cut=True)
        assert found == calls[: len(found)] and len(found) >= sum(end >= each for each in ends)
        assert said == (content if found else text[:end])
        assert tool_format.parse(text[:end], TOOLS)[1] in ((), found)
    assert tool_format.parse(text, TOOLS, cut=True) == (content, calls)


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


@pytest.mark.parametrize("name", WRITTEN)
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
        splitter = AnswerSplitter(AnswerForm(choose_format(name)))
        shown = "".join(splitter.feed(letter).content for letter in text)
        assert shown + splitter.rest(Shown("", content)).content == content


PIECES = "<think> </think> <tool _call> </tool_call> <|python_tag|> { } [] a < </ <| <t ;".split()
PIECES += [" ", "\n", HERMES_FIND, HERMES_REPLY, LLAMA_FIND, LLAMA_REPLY]
# Of each format, pieces of its tags and a whole call.
OWN = {
    "llama_function": ["<function=", "</function>", f"<function=find>{ARGUMENTS}</function>"],
    "qwen3_coder": ["<function=reply>", "</function>", "<parameter=n>", QWEN_FIND, QWEN_REPLY],
    "glm": ["<arg_key>", "</arg_value>", GLM_FIND, GLM_REPLY],
    "mistral": ["[TOOL", "_CALLS]", "[TOOL_CALLS]", MISTRAL],
    "mistral_args": [
        "[THINK]",
        "[/THINK]",
        "[TOOL",
        "_CALLS]",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[TOOL_CALLS]reply[ARGS]{}",
    ],
    "deepseek_v3": ["<｜tool▁", f"<｜tool▁calls▁begin｜>{V3_FIND}<｜tool▁calls▁end｜>"],
    "deepseek_v31": ["<｜tool▁", f"<｜tool▁calls▁begin｜>{V31_FIND}<｜tool▁calls▁end｜>"],
    "kimi": ["<|tool_", f"<|tool_calls_section_begin|>{KIMI_FIND}<|tool_calls_section_end|>"],
    "gemma": ["```", "```tool", "_code\n", "\n```tool_code\nreply()\n```\n"],
    "harmony": [
        *("<|channel|>", "final", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>"),
        *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "to=functions.find"),
        *(HARMONY_THOUGHT, HARMONY_FIND, HARMONY_REPLY),
    ],
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_shown_while_it_is_sampled_is_the_content(name, apart):
    form, rng, called, early = AnswerForm(choose_format(name), apart), random.Random(0), 0, 0
    pieces = PIECES + OWN.get(name, []) * 3
    for _ in range(1500):
        text = "".join(rng.choices(pieces, k=rng.choice((1, 2, 3, 7))))
        thoughts, content, calls = form.parse(text, TOOLS)
        splitter, thought, shown = AnswerSplitter(form), "", ""
        while text:
            cut = rng.randint(1, 12)
            part = splitter.feed(text[:cut])
            assert not (part.thoughts and shown)  # thoughts come before the content
            thought, shown, text = thought + part.thoughts, shown + part.content, text[cut:]
            assert content.startswith(shown) and thoughts.startswith(thought)
        called += bool(calls)
        early += bool(shown)
        rest = splitter.rest(Shown(thoughts, content))
        assert (thought + rest.thoughts, shown + rest.content) == (thoughts, content)
    assert called > 50 and early > 300


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *case) for name, cases in READ.items() for case in cases],
)
def test_a_text_is_shown_the_same_wherever_it_is_split(name, text, content, calls):
    for cut in range(len(text) + 1):
        splitter = AnswerSplitter(AnswerForm(choose_format(name)))
        shown = [splitter.feed(text[:cut]).content, splitter.feed(text[cut:]).content]
        assert all(content.startswith("".join(shown[:count])) for count in (1, 2))
        assert "".join(shown) + splitter.rest(Shown("", content)).content == content


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_content_is_shown_at_once(name):
    splitter = AnswerSplitter(AnswerForm(choose_format(name)))
    pieces = ["I", " look", " <b", "> up"]
    assert [splitter.feed(piece).content for piece in pieces] == pieces


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("Hi", "", "Hi"),
        ("<think>\nHm.\n</think>\n\nHi \n", "Hm.", "Hi \n"),
        (" <think>Hm.</think>", "Hm.", ""),
        ("<think>\n\n</think>\n\nHi", "", "Hi"),
        ("<think>Hm. </thi", "Hm. </thi", ""),
        ("Hi <think>Hm.</think>", "", "Hi <think>Hm.</think>"),
        (f"<think>{HERMES_FIND}</think>\nI look.\n{HERMES_REPLY}", HERMES_FIND, "I look."),
        # As Magistral writes them since its version of July 2025.
        ("[THINK]Hm.[/THINK]Hi", "Hm.", "Hi"),
        ("[THINK]Hm. <think> </think>[/THI", "Hm. <think> </think>[/THI", ""),
        (f"[THINK]{HERMES_FIND}[/THINK]I look.\n{HERMES_REPLY}", HERMES_FIND, "I look."),
    ],
)
def test_thoughts_apart_are_no_content(text, thoughts, content):
    form = AnswerForm(choose_format("hermes"), thoughts_apart=True)
    calls = (REPLY,) if text.endswith(HERMES_REPLY) else ()
    assert form.parse(text) == (thoughts, content, calls)


def test_the_configuration_names_the_formats_and_those_without_a_grammar():
    assert tuple(TOOL_FORMATS) == agent_schema.TOOL_FORMATS
    without = [name for name, each in TOOL_FORMATS.items() if each.grammar is None]
    assert tuple(without) == agent_schema.UNCONSTRAINED


def test_an_unknown_format_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="got 'pixtral'; allowed: hermes, llama"):
        choose_format("pixtral")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_whose_header_opens_a_thought_writes_calls_as_it_does_without(name):
    plain, thinking = chat_cases.make("qwen3"), chat_cases.thinking()[1]
    for tokenizer in (plain, thinking):
        assert template_writes(tokenizer, TOOL_FORMATS[name]) == (name == "hermes")
