"""Files of trajectories: what is read is what was written, and what is wrong is named."""

import dataclasses
import json
import re
from pathlib import Path

import learner_cases as cases
import numpy as np
import pytest
import stored_cases as files
import telemetry_cases
from stored_fields import with_fields

from seeupo_jax.trajectories import reader
from seeupo_jax.trajectories.stored import check_trajectories, read_stored
from seeupo_jax.types import rewards_of

LINE = {"tokens": [5, 6, 7, 8, 9], "turn": [-1, 0, 0, -1, 1], "reward": 0.5, "group": 3}
LOGP = [0, -0.5, -1.0, 0.0, -2]
DOCS = Path(__file__).parents[2] / "docs" / "update.md"


def read(tmp_path, *lines, **choices):
    file = tmp_path / "file.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return read_stored(file, **choices)


def test_the_page_makes_a_file_of_what_a_run_has_stored(tmp_path, monkeypatch):
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    telemetry_cases.write_run(tmp_path / "runs" / "quickstart", iterations=1)
    records = [telemetry_cases.record(1, g, m) for g in range(4) for m in range(4)]
    (unknown,) = records[2]["segments"]  # as where it is not recorded: none is forced
    unknown["logp"] = [None] * len(unknown["logp"])
    telemetry_cases.write_shard(tmp_path / "runs" / "quickstart", records)
    exec(block, {})
    stored = list(reader.read_trajectories("runs/quickstart", evaluation=False, iterations=[1]))
    found = read_stored("trajectories.jsonl")
    assert len(found) == len(stored) > 8
    for mine, reference in zip(found, stored, strict=True):
        assert (mine.reward, mine.group, mine.stop) == tuple(
            reference[name] for name in ("reward", "group", "stop")
        )
        assert list(mine.turn_rewards) == reference["turn_rewards"]
        for segment, known in zip(mine.segments, reference["segments"], strict=True):
            assert segment.tokens_L.tolist() == known["tokens"]
            assert segment.turn_L.tolist() == known["turn"]
            logp_L = np.array(known["logp"], float)
            logp_L[segment.turn_L < 0] = 0.0
            np.testing.assert_allclose(segment.logp_L, logp_L, 1e-6)
    assert sum(bool(np.isnan(s.logp_L).any()) for t in found for s in t.segments) == 1


def test_what_is_read_is_what_was_written(tmp_path):
    wanted = cases.ragged()  # one failed, two of two segments
    wanted[5] = with_fields(wanted[5], turn_rewards=(0.5, 0.0, -1.0))
    file = files.write(tmp_path / "file.jsonl", wanted)
    found = read_stored(file)
    assert len(found) == len(wanted)
    for number, (mine, reference) in enumerate(zip(found, wanted, strict=True), start=1):
        for name in (
            "reward",
            "group",
            "stop",
            "failed",
            "turns",
            "turn_rewards",
            "policy_version",
        ):
            assert getattr(mine, name) == getattr(reference, name)
        assert mine.task_id == f"{file}:{number}"
        for segment, other in zip(mine.segments, reference.segments, strict=True):
            for name in ("tokens_L", "turn_L", "logp_L"):
                got, expected = getattr(segment, name), getattr(other, name)
                assert got.dtype == expected.dtype and got.tolist() == expected.tolist()


def test_what_nobody_recorded_is_not_a_number(tmp_path):
    first, second = read(tmp_path, LINE, LINE | {"logp": LOGP})
    assert np.isnan(first.segments[0].logp_L).tolist() == [False, True, True, False, True]
    assert second.segments[0].logp_L.tolist() == LOGP
    assert first.stop == "done"


def test_a_samplers_rounding_may_take_a_log_probability_above_0(tmp_path):
    found, _ = read(tmp_path, LINE | {"logp": [0, -0.5, 0.009, 0, -2]}, LINE)
    assert found.segments[0].logp_L[2] == np.float32(0.009)


def test_empty_lines_and_further_fields_are_passed_over(tmp_path):
    file, logged = tmp_path / "file.jsonl", []
    file.write_text(f"{json.dumps(LINE | {'note': 1})}\n\n{json.dumps(LINE)}\n")
    found = read_stored(file, log=logged.append)
    assert [t.task_id for t in found] == [f"{file}:1", f"{file}:3"]
    assert logged == [f"{file}: fields that are not read: note."]


