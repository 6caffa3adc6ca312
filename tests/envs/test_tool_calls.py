"""The reader of tool calls takes exactly its form, and says what is wrong with anything else."""

import json

import pytest

from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, parse_hermes, render_hermes


def block(body):
    return f"<tool_call>{body}</tool_call>"


def test_a_rendered_call_is_read_back():
    arguments = {"text": 'a "quoted" é\n<b>', "count": -3, "part": 0.5, "flags": [True, None, {}]}
    text = render_hermes("tell", **arguments)
    assert parse_hermes(text) == (ToolCall("tell", arguments),)


def test_an_argument_may_be_called_name():
    assert parse_hermes(render_hermes("find", name="x")) == (ToolCall("find", {"name": "x"}),)


def test_calls_are_read_in_order_and_the_text_around_them_is_skipped():
    text = f"I will look.\n{render_hermes('a')} then\n{render_hermes('b', x=1)} \n"
    assert parse_hermes(text) == (ToolCall("a", {}), ToolCall("b", {"x": 1}))


def test_white_space_and_key_order_inside_a_block_are_free():
    text = block('\n{"arguments": {"x": [1]},\n "name": "a"}\n')
    assert parse_hermes(text) == (ToolCall("a", {"x": [1]}),)


@pytest.mark.parametrize("text", ["", "Done.", '{"name": "a", "arguments": {}}', "<tool>a</tool>"])
def test_a_text_without_a_block_holds_no_call(text):
    assert parse_hermes(text) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{}", "needs its </tool_call>"),
        ("{}</tool_call>", "needs its </tool_call>"),
        (render_hermes("a") + "<tool_call>", "needs its </tool_call>"),
        ("</tool_call>" + render_hermes("a"), "needs its </tool_call>"),
        (render_hermes("a") + " bye", "nothing may follow"),
        (block(""), "one JSON object"),
        (block('{"name": "a", "arguments": {}'), "one JSON object"),
        (block('{"name": "a", "arguments": {}} {}'), "one JSON object"),
        (block(render_hermes("a")), "one JSON object"),
        (block("[]"), "exactly the keys"),
        (block('"name arguments"'), "exactly the keys"),
        (block('{"name": "a"}'), "exactly the keys"),
        (block('{"name": "a", "arguments": {}, "id": 1}'), "exactly the keys"),
        (block('{"name": 1, "arguments": {}}'), "must be a string"),
        (block('{"name": "a", "arguments": []}'), "an object"),
        (block('{"name": "a", "name": "b", "arguments": {}}'), "occurs twice"),
        (block('{"name": "a", "arguments": {"x": [{"y": 1, "y": 2}]}}'), "occurs twice"),
    ],
)
def test_a_broken_form_is_refused_with_its_reason(text, reason):
    with pytest.raises(ToolCallError, match=reason):
        parse_hermes(text)


def test_one_broken_block_refuses_the_whole_message():
    with pytest.raises(ToolCallError):
        parse_hermes(render_hermes("a") + block("{") + render_hermes("b"))


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "9" * 10_000, "[" * 900 + "]" * 900 + ",", '"' + "x" * 100_000]
)
def test_a_text_too_deep_or_too_long_for_json_is_an_ordinary_error(value):
    with pytest.raises(ToolCallError, match="one JSON object"):
        parse_hermes(block('{"name": "a", "arguments": {"x": ' + value + "}}"))


def test_an_error_is_a_text_for_the_model_and_a_value_error():
    with pytest.raises(ValueError) as caught:
        parse_hermes(block("{}"))
    assert json.loads(json.dumps(str(caught.value))).startswith("a tool call has exactly")
