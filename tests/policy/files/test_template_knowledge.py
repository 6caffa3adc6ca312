"""A model's tool format and its thoughts are known by what its chat template writes."""

import copy

import pytest
from chat_cases import QWEN3_TEMPLATE, TOOL, library

from seeupo_jax.configuration import schema
from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy.files.chat.call_format import as_function
from seeupo_jax.policy.files.huggingface_tokenizer import HuggingFaceTokenizer
from seeupo_jax.policy.files.messages import TOOL_LISTINGS
from seeupo_jax.policy.files.template_knowledge import (
    knows_thoughts,
    resolve_format,
    template_writes,
)

CHAT = (
    "{tools}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}"
    "{{% for t in m.tool_calls or [] %}}{{% set f = t.function %}}{{% if loop.first %}}"
    "{begin}{{% endif %}}{call}{{% if loop.last %}}{end}{{% endif %}}{{% endfor %}}<|im_end|>\n"
    "{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{header}"
    "{{% endif %}}"
)
LISTS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ARGUMENTS, NAME = "{{ f.arguments | tojson }}", "{{ f.name }}"
KIMI = "<|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>"
# The part of each template that writes calls, by what the makers' templates write: Qwen2.5's,
# Llama 3.2's, Llama 3.1's prompt, Qwen3-Coder's, GLM-4.5's, Mistral-Small-3.1's and Magistral's,
# DeepSeek-V3's and V3.1's, Kimi-K2's, and that of Google's page on Gemma.
CALLS = {
    "hermes": (
        "",
        f'\n<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "",
    ),
    "llama": ("", f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', ""),
    "llama_function": ("", f"<function={NAME}>{ARGUMENTS}</function>", ""),
    "qwen3_coder": (
        "",
        f"\n<tool_call>\n<function={NAME}>\n{{% for k, v in f.arguments | items %}}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "",
    ),
    "glm": (
        "",
        f"\n<tool_call>{NAME}\n{{% for k, v in f.arguments | items %}}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>"
        "\n{% endfor %}</tool_call>",
        "",
    ),
    "mistral": (
        "[TOOL_CALLS] [",
        "{% if t.id | length < 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
        f'{{"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ t.id }}}}"}}'
        '{{ "" if loop.last else ", " }}',
        "]",
    ),
    "mistral_args": ("", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{{{{ t.type }}}}<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        f"{KIMI}{ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "gemma": (
        "\n```tool_code\n",
        f"{NAME}({{% for k, v in f.arguments | items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}})\n",
        "```",
    ),
}


def tokenizer(template, **chat):
    made = copy.copy(library("small"))
    made.chat_template = template
    return HuggingFaceTokenizer(made, schema.Chat(**chat), generation={}, where="small")


def written(name, header="", tools=LISTS):
    begin, call, end = CALLS[name]
    return CHAT.format(begin=begin, call=call, end=end, header=header, tools=tools)


@pytest.mark.parametrize("name", CALLS)
def test_auto_is_the_format_that_the_template_writes(name):
    made = tokenizer(written(name))
    assert made.tool_listing is None
    assert resolve_format("auto", made) is TOOL_FORMATS[name]
    assert resolve_format("llama", made) is TOOL_FORMATS["llama"]


def test_every_format_has_a_template_here():
    assert CALLS.keys() == TOOL_FORMATS.keys()


def test_auto_is_found_where_a_header_begins_otherwise_than_a_history():
    assert resolve_format("auto", tokenizer(written("deepseek_v3", header="<think>\n"))).name == (
        "deepseek_v3"
    )


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_tools_that_a_template_does_not_list_are_listed_with_the_format_that_auto_reads(name):
    unlisted = tokenizer(written(name, tools=""))
    assert unlisted.tool_listing == resolve_format("auto", unlisted).name == name
    named = tokenizer(written("hermes"), tools=name)
    assert named.tool_listing == resolve_format("auto", named).name == name
    asked = [{"role": "user", "content": "?"}]
    text = named.text(named.begin(asked, (TOOL,)).tokens)
    call = ToolCall("TOOL", {"PARAMETER": "VALUE"})
    assert TOOL_FORMATS[name].render("", [call]).replace('"VALUE"', "VALUE") in text
    assert '"name": "find"' in text and "TOOL" not in named.text(named.begin(asked, ()).tokens)


def test_a_template_that_writes_calls_in_no_known_format_is_refused_with_the_known_ones():
    strange = CHAT.format(begin="", call=f"call:{NAME}{ARGUMENTS}", end="", header="", tools=LISTS)
    with pytest.raises(ValueError, match="in no known format; allowed: hermes, .*, gemma, the"):
        resolve_format("auto", tokenizer(strange))
    assert resolve_format("kimi", tokenizer(strange)).name == "kimi"


@pytest.mark.parametrize("kind", ["none", "signatures", "json"])
def test_a_listing_without_a_form_of_calls_is_read_as_hermes(kind):
    assert resolve_format("auto", tokenizer(written("glm"), tools=kind)).name == "hermes"
    assert kind in TOOL_LISTINGS


def test_calls_of_a_history_are_the_template_s_where_it_writes_them_as_the_format_does():
    made = tokenizer(written("qwen3_coder"))
    assert template_writes(made, TOOL_FORMATS["qwen3_coder"])
    assert not template_writes(made, TOOL_FORMATS["hermes"])
    conversation = made.begin([{"role": "user", "content": "?"}], (TOOL,))
    call = ToolCall("find", {"name": "x"})
    message = {"role": "assistant", "content": "I look.", "tool_calls": [as_function(call)]}
    text = made.text(conversation.say(message))
    assert TOOL_FORMATS["qwen3_coder"].parse(text, (TOOL,)) == ("I look.", (call,))


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        (written("hermes"), False),
        (written("hermes", header="<think>\n"), True),
        (written("hermes", header="<think>\n\n</think>\n\n"), False),
        (QWEN3_TEMPLATE.read_text(), True),
    ],
)
def test_a_template_knows_thoughts_that_it_opens_or_writes(template, knows):
    assert knows_thoughts(tokenizer(template)) is knows
