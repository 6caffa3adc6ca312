"""Forms that requests ask for: which texts their grammars let through, token by token."""

import functools
import itertools

import numpy as np
import pytest

from seeupo_jax.envs.tool_calls import ToolCall
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.rollout.engine.constraints import Constraints, check_schema, constraint_grammar
from seeupo_jax.rollout.engine.protocol import Constraint

LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
    },
}
TOOLS = [LOOK, {"name": "wait", "parameters": {"type": "object", "properties": {}}}]
# Of the others the tags are no text of the bundled tokenizer.
FORMATS = (
    "hermes",
    "llama",
    "llama_function",
    "qwen3_coder",
    "glm",
    "mistral",
    "mistral_args",
    "kimi",
)
OBJECT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


@functools.cache
def tokenizer():
    return read_tokenizer("package:order_desk")


@functools.cache
def constraints(name):
    return Constraints(tokenizer(), tokenizer().vocab_size, TOOL_FORMATS[name])


def allows(name, text, **form):
    """Whether an action may be this text and end there."""
    matcher = constraints(name).begin(Constraint(field="tool_choice", **form), TOOLS)
    words_W = np.zeros(-(-tokenizer().vocab_size // 32), np.uint32)
    for token in tokenizer().action(text):
        matcher.allowed(words_W)
        if not words_W[token // 32] >> (token % 32) & 1:
            return False
        matcher.accept(token)
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_is_all_that_there_is(name):
    render = TOOL_FORMATS[name].render
    one, other = render("", [ToolCall("look", {"id": 1})]), render("", [ToolCall("wait", {})])
    two = render("", [ToolCall("look", {"id": 1}), ToolCall("wait", {})])
    assert allows(name, one, calls="must") and allows(name, two, calls="must")
    assert not allows(name, two, calls="must", single=True)
    assert allows(name, one, calls="must", single=True)
    assert not allows(name, one, calls="must", names=("wait",))
    assert allows(name, other, calls="must", names=("wait",))
    for text in ("", "I look.", f"I look. {one}", f"<think>x</think>{one}", one[:-1]):
        assert not allows(name, text, calls="must"), text
    wrong = render("", [ToolCall("look", {"id": "x"})])
    assert not allows(name, wrong, calls="must")


@pytest.mark.parametrize("form", [{"calls": "must"}, {"schema": OBJECT}], ids=str)
def test_a_form_holds_after_the_thoughts(form):
    text = '{"a": 5}' if "schema" in form else '<tool_call>{"name": "wait", "arguments": {}}'
    text += "" if "schema" in form else "</tool_call>"
    for thoughts, lead in itertools.product(
        ("none", "may", "open"), ("", "<think>\nx {</think>\n\n", "x {</think>\n\n", "x ")
    ):
        wanted = {
            "none": lead == "",
            "may": not lead or lead.startswith("<think>"),
            "open": "</think>" in lead,
        }
        assert allows("hermes", lead + text, thoughts=thoughts, **form) == wanted[thoughts], lead


def test_a_text_of_a_schema_may_be_beside_calls_where_they_can_be_told_apart():
    form = {"calls": "may", "schema": OBJECT}
    call = TOOL_FORMATS["hermes"].render("", [ToolCall("look", {"id": 1})])
    assert allows("hermes", call, **form) and allows("hermes", '{"a": 1}', **form)
    assert not allows("hermes", '{"a": "x"}', **form) and not allows("hermes", "so", **form)
    assert not allows("hermes", call, schema=OBJECT)
    with pytest.raises(ValueError, match="tool_choice: got a schema beside tools; .* 'llama' are"):
        allows("llama", "", **form)


def test_some_of_the_tools_may_be_called_or_none():
    render = TOOL_FORMATS["hermes"].render
    form = {"calls": "may", "names": ("wait",)}
    assert allows("hermes", "so", **form)
    assert allows("hermes", render("so", [ToolCall("wait", {})]), **form)
    assert not allows("hermes", render("so", [ToolCall("look", {"id": 1})]), **form)
    two = render("", [ToolCall("wait", {})] * 2)
    assert allows("hermes", two, **form) and not allows("hermes", two, **form, single=True)


@pytest.mark.parametrize("form", [{"calls": "must"}, {"calls": "none", "schema": OBJECT}])
def test_channels_are_constrained_to_no_form(form):
    constraint = Constraint(field="tool_choice", **form)
    wanted = (
        "^tool_choice: got a form of the answer; allowed: none, since the channels of 'harmony'"
    )
    with pytest.raises(ValueError, match=wanted):
        constraint_grammar(constraint, TOOLS, TOOL_FORMATS["harmony"])


def test_a_format_without_a_grammar_forces_no_calls():
    with pytest.raises(ValueError, match="tool_choice: got a form of calls; allowed: none, since"):
        allows("gemma", "", calls="must")
    assert allows("gemma", '{"a": 1}', schema=OBJECT)


@pytest.mark.parametrize(
    "schema, keyword",
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"contains": {"type": "integer"}}, "contains"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"type": "nothing"}, "nothing"),
        ({"$ref": "#/missing"}, "missing"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(schema, keyword):
    with pytest.raises(
        ValueError, match=f"^f: llguidance refused the schema: .*{keyword}"
    ) as error:
        check_schema(schema, "f")
    assert "x-guidance" not in str(error.value)
