"""What the policy reads of the tools in each format, against the official prompts."""

import ast
import json
import re
from importlib.resources import files

import bfcl_eval
import pytest
from bfcl_eval.constants import default_prompts

from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, added_docs, listed_docs, load_tasks
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.formats import FORMATS
from seeupo_jax.envs.bfcl.multi_turn import CLOSING
from seeupo_jax.envs.tool_calls import ToolCall, render_hermes

BASE, MISSING = "multi_turn_base_0", "multi_turn_miss_func_0"
SENTENCE = "I have updated some more functions you can choose from. What about now?"


def official_functions(path, names):
    """Functions of an official file that itself needs packages which are not installed."""
    tree = ast.parse((files(bfcl_eval) / path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(tree.body) == len(names)
    space = {"re": re, "json": json, **vars(default_prompts)}
    exec(compile(tree, path, "exec"), space)
    return space


def with_hints(docs):
    loader = official_functions(
        "utils.py",
        ["_get_language_specific_hint", "is_java", "is_js"],
    )
    hint = loader["_get_language_specific_hint"]("multi_turn_base")
    return [doc | {"description": doc["description"] + hint} for doc in docs]


def begin_added_turn(form, **options):
    env = Bfcl("multi_turn_miss_func", format=form, **options)
    env.reset(MISSING, seed=0)
    (turn,) = load_tasks("multi_turn_miss_func")[MISSING].held_out
    (message,) = [env.step(CLOSING) for _ in range(turn)][-1].observation
    assert message["role"] == "user"
    return message["content"], turn


def test_without_shortening_the_python_prompt_is_the_official_one_to_the_letter():
    formulate = official_functions(
        "model_handler/utils.py",
        ["formulate_system_prompt", "format_function_doc", "parse_prompt_variation_params"],
    )["formulate_system_prompt"]
    for category in CATEGORIES:
        env = Bfcl(category, format="python", compact=False)
        for task_id, task in [*load_tasks(category).items()][::10]:
            docs = with_hints(listed_docs(task))
            wanted = formulate(default_prompts.DEFAULT_SYSTEM_PROMPT_FORMAT, docs)
            messages, tools = env.reset(task_id, seed=0)
            assert messages == ({"role": "system", "content": wanted}, *task.questions[0])
            assert tools == ()


def test_without_shortening_added_tools_come_in_the_official_message():
    text, turn = begin_added_turn("python", compact=False)
    docs = with_hints(added_docs(load_tasks("multi_turn_miss_func")[MISSING], turn))
    prompt = default_prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
    assert text == prompt.format(functions=docs)


def test_a_short_python_prompt_has_the_same_instructions_and_a_tool_a_line():
    long, short = (
        Bfcl(format="python", compact=compact).reset(BASE, 0)[0][0]["content"]
        for compact in (False, True)
    )
    instructions, _, listing = short.partition("\n[")
    assert long.startswith(instructions + "\n[") and len(short) < len(long) / 2
    tools = json.loads("[" + listing)
    assert [tool["name"] for tool in tools] == [
        doc["name"] for doc in listed_docs(load_tasks("multi_turn_base")[BASE])
    ]
    assert {key for tool in tools for key in tool} == {"name", "description", "parameters"}
    assert listing.count("\n{") == len(tools) - 1 and "This tool belongs to" not in listing


@pytest.mark.parametrize("form", FORMATS)
def test_held_out_tools_are_unseen_until_their_turn(form):
    env = Bfcl("multi_turn_miss_func", format=form)
    for task_id, task in load_tasks("multi_turn_miss_func").items():
        messages, tools = env.reset(task_id, seed=0)
        ((turn, names),) = task.held_out.items()
        reported = str(tools) + messages[0]["content"]
        assert not any(f"{quote}{n}{quote}" in reported for n in names for quote in ("'", '"'))
        replies = [env.step(CLOSING).observation for _ in range(turn)]
        assert replies[:-1] == [task.questions[index] for index in range(1, turn)]
        assert all(f'"{name}"' in replies[-1][0]["content"] for name in names)


def test_added_hermes_tools_come_as_a_chat_template_lists_tools():
    text, _ = begin_added_turn("hermes")
    first, line, last, sentence = text.split("\n")
    assert (first, last, sentence) == ("<tools>", "</tools>", SENTENCE)
    tool = json.loads(line)
    assert tool["type"] == "function"
    known = {tool["name"]: tool for tool in Bfcl().reset(BASE, 0)[1]}
    assert tool["function"] == known["sort"]


def test_a_held_out_tool_answers_before_its_turn_as_it_does_officially():
    env = Bfcl("multi_turn_miss_func")
    env.reset(MISSING, seed=0)
    (answer,) = env.step(render_hermes("sort", file_name="x")).observation
    assert "sort: " in answer["content"]


def test_tools_are_the_official_docs_as_json_schema():
    _, tools = Bfcl().reset(BASE, seed=0)
    assert [tool["name"] for tool in tools[:2]] == ["authenticate_twitter", "comment"]
    assert len(tools) == 14 + 18
    by_name = {tool["name"]: tool for tool in tools}
    assert by_name["cat"] == {
        "name": "cat",
        "description": by_name["cat"]["description"],
        "parameters": {
            "type": "object",
            "properties": by_name["cat"]["parameters"]["properties"],
            "required": ["file_name"],
        },
    }
    long = {tool["name"]: tool for tool in Bfcl(compact=False).reset(BASE, seed=0)[1]}
    assert long["cat"]["description"].startswith("This tool belongs to the Gorilla file system.")
    assert long["cat"]["description"].endswith(by_name["cat"]["description"])


def test_no_type_of_a_tool_is_left_in_pythons_words():
    def types(schema):
        yield schema["type"]
        for part in (*schema.get("properties", {}).values(), *filter(None, [schema.get("items")])):
            yield from types(part)

    found = set()
    for task_id in load_tasks("multi_turn_base"):
        for tool in Bfcl().reset(task_id, seed=0)[1]:
            found |= set(types(tool["parameters"]))
    assert found == {"object", "string", "number", "integer", "array", "boolean"}


@pytest.mark.parametrize("form", FORMATS)
def test_rendered_calls_are_read_back(form):
    calls = (ToolCall("f", {"x": ["a"]}), ToolCall("g", {}))
    parameters = {"type": "object", "properties": {"x": {"type": "array"}}}
    tools = [{"name": "f", "description": "", "parameters": parameters}]
    assert FORMATS[form].parse(FORMATS[form].render(calls), tools) == calls
