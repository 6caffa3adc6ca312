"""What `write_pages` leaves on disk: an index, chunks of records, and nothing of older ones."""

import base64
import gzip
import json
import math
import os
import re

import pytest
from telemetry_cases import record, write_run, write_shard

from seeupo_jax import read_trajectories
from seeupo_jax.reports import trajectory_pages
from seeupo_jax.reports.trajectory_pages import write_pages
from seeupo_jax.trajectories.reader import find_shards, read_shard

HOSTILE = '</script><script>alert(1)</script><!--\u2028\u2029\u202e\x00\ud800"\\'


def read_index(workdir):
    text = (workdir / "trajectories" / "data" / "index.js").read_text()
    return json.loads(re.fullmatch(r"receiveIndex\((.*)\);\n", text)[1])


def read_chunk(file):
    name, packed = re.fullmatch(r'receiveChunk\("(.*)","(.*)"\);\n', file.read_text()).groups()
    assert name == file.name.removesuffix(".js")
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def column(index, key):
    values = index["values"].get(key)
    return [values[v] if values else v for v in index["columns"][key]]


def written(workdir):
    return {file.name: file.stat().st_mtime_ns for file in data_of(workdir).iterdir()}


def data_of(workdir):
    return workdir / "trajectories" / "data"


def test_every_record_is_found_whole_where_the_index_says(tmp_path):
    write_run(tmp_path, iterations=2)
    write_pages(tmp_path)
    index = read_index(tmp_path)
    assert index["rows"] == 96
    places = zip(column(index, "chunk"), column(index, "place"), strict=True)
    found = [read_chunk(data_of(tmp_path) / f"{chunk}.js")[place] for chunk, place in places]
    assert found == list(read_trajectories(tmp_path))


def test_the_index_holds_what_the_list_shows(tmp_path):
    made = record(4, 2, 1, success=True, reward=0.5, advantage=-0.25, weights=[-0.5, None, 0.25])
    write_shard(tmp_path, [made])
    write_pages(tmp_path)
    index = read_index(tmp_path)
    keys = ("source", "iteration", "group", "member", "task_id", "reward", "advantage", "weight")
    got = [column(index, key) for key in keys]
    assert got == [["train"], [4], [2], [1], [made["task_id"]], [0.5], [-0.25], [0.5]]
    actions = sum(turn >= 0 for turn in made["segments"][0]["turn"])
    assert column(index, "tokens") == [actions]
    assert json.loads(column(index, "labels")[0]) == made["labels"]


def test_an_evaluation_on_the_training_tasks_is_not_taken_for_training(tmp_path):
    write_shard(tmp_path, [record()])
    write_shard(tmp_path, [record()], name="eval_train")
    write_pages(tmp_path)
    assert sorted(column(read_index(tmp_path), "source")) == ["eval_train", "train"]


def test_chunks_are_cut_at_their_size_and_a_large_record_is_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectory_pages, "CHUNK", 20_000)
    large = [{"role": "user", "content": "x" * 30_000}]
    records = [record(group=g) for g in range(6)] + [record(group=6, messages=large)]
    write_shard(tmp_path, records)
    write_pages(tmp_path)
    chunks = [read_chunk(file) for file in sorted(data_of(tmp_path).glob("train_*.js"))]
    assert [made for chunk in chunks for made in chunk] == records
    assert len(chunks) > 2 and len(chunks[-1]) == 1
    sizes = [len(json.dumps(chunk, separators=(",", ":"))) for chunk in chunks[:-1]]
    assert max(sizes) <= 20_010 and sizes[0] > 10_000


def test_only_changed_shards_are_written_again_and_what_is_old_is_removed(tmp_path, monkeypatch):
    write_run(tmp_path, iterations=2, test=False)
    write_pages(tmp_path)
    before = written(tmp_path)
    read = []
    monkeypatch.setattr(
        trajectory_pages, "read_shard", lambda path: read.append(path.name) or read_shard(path)
    )
    write_pages(tmp_path)
    assert written(tmp_path) == before and not read
    write_shard(tmp_path, [record(1, seed=1)])
    write_pages(tmp_path)
    assert read == ["train_000001.jsonl.gz"]
    after = written(tmp_path)
    kept = {name for name in before if name.startswith("train_000000")}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert len(kept) == 2
    assert not {name for name in before if name.startswith("train_000001")} & after.keys()
    assert read_index(tmp_path)["rows"] == 33


