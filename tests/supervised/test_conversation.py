"""Conversations as OpenAI and TRL write them, and one sentence for what is none."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.tool_formats.formats import choose_format
from seeupo_jax.errors import DataChanged
from seeupo_jax.supervised.conversation import read_conversation
from seeupo_jax.supervised.conversation_sources import (
    ToolCallsAsText,
    open_conversations,
)

USER = {"role": "user", "content": "Where is order 4075?"}
ANSWER = {"role": "assistant", "content": "On its way."}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find", "arguments": '{"name": "Ann"}'},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "shipped"}
TOOL = {"name": "find", "description": "", "parameters": {"type": "object", "properties": {}}}


def read(messages, **more):
    return read_conversation({"messages": messages, **more}, "here")


def test_openais_calls_and_tools_become_what_templates_read():
    shown = read(
        [
            {"role": "developer", "content": _texts("Be kind.", "Be brief.")},
            USER | {"name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "tool_call_id": "call_1", "content": "shipped"},
            ANSWER | {"weight": 1, "annotations": []},
        ],
        tools=[{"type": "function", "function": TOOL}],
    )
    call = CALL | {"function": {"name": "find", "arguments": {"name": "Ann"}}}  # with its id
    assert shown.messages == (
        {"role": "system", "content": "Be kind.\nBe brief."},  # as vLLM joins parts
        USER | {"name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "shipped", "tool_call_id": "call_1"},
        ANSWER,
    )
    assert shown.tools == (TOOL,)
    assert read([USER, ANSWER], tools=json.dumps([TOOL])).tools == (TOOL,)
    assert read([USER, ANSWER], tools=None).tools == ()


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_other_fields_may_be_null_or_empty(empty):
    others = ("tool_calls", "reasoning_content", "weight", "refusal")
    asked = USER | dict.fromkeys(others, empty)
    answer = ANSWER | dict.fromkeys(("tool_calls", "reasoning_content", "refusal"), empty)
    assert read([asked, answer]).messages == (USER, ANSWER)


def _texts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_a_tool_may_answer_with_an_empty_text():
    assert read([USER, {"role": "tool", "content": ""}, ANSWER]).messages[1]["content"] == ""


def test_a_message_of_weight_0_keeps_it():
    shown = read([USER, ANSWER | {"weight": 0}, USER, ANSWER])
    assert [m.get("weight", 1) for m in shown.messages] == [1, 0, 1, 1]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    "messages, message",
    [
        (None, "messages: got none; allowed: a list of messages"),
        ("hello", "messages: got hello; allowed: a list"),
        ([], "messages: got none; allowed: at least one assistant message"),
        ([USER], "messages: got the roles user; allowed: at least one assistant"),
        ([ANSWER, USER], "messages[0]: got role 'assistant'"),
        ([USER, "hi"], "messages[1]: got hi; allowed: an object"),
        ([USER | {"role": "bot"}, ANSWER], "messages[0].role: got bot; allowed: system, user"),
        ([{"content": "x"}, ANSWER], "messages[0].role: got None"),
        ([USER, {"role": "assistant", "content": ""}], "messages[1]: got no content"),
        ([USER, ANSWER | {"function_call": {"name": "f"}}], "got function_call in a message of"),
        ([USER | {"tool_calls": [CALL]}, ANSWER], "got tool_calls in a message of role user"),
        ([USER | {"content": 3}, ANSWER], "messages[0].content: got 3; allowed: a text"),
        ([{"role": "user"}, ANSWER], "messages[0].content: got none in a message of role user"),
        ([USER | {"content": None}, ANSWER], "messages[0].content: got none in a message of role"),
        ([USER | {"content": []}, ANSWER], "messages[0].content: got none in a message of role"),
        ([{"role": "system"}, USER, ANSWER], "messages[0].content: got none in a message of role"),
        ([USER, {"role": "tool"}, ANSWER], "messages[1].content: got none in a message of role"),
        ([USER | {"content": [IMAGE]}, ANSWER], "messages[0].content[0]: got {'type': 'image_url'"),
        ([USER | {"content": "\ud800"}, ANSWER], "messages[0].content: got"),
        ([USER | {"name": "\ud800"}, ANSWER], "messages[0].name: got"),
        ([USER, RESULT | {"tool_call_id": "\ud800"}, ANSWER], "messages[1].tool_call_id: got"),
        ([USER, CALLING | {"tool_calls": [CALL | {"id": "\ud800"}]}], "tool_calls[0].id: got"),
        *(
            ([USER, CALLING | {"tool_calls": [{"function": function}]}], "function.arguments: got")
            for function in (
                {"name": "f", "arguments": '{"q": ["\\ud800"]}'},
                {"name": "f", "arguments": {"\ud800": 1}},
            )
        ),
        ([USER, ANSWER | {"weight": 0}], "got weight 0 for all"),
        ([USER, ANSWER | {"weight": 0.5}], "messages[1].weight: got 0.5; allowed: 0 or 1"),
        ([USER, ANSWER | {"tool_calls": [{"type": "custom"}]}], "tool_calls[0]: got {'type'"),
        ([USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "JSON"),
        ([USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}], "objec"),
    ],
)
def test_what_is_no_conversation_is_told_with_its_place(messages, message):
    with pytest.raises(ValueError) as error:
        read(messages)
    text = str(error.value)
    assert text.startswith("here") and message in text and "\n" not in text and "allowed: " in text


HALF = TOOL | {"description": "\ud800"}


@pytest.mark.parametrize("tools", [3, "{", [{"type": "function"}], ["find"], [HALF]])
def test_what_is_no_tool_is_told(tools):
    with pytest.raises(ValueError, match="^here: tools"):
        read([USER, ANSWER], tools=tools)


def test_nulls_of_tools_are_left_out():
    """As tables have them, whose rows all have the fields of every tool; a null default stays."""
    zone = {"type": "string", "default": None}
    schema = {"type": "object", "properties": {"zone": zone, "of": None}, "required": None}
    tools = [{"name": "a", "description": None, "parameters": None}]
    tools += [{"type": "function", "function": {"name": "b", "parameters": schema, "strict": None}}]
    wanted = {"type": "object", "properties": {"zone": zone}}
    assert read([USER, ANSWER], tools=tools).tools == (
        {"name": "a", "description": "", "parameters": {"type": "object", "properties": {}}},
        {"name": "b", "description": "", "parameters": wanted},
    )


@pytest.mark.parametrize(
    "parameters, place",
    [
        ("{}", ""),
        ([], ""),
        ({"properties": ["zone"]}, ".properties"),
        ({"required": "zone"}, ".required"),
    ],
)
def test_parameters_that_are_no_schema_are_told(parameters, place):
    with pytest.raises(ValueError, match=rf"^here: tools\[0\]\.parameters{place}: got "):
        read([USER, ANSWER], tools=[{"name": "find", "parameters": parameters}])


def write(path, *lines):
    path.write_bytes(b"\n".join(lines))
    return path


def conversations_of(file):
    return open_conversations(from_dict({}), str(file), "train", {}, "--data")


GOOD = json.dumps({"messages": [USER, ANSWER], "id": 7}, ensure_ascii=False).encode()


def test_lines_are_read_by_number_and_empty_ones_count_for_nothing(tmp_path):
    other = json.dumps({"messages": [USER, ANSWER | {"content": "Ünknown"}]}, ensure_ascii=False)
    file = write(tmp_path / "c.jsonl", b"", GOOD, b"  ", other.encode())
    found = conversations_of(file)
    assert len(found) == 2 and found.where(1) == f"--data: {file}, line 4"
    assert found[1].messages[1]["content"] == "Ünknown" and found[0].messages == (USER, ANSWER)


def test_a_line_that_another_has_replaced_is_told_and_those_that_stayed_are_read(tmp_path):
    file = write(tmp_path / "c.jsonl", GOOD, GOOD)
    found = conversations_of(file)
    write(file, GOOD, GOOD.replace(b"4075", b"5186"), GOOD)  # of as many bytes, and one more behind
    assert len(found) == 2 and found[0].messages == (USER, ANSWER)
    with pytest.raises(DataChanged, match=f"^--data: {file}, line 2: got another line than when"):
        found[1]
    file.unlink()
    with pytest.raises(DataChanged, match="line 1: got a file that cannot be read any more"):
        found[0]


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "got {, which is not JSON"),
        (b"\xff\xfe", "which is not JSON"),
        (b"[1]", "got [1]; allowed: a JSON object"),
        (b'{"prompt": 1}', "messages: got none"),
    ],
)
def test_a_broken_line_is_told_with_file_and_number(line, message, tmp_path):
    file = write(tmp_path / "c.jsonl", GOOD, line)
    found = conversations_of(file)
    with pytest.raises(ValueError, match=f"--data: {file}, line 2") as error:
        found[1]
    assert message in str(error.value)


@pytest.mark.parametrize("data", ["no.jsonl", "."])
def test_a_file_that_cannot_be_read_is_told(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--data: got .*, which cannot be read"):
        open_conversations(from_dict({}), data, "train", {}, "--data")


def test_an_empty_file_is_told(tmp_path):
    file = write(tmp_path / "c.jsonl", b"\n")
    with pytest.raises(ValueError, match="has no conversation"):
        open_conversations(from_dict({}), str(file), "train", {}, "--data")


def test_demonstrations_and_tfds_are_the_same_conversations(tmp_path):
    """The order desk's demonstrations, and the dataset that they are kept in."""
    config = from_dict({"env": {"options": {"data_dir": str(tmp_path)}}})
    shown = open_conversations(config, "demonstrations", "train", {"episodes": 20}, "--data")
    (folder,) = tmp_path.glob("order_desk/*/*")
    kept = open_conversations(config, f"tfds:{folder}", "train", {}, "--data")
    assert len(shown) == len(kept) == 20
    for index in (0, 19):
        assert shown[index].messages == kept[index].messages
    assert shown[0].tools and not kept[0].tools
    assert kept.where(3) == f"--data: tfds:{folder}, train, record 3"
    with pytest.raises(ValueError, match="split 'nosuch', which cannot be read"):
        open_conversations(config, f"tfds:{folder}", "nosuch", {}, "--data")


