"""Records hold what a trajectory was and what was learned of it, as strict JSON."""

import dataclasses
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from seeupo_jax.policy import from_pretrained
from seeupo_jax.trajectories.json_lines import plain
from seeupo_jax.trajectories.reader import FIELDS, SEGMENT_FIELDS, pack_shard
from seeupo_jax.trajectories.trajectory_record import TokenTexts, to_record
from seeupo_jax.types import Segment, Trajectory, TrajectoryStats

BYTES = [b"a", b"\xc3", b"\xbc", b"\xff<|end|>", b"b", "é".encode(), b"\xe2\x82", b"\xac", b"\xff"]
TEXTS = TokenTexts(lambda: BYTES)


def segment(tokens, turn, logp):
    arrays = (tokens, np.int32), (turn, np.int32), (logp, np.float32)
    return Segment(*(np.array(values, kind) for values, kind in arrays))


SEGMENT = segment([0, 1, 2, 4], [-1, 0, 0, -1], [0, -0.1234567, np.nan, 0])
TRAJECTORY = Trajectory.of(
    (SEGMENT,),
    1.5,
    3,
    task_id="t",
    seed=7,
    messages=({"role": "user", "content": "<script>"},),
    info={"score": 1.0, "member": 2, "retries": 1, "note": {"nan": math.nan, 1: (np.int64(4),)}},
    policy_version=4,
    turn_rewards=(1.5,),
    rewards={"env": 1.0, "brevity": np.float64(0.5)},
    named_turn_rewards={"env": (1.0,), "brevity": (np.float64(0.5),)},
)
STATS = TrajectoryStats(
    -0.123456789,
    np.array([-0.5, np.nan], np.float32),
    (np.array([np.nan, -0.5, -0.25, np.nan], np.float32),),
    (np.array([np.nan, 1.0, np.nan, np.nan], np.float32),),
)


def made(trajectory=TRAJECTORY, stats=STATS, **more):
    labels = {"kind": "refund"}
    options = {"split": "train", "iteration": 5, "labels": labels, "texts": TEXTS} | more
    return to_record(trajectory, stats=stats, **options)


def test_versions_are_written_where_the_trajectorys_does_not_say_them():
    for version_L, wanted in (([-1, 4, 4, -1], None), ([-1, 4, 5, -1], [-1, 4, 5, -1])):
        own = replace(SEGMENT, version_L=np.array(version_L, np.int32))
        (segment,) = made(replace(TRAJECTORY, segments=(own,)))["segments"]
        assert segment.get("version") == wanted


def test_a_record_by_hand():
    record = made()
    assert record.keys() == FIELDS.keys()
    segments = record.pop("segments")
    assert record == {
        "schema": 1,
        "split": "train",
        "evaluation": False,
        "iteration": 5,
        "group": 3,
        "member": 2,
        "task_id": "t",
        "seed": 7,
        "labels": {"kind": "refund"},
        "stop": "done",
        "failed": False,
        "failure": None,
        "reward": 1.5,
        "score": 1.0,
        "success": True,
        "turns": 1,
        "turn_rewards": [1.5],
        "rewards": {"env": 1.0, "brevity": 0.5},
        "named_turn_rewards": {"env": [1.0], "brevity": [0.5]},
        "policy_version": 4,
        "advantage": -0.12346,
        "weights": [-0.5, None],
        "info": {"retries": 1, "note": {"nan": None, "1": [4]}},
        "messages": [{"role": "user", "content": "<script>"}],
    }
    assert segments == [
        {
            "tokens": [0, 1, 2, 4],
            "turn": [-1, 0, 0, -1],
            "text": ["a", "", "ü", "b"],
            "logp": [None, -0.12346, None, None],
            "trainer_logp": [None, -0.5, -0.25, None],
            "entropy": [None, 1.0, None, None],
        }
    ]
    assert [*segments[0]] == [*SEGMENT_FIELDS]


def test_only_what_is_0_is_recorded_as_0():
    """A sampled token's log-probability of 0 says that it was forced, and one of -1e-7 does not."""
    logp = [0, -1.2e-7, -4.9e-6, 0]
    sampled = segment([0, 1, 2, 4], [-1, 0, 0, 0], logp)
    (only,) = made(dataclasses.replace(TRAJECTORY, segments=(sampled,)))["segments"]
    assert only["logp"] == [None, -1e-7, -5e-6, 0.0]


def test_what_nobody_learned_is_null():
    record = made(stats=None)
    assert record["advantage"] is None and record["weights"] == []
    (only,) = record["segments"]
    assert only["trainer_logp"] == only["entropy"] == [None] * 4


def test_a_failure_has_a_cause_and_is_no_success():
    failed = Trajectory.of((), 0.0, 0, stop="timeout", info={"score": 0.0, "failure": "slow"})
    record = made(failed, None)
    assert (record["failed"], record["failure"], record["success"]) == (True, "slow", None)
    assert record["info"] == {} and record["segments"] == []
    played = made(Trajectory.of((), 0.0, 0, info={"score": 0.5, "failure": "of a tool"}), None)
    assert (played["success"], played["failure"]) == (False, None)
    assert played["info"] == {"failure": "of a tool"}  # the environment's own


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([1, 2], ["", "ü"]),
        ([6, 7, 5], ["", "€", "é"]),
        ([1], ["\ufffd"]),  # incomplete at the end
        ([1, 0], ["", "\ufffda"]),
        ([1, 3, 2], ["\ufffd", "<|end|>", "\ufffd"]),  # a control token ends what is incomplete
        ([0, 99, 4], ["a", "", "b"]),  # an id of the padded head
        ([], []),
    ],
)
def test_a_character_belongs_to_the_token_that_completes_it(tokens, texts):
    assert TEXTS(tokens) == texts


def test_texts_join_to_what_a_real_tokenizer_decodes():
    _, tokenizer = from_pretrained("package:order_desk")
    said = 'Refund ü € 漢字 {"name": "find_order"}'
    tokens = tokenizer.action(said)
    texts = TokenTexts(tokenizer.token_bytes)(tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts[:-1]).strip() == tokenizer.text(tokens).strip() == said


class Rude:
    def __str__(self):
        raise RuntimeError("no")


def test_whatever_an_environment_says_becomes_strict_json():
    wild = {"a": {1, 2}, "b": object, "c": Rude(), "d": np.float32(np.inf), "e": np.arange(2)}
    made_plain = plain(wild)
    assert made_plain["a"] == [1, 2] and made_plain["d"] is None and made_plain["e"] == [0, 1]
    assert made_plain["c"] == "a Rude"
    assert plain(np.longdouble(0.5)) == "0.5"  # which has no kind of Python's
    json.loads(json.dumps(made_plain, allow_nan=False))
    pack_shard([made()])  # refuses what is not a number
