"""The wire format against Google's own library."""

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, struct_pb2, wrappers_pb2

from seeupo_jax.train_service import protobuf
from seeupo_jax.train_service.messages import read_forward_backward
from seeupo_jax.train_service.protobuf import DamagedMessage
from seeupo_jax.train_service.refusals import RequestRefused


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63)])
def test_whole_numbers(value):
    if value:  # a number that is 0 is not sent
        official = wrappers_pb2.Int64Value(value=value).SerializeToString()
        assert protobuf.write_integer(1, value) == official
        assert [(n, protobuf.signed(v)) for n, v in protobuf.fields(official)] == [(1, value)]
    read = wrappers_pb2.Int64Value.FromString(protobuf.write_integer(1, value))
    assert read.value == value


@pytest.mark.parametrize("value", [1.5, -0.1, 1e300, float("inf")])
def test_float64(value):
    official = wrappers_pb2.DoubleValue(value=value).SerializeToString()
    assert protobuf.write_double(1, value) == official
    assert [(n, protobuf.double(v)) for n, v in protobuf.fields(official)] == [(1, value)]


def test_text_and_nested_messages():
    official = struct_pb2.Value(string_value="Zürich " * 40).SerializeToString()
    assert protobuf.write_bytes(3, "Zürich " * 40) == official
    outer = struct_pb2.ListValue(values=[struct_pb2.Value(number_value=2.0)]).SerializeToString()
    inner = protobuf.write_double(2, 2.0)
    assert outer == protobuf.write_bytes(1, inner)


def test_packed_numbers():
    path = [0, 5, 300, 2**31 - 1]
    place = descriptor_pb2.SourceCodeInfo.Location(path=path).SerializeToString()
    assert protobuf.write_integers(1, path) == place
    (field,) = protobuf.fields(place)
    assert protobuf.integers(field[1]) == path


def test_a_message_that_is_cut_anywhere_is_refused_or_shorter():
    whole = protobuf.write_bytes(1, "abc") + protobuf.write_integer(2, 300)
    for size in range(len(whole)):
        if size in (0, 5):  # between two fields
            assert len(list(protobuf.fields(whole[:size]))) == (size > 0)
            continue
        with pytest.raises(DamagedMessage):
            list(protobuf.fields(whole[:size]))


def test_random_bytes_are_refused_in_a_sentence_or_read():
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        try:
            read_forward_backward(rng.bytes(int(rng.integers(1, 60))))
        except RequestRefused as refusal:
            refused += str(refusal).startswith(("the body:", "data[", "loss_fn"))
    assert refused > 200
