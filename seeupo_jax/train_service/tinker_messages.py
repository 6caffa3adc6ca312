"""What requests ask for and results say, read from and written into the forms of Tinker's API.

Passes over data and their results, and the results of sampling, are protocol buffers; all else is
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from seeupo_jax.train_service.message_schema import (
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)
from seeupo_jax.train_service.refusals import RequestRefused

_FLOAT32, _INT64 = 1, 2  # DType
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOP, _LENGTH = 0, 1  # StopReason
UNSCORED, NO_TOKEN = -99999.0, 0  # in tables of likeliest tokens, where there are fewer


class Datum(NamedTuple):
    """One sequence: its tokens, and arrays of the loss by name, each as long as the tokens."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """A pass over data. options: of the loss. forward_only: no gradient is accumulated."""

    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float]
    forward_only: bool


class PassResult(NamedTuple):
    """outputs: by name, an array a datum. metrics: names end with how parts are combined."""

    outputs: Mapping[str, Sequence[np.ndarray]]
    metrics: Mapping[str, float]


class SampledSequence(NamedTuple):
    """A sampled sequence. stopped: by a stop token or string, and not by its length."""

    tokens: Sequence[int]
    logp: Sequence[float]
    stopped: bool
    top: Sequence[Sequence[tuple[int, float]]] | None


class SampleResult(NamedTuple):
    """prompt_logp: of each token of the prompt, NaN where not computed; None: not asked for."""

    sequences: Sequence[SampledSequence]
    prompt_logp: Sequence[float] | None
    prompt_top: Sequence[Sequence[tuple[int, float]]] | None
    cached_tokens: int


def parse_forward_backward(body: bytes) -> Any:
    """A `ForwardBackwardRequest`, whose data are not read yet.

    Raises:
      RequestRefused: a damaged message.
    """
    try:
        return ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise RequestRefused(
            f"the body: got {len(body)} bytes that are damaged; allowed: a ForwardBackwardRequest."
        ) from None


def read_forward_backward(message: Any) -> ForwardBackward:
    """A pass over data, of what `parse_forward_backward` returned.

    Raises:
      RequestRefused: data other than tokens and one number a token, or an option that is text.
    """
    options = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if not value.HasField("number"):
            raise RequestRefused(f"loss_fn_config: got text for {name!r}; allowed: numbers.")
        options[name] = value.number
    data = [_read_datum(each, f"data[{index}]") for index, each in enumerate(message.data)]
    return ForwardBackward(data, message.loss_fn, options, message.forward_only)


def _read_datum(message: Any, name: str) -> Datum:
    if not all(chunk.HasField("encoded_text") for chunk in message.model_input):
        raise RequestRefused(f"{name}.model_input: got an image or sound; allowed: tokens.")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    return Datum(
        _read_array(tokens, np.dtype("<i4"), f"{name}.model_input"),
        {
            key: _read_tensor(tensor, f"{name}.{key}")
            for key, tensor in message.loss_fn_inputs.items()
        },
    )


def _read_tensor(message: Any, name: str) -> np.ndarray:
    if message.HasField("sparse_csr"):
        raise RequestRefused(f"{name}: got a sparse array; allowed: one number a token.")
    if message.dtype not in _DTYPES:
        raise RequestRefused(f"{name}: got type {message.dtype}; allowed: float32 and int64.")
    array = _read_array(message.dense, _DTYPES[message.dtype], name)
    shape = [*message.shape]
    if shape not in ([], [len(array)]):
        raise RequestRefused(f"{name}: got shape {shape!s:.80}; allowed: one number a token.")
    return array


def _read_array(data: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestRefused(f"{name}: got {len(data)} bytes; allowed: a multiple of {dtype}'s.")
    return np.frombuffer(data, dtype)


def write_pass_result(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput`."""
    out = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    record = out.loss_fn_outputs.add()
    for name, arrays in result.outputs.items():
        tensor = record.fields[name]
        tensor.data = b"".join(np.asarray(array, "<f4").tobytes() for array in arrays)
        ends = np.cumsum([0, *(4 * len(array) for array in arrays)], dtype="<i8")
        tensor.offsets, tensor.dtype = ends.tobytes(), _FLOAT32
        record.num_datums = len(arrays)
    return out.SerializeToString()


def write_sample_result(result: SampleResult) -> bytes:
    """A `SampleResponse`."""
    out = SampleResponse(prompt_cache_hit_tokens=result.cached_tokens)
    for each in result.sequences:
        sequence = out.sequences.add(
            stop_reason=_STOP if each.stopped else _LENGTH,
            tokens=np.asarray(each.tokens, "<i4").tobytes(),
            logprobs=np.asarray(each.logp, "<f4").tobytes(),
        )
        if each.top is not None:
            _write_top(each.top, sequence.topk_sampled_logprobs)
    if result.prompt_logp is not None:
        out.prompt_logprobs = np.asarray(result.prompt_logp, "<f4").tobytes()
    if result.prompt_top is not None:
        _write_top(result.prompt_top, out.topk_prompt_logprobs)
    return out.SerializeToString()


def _write_top(top: Sequence[Sequence[tuple[int, float]]], message: Any) -> None:
    """Fills a `TopkLogprobs`."""
    most = max(map(len, top), default=0)
    token_LT = np.full((len(top), most), NO_TOKEN, "<i4")
    logp_LT = np.full((len(top), most), UNSCORED, "<f4")
    for place, likeliest in enumerate(top):
        for rank, (token, logp) in enumerate(likeliest):
            token_LT[place, rank], logp_LT[place, rank] = token, logp
    message.token_ids, message.logprobs = token_LT.tobytes(), logp_LT.tobytes()
    message.k, message.length = most, len(top)


def read_prompt(value: Any) -> list[int]:
    """The tokens of a `ModelInput` in JSON.

    Raises:
      RequestRefused: it is none, or has other parts than tokens.
    """
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not isinstance(chunks, list):
        raise RequestRefused("prompt: got no chunks; allowed: chunks of tokens.")
    tokens: list[int] = []
    for chunk in chunks:
        found = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(found, list) or any(type(token) is not int for token in found):
            raise RequestRefused("prompt: got a chunk without tokens; allowed: chunks of tokens.")
        tokens += found
    return tokens
