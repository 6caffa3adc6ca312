"""One reader of rows for every format, and one sentence for what is none."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import task_files
from task_files import FORMS, ROWS, write_rows

from seeupo_jax.errors import DataChanged
from seeupo_jax.tasks.records import function_records, open_records, source_splits


@pytest.mark.parametrize("form", FORMS)
def test_every_format_has_the_same_rows(form, tmp_path):
    source = write_rows(tmp_path, form)
    records = open_records(source, "file")
    assert [records[index] for index in range(len(records))] == ROWS
    place = {"jsonl": "line 2", "json": "entry 1", "csv": "line 3", "tsv": "line 3"}
    shown = "train, record 1" if form == "tfds" else place.get(form, "row 1")
    assert records.where(1) == f"file: {source}, {shown}"
    with pytest.raises(IndexError):
        records[len(ROWS)]
    assert source_splits(source, "file") == (("train", "test") if form == "tfds" else ())


@pytest.mark.parametrize("form", [form for form in FORMS if form != "tfds"])
def test_a_source_is_read_once_until_it_changes(form, tmp_path):
    source = write_rows(tmp_path, form)
    first = open_records(source, "file")
    assert open_records(source, "file") is first
    if form == "saved":
        task_files.write_arrow(tmp_path / "rows.saved/data-00000-of-00002.arrow", ROWS[1:])
    else:
        write_rows(tmp_path, form, ROWS[1:])
    assert open_records(source, "file")[0] == ROWS[1]


def test_a_row_is_the_callers_own(tmp_path):
    for form in ("jsonl", "json", "parquet"):
        records = open_records(write_rows(tmp_path, form), "file")
        records[0]["question"] = "other"
        assert records[0] == ROWS[0]


def test_a_json_file_may_have_an_object_per_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    records = open_records(str(path), "file")
    assert records[4] == ROWS[4] and records.where(0).endswith("line 2")


def test_a_line_ends_where_json_lines_end(tmp_path):
    row = {"question": "\u2028 \u2029 \x85"}
    (tmp_path / "rows").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    records = open_records(str(tmp_path / "rows"), "file")
    assert len(records) == 1 and records[0] == row


def test_a_dataset_dict_has_splits_and_so_its_name_is_asked_for(tmp_path):
    task_files.save_splits(tmp_path / "two", {"train": ROWS[:3], "test": ROWS[3:]})
    source = str(tmp_path / "two")
    assert source_splits(source, "file") == ("train", "test")
    assert open_records(source, "file", "test")[1] == ROWS[4]
    with pytest.raises(ValueError, match=r"with split 'dev'; allowed: train, test\.$"):
        open_records(source, "file", "dev")


def test_a_line_or_a_group_of_rows_that_was_replaced_is_told(tmp_path):
    lines = write_rows(tmp_path, "jsonl")
    opened = open_records(lines, "file")
    write_rows(tmp_path, "jsonl", [ROWS[0], ROWS[1] | {"answer": "7"}, *ROWS[2:]])
    assert opened[0] == ROWS[0]
    with pytest.raises(DataChanged, match="line 2: got another line than when the run first"):
        opened[1]
    opened = open_records(write_rows(tmp_path, "parquet"), "file")
    assert opened[0] == ROWS[0]
    pq.write_table(pa.Table.from_pylist(ROWS[:3]), tmp_path / "rows.parquet", row_group_size=1)
    with pytest.raises(DataChanged, match="row 4: got another file than when the run first"):
        opened[4]


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.csv", b"", "line 1: got nothing; allowed: the names of the columns"),
        ("a.csv", b"q,q\n1,2\n", "line 1: got the column 'q'; allowed: the names of the columns"),
        ("a.csv", b'q,a\n"1\n2",3\n4\n', "line 4: got 1 cells; allowed: 2, as the header has"),
        ("a.csv", b"q,a\n\xff,2\n", "cannot be read .*; allowed: CSV in UTF-8"),
        ("a.csv", b'q,a\n"1,2\n', "cannot be read .*; allowed: CSV in UTF-8"),
        ("a.json", b"[1]", "entry 0: got 1; allowed: an object, whose keys are the columns"),
        ("a.json", b"[{", "which is not JSON .*; allowed: a list of objects"),
        ("a.parquet", b"PAR", "cannot be read .*; allowed: a Parquet file"),
        ("a.arrow", b"12345678", "cannot be read .*; allowed: an Arrow file"),
        ("a/state.json", b"{}", "cannot be read .*_data_files.*; allowed: a folder that"),
        ("a/rows.txt", b"", "a folder without state.json or dataset_dict.json"),
    ],
)
def test_what_is_no_file_of_its_kind_is_told_in_one_sentence(name, content, says, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    source = path.parent if "/" in name else path
    with pytest.raises(ValueError, match=f"^file: .*{says}") as error:
        open_records(str(source), "file")
    assert "\n" not in str(error.value)


def test_cells_may_hold_line_breaks_and_a_mark_of_the_encoding(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeffq,a\n"1\n2",3\n\n4,ü\n'.encode())
    records = open_records(str(path), "file")
    assert [records[0], records[1]] == [{"q": "1\n2", "a": "3"}, {"q": "4", "a": "ü"}]
    assert records.where(1).endswith("line 5")


@pytest.mark.parametrize("source", ["no.jsonl", "no.parquet", "no.csv", "no.json", "no.arrow"])
def test_a_file_that_is_not_there_is_told_with_what_is_allowed(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = (
        rf"^file: got '{source}', which cannot be read \(.*No such file.*\); allowed: a file .jsonl"
    )
    with pytest.raises(ValueError, match=says):
        open_records(source, "file")


FUNCTIONS = """
calls = []
def rows(count=2):
    calls.append(count)
    return ({"question": n} for n in range(count))
def broken():
    raise KeyError("x")
def texts():
    return ["x"]
"""


def test_a_function_returns_rows_once_for_the_same_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    records = function_records(f"{file}:rows", {"count": 3}, "file")
    assert len(records) == 3 and records[2] == {"question": 2}
    assert function_records(f"{file}:rows", {"count": 3}, "file") is records
    assert len(function_records(f"{file}:rows", {}, "file")) == 2
    for name, options, says in (
        ("rows", {"many": 1}, "refused {'many': 1}: .*'many'"),
        ("rows", {"count": {1}}, "got options that are not JSON"),
        ("broken", {}, r"raised KeyError: 'x' \(broken, mine.py:7\)"),
        ("texts", {}, "row 0: got x; allowed: an object"),
    ):
        with pytest.raises(ValueError, match=f"^file: .*{says}"):
            function_records(f"{file}:{name}", options, "file")