def test_turn_rewards_that_do_not_add_up_to_the_reward_are_kept_and_said(tmp_path):
    file, logged = tmp_path / "file.jsonl", []
    lines = [LINE | {"turn_rewards": rewards} for rewards in ([0.1, 0.4], [1, 0], [0.5, 0.5])]
    file.write_text("\n".join(map(json.dumps, [*lines, LINE])))
    found = read_stored(file, log=logged.append)
    assert [t.turn_rewards for t in found] == [(0.1, 0.4), (1.0, 0.0), (0.5, 0.5), ()]
    assert [rewards_of(t) for t in found[2:]] == [[0.5, 0.5], [0.0, 0.5]]
    (said,) = logged
    assert said.startswith(f"{file}: turn_rewards do not add up to reward in 2 of 3 lines")


def test_a_trajectory_without_a_turn_or_a_token_is_one(tmp_path):
    empty = LINE | {"tokens": [], "turn": [], "stop": "env_error"}
    found = read(tmp_path, LINE, LINE | {"turn": [-1] * 5}, empty)
    assert [t.turns for t in found] == [2, 0, 0]


WRONG = {
    # What is wrong with the second line -> what is said of it.
    "nonsense": ("{tokens", "got {tokens, which is not JSON; allowed: a JSON object with tokens"),
    "bytes": ("\x00", "which is not JSON"),
    "list": ([1], r"got \[1\]; allowed: a JSON object"),
    "missing": ({"tokens": [1], "turn": [-1]}, "got no reward, group but tokens, turn; allowed"),
    "text": (LINE | {"tokens": "abc"}, "tokens: got abc; allowed: a list, or a list of lists"),
    "token": (LINE | {"tokens": [5, -6, 7, 8, 9]}, "tokens: got -6; allowed: token ids"),
    "float": (LINE | {"tokens": [5.0, 6, 7, 8, 9]}, "tokens: got 5.0; allowed: token ids"),
    "bool": (LINE | {"tokens": [True, 6, 7, 8, 9]}, "tokens: got True; allowed: token ids"),
    "large": (LINE | {"tokens": [2**31, 6, 7, 8, 9]}, "tokens: got 2147483648; allowed"),
    "mixed": (LINE | {"tokens": [[5, 6], 7]}, "tokens: got lists and numbers; allowed: one or"),
    "short": (LINE | {"turn": [-1, 0, 0, 1]}, "turn: got 4 numbers; .* each token, 5"),
    "flat": (
        LINE | {"tokens": [[5, 6, 7], [8, 9]]},
        r"turn: got 5 numbers; .* each token, \[3, 2\]",
    ),
    "logp": (LINE | {"logp": LOGP[1:]}, "logp: got 4 numbers; allowed: one for each token, 5"),
    "positive": (LINE | {"logp": [0, 0.5, 1, 0, 2]}, "logp: got 0.5; allowed: .* numbers <= 0"),
    "infinite": (LINE | {"logp": [0, -np.inf, 0, 0, 0]}, "logp: got -inf; allowed: .* finite"),
    "null": (LINE | {"logp": None}, "logp: got None; allowed: a list"),
    "below": (LINE | {"turn": [-2, 0, 0, -1, 1]}, "turn: got -2; allowed: -1 at context, or"),
    "first": (LINE | {"turn": [0, 0, 0, -1, 1]}, "turn: got 0 first; allowed: -1, since"),
    "falls": (LINE | {"turn": [-1, 1, 1, -1, 0]}, "turn: got 0 after 1; allowed: indices that do"),
    "skips": (LINE | {"turn": [-1, 0, 0, -1, 2]}, "turn: got the turns 0, 2; allowed: 0, 1, 2"),
    "begins": (LINE | {"turn": [-1, 1, 1, -1, 2]}, "turn: got the turns 1, 2; allowed: 0, 1, 2"),
    "twice": (
        LINE | {"tokens": [[5, 6], [7, 8, 9]], "turn": [[-1, 0], [-1, 0, 1]]},
        "turn: got the turns 0, 0, 1; allowed: .* each in one segment",
    ),
    "nan": (LINE | {"reward": float("nan")}, "reward: got nan; allowed: a finite number"),
    "word": (LINE | {"reward": "1"}, "reward: got 1; allowed: a finite number"),
    "name": (LINE | {"group": "a"}, "group: got a; allowed: a whole number"),
    "half": (LINE | {"group": 0.5}, "group: got 0.5; allowed: a whole number"),
    "turns": (
        LINE | {"turn_rewards": [1, 0, 0]},
        "turn_rewards: got 3 numbers; allowed: .* for each turn, 2",
    ),
    "no list": (LINE | {"turn_rewards": 0.5}, "turn_rewards: got 0.5; allowed: a list of a num"),
    "not finite": (LINE | {"turn_rewards": [0, np.inf]}, "turn_rewards: got inf; .* finite num"),
    "stop": (LINE | {"stop": "crashed"}, "stop: got crashed; allowed: done, max_turns, max_tok"),
    "rewards": (LINE | {"rewards": [1.0]}, r"rewards: got \[1.0\]; allowed: numbers by name"),
    "reward name": (
        LINE | {"rewards": {"a b": 1.0}},
        "rewards: got the name a b; allowed: 1 to 64",
    ),
    "reward nan": (
        LINE | {"rewards": {"late": float("nan")}},
        r"rewards\[late\]: got nan; allowed: a finite number",
    ),
    "stops": (LINE | {"stop": ["done"]}, r"stop: got \['done'\]; allowed: done"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_named(tmp_path, name):
    line, said = WRONG[name]
    with pytest.raises(ValueError, match=said) as caught:
        read(tmp_path, LINE, line, LINE)
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path / 'file.jsonl'}:2: ") and sentence.endswith(".")
    assert "\n" not in sentence and len(sentence) < 300


@pytest.mark.parametrize(
    "lines, said",
    [
        ((), "got no line; allowed: a JSON object for each trajectory"),
        ((LINE, LINE | {"group": 4}), "got no group with two trajectories that did not fail"),
        ((LINE, LINE | {"stop": "timeout"}), "got no group with two trajectories that did not"),
        ((LINE | {"turn": [-1] * 5},) * 2, "got no turn to update; allowed: at least one"),
    ],
)
def test_a_file_that_teaches_nothing_is_named(tmp_path, lines, said):
    with pytest.raises(ValueError, match=said):
        read(tmp_path, *lines)


def test_a_timeout_behind_an_action_counts_where_it_is_a_mistake(tmp_path):
    """As of an episode: one whose environment hung before any action was there has failed."""
    hung = [LINE | {"stop": "timeout"}, LINE | {"stop": "timeout", "turn": [-1] * 5}]
    lines = [LINE, LINE, *hung, LINE | {"stop": "env_error"}]
    failed = {
        counts: [t.failed for t in read(tmp_path, *lines, timeouts_count=counts)]
        for counts in (False, True)
    }
    assert failed[False] == [False, False, True, True, True]
    assert failed[True] == [False, False, False, True, True]
    assert read(tmp_path, *lines[1:3], timeouts_count=True)[1].timeout_counts  # is a group


def test_lines_that_did_not_fail_have_the_same_rewards(tmp_path):
    both, one = {"env": 1, "late": 0.5}, {"env": 0.25}
    failed = LINE | {"stop": "timeout"}
    found = read(tmp_path, LINE | {"rewards": both}, LINE | {"rewards": both}, failed)
    assert [t.rewards for t in found] == [both, both, {}]
    for own, got in ((one, "env"), ({}, "none")):
        said = f"file.jsonl:2: rewards: got {got} without (late|env), which another line has; allo"
        with pytest.raises(ValueError, match=said):
            read(tmp_path, LINE | {"rewards": both}, LINE | {"rewards": own})


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="--trajectories: got .* [(]No such file .*; allowed: a"):
        read_stored(tmp_path / "file.jsonl")


