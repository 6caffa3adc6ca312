"""Trajectories on disk: what is written is what is read, and what is no record is told."""

import gzip
import json
import logging

import pytest

from seeupo_jax import read_trajectories
from seeupo_jax.trajectories.reader import (
    FIELDS,
    FOLDER,
    TrajectoryFile,
    evaluation_label,
    find_shards,
    pack_shard,
    read_shard,
    write_shard,
)


def record(iteration=1, split="train", group=0, member=0, **more):
    segment = {
        "tokens": [5, 6],
        "turn": [-1, 0],
        "text": ["a", "ü"],
        "logp": [None, -0.5],
        "trainer_logp": [None, -0.5],
        "entropy": [None, 0.25],
    }
    values = {
        "schema": 1,
        "split": split,
        "evaluation": split != "train",
        "iteration": iteration,
        "group": group,
        "member": member,
        "task_id": "t",
        "seed": 0,
        "labels": {"kind": "x"},
        "stop": "done",
        "failed": False,
        "failure": None,
        "reward": 1.0,
        "score": 1.0,
        "success": True,
        "turns": 1,
        "turn_rewards": [1.0],
        "rewards": {},
        "named_turn_rewards": {},
        "policy_version": 0,
        "advantage": 0.5,
        "weights": [0.5],
        "info": {},
        "messages": [{"role": "user", "content": "ü </script>"}],
        "segments": [segment],
    }
    return values | more


def write(workdir, shard, *records):
    write_shard(workdir, shard, pack_shard(records))


def shard(iteration, split=None):
    return TrajectoryFile(iteration, "train" if split is None else split, split is not None)


def test_records_come_back_in_order_whatever_order_they_were_written_in(tmp_path):
    order = [(2, "train"), (1, "train"), (1, "test"), (0, "test")]
    for iteration, split in order:
        name = None if split == "train" else split
        pair = [record(iteration, split, member=member) for member in (0, 1)]
        write(tmp_path, shard(iteration, name), *pair)
    found = [(r["iteration"], r["split"], r["member"]) for r in read_trajectories(tmp_path)]
    assert found == [(*key, member) for key in sorted([*order]) for member in (0, 1)]
    assert next(read_trajectories(tmp_path)) == record(0, "test")
    only = [r["iteration"] for r in read_trajectories(tmp_path, split="train", iterations={2, 3})]
    assert only == [2, 2]


def test_evaluations_on_the_training_tasks_are_told_from_what_training_learned_from(tmp_path):
    learned, played = record(1), record(1, evaluation=True)
    old = {name: value for name, value in record(1, member=1).items() if name != "evaluation"}
    write(tmp_path, shard(1), learned, old)
    write(tmp_path, shard(1, "train"), played, old)
    assert [*read_trajectories(tmp_path, evaluation=False)] == [
        learned,
        old | {"evaluation": False},
    ]
    assert [*read_trajectories(tmp_path, evaluation=True)] == [played, old | {"evaluation": True}]
    assert len([*read_trajectories(tmp_path, split="train")]) == 4
    assert [evaluation_label(split) for split in ("train", "test")] == ["eval_train", "test"]


def test_files_are_named_by_split_and_iteration(tmp_path):
    shards = [shard(7), shard(10, "test"), shard(10, "a/b_000001"), shard(1_000_000)]
    for each in shards:
        write(tmp_path, each, record())
    assert (tmp_path / FOLDER / "train_000007.jsonl.gz").is_file()
    assert (tmp_path / FOLDER / "eval_test_000010.jsonl.gz").is_file()
    assert find_shards(tmp_path) == sorted(shards)
    (tmp_path / FOLDER / "index.html").write_text("a page")
    (tmp_path / FOLDER / "train_000008.jsonl.gz.0a1b2c3d.tmp").write_text("killed")
    assert find_shards(tmp_path) == sorted(shards)


def test_a_record_of_before_rewards_had_names_has_none(tmp_path):
    old = record()
    del old["rewards"], old["named_turn_rewards"]
    write(tmp_path, shard(1), old, record(rewards={"env": 0.5}))
    read = [*read_trajectories(tmp_path)]
    assert [each["rewards"] for each in read] == [{}, {"env": 0.5}]
    assert [each["named_turn_rewards"] for each in read] == [{}, {}]


def test_a_folder_without_trajectories_has_none(tmp_path):
    assert [*read_trajectories(tmp_path)] == []


def test_a_mistyped_folder_and_a_single_iteration_are_sentences(tmp_path):
    with pytest.raises(ValueError, match="workdir: got .*nowhere; allowed: the folder of a run"):
        read_trajectories(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="iterations: got 3; allowed: a collection of numbers"):
        read_trajectories(tmp_path, iterations=3)


def test_the_same_records_give_the_same_bytes(tmp_path):
    assert pack_shard([record()]) == pack_shard([record()])
    write(tmp_path, shard(1), record(), record(member=1))
    with gzip.open(shard(1).path(tmp_path)) as file:
        assert [json.loads(line) for line in file] == [record(), record(member=1)]


