"""Tasks from rows: splits, stable ids, prompts, and figures of rows that are none."""

import json

import pytest
import task_files
from task_files import FORMS, ROWS, write_rows

from seeupo_jax.tasks.prompt_tasks import PromptColumns, PromptTasks
from seeupo_jax.tasks.templates import RowTemplate


def tasks_of(file, *, prompt="question", answer="answer", system=None, template=None, **more):
    template = None if template is None else RowTemplate(template, "template")
    columns = PromptColumns(prompt, answer, system, template, "split")
    return PromptTasks(file, columns, **{"options": {}, **more})


def rows_of(tasks, split):
    return [tasks.find(task).row for task in tasks.ids(split)]


@pytest.mark.parametrize("form", FORMS)
def test_the_tasks_of_every_format_are_the_same(form, tmp_path):
    file = write_rows(tmp_path, form)
    share = {} if form == "tfds" else {"test_share": 0}
    tasks = tasks_of(file, **share)
    ids = tasks.ids("train")
    assert ids == tasks_of(write_rows(tmp_path, "jsonl"), test_share=0).ids("train")
    assert len(ids) == 5 and ids[3].startswith("train/3-")
    task = tasks.find(ids[3])
    assert task.messages == ({"role": "user", "content": "What is 3 + 3?"},)
    assert task.answer == "6" and task.row == ROWS[3]


def test_splits_come_from_a_column_from_files_or_from_a_share(tmp_path):
    names = ("train", "test", "train", "validation", "test")
    rows = [row | {"split": name} for row, name in zip(ROWS, names, strict=True)]
    column = tasks_of(write_rows(tmp_path, "csv", rows))
    assert rows_of(column, "test") == [rows[1], rows[4]]
    assert rows_of(column, "validation") == [rows[3]]
    first, second = write_rows(tmp_path, "jsonl", ROWS[:3]), write_rows(tmp_path, "json", ROWS[3:])
    files = tasks_of({"train": first, "test": second})
    assert (rows_of(files, "train"), rows_of(files, "test")) == (ROWS[:3], ROWS[3:])
    task_files.save_splits(tmp_path / "two", {"train": ROWS[:3], "test": ROWS[3:]})
    saved = tasks_of(str(tmp_path / "two"))
    assert saved.ids("test") == files.ids("test") and saved.ids("train") == files.ids("train")
    with pytest.raises(ValueError, match="split: got 'dev'; allowed: train, test, which .* has"):
        saved.ids("dev")
    with pytest.raises(ValueError, match="test_share: got 0.5 for .* has splits of its own"):
        tasks_of(str(tmp_path / "two"), test_share=0.5)


def test_a_share_is_drawn_by_the_seed_whatever_the_order_of_the_call(tmp_path):
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(40)]
    file = write_rows(tmp_path, "jsonl", rows)
    drawn = [
        tasks_of(file, test_share=share, seed=seed)
        for share, seed in ((0.25, 0), (0.25, 1), (None, 0), (0.25, 0))
    ]
    tests = [task.ids("test") for task in drawn]
    assert [len(ids) for ids in tests] == [10, 10, 4, 10]
    assert tests[0] == tests[3] != tests[1] and set(tests[2]) <= set(tests[0])
    both = rows_of(drawn[0], "test") + rows_of(drawn[0], "train")
    assert sorted(both, key=lambda row: int(row["answer"])) == rows


def test_an_id_stays_with_its_row_and_no_other_rows_id_finds_it(tmp_path):
    ids = tasks_of(write_rows(tmp_path, "jsonl"), test_share=0).ids("train")
    longer = tasks_of(write_rows(tmp_path, "jsonl", [*ROWS, ROWS[0] | {"answer": "9"}]))
    assert longer.find(ids[4]).row == ROWS[4]
    other = [ROWS[0], ROWS[1] | {"subject": "other"}, *ROWS[2:]]
    edited = tasks_of(write_rows(tmp_path, "jsonl", other))
    assert edited.find(ids[0]).row == ROWS[0]
    with pytest.raises(ValueError, match="line 2: got another row than that of the task 'train/1"):
        edited.find(ids[1])
    for wrong in ("train/9-00000000", "0", "", "train/x-1", "train/-1-0"):
        with pytest.raises(ValueError, match="allowed: an id of task_ids"):
            edited.find(wrong)


def test_a_prompt_may_be_messages_a_template_and_have_a_system_text(tmp_path):
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}]
    wanted = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    rows = [{"prompt": each, "answer": "x"} for each in (asked, turns, "Why?")]
    tasks = tasks_of(write_rows(tmp_path, "jsonl", rows), prompt="prompt", test_share=0)
    found = [tasks.find(task).messages for task in tasks.ids("train")]
    assert found == [wanted, wanted, wanted[1:]]
    filled = tasks_of(
        write_rows(tmp_path, "json"),
        prompt=None,
        system="Be brief.",
        template="{subject}: {question} {{number}}",
        test_share=0,
    )
    assert filled.find(filled.ids("train")[1]).messages == (
        wanted[0],
        {"role": "user", "content": "sums: What is 1 + 1? {number}"},
    )