@pytest.mark.parametrize(
    "limits, said",
    [
        ({"vocab_size": 9}, "tokens: got 9; allowed: ids below the model's vocabulary of 9"),
        (
            {"unassigned_V": np.isin(np.arange(10), [8, 9])},
            "tokens: got 9; allowed: in turns ids of the tokenizer",
        ),
        ({"max_positions": 4}, "tokens: got 5; allowed: at most the 4 positions"),
        (
            {"max_reward": 0.4},
            r"reward: got 0.5; allowed: .* at most 0.4 \(config.env.max_reward\)",
        ),
        ({"max_reward": 0.8}, "turn_rewards: got -0.9; allowed: .* at most 0.8"),
        ({"max_reward": 0.95}, r"rewards\[late\]: got 7; allowed: .* at most 0.95"),
        ({"recorded": True}, "logp: got none; allowed: .* which config.algorithm.importance reads"),
    ],
)
def test_what_does_not_go_with_the_model_is_named(tmp_path, limits, said):
    whole = {"tokens": [1] * 4, "turn": [-1, 0, 0, 0], "logp": LOGP[:4], "reward": -0.4}
    turns = {"turn_rewards": [0.7, -0.9]}
    named = [{"rewards": {"late": reward}} for reward in (0.1, 7)]
    trajectories = read(tmp_path, LINE | whole | named[0], LINE | turns | named[1])
    fitting = {"vocab_size": 10, "max_positions": 5}
    check_trajectories(trajectories, **fitting)
    with pytest.raises(ValueError, match=f"file.jsonl:2: {said}"):
        check_trajectories(trajectories, **(fitting | limits))


