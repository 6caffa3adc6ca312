"""Values that a format writes as plain text get the types of the tool's schema."""

import pytest

from seeupo_jax.envs.tool_formats.formats import choose_format
from seeupo_jax.envs.tool_formats.typed_values import ANY, json_types, typed_value

# Text, schema, value: as vLLM's and SGLang's parsers of Qwen3-Coder convert it, but for booleans:
# theirs read every other text as false.
CONVERTED = [
    ("42", {"type": "string"}, "42"),
    ("true", {"type": "string"}, "true"),
    ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
    ("42", {"type": "integer"}, 42),
    ("-7", {"type": "integer"}, -7),
    ("4.0", {"type": "integer"}, "4.0"),
    ("many", {"type": "integer"}, "many"),
    ("True", {"type": "integer"}, "True"),
    ("42", {"type": "number"}, 42),
    ("2.5", {"type": "number"}, 2.5),
    ("1e3", {"type": "number"}, 1000.0),
    ("NaN", {"type": "number"}, "NaN"),
    ("true", {"type": "boolean"}, True),
    ("False", {"type": "boolean"}, False),
    ("yes", {"type": "boolean"}, "yes"),
    ("1", {"type": "boolean"}, "1"),
    ('{"a": [1, null]}', {"type": "object"}, {"a": [1, None]}),
    ("{'a': True}", {"type": "object"}, {"a": True}),
    ("{a}", {"type": "object"}, "{a}"),
    ("[1, 'x']", {"type": "array"}, [1, "x"]),
    ('{"a": 1, "a": 2}', {"type": "object"}, '{"a": 1, "a": 2}'),
    ("null", {"type": "integer"}, None),
    ("None", {"type": ["integer", "null"]}, None),
    ("null", {"type": ["string", "null"]}, None),
    ("null", {"type": "string"}, "null"),
    ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
    ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5"),
    ("5", {"enum": [1, 5]}, 5),
    ("x", {"enum": ["x", "y"]}, "x"),
    ("5", {"const": 5}, 5),
    ("[5]", {"items": {"type": "integer"}}, [5]),
    ('{"k": 1}', {"properties": {"k": {}}}, {"k": 1}),
    (" 5 ", {"type": "integer"}, 5),
]


@pytest.mark.parametrize(("text", "schema", "value"), CONVERTED)
def test_a_text_has_the_type_of_its_schema_or_stays_a_text(text, schema, value):
    found = typed_value(text, schema, "string")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "unknown", "value"),
    [
        ("5", "string", "5"),
        ("5", ANY, 5),
        ('"5"', ANY, "5"),
        ("[1]", ANY, [1]),
        ("x", ANY, "x"),
    ],
)
def test_a_text_without_a_schema_has_the_format_s_type(text, unknown, value):
    assert typed_value(text, None, unknown) == value
    assert typed_value(text, {"description": "x"}, unknown) == value


def test_a_schema_without_end_has_no_type():
    endless = {"anyOf": []}
    endless["anyOf"].append(endless)
    assert json_types(endless) == []


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_a_reference_within_a_tool_s_schema_is_followed(name):
    parameters = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/person"}, "lost": {"$ref": "#/$defs/none"}},
        "$defs": {"person": {"type": "object"}},
    }
    tools = [{"name": "say", "description": "", "parameters": parameters}]
    tool_format = choose_format(name)
    texts = {
        "qwen3_coder": '<tool_call><function=say><parameter=to>{"x": 1}</parameter></function>'
        "</tool_call>",
        "glm": '<tool_call>say<arg_key>to</arg_key><arg_value>{"x": 1}</arg_value></tool_call>',
    }
    ((_, (call,)),) = [tool_format.parse(texts[name], tools)]
    assert call.arguments == {"to": {"x": 1}}


def test_a_value_may_have_the_closing_tag_where_no_value_ends():
    said = "a </parameter> b"
    text = f"<tool_call><function=f><parameter=x>\n{said}\n</parameter></function></tool_call>"
    (call,) = choose_format("qwen3_coder").parse(text)[1]
    assert call.arguments == {"x": said}
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>a </arg_value> b</arg_value></tool_call>"
    (call,) = choose_format("glm").parse(text)[1]
    assert call.arguments == {"x": "a </arg_value> b"}
