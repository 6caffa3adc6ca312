"""Stored collections come back bit for bit, or not at all."""

import contextlib
import dataclasses
import enum
import hashlib
import os
import threading
import zlib

import numpy as np
import pytest

from seeupo_jax.parallel.codec import decode, encode
from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.rollout_store import RolloutStore
from seeupo_jax.types import Segment, Trajectory

ODD = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 0x00000001], np.uint32)


def segment(rng, length):
    """Random bits as log-probabilities: NaNs of every kind, infinities and subnormal numbers."""
    return Segment(
        rng.integers(0, 2**31, length, np.int32),
        rng.integers(-1, 9, length, np.int32),
        rng.integers(0, 2**32, length, np.uint32).view(np.float32),
    )


def trajectory(rng, **fields):
    lengths = rng.integers(0, 20, rng.integers(0, 4))
    given = {
        "segments": tuple(segment(rng, length) for length in lengths),
        "reward": float(rng.normal()),
        "group": int(rng.integers(9)),
        "task_id": f"task/{rng.integers(99)}",
        "seed": int(rng.integers(2**32)),
        "stop": str(rng.choice(["done", "max_turns", "max_tokens"])),
        "messages": ({"role": "user", "content": "naïve \ud800 \0 \u2028"}, {"role": "tool"}),
        "info": {"score": 1 / 3, "member": 2, "nested": {"counts": [1, None, True]}},
        "policy_version": int(rng.integers(9)),
        "turn_rewards": tuple(rng.normal(size=rng.integers(0, 4)).tolist()),
        "rewards": {"env": -0.0, "brevity": float(rng.normal())},
    }
    return Trajectory.of(**(given | fields))


def collection(*trajectories, **rounds):
    usage = {"prefilled": 2**40}
    return Collected(trajectories, 0.1 + 0.2, 1e-300, 2**53 + 1, 20, usage, **rounds)


def bits(value):
    """Of a number, an array, or whatever holds some: equal ones are equal to the bit."""
    if dataclasses.is_dataclass(value):
        return {name: bits(item) for name, item in vars(value).items()}
    if isinstance(value, tuple):
        return tuple(bits(item) for item in value)
    if isinstance(value, float):
        return np.float64(value).tobytes()
    return (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.fixture
def log():
    return []


@pytest.fixture
def kept(tmp_path, log):
    with contextlib.closing(RolloutStore(tmp_path / "rollouts", log=log.append)) as store:
        yield store


def test_every_bit_comes_back(kept, log):
    rng = np.random.default_rng(0)
    every = [trajectory(rng) for _ in range(40)]
    assert {len(t.segments) for t in every} == {0, 1, 2, 3}
    assert any(not len(s.tokens_L) for t in every for s in t.segments)
    assert {len(t.turn_rewards) for t in every} == {0, 1, 2, 3}
    saved = collection(*every)
    kept.save(7, saved)
    assert bits(kept.load(7)) == bits(saved) and log == []


@pytest.mark.parametrize(
    "fields",
    [
        {"segments": (), "stop": "env_error", "info": {"failure": "it fails"}},
        {"reward": float("nan")},
        {"reward": -float("inf"), "policy_version": None},
        {"reward": -0.0, "messages": (), "info": {}},
        {"turn_rewards": (0.1 + 0.2, -0.0, 5e-324, float("inf"), float("nan"))},
        {
            "segments": (
                Segment(
                    np.arange(5, dtype=np.int32),
                    np.zeros(5, np.int32),
                    ODD.view("f4"),
                    np.arange(15, dtype=np.uint8).reshape(5, 3) + 240,
                ),
            )
        },
    ],
)
def test_a_collection_of_one_odd_trajectory_comes_back(kept, fields):
    saved = collection(trajectory(np.random.default_rng(1), **fields))
    kept.save(1, saved)
    assert bits(kept.load(1)) == bits(saved)


@pytest.mark.parametrize("kept_of_five", [5, 3, 0])
def test_what_was_left_out_of_a_collection_comes_back_apart_from_the_rest(kept, kept_of_five):
    rng = np.random.default_rng(9)
    every = [trajectory(rng) for _ in range(5)]
    left_out = tuple(every[kept_of_five:])
    saved = collection(*every[:kept_of_five], rounds=3, left_out=left_out)
    kept.save(1, saved)
    assert bits(kept.load(1)) == bits(saved)


def test_an_empty_collection_comes_back(kept):
    kept.save(1, collection())
    assert bits(kept.load(1)) == bits(collection())


class Silent:
    def __str__(self):
        raise RuntimeError("no text")


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "value, wanted",
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.bool_(True), True),
        (np.arange(4, dtype=np.int8).reshape(2, 2), [[0, 1], [2, 3]]),
        ((1, (2,)), [1, [2]]),
        ({1: 2, (3, 4): {5}}, {"1": 2, "(3, 4)": [5]}),
        (Colour.RED, "red"),
        (b"bytes", "b'bytes'"),
        (np.longdouble(0.5), "0.5"),
        ([np.float32("inf"), -np.inf], [np.inf, -np.inf]),  # no JSON, yet read back as it was
        (Silent(), "a Silent"),
    ],
)
def test_what_json_cannot_hold_is_kept_as_text(kept, log, value, wanted):
    kept.save(1, collection(trajectory(np.random.default_rng(2), info={"value": value})))
    assert kept.load(1).trajectories[0].info == {"value": wanted} and log == []