def test_records_of_tfds_are_utf8(monkeypatch):
    messages = [USER | {"content": "Zürich, 李"}, ANSWER]
    columns = {name: [m[name].encode() for m in messages] for name in ("role", "content")}
    texts = {"messages": json.dumps(messages, ensure_ascii=False).encode()}
    rows = [{name: text.encode() for name, text in message.items()} for message in messages]
    listed = (columns, rows, np.array(rows))
    records = [texts, *({"messages": each} for each in listed)]
    kept = of_tfds(monkeypatch, records)
    assert [kept[index].messages for index in range(4)] == [tuple(messages)] * 4


@pytest.mark.parametrize(
    "given",
    [
        3,
        np.int64(3),
        [GOOD, GOOD],
        np.array([GOOD] * 9, object),
        {"role": 3},
        {"role": ["user"], "x": []},
    ],
)
def test_a_record_of_tfds_in_another_form_is_told(given, monkeypatch):
    kept = of_tfds(monkeypatch, [{"messages": given}])
    told = "^--data: tfds:mine, train, record 0: got .*; allowed: a "
    with pytest.raises(ValueError, match=told) as error:
        kept[0]
    assert "\n" not in str(error.value)


def of_tfds(monkeypatch, records):
    made = SimpleNamespace(as_data_source=lambda split: records)
    monkeypatch.setattr("tensorflow_datasets.builder", lambda name: made)
    return open_conversations(from_dict({}), "tfds:mine", "train", {}, "--data")


def test_an_environment_without_demonstrations_is_told():
    config = from_dict({"env": {"name": "run_environment:Echo"}})
    with pytest.raises(ValueError, match="has no demonstrations"):
        open_conversations(config, "demonstrations", "train", {}, "--data")


def test_calls_are_text_for_a_tokenizer_that_writes_none(tmp_path):
    said = {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "I look."}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    line = json.dumps({"messages": [USER, said, result, ANSWER]})
    file = write(tmp_path / "c.jsonl", line.encode())
    (shown,) = ToolCallsAsText(conversations_of(file), choose_format("hermes"))
    call = '<tool_call>{"name": "find", "arguments": {"name": "Ann"}}</tool_call>'
    text = f"<think>\nI look.\n</think>\n\n{call}"
    assert shown.messages[1] == {"role": "assistant", "content": text}
    assert shown.messages[3] == ANSWER
