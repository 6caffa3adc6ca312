"""What a stopped evaluation leaves, and what the next one makes of it."""

import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from fault_fs import FaultFs
from process_cases import environment

from seeupo_jax.trajectories.episodes import (
    EpisodeFile,
    EvaluationEpisode,
    process_file,
    process_files,
    read_played,
    to_episode,
)
from seeupo_jax.trajectories.policy_fingerprint import fingerprint
from seeupo_jax.types import Segment, Trajectory

SETTINGS = {"split": "test", "k": 2, "rollout.top_p": None, "env.options": {"size": (1, 2)}}


def episode(task_id="t/0", member=0, stop="done", **fields):
    values = {
        "score": 1.0,
        "reward": 1.5,
        "failed": stop == "env_error",
        "turns": 1,
        "messages": [{"role": "user", "content": "a\r\n\ud800 ü"}],
        "info": {"retries": 0},
        "labels": {"kind": "x"},
    }
    return EvaluationEpisode(task_id=task_id, member=member, stop=stop, **(values | fields))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "evaluation" / "one.jsonl"


def played(path, settings=SETTINGS):
    with EpisodeFile(path, settings) as file:
        return file.played


def test_an_episode_is_read_as_it_was_written(path):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode())
        file.add(episode(member=1, score=0.5))
        assert len(path.read_bytes().splitlines()) == 3  # on disk before the file is closed
        assert file.played[("t/0", 1)] == episode(member=1, score=0.5)
    assert played(path) == {("t/0", 0): episode(), ("t/0", 1): episode(member=1, score=0.5)}
    first, second, _ = map(json.loads, path.read_text().splitlines())
    assert first["settings"]["split"] == "test" and second["messages"][0]["role"] == "user"


def test_another_policy_of_the_same_name_is_refused_where_both_say_something(path):
    def said(token):
        return {"fingerprint": fingerprint(f"{token}", [token], [-0.1])}

    with EpisodeFile(path, SETTINGS | said(5)) as file:
        file.add(episode())
    assert played(path, SETTINGS | said(5)).keys() == {("t/0", 0)}
    assert played(path).keys() == read_played(path, SETTINGS) == {("t/0", 0)}
    for read in (played, read_played):
        with pytest.raises(ValueError, match="got \"a policy that says '6'.*allowed: .*says '5'"):
            read(path, SETTINGS | said(6))


@pytest.mark.parametrize("others", [False, True], ids=["its own file", "another process's"])
def test_files_with_a_damaged_fingerprint_are_refused_and_kept(path, others):
    """Any value of JSON in the place of any part of a fingerprint."""
    given = SETTINGS | {"fingerprint": fingerprint("5", [5], [-0.1])}
    file, rng = process_file(path, int(others)), random.Random(0)
    values = [None, True, 3, -1.5, "x", [], [5], ["5"], {}, {"text": "5"}, [None], [[-0.1]]]
    refused = 0

    def opened(path, settings):
        with EpisodeFile(path, settings, process_files(path, 1)):
            pass

    for _ in range(300):
        made = dict(given["fingerprint"])
        for name in rng.sample([*made], rng.randint(1, 3)):
            made[name] = rng.choice(values)
        damaged = rng.choice([made, made, rng.choice(values)])
        with EpisodeFile(file, SETTINGS):
            pass
        content = json.dumps({"settings": SETTINGS | {"fingerprint": damaged}}).encode() + b"\n"
        file.write_bytes(content)
        for read in (opened, read_played):
            try:
                read(path, given)
            except ValueError as error:
                refused += 1
                assert "fingerprint: got" in str(error) and str(error).endswith(".")
        assert file.read_bytes() == content
        file.unlink()
        path.unlink(missing_ok=True)
    assert refused > 300


def test_a_file_from_before_fingerprints_is_read(path):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode())
    assert played(path, SETTINGS | {"fingerprint": fingerprint("5", [5], [-0.1])})


