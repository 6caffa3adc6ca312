"""Rows that are conversations: in every form, and in files of every format."""

import json

import pytest
from task_files import FORMS, write_rows

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.supervised.conversation import read_conversation
from seeupo_jax.supervised.conversation_sources import open_conversations

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(folder, *rows, form="jsonl", options=None):
    file = write_rows(folder, form, rows)
    return open_conversations(from_dict({}), file, "train", options or {}, "--data")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "tfds"])
def test_a_prompt_and_a_completion_are_a_conversation_in_every_format(form, tmp_path):
    row = {"prompt": "Why?", "completion": "So."}
    assert read(tmp_path, row, row, form=form)[1].messages == (USER, ANSWER)


def test_rows_of_tfds_are_read_by_named_columns(tmp_path):
    columns = {"prompt": "question", "completion": "answer"}
    rows = [{"question": "Why?", "answer": "So.", "subject": "x"}] * 2
    assert read(tmp_path, *rows, form="tfds", options=columns)[1].messages == (USER, ANSWER)


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"messages": [USER, ANSWER]}, (USER, ANSWER)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Why?"},
                    {"from": "gpt", "value": "So."},
                ]
            },
            (USER, ANSWER),
        ),
        (
            {
                "system": "Be brief.",
                "conversations": [
                    {"from": "human", "value": "Why?"},
                    {"from": "gpt", "value": "So.", "weight": 1},
                ],
            },
            (SYSTEM, USER, ANSWER),
        ),
        ({"conversations": [USER, ANSWER]}, (USER, ANSWER)),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, (SYSTEM, USER, ANSWER)),
        ({"system": "Be brief.", "prompt": "Why?", "completion": "So."}, (SYSTEM, USER, ANSWER)),
        ({"messages": None, "prompt": "Why?", "completion": "So."}, (USER, ANSWER)),
    ],
)
def test_the_forms_of_a_row(row, wanted, tmp_path):
    assert read(tmp_path, row)[0].messages == wanted
    if "prompt" not in row:  # a table has the keys of every message in each
        assert read(tmp_path, row, form="parquet")[0].messages == wanted


def test_messages_in_a_csv_file_are_json(tmp_path):
    row = {"messages": json.dumps([USER, ANSWER]), "tools": ""}
    shown = read(tmp_path, row, form="csv")[0]
    assert shown.messages == (USER, ANSWER) and shown.tools == ()


def test_named_columns_come_before_messages(tmp_path):
    row = {"messages": [USER, ANSWER], "q": "Why?", "a": {"text": 4}}
    options = {"prompt": "q", "completion": "a.text"}
    shown = read(tmp_path, row, options=options)[0]
    assert shown.messages == (USER, ANSWER | {"content": "4"})


@pytest.mark.parametrize(
    "row, says",
    [
        ({"instruction": "Why?", "output": "So."}, "the columns instruction, output; allowed: the"),
        (
            {"prompt": "Why?", "chosen": "So."},
            "with the columns prompt, chosen; allowed: the column",
        ),
        ({"conversations": [{"from": "cat", "value": "x"}]}, r"conversations\[0\].from: got cat"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: got .*from and value"),
        (
            {"conversations": [{"from": "function_call", "value": "x"}]},
            "with the call in tool_calls",
        ),
        ({"messages": "hello"}, "got hello; allowed: JSON"),
        ({"messages": ["hello"]}, "allowed: a text of JSON, or a list of objects"),
    ],
)
def test_what_is_no_conversation_names_its_columns_and_what_is_allowed(row, says, tmp_path):
    shown = read(tmp_path, row)
    with pytest.raises(ValueError, match=f"^--data: .*line 1: .*{says}") as error:
        shown[0]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"skill": 1.0}, {"prompt": 1}])
def test_options_that_are_no_columns_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match="--data: got config.sft.options=.* allowed for a file"):
        read(tmp_path, {"prompt": "a", "completion": "b"}, options=options)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_three_names(name):
    shown = read_conversation({"messages": [USER, ANSWER | {name: "Hm."}]}, "here")
    assert shown.messages[1] == ANSWER | {"reasoning_content": "Hm."}


def test_thoughts_under_two_names_agree():
    both = ANSWER | {"reasoning": "Hm.", "reasoning_content": "Hm.", "thinking": None}
    shown = read_conversation({"messages": [USER, both]}, "here")
    assert shown.messages[1] == ANSWER | {"reasoning_content": "Hm."}
    with pytest.raises(ValueError, match=r"got different thoughts in reasoning_content and reason"):
        read_conversation({"messages": [USER, both | {"reasoning": "Oh."}]}, "here")


def test_empty_arguments_of_a_call_are_no_arguments():
    call = {"type": "function", "function": {"name": "now", "arguments": ""}}
    shown = read_conversation({"messages": [USER, ANSWER | {"tool_calls": [call]}]}, "here")
    assert shown.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