def test_what_cannot_be_kept_is_told_and_stops_nothing(kept, log):
    endless = {}
    endless["self"] = endless
    kept.save(1, collection(trajectory(np.random.default_rng(3), info=endless)))
    assert kept.load(1) is None
    (sentence,) = log
    assert "1.rollouts could not be written" in sentence and "sample again" in sentence


def test_a_full_disk_is_told_and_leaves_nothing(kept, log, monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    kept.save(1, collection(trajectory(np.random.default_rng(4))))
    kept.wait()
    assert "No space left on device" in log[0] and kept.load(1) is None
    assert list((tmp_path / "rollouts").iterdir()) == []


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that takes nothing until the event is set."""
    free, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: free.wait(10) and fsync(file))
    yield free
    free.set()


@pytest.mark.parametrize("ends", ["wait", "close"])
def test_saving_does_not_wait_for_the_disk_but_what_asks_for_it_does(
    kept, slow_disk, tmp_path, ends
):
    for iteration in (1, 2):
        kept.save(iteration, collection(trajectory(np.random.default_rng(iteration))))

    def names():
        return {file.name for file in (tmp_path / "rollouts").glob("*.rollouts")}

    assert names() == set()
    threading.Timer(0.1, slow_disk.set).start()
    getattr(kept, ends)()
    assert names() == {"1.rollouts", "2.rollouts"}


@pytest.mark.parametrize("asks, found", [("load", True), ("forget", False)])
def test_what_is_being_written_is_there_for_whoever_asks(kept, slow_disk, tmp_path, asks, found):
    kept.save(1, collection())
    threading.Timer(0.1, slow_disk.set).start()
    getattr(kept, asks)(1)
    assert (tmp_path / "rollouts" / "1.rollouts").exists() == found


DAMAGE = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "halved": lambda data: data[: len(data) // 2],
    "grown": lambda data: data + b"\0",
    "digest": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "flipped": lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_passed_over_with_one_sentence(kept, log, tmp_path, damage):
    kept.save(3, collection(trajectory(np.random.default_rng(5))))
    kept.wait()
    file = tmp_path / "rollouts" / "3.rollouts"
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert kept.load(3) is None
    assert log == [
        f"{file} changed after it was written; its trajectories are discarded and sampled again."
    ]


def test_a_file_from_before_rewards_had_names_is_used(kept, tmp_path):
    saved = collection(trajectory(np.random.default_rng(6), rewards={}))
    kept.save(2, saved)
    kept.wait()
    file = tmp_path / "rollouts" / "2.rollouts"
    body = zlib.decompress(file.read_bytes()[32:])
    fields = saved.trajectories[0].stored_fields().keys() - {"rewards", "named_turn_rewards"}
    old = dataclasses.make_dataclass("Trajectory", sorted(fields))
    types = (Collected, Trajectory, Segment)
    notes = decode(body, types)
    (t,) = notes["collected"].trajectories
    before = old(**{name: getattr(t, name) for name in fields})
    changed = dataclasses.replace(notes["collected"], trajectories=(before,))
    body = zlib.compress(encode(notes | {"collected": changed}, (Collected, old, Segment)))
    file.write_bytes(hashlib.sha256(body).digest() + body)
    assert bits(kept.load(2)) == bits(saved)


def test_what_other_settings_or_parameters_sampled_is_thrown_away(kept, log):
    saved = collection(trajectory(np.random.default_rng(6)))
    kept.save(2, saved, "a1", "p1")
    assert kept.load(2, "b2", "p1") is None and "with another seed, environment" in log[0]
    assert kept.load(2, "a1", "p2") is None and "by other parameters (p1)" in log[1]
    assert len(log) == 2 and all(each.endswith("discarded and sampled again.") for each in log)
    assert bits(kept.load(2, "a1", "p1")) == bits(saved)


@pytest.mark.parametrize("content", [b"no value", encode({"iteration": 1})])
@pytest.mark.parametrize("pack", [zlib.compress, bytes], ids=["compressed", "plain"])
def test_a_file_of_another_form_is_sampled_again(kept, log, tmp_path, content, pack):
    body = pack(content)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "1.rollouts").write_bytes(hashlib.sha256(body).digest() + body)
    assert kept.load(1) is None and "another version" in log[0]


def test_what_a_checkpoint_covers_is_forgotten(kept, tmp_path, log):
    assert kept.load(1) is None
    kept.forget(5)  # where there is no folder yet
    for iteration in (1, 2, 3, 10):
        kept.save(iteration, collection())
    kept.wait()
    for name in ("2.rollouts.tmp", "2.rollouts.0a1b2c3d.tmp"):  # of an earlier version; of this one
        (tmp_path / "rollouts" / name).write_bytes(b"")
    mine = {"notes.txt", "1.txt", "2", "3.rollouts.old"}
    for name in mine:
        (tmp_path / "rollouts" / name).write_text("")
    (tmp_path / "rollouts" / "0.rollouts").mkdir()
    kept.forget(3)
    left = {p.name for p in (tmp_path / "rollouts").iterdir()}
    assert left == {"10.rollouts", "0.rollouts"} | mine
    kept.save(10, collection(trajectory(np.random.default_rng(8))))
    assert len(kept.load(10).trajectories) == 1 and log == []
