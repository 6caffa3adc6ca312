"""Nulls that Arrow's tables write for what is absent are left out; those that may be meant stay."""

import json
import logging
import random

import pyarrow as pa
import pytest
from agent_cases import RULES

from seeupo_jax.agents.dialects import chat_completions
from seeupo_jax.agents.dialects.exchange import Caller
from seeupo_jax.envs import null_fields
from seeupo_jax.envs.null_fields import NullCounts, drop_from_arguments, normal_tool
from seeupo_jax.envs.validation import check_reset
from seeupo_jax.supervised.conversation import read_conversation

# Schemas of arguments and values of them, by name: a column of a table has one type.
ARGUMENTS = {
    "place": ({"type": "string", "description": "Where."}, "Oslo"),
    "unit": ({"type": "string", "enum": ["C", "F"]}, "C"),
    "days": ({"type": "array", "items": {"type": "integer"}}, [1, 2]),
    "who": (
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name"],
            "additionalProperties": False,
        },
        {"name": "Ann"},
    ),
    "stops": (
        {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "number"}}}},
        [{"at": 1.5}, {}],
    ),
}


def random_tool(rng, number):
    names = rng.sample(list(ARGUMENTS), rng.randint(0, 4))
    schema = {"type": "object", "properties": {name: ARGUMENTS[name][0] for name in names}}
    if rng.random() < 0.5:
        schema["required"] = names[:1]
    described = {"description": "Does."} if rng.random() < 0.5 else {}
    return {"name": f"tool_{number}", **described, "parameters": schema}


def random_row(rng):
    tools = [random_tool(rng, number) for number in range(rng.randint(1, 3))]
    messages = [{"role": "user", "content": "Go on."}]
    for turn in range(rng.randint(1, 3)):
        calls, results = [], []
        for n in range(rng.randint(0, 2)):
            tool = rng.choice(tools)
            names = [name for name in tool["parameters"]["properties"] if rng.random() < 0.6]
            arguments = {name: ARGUMENTS[name][1] for name in names}
            function = {"name": tool["name"], "arguments": arguments}
            calls.append({"id": f"c{turn}{n}", "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": f"c{turn}{n}", "content": "seen"})
        called = {"tool_calls": calls} if calls else {}
        messages += [{"role": "assistant", "content": "Well.", **called}, *results]
    return {"messages": messages, "tools": tools}


def through_arrow(rows):
    """As a table gives them back: each with the fields of all, null where it had none."""
    return pa.Table.from_pylist(rows).to_pylist()


def count_nulls(value):
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return sum(map(count_nulls, parts))
    return value is None


@pytest.mark.parametrize("arguments", ["objects", "texts"])
@pytest.mark.parametrize("seed", range(8))
def test_conversations_from_a_table_are_those_that_were_put_into_it(seed, arguments):
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(20)]
    found = through_arrow(rows)
    assert count_nulls(found) > 200 and not count_nulls(rows)
    dropped = 0
    for row, read in zip(rows, found, strict=True):
        if arguments == "texts":  # as exporters write them behind a table
            for message in read["messages"]:
                for call in message["tool_calls"] or ():
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            read["tools"] = json.dumps(read["tools"])
        shown, wanted = read_conversation(read, "here"), read_conversation(row, "here")
        assert (shown.messages, shown.tools) == (wanted.messages, wanted.tools)
        assert (shown.nulls.kept, wanted.nulls) == (0, NullCounts())
        dropped += shown.nulls.dropped
    assert dropped > 100


STRING = {"type": "string"}
# Schemas of an argument `a`, by whether one that is null stays.
STAYS = {
    False: [
        STRING,
        {"type": ["string", "integer"]},
        {"enum": ["x"]},
        {"type": "string", "enum": ["x", None]},
        {"const": 1},
        {"anyOf": [STRING, {"type": "integer"}]},
        {"oneOf": [STRING]},
        {"allOf": [{"type": ["string", "null"]}, STRING]},
        False,
    ],
    True: [
        {"type": "null"},
        {"type": ["string", "null"]},
        {"type": "string", "nullable": True},
        {"enum": ["x", None]},
        {"anyOf": [STRING, {"type": "null"}]},
        {"description": "Anything."},
        {"$ref": "#/$defs/a"},
        {},
        True,
    ],
}


