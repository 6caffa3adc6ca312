"""Messages against bytes that Tinker's SDK 0.38.0 wrote, and damaged ones."""

import numpy as np
import pytest

from seeupo_jax.train_service.message_schema import ForwardBackwardRequest
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.tinker_messages import (
    PassResult,
    SampledSequence,
    SampleResult,
    parse_forward_backward,
    read_forward_backward,
    write_pass_result,
    write_sample_result,
)

# By `forward_backward_request_to_proto` of the SDK and the classes of its `tinker_public_pb2`.
REQUEST = bytes.fromhex(
    "0a1173657373696f6e2d313a747261696e3a3010ac021a6d0a0c0a0a0a08050000002c0100000a080a060a0470110100"
    "12210a0a616476616e746167657312130a0c0000003f000080bf00000040180122010312300a0d7461726765745f746f"
    "6b656e73121f0a182c01000000000000701101000000000001000000000000001802220103220370706f2a1d0a12636c"
    "69705f6c6f775f7468726573686f6c6411cdccccccccccec3f30013a1f0a12636c69705f6c6f775f7468726573686f6c"
    "64120909cdccccccccccec3f"
)
PASS = bytes.fromhex(
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000000bf1218000000"
    "000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d11000000000000f8bf"
)
SAMPLE = bytes.fromhex(
    "0a4008011208070000002c0100001a08000000bf000000c022280a1007000000080000002c0100000000000012100000"
    "00bf000080bf000000c0804fc3c71802200212080000c07f000080bf2003"
)


def test_a_request_of_the_sdk_is_read():
    message = parse_forward_backward(REQUEST)
    assert (message.model_id, message.seq_id) == ("session-1:train:0", 300)
    asked = read_forward_backward(message)
    assert (asked.loss, asked.options, asked.forward_only) == (
        "ppo",
        {"clip_low_threshold": 0.9},
        True,
    )
    (datum,) = asked.data
    assert (datum.tokens.tolist(), datum.tokens.dtype) == ([5, 300, 70000], "int32")
    targets, advantages = datum.inputs["target_tokens"], datum.inputs["advantages"]
    assert (targets.tolist(), targets.dtype) == ([300, 70000, 1], "int64")
    assert (advantages.tolist(), advantages.dtype) == ([0.5, -1.0, 2.0], "float32")


def test_results_are_the_bytes_that_the_sdk_would_write():
    arrays = [np.array([-1.0, -2.0]), np.array([-0.5])]
    assert write_pass_result(PassResult({"logprobs": arrays}, {"loss:sum": -1.5})) == PASS
    top = [[(7, -0.5), (8, -1.0)], [(300, -2.0)]]
    sequence = SampledSequence([7, 300], [-0.5, -2.0], False, top)
    assert write_sample_result(SampleResult([sequence], [np.nan, -1.0], None, 3)) == SAMPLE


def test_a_message_that_is_cut_anywhere_is_refused_or_shorter():
    refused = 0
    for size in range(len(REQUEST)):
        try:
            shorter = parse_forward_backward(REQUEST[:size])
            assert len(shorter.SerializeToString()) == size
        except RequestRefused as refusal:
            refused += 1
            assert str(refusal).startswith(f"the body: got {size} bytes that are damaged; ")
    assert refused == len(REQUEST) - 7  # which may end before each of the seven fields


def test_random_bytes_are_refused_in_a_sentence_or_read():
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        try:
            body = rng.bytes(int(rng.integers(1, 60)))
            read_forward_backward(parse_forward_backward(body))
        except RequestRefused as refusal:
            refused += str(refusal).startswith(("the body:", "data[", "loss_fn"))
    assert refused > 200


def request(dense=b"", dtype=0, shape=()):
    """One datum of two tokens, with weights."""
    message = ForwardBackwardRequest()
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(8)
    weights = datum.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = dense, dtype
    weights.shape.extend(shape)
    return message


def test_data_that_is_no_row_of_numbers_is_refused_by_name():
    cut, image, text = request(dense=bytes(7), dtype=1), request(), request()
    flat, sparse = request(dense=bytes(8), dtype=1, shape=[1, 2]), request()
    sparse.data[0].loss_fn_inputs["weights"].sparse_csr.SetInParent()
    image.data[0].model_input.add()
    text.loss_fn_config_v2["mode"].text = ""
    for message, sentence in (
        (cut, r"data\[0\].weights: got 7 bytes; allowed: a multiple of float32's."),
        (flat, r"data\[0\].weights: got shape \[1, 2\]; allowed: one number a token."),
        (sparse, r"data\[0\].weights: got a sparse array; allowed: one number a token."),
        (request(dtype=4), r"data\[0\].weights: got type 4; allowed: float32 and int64."),
        (image, r"data\[0\].model_input: got an image or sound; allowed: tokens."),
        (text, "loss_fn_config: got text for 'mode'; allowed: numbers."),
    ):
        with pytest.raises(RequestRefused, match=f"^{sentence}$"):
            read_forward_backward(message)