@pytest.mark.parametrize("pattern", ["*.json.gz", "train_*.js"])
@pytest.mark.parametrize("damage", ["removed", "emptied", "cut"])
def test_damaged_files_are_written_again(tmp_path, pattern, damage):
    write_shard(tmp_path, [record()])
    write_pages(tmp_path)
    before = {file.name: file.read_bytes() for file in data_of(tmp_path).iterdir()}
    (file,) = data_of(tmp_path).glob(pattern)
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(before[file.name][:40] if damage == "cut" else b"")
    write_pages(tmp_path)
    assert {file.name: file.read_bytes() for file in data_of(tmp_path).iterdir()} == before


@pytest.mark.parametrize("when", ["before it is opened", "before it is read"])
def test_shards_that_a_run_removes_meanwhile_are_left_out(tmp_path, monkeypatch, when):
    write_run(tmp_path, iterations=2, test=False)
    found, first = find_shards(tmp_path), tmp_path / "trajectories" / "train_000000.jsonl.gz"

    def read(path):
        first.unlink(missing_ok=True)
        return read_shard(path)

    if when == "before it is opened":
        first.unlink()
    monkeypatch.setattr(trajectory_pages, "find_shards", lambda workdir: found)
    monkeypatch.setattr(trajectory_pages, "read_shard", read)
    write_pages(tmp_path)
    index = read_index(tmp_path)
    assert index["rows"] == 32 and set(column(index, "iteration")) == {1}


def test_pages_that_cannot_be_written_are_told(tmp_path):
    file = write_shard(tmp_path, [record()]).with_name("data")
    file.write_text("a file")
    with pytest.raises(ValueError) as error:
        write_pages(tmp_path)
    assert str(error.value) == (
        f"workdir: got {tmp_path} ({file}: File exists); allowed: a folder whose trajectories can"
        " be read and whose pages can be written."
    )


def test_a_write_that_is_cut_off_leaves_the_old_pages(tmp_path, monkeypatch):
    write_run(tmp_path, iterations=1, test=False)
    page = write_pages(tmp_path)
    before = written(tmp_path)
    write_shard(tmp_path, [record(1)])
    replace = os.replace

    def cut_off(source, target):
        if target.name == "index.js":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write_pages(tmp_path)
    assert page.exists() and read_index(tmp_path)["rows"] == 32
    assert before.items() <= written(tmp_path).items()
    monkeypatch.setattr(os, "replace", replace)
    write_pages(tmp_path)
    assert not [name for name in written(tmp_path) if name.endswith(".tmp")]


def test_data_ends_no_script_whatever_the_model_wrote(tmp_path):
    messages = [{"role": "assistant", "content": HOSTILE}]
    given = {"task_id": HOSTILE, "failure": HOSTILE, "labels": {HOSTILE: HOSTILE}}
    write_shard(tmp_path, [record(messages=messages, **given)])
    write_pages(tmp_path)
    for file in data_of(tmp_path).iterdir():
        if file.suffix == ".js":
            text = file.read_bytes().decode("ascii")
            assert "<" not in text and not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    index = read_index(tmp_path)
    assert column(index, "task_id") == [HOSTILE]
    assert json.loads(column(index, "labels")[0]) == {HOSTILE: HOSTILE}


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    write_shard(tmp_path, [record(info={"loss": [math.nan, 1.5]}, reward=math.inf)])
    write_pages(tmp_path)
    (file,) = data_of(tmp_path).glob("train_*.js")
    assert read_chunk(file)[0]["info"] == {"loss": [None, 1.5]}
    assert column(read_index(tmp_path), "reward") == [None]


def test_a_run_without_trajectories_has_a_page_too(tmp_path):
    page = write_pages(tmp_path, report=None)
    assert page == tmp_path / "trajectories" / "index.html" and page.exists()
    index = read_index(tmp_path)
    assert index["rows"] == 0 and index["report"] is None and index["name"] == tmp_path.name


def test_the_page_has_the_name_of_the_run(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "desk-7"}')
    write_pages(tmp_path)
    assert read_index(tmp_path)["name"] == "desk-7"


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match="workdir: got .*nowhere.*; allowed: a folder"):
        write_pages(tmp_path / "nowhere")