def test_a_shard_is_replaced_whole(tmp_path, monkeypatch):
    write(tmp_path, shard(1), record())
    import os

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        write(tmp_path, shard(1), record(reward=2.0))
    assert [r["reward"] for r in read_trajectories(tmp_path)] == [1.0]
    assert [entry.name for entry in (tmp_path / FOLDER).iterdir()] == [shard(1).name]


def test_what_is_whole_of_a_torn_shard_is_read_and_told(tmp_path, caplog):
    # Incompressible, so that every cut of the file leaves some of the lines.
    texts = ["".join(chr(33 + (i * i * 7 + i * k) % 90) for i in range(4000)) for k in range(4)]
    records = [record(member=i, task_id=text) for i, text in enumerate(texts)]
    write(tmp_path, shard(1), *records)
    path = shard(1).path(tmp_path)
    whole, counts = path.read_bytes(), set()
    for share in range(20):
        path.write_bytes(whole[: len(whole) * share // 20])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            read = [*read_trajectories(tmp_path)]
        assert read == records[: len(read)]
        assert [f"after {len(read)} lines" in line for line in caplog.messages] == [True]
        counts.add(len(read))
    assert len(counts) > 2 and 4 not in counts


def test_a_damaged_shard_is_read_up_to_the_damage_and_told(tmp_path, caplog):
    write(tmp_path, shard(1), record())
    path, whole = shard(1).path(tmp_path), shard(1).path(tmp_path).read_bytes()
    # No gzip, a block of a kind that deflate does not have, another checksum (RFC 1951, 1952).
    for damaged in (b"PK" + whole, whole[:10] + b"\x07" + whole[11:], whole[:-8] + bytes(8)):
        path.write_bytes(damaged)
        caplog.clear()
        read = [*read_trajectories(tmp_path)]
        assert read in ([], [record()]) and len(caplog.messages) == 1
        assert f"the rest after {len(read)} lines cannot be read" in caplog.messages[0]


def test_the_folder_is_the_one_that_was_meant_when_reading_began(tmp_path, monkeypatch):
    write(tmp_path / "run", shard(1), record())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    records = read_trajectories("run")
    monkeypatch.chdir("elsewhere")
    assert [*records] == [record()]


def test_a_shard_that_is_removed_while_others_are_read_is_left_out_and_told(tmp_path, caplog):
    for iteration in (1, 2, 3):
        write(tmp_path, shard(iteration), record(iteration))
    records = read_trajectories(tmp_path)
    read, path = [next(records)], shard(2).path(tmp_path)
    path.unlink()
    read += records
    assert [r["iteration"] for r in read] == [1, 3]
    assert caplog.messages == [f"{path}: it has been removed since the files were listed."]
    with pytest.raises(FileNotFoundError):
        next(read_shard(path))


def of_segment(**fields):
    return json.dumps(record(segments=[record()["segments"][0] | fields])).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "logged"),
    [
        (b"nonsense\n", "not JSON"),
        (b"[1]\n", "a JSON object"),
        (json.dumps(record(schema=2)).encode() + b"\n", "schema: got 2; allowed: 1"),
        (json.dumps(record(turns="2")).encode() + b"\n", "turns: got 2; allowed: int"),
        (json.dumps(record(failed=0)).encode() + b"\n", "failed: got 0; allowed: bool"),
        (json.dumps({"schema": 1}).encode() + b"\n", "got no split; allowed: schema, split"),
        (json.dumps(record(segments=[{}])).encode() + b"\n", "allowed: tokens, turn, text"),
        (of_segment(turn=[]), "2 tokens, 0 turn"),
        (of_segment(tokens=5), "segments: tokens: got 5; allowed: a list, each int."),
        (
            of_segment(version=[0.5, 0]),
            "segments: version: got [0.5, 0]; allowed: a list, each int.",
        ),
        (of_segment(version=[0] * 9), "9 version; allowed: as many of each."),
        (of_segment(logp=None), "segments: logp: got None; allowed: a list, each int or float"),
        (of_segment(turn=[None, 0]), "segments: turn: got [None, 0]; allowed: a list, each int."),
        (json.dumps(record(weights=["a"])).encode() + b"\n", "weights: got ['a']; allowed: a list"),
    ],
)
def test_what_is_no_record_is_told_with_its_place(tmp_path, line, logged):
    write(tmp_path, shard(1), record())
    path = shard(1).path(tmp_path)
    path.write_bytes(gzip.compress(pack_lines(record()) + line))
    with pytest.raises(ValueError, match="line 2") as error:
        [*read_trajectories(tmp_path)]
    assert logged in str(error.value) and str(path) in str(error.value)


def pack_lines(*records):
    return b"".join(json.dumps(each).encode() + b"\n" for each in records)


def test_a_last_line_without_an_end_is_left_out(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(pack_lines(record()) + b'{"schema": 1, "spl'))
    logged = []
    assert [*read_shard(path, logged.append)] == [record()] and len(logged) == 1


def test_every_field_is_checked():
    assert record().keys() == FIELDS.keys()