def test_the_lines_of_the_docs_are_such_a_file(tmp_path):
    (block,) = re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    found = read(tmp_path, *block.splitlines())
    assert len(found) >= 3 and {len(t.segments) for t in found} == {1, 2}
    assert {t.failed for t in found} == {True, False}


def test_forks_are_the_lines_own_or_found_by_their_tokens(tmp_path):
    wanted = [dataclasses.replace(each, parent=None, fork=0) for each in cases.trees()]
    file = files.write(tmp_path / "file.jsonl", wanted)
    assert [t.fork for t in read_stored(file)] == [0] * 10  # where nothing reads them
    found = read_stored(file, forks=True)
    # As they were sampled; but each continues the first one that it shares so much with.
    assert [(t.parent, t.fork) for t in found] == [
        *[(None, 0)] * 3,
        (0, 1),
        (2, 2),
        (0, 2),
        (None, 0),
        (0, 1),
        (0, 1),
        (1, 2),
    ]
    given = [json.loads(line) for line in file.read_text().splitlines()]
    given[5] |= {"parent": 0, "fork": 1}  # then only these are: equal turns were sampled twice
    file.write_text("\n".join(map(json.dumps, given)))
    found, logged = read_stored(file, forks=True), []
    assert [(t.parent, t.fork) for t in found] == [*[(None, 0)] * 5, (0, 1), *[(None, 0)] * 4]
    read_stored(file, log=logged.append)
    assert logged == [f"{file}: fields that are not read: fork, parent."]


def test_turns_of_equal_tokens_that_begin_elsewhere_are_not_shared(tmp_path):
    other = LINE | {"turn": [-1, -1, 0, -1, 1]}
    found = read(tmp_path, LINE, other, LINE, forks=True)
    assert [(t.parent, t.fork) for t in found] == [(None, 0), (None, 0), (0, 2)]


@pytest.mark.parametrize(
    "fork, said",
    [
        ({"parent": 0}, ":2: got parent alone; allowed: parent and fork together."),
        ({"parent": -1, "fork": 1}, ":2: parent: got -1; allowed: a place in the group, a whole"),
        ({"parent": 0, "fork": 0}, ":2: fork: got 0; allowed: a number of turns, a whole number"),
        ({"parent": 1, "fork": 1}, ":2: parent: got 1; allowed: a place from 0 to 0, of an ear"),
        ({"parent": 0, "fork": 3}, ":2: fork: got 3; allowed: at most 2, the turns that it and i"),
        ({"parent": 0, "fork": 2}, ":2: fork: got 2; allowed: at most 1, the turns whose tokens"),
    ],
)
def test_a_fork_that_cannot_be_is_named(tmp_path, fork, said):
    file = tmp_path / "file.jsonl"
    other = LINE | {"tokens": [5, 6, 7, 8, 4]} | fork
    file.write_text(f"{json.dumps(LINE)}\n{json.dumps(other)}")
    with pytest.raises(ValueError, match=re.escape(said)):
        read_stored(file, forks=True)