def test_episodes_of_processes_that_are_not_there_any_more_are_taken_once(path):
    def left(number, settings, *episodes):
        with EpisodeFile(process_file(path, number), settings) as file:
            for each in episodes:
                file.add(each)

    def reopened(processes):
        with EpisodeFile(path, SETTINGS, process_files(path, processes)) as file:
            return file.played

    left(0, SETTINGS, episode())
    left(1, SETTINGS, episode(score=0.0), episode(member=1), episode("t/1", stop="env_error"))
    left(2, SETTINGS | {"k": 4}, episode("t/2"))  # of another evaluation
    left(10, SETTINGS, episode(member=1, score=0.0), episode("t/3"))
    path.with_name("one-process11.jsonl").write_bytes(b'{"settings": {"sp')  # killed at once
    before = {file: file.read_bytes() for file in process_files(path, 1)}
    assert [file.name for file in before] == [f"one-process{n}.jsonl" for n in (1, 2, 10, 11)]
    assert reopened(11) == {("t/0", 0): episode()}  # these processes have files of their own
    assert read_played(path, SETTINGS) == {("t/0", 0), ("t/0", 1), ("t/3", 0)}
    for _ in range(2):
        assert list(reopened(1).values()) == [episode(), episode(member=1), episode("t/3")]
        assert len(path.read_bytes().splitlines()) == 4
    assert before == {file: file.read_bytes() for file in before}
    path.unlink()
    assert read_played(path, SETTINGS) == {("t/0", 0), ("t/0", 1), ("t/3", 0)}


def test_rewards_by_name_are_kept_and_a_file_from_before_them_is_read(path):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode(rewards={"env": 0.5, "brevity": 1 / 3}))
        file.add(episode(member=1))
    old = path.read_bytes().replace(b',"rewards":{}', b"")
    assert old != path.read_bytes()
    path.write_bytes(old)
    assert [each.rewards for each in played(path).values()] == [{"env": 0.5, "brevity": 1 / 3}, {}]
    assert to_episode(Trajectory.of((), 1.0, 0, info={"score": 1, "member": 0}), {}).rewards == {}


def test_a_failed_episode_is_kept_in_the_file_but_not_taken_as_played(path):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode(stop="env_error"))
    assert played(path) == {} and read_played(path, SETTINGS) == set()
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode(score=0.0))
    assert played(path) == {("t/0", 0): episode(score=0.0)}
    assert len(path.read_text().splitlines()) == 3


# A power cut leaves zeros where a file had grown and its bytes were not on the disk yet.
ZEROS = pytest.mark.parametrize("zeros", [b"", bytes(4096)])


@ZEROS
@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_line_that_a_kill_cut_short_is_dropped_and_the_next_one_is_whole(path, cut, zeros):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode())
        file.add(episode(member=1))
    path.write_bytes(path.read_bytes()[:-cut] + zeros)
    with EpisodeFile(path, SETTINGS) as file:
        assert list(file.played) == [("t/0", 0)]
        file.add(episode(member=1))
    assert list(played(path)) == [("t/0", 0), ("t/0", 1)]


@ZEROS
@pytest.mark.parametrize("end", [0, 5, -1])
def test_a_file_that_was_cut_in_its_first_line_begins_anew(path, end, zeros):
    played(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:end] + zeros)
    assert read_played(path, SETTINGS) == set()
    assert played(path) == {} and path.read_bytes() == whole


def test_an_evaluation_s_episodes_are_on_the_disk_when_its_file_is_closed(path):
    faults = FaultFs(path.parent / "faults", path.parent / "root")
    path = faults.root / "made" / path.name
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from seeupo_jax.trajectories.episodes import EpisodeFile, EvaluationEpisode\n"
        "with EpisodeFile(Path(sys.argv[1]), {'k': 2}) as file:\n"
        "    file.add(EvaluationEpisode('t/0', 0, 1.0, 1.0, 'done', False, 1, [], {}, {}))\n"
    )
    faults.root.mkdir()
    command = [sys.executable, "-c", program, path]
    subprocess.run(command, env=environment() | faults.environment, check=True)
    synced = [call for call in faults.calls() if call.kind == "sync"]
    assert [call.path for call in synced] == [str(faults.root), str(path.parent), str(path)]
    assert (faults.log / synced[-1].other).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("other", [{"k": 4}, {"new": 1}, {"env.options": {"size": (1, 3)}}])
