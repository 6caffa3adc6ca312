"""What processes send each other comes back to the bit, and cannot be code."""

import pickle
import re
import struct
from collections import Counter, namedtuple
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import MappingProxyType

import msgpack
import numpy as np
import pytest

import seeupo_jax
from seeupo_jax.parallel import codec
from seeupo_jax.parallel.codec import decode, encode
from seeupo_jax.trajectories.episodes import EvaluationEpisode
from seeupo_jax.types import Segment, Trajectory

NAN = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]  # negative, with a payload


def bits(value):
    """A value with the type and the bytes of everything in it."""
    if is_dataclass(value):
        return type(value), {f.name: bits(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return dict, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if type(value) is float:
        return float, struct.pack(">d", value)
    return type(value), value


VALUES = [
    *(
        None,
        True,
        False,
        0,
        -1,
        2**63,
        -(2**64),
        10**6000,
        "",
        "ü\0",
        "\ud83d\ude00 \ud800",
        b"\x80",
    ),
    *(0.1, -0.0, 1.0, 5e-324, float("inf"), float("nan"), NAN),
    *([], (), {}, [()], ([],), [None, [1, (2,)]], (1.0, 1, True)),
    *({"a": 1, "b": (1,)}, {1: "a", ("t", 0): [2], "": 3}, {"ü": 1}),
    np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
    np.array([2**63 - 1, -(2**63)], np.int64),
    np.arange(6, dtype=">i2").reshape(2, 3).T,
    np.zeros((0, 3), np.uint8),
    np.array([NAN]),
    *(np.array(7, np.int32), np.array(["a", "üü"]), np.array([True, False])),
    *(np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.str_("x")),
    np.array(["2026-11-23"], "datetime64[D]"),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_comes_back_to_the_bit(value):
    assert bits(decode(encode(value))) == bits(value)
    assert bits(decode(encode([value, {"x": value}]))) == bits([value, {"x": value}])


def trajectory(number):
    logp_L = np.random.default_rng(number).normal(size=5).astype(np.float32)
    logp_L[number % 5] = np.nan
    tokens_L = np.arange(5, dtype=np.int32)
    return Trajectory.of(
        segments=(Segment(tokens_L, tokens_L % 2 - 1, logp_L),) * 2,
        reward=1 / 3,
        group=number,
        messages=({"role": "user", "content": "ü\n"},),
        info={"states": ["a", "b"], "pair": (1, 2), "score": 0.5},
        turn_rewards=(0.1, float("nan")),
        rewards={"env": 0.25},
        named_turn_rewards={"env": (0.25, -0.0)},
    )


def test_what_a_collection_gathers_is_what_pickle_would_have_made_of_it():
    sent = ({3: trajectory(3), 1: trajectory(1)}, (0.5, 0.25), Counter(tokens=4))
    got = decode(encode(sent, (Trajectory, Segment)), (Segment, Trajectory))
    assert bits(got) == bits(pickle.loads(pickle.dumps(sent)))
    logp_L = got[0][3].segments[0].logp_L
    logp_L[0] = 1  # as after pickle, an array is the receiver's own
    assert decode(encode(MappingProxyType({"a": 1}))) == {"a": 1}


def test_a_trajectory_is_encoded_by_the_fields_that_files_have_always_had():
    """The names and their order in the files of earlier versions, read with MessagePack alone."""
    sent = trajectory(1)
    extension = msgpack.unpackb(encode(sent, (Trajectory, Segment)))
    name, fields = msgpack.unpackb(extension.data)
    assert name == "Trajectory" and " ".join(fields) == (
        "segments reward group task_id seed stop messages info policy_version turn_rewards"
        " timeout_counts rewards named_turn_rewards parent fork role_rewards"
    )
    assert (fields["reward"], fields["rewards"]) == (sent.reward, {"env": 0.25})


def test_a_segment_of_an_earlier_version_is_read():
    names = ("tokens_L", "turn_L", "logp_L", "expert_LG", "role")
    earlier = make_dataclass("Segment", names)
    sent = earlier(np.arange(2), np.array([-1, 0]), np.zeros(2), None, "seller")
    got = decode(encode(sent, (earlier,)), (Segment,))
    assert got.version_L is None and got.versions(3).tolist() == [-1, 3]
    assert (got.role, got.tokens_L.tolist()) == ("seller", [0, 1])


class Code:
    def __reduce__(self):
        return print, ("it ran",)


@dataclass
class Other:
    x: int = 0


@pytest.mark.parametrize(
    "value",
    [
        *(Code(), Other(), {1, 2}, Path("x"), namedtuple("N", "x")(1), 1j, ValueError("x")),
        np.array([Code()], object),
        np.zeros(2, [("a", "f4")]),
        EvaluationEpisode,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_value_is_refused_where_it_is_sent(value, capsys):
    with pytest.raises(TypeError, match="^between processes: got .*; allowed: plain values"):
        encode({"deep": [value]}, (Trajectory,))
    assert capsys.readouterr().out == ""


def extension(code, *parts):
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(list(parts))))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Code()),
        b"",
        encode([1, "text"])[:-3],
        encode(np.zeros(3, np.float32))[:-4],
        extension(9, 1),
        extension(codec._INT),
        extension(codec._ARRAY, "<f4", [3], b"12345678"),
        extension(codec._ARRAY, "|O", [1], b"12345678"),
        extension(codec._ARRAY, "V4", [1], b"12345678"),
        extension(codec._CLASS, "Code", {}),
        extension(codec._CLASS, "Segment", {"no": 1}),
        b"\x91" * 100_000,
    ],
    ids=range(12),
)
def test_bytes_that_are_no_value_are_an_error_and_nothing_runs(data, capsys):
    with pytest.raises(ValueError):
        decode(data, (Segment,))
    assert capsys.readouterr().out == ""


def test_no_module_of_the_package_can_unpickle():
    banned = re.compile(r"^\s*(import|from) (pickle|cloudpickle|dill|shelve|marshal)\b", re.M)
    for file in Path(seeupo_jax.__path__[0]).rglob("*.py"):
        assert not banned.search(file.read_text()), file
    assert banned.search("\n    import pickle\n")