@pytest.mark.parametrize(
    "schema, stays", [(schema, stays) for stays, each in STAYS.items() for schema in each]
)
def test_an_argument_that_is_null_stays_where_its_schema_allows_that(schema, stays):
    for arguments, parameters in (
        ({"a": None, "b": 1}, {"properties": {"a": schema}}),
        ({"c": {"a": None}, "b": 1}, {"properties": {"c": {"properties": {"a": schema}}}}),
        ({"c": [{"a": None}]}, {"properties": {"c": {"items": {"properties": {"a": schema}}}}}),
        ({"a": None}, {"properties": {}, "additionalProperties": schema}),
    ):
        counts = NullCounts()
        found = drop_from_arguments(arguments, parameters, counts)
        assert (found == arguments) == stays
        assert counts == NullCounts(dropped=not stays, kept=stays)


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"properties": None}])
def test_without_properties_in_the_schema_nulls_of_arguments_stay_and_count(schema):
    counts = NullCounts()
    arguments = {"a": None, "b": {"c": None}, "d": [None]}
    assert drop_from_arguments(arguments, schema, counts) == arguments
    assert counts == NullCounts(kept=2)  # of fields; tables add none to lists


def test_nulls_of_a_schema_go_but_for_values_that_may_be_meant():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "default": None, "enum": None, "description": None},
            "b": None,
            "default": {"type": ["string", "null"], "const": None, "enum": ["x", None]},
            "c": {"anyOf": [{"type": "null", "title": None}], "items": None, "const": None},
            "d": {"default": {"x": None}, "examples": [{"x": None}]},
        },
        "$defs": {"e": None, "f": {"not": {"type": None, "const": 1}}},
        "required": None,
    }
    counts = NullCounts()
    tool = {"name": "t", "description": None, "parameters": schema, "strict": None}
    assert normal_tool(tool, counts) == {
        "name": "t",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string", "default": None},
                "default": {"type": ["string", "null"], "enum": ["x", None]},
                "c": {"anyOf": [{"type": "null"}], "const": None},
                "d": {"default": {"x": None}, "examples": [{"x": None}]},
            },
            "$defs": {"f": {"not": {"const": 1}}},
        },
    }
    assert counts == NullCounts(dropped=11, kept=2)


NULLED = {"type": "object", "properties": {"a": {"type": "string", "enum": None}, "b": None}}


@pytest.mark.parametrize(
    "tool",
    [
        {"parameters": {"properties": {"b": STRING, "a": STRING}}, "name": "t", "returns": 1},
        {
            "returns": 1,
            "description": None,
            "parameters": {"properties": {"b": STRING, "a": STRING}, "type": "object"},
            "name": "t",
        },
    ],
)
def test_the_normal_form_has_one_order_and_nothing_missing(tool):
    """The order of properties is the client's: a model reads it as that of the arguments."""
    schema = {"type": "object", "properties": {"b": STRING, "a": STRING}}
    wanted = {"name": "t", "description": "", "parameters": schema, "returns": 1}
    assert json.dumps(normal_tool(tool, NullCounts())) == json.dumps(wanted)
    assert normal_tool({"name": "t"}, NullCounts())["parameters"] == {
        "type": "object",
        "properties": {},
    }


def test_tools_of_environments_lose_their_nulls_with_one_warning(caplog):
    tool = {"name": "t", "description": "Does.", "parameters": NULLED}
    null_fields._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _, tools = check_reset(((), (tool,)))
    assert tools[0]["parameters"] == {"type": "object", "properties": {"a": STRING}}
    assert [m.partition(",")[0] for m in caplog.messages] == [
        "warning: the environment's tools have 2 null fields"
    ]


def test_tools_of_requests_lose_their_nulls_which_are_counted():
    function = {"name": "t", "parameters": NULLED}
    calls = [{"id": "c", "function": {"name": "t", "arguments": '{"a": null}'}}]
    tree = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": "seen"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    caller = Caller("m", 1, RULES, {}, ())
    call = chat_completions.DIALECT.read(tree, caller).call
    assert call.tools[0]["parameters"] == {"type": "object", "properties": {"a": STRING}}
    assert call.messages[1].calls[0].arguments == {"a": None}  # the policy's own words
    assert caller.ignored == ["null fields of tools[0]"]
