"""A model's tool format and its thoughts are known by what its chat template writes."""

import pytest
from chat_cases import QWEN3_TEMPLATE, TOOL
from format_cases import ARGUMENTS, CHAT, LISTS, NAME, tokenizer, written

from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy.files.chat.call_ids import as_function
from seeupo_jax.policy.files.messages import TOOL_LISTINGS
from seeupo_jax.policy.files.template_knowledge import (
    knows_thoughts,
    resolve_format,
    template_writes,
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_auto_is_the_format_that_the_template_writes(name):
    made = tokenizer(written(name))
    assert made.tool_listing is None
    assert resolve_format("auto", made) is TOOL_FORMATS[name]
    if name != "harmony":
        assert resolve_format("llama", made) is TOOL_FORMATS["llama"]


def test_harmony_is_of_tokenizers_with_channels_and_these_have_no_other():
    channels, plain = tokenizer(written("harmony")), tokenizer(written("hermes"))
    assert resolve_format("harmony", channels) is TOOL_FORMATS["harmony"]
    with pytest.raises(ValueError, match="'llama' for a model whose .*; allowed: auto, harmony."):
        resolve_format("llama", channels)
    with pytest.raises(ValueError, match="'harmony' for a tokenizer without the control token"):
        resolve_format("harmony", plain)
    # Also where a message lists the tools.
    unlisted = tokenizer(written("harmony"), tools="none")
    assert resolve_format("auto", unlisted) is TOOL_FORMATS["harmony"]
    with pytest.raises(ValueError, match="config.chat.tools: got 'llama' for a model whose"):
        resolve_format("auto", tokenizer(written("harmony"), tools="llama"))


def test_auto_is_found_where_a_header_begins_otherwise_than_a_history():
    assert resolve_format("auto", tokenizer(written("deepseek_v3", header="<think>\n"))).name == (
        "deepseek_v3"
    )


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_tools_that_a_template_does_not_list_are_listed_with_the_format_that_auto_reads(name):
    unlisted = tokenizer(written(name, tools=""))
    assert unlisted.tool_listing == resolve_format("auto", unlisted).name == name
    named = tokenizer(written("harmony" if name == "harmony" else "hermes"), tools=name)
    assert named.tool_listing == resolve_format("auto", named).name == name
    asked = [{"role": "user", "content": "?"}]
    text = named.text(named.begin(asked, (TOOL,)).tokens)
    call = ToolCall("TOOL", {"PARAMETER": "VALUE"})
    assert TOOL_FORMATS[name].render("", [call]).replace('"VALUE"', "VALUE") in text
    assert '"name": "find"' in text and "TOOL" not in named.text(named.begin(asked, ()).tokens)


def test_a_template_that_writes_calls_in_no_known_format_is_refused_with_the_known_ones():
    strange = CHAT.format(begin="", call=f"call:{NAME}{ARGUMENTS}", end="", header="", tools=LISTS)
    with pytest.raises(ValueError, match="in no known format; allowed: hermes, .*, harmony, the"):
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