def test_episodes_of_other_settings_are_not_mixed_in(path, other):
    played(path)
    before = path.read_bytes()
    (name, value), *_ = other.items()
    with pytest.raises(ValueError) as logged:
        played(path, SETTINGS | other)
    wanted = json.loads(json.dumps(value))
    assert str(logged.value).startswith(f"{name}: got {wanted!r}; allowed: ")
    assert f"episodes in {path} were played; move that file away" in str(logged.value)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="split: got None; allowed: 'test'"):
        played(path, {name: SETTINGS[name] for name in SETTINGS if name != "split"})
    assert played(path) == {}  # and it is closed again


def test_two_evaluations_do_not_write_one_file(path):
    with EpisodeFile(path, SETTINGS):
        with pytest.raises(ValueError) as logged:
            EpisodeFile(path, SETTINGS)
        assert str(logged.value).startswith(f"got {path}, in use by process {os.getpid()} on ")
        other = path.with_name("other.jsonl")
        assert played(other) == {}  # with other settings there may be another one at a time
    assert played(path) == {}
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, other.name]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"task_id": "t/0"}'])
def test_a_line_that_is_none_of_ours_is_told_and_stays(path, line):
    played(path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"{path.name} line 2: got "):
        played(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ['{"accuracy": 0.91}', '{\n "my": 1,\n "last": 2\n}', '{"settings": 5}\n{}\n{"a"', "[1]\n"],
)
def test_a_file_of_something_else_is_told_and_stays(path, content):
    path.parent.mkdir()
    path.write_text(content)
    for read in (played, read_played):
        with pytest.raises(ValueError, match=path.name):
            read(path, SETTINGS)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task_id": [1]}, r"task_id: got \[1\]; allowed: str"),
        ({"member": {}}, "member: got {}; allowed: int"),
        ({"score": None}, "score: got None; allowed: int or float"),
        ({"failed": 0}, "failed: got 0; allowed: bool"),
        ({"messages": 5}, "messages: got 5; allowed: list"),
    ],
)
def test_an_episode_with_a_field_of_another_kind_is_told_with_its_line(path, fields, message):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode())
    settings, line = path.read_text().splitlines()
    path.write_text(f"{settings}\n{line}\n{json.dumps(json.loads(line) | fields)}\n")
    for read in (played, read_played):
        with pytest.raises(ValueError, match=f"{path.name} line 3: {message}"):
            read(path, SETTINGS)


def test_what_is_no_json_in_info_is_kept_as_text(path):
    with EpisodeFile(path, SETTINGS) as file:
        file.add(episode(info={"size": np.float32(0.5), "set": {1}, "kind": b"x"}))
    (read,) = played(path).values()
    assert read.info == {"size": 0.5, "set": [1], "kind": "b'x'"}


def test_a_trajectory_becomes_an_episode():
    turns = Segment(np.zeros(3, np.int32), np.array([-1, 0, 1], np.int32), np.zeros(3, np.float32))
    trajectory = Trajectory.of(
        segments=(turns,),
        reward=-1,
        group=3,
        task_id="t/5",
        stop="max_turns",
        messages=({"role": "user", "content": "hi"},),
        info={"score": 1, "member": 2, "retries": 1, "bad_calls": 4},
    )
    made = to_episode(trajectory, {"kind": "x"})
    assert made.key == ("t/5", 2) and made.success == 1.0
    assert (made.turns, made.reward, made.stop, made.failed) == (2, -1.0, "max_turns", False)
    assert made.info == {"retries": 1, "bad_calls": 4} and made.labels == {"kind": "x"}
    assert trajectory.info["member"] == 2


def test_success_is_a_full_score_of_an_environment_that_did_not_fail():
    assert episode(score=0.99).success == 0.0
    assert math.isnan(episode(stop="env_error").success)
