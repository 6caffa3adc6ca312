"""A grammar of tool calls constrains the format in which they are read."""

import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy_io.build_sampler import build_grammars

GRAMMAR = {"rollout": {"grammar": "tool_calls"}}
TOOLS = ({"name": "wait", "parameters": {"type": "object", "properties": {}}},)
CALLS = {
    "hermes": '<tool_call>{"name": "wait", "arguments": {}}</tool_call>',
    "glm": "<tool_call>wait\n</tool_call>",
    "mistral_args": "[TOOL_CALLS]wait[ARGS]{}",
}


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({}, "hermes"),
        ({"env": {"name": "bfcl", "options": {"format": "glm"}}}, "glm"),
        ({"agent": {"name": "m:f", "tool_format": "mistral_args"}}, "mistral_args"),
        ({"agent": {"name": "m:f"}}, "hermes"),  # as the bundled tokenizer lists tools
    ],
)
def test_the_grammar_is_of_the_agents_format_or_of_the_environments(sections, name):
    tokenizer = read_tokenizer("package:order_desk")
    made = build_grammars(from_dict(GRAMMAR | sections), tokenizer, tokenizer.vocab_size)
    assert made is not None

    def allows(text):
        matcher = made.begin(TOOLS)
        try:
            for token in tokenizer.action(text):
                matcher.accept(token)
        except RuntimeError:
            return False
        return True

    assert allows(CALLS[name]) and not allows(CALLS[name].replace("wait", "leave"))
    # In any other format the tag is a word.
    assert allows(CALLS["mistral_args"].replace("wait", "leave")) is (name != "mistral_args")
    others = {"hermes", "glm"} - {name} if name != "mistral_args" else set()
    assert not any(allows(CALLS[other]) for other in others)