def test_a_nested_column_is_named_with_a_dot(tmp_path):
    rows = [{"prompt": "1 + 1?", "reward_model": {"ground_truth": "2", "style": "rule"}}]
    file = write_rows(tmp_path, "parquet", rows)
    tasks = tasks_of(file, prompt="prompt", answer="reward_model.ground_truth", test_share=0)
    assert tasks.find(tasks.ids("train")[0]).answer == "2"


@pytest.mark.parametrize(
    "prompt, says",
    [
        (3, "got 3; allowed: a text or a list of messages"),
        ([{"role": "bot", "content": "x"}], r"\[0\]: got .*; allowed: an object with content"),
        ([{"role": "user", "content": 3}], r"\[0\].content: got 3; allowed: a text"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "got 'tool_calls' in a prompt"),
        ([{"from": "cat", "value": "x"}], r"\[0\].from: got cat; allowed: human, user"),
        ([{"from": "function_call", "value": "x"}], "allowed: messages in OpenAI's form, with the"),
        ([{"role": "assistant", "content": "x"}], "end with the assistant's; .*data of seeupo-sft"),
    ],
)
def test_what_is_no_prompt_is_told_with_its_place(prompt, says, tmp_path):
    file = write_rows(tmp_path, "jsonl", [{"prompt": prompt, "answer": "1"}])
    with pytest.raises(ValueError, match=f"line 1: prompt.*{says}") as error:
        tasks_of(file, prompt="prompt").ids("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "template, says",
    [
        ("{", r"got \{ \(.*\); allowed: names of columns"),
        ("{}", r"got \{\}; allowed: names of columns"),
        ("{a!r}", r"got \{a!r\}; allowed"),
        ("{a:>3}", r"got \{a:>3\}; allowed"),
    ],
)
def test_what_is_no_template_is_told(template, says):
    with pytest.raises(ValueError, match=f"^template: {says}"):
        RowTemplate(template, "template")


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path):
    file = write_rows(tmp_path, "jsonl")
    columns = "allowed: question, answer, subject"
    for names in ({"prompt": "q"}, {"answer": "q"}, {"prompt": None, "template": "{q}"}):
        option = next(iter({*names} & {"template"}), next(iter(names)))
        says = f"line 1: got no column 'q', which the option {option} names; {columns}"
        with pytest.raises(ValueError, match=says):
            tasks_of(file, **names)
    rows = [{"question": [1], "answer": "1"}]
    with pytest.raises(ValueError, match=r"question: got \[1\]; allowed in a template"):
        tasks_of(write_rows(tmp_path, "json", rows), prompt=None, template="{question}").ids("test")


def test_rows_without_a_prompt_or_an_answer_are_counted(tmp_path, caplog):
    more = [{"question": " "}, {"question": None, "answer": "1"}, {"question": "?", "answer": ""}]
    file = write_rows(tmp_path, "jsonl", [*ROWS, *more])
    figure = r"3 of 8 rows of .*rows.jsonl have no prompt or no answer \(the first: .*line 6\)"
    with pytest.raises(ValueError, match=figure):
        tasks_of(file).ids("train")
    tasks = tasks_of(file, empty="skip", test_share=0)
    assert rows_of(tasks, "train") == ROWS
    assert "3 of 8 rows" in caplog.text and "left out" in caplog.text
    with pytest.raises(ValueError, match="2 of 2 rows"):
        tasks_of(write_rows(tmp_path, "json", more[1:]), empty="skip").ids("train")
    with pytest.raises(ValueError, match="has no row; allowed: at least one"):
        tasks_of(write_rows(tmp_path, "jsonl", []))


def test_repeated_prompts_are_counted_once_per_process(tmp_path, caplog):
    rows = [*ROWS, ROWS[0], ROWS[0]]
    splits = ["train"] * 5 + ["train", "test"]
    file = write_rows(
        tmp_path, "jsonl", [r | {"split": s} for r, s in zip(rows, splits, strict=True)]
    )
    for _ in range(2):
        assert len(tasks_of(file).ids("train")) == 6
    assert [record.getMessage().partition(" of ")[0] for record in caplog.records] == [
        "prompts: 1 rows",
        "prompts: 1 prompts",
    ]


def test_a_split_without_a_name_is_told(tmp_path):
    rows = [row | {"split": split} for row, split in zip(ROWS, "a b", strict=False)]
    rows[1]["split"] = None
    file = write_rows(tmp_path, "jsonl", rows)
    with pytest.raises(ValueError, match="line 2: got None as split; allowed: a split's name"):
        tasks_of(file).ids("train")


def test_ids_are_hashes_of_all_of_the_row(tmp_path):
    """Worked out by hand: BLAKE2b of the row's JSON with sorted keys, 4 bytes."""
    import hashlib

    file = write_rows(tmp_path, "jsonl")
    text = json.dumps(ROWS[2], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    assert f"train/2-{digest}" in tasks_of(file, test_share=0).ids("train")
