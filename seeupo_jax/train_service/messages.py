"""What requests ask for and results say, read from and written into the forms of Tinker's API.

Passes over data and their results, and the results of sampling, are protocol buffers; all else is
JSON. Numbers of fields are those of `tinker_public.proto` in the package `tinker` 0.38.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seeupo_jax.train_service import protobuf
from seeupo_jax.train_service.refusals import RequestRefused

_FLOAT32, _INT64 = 1, 2  # DType
_DTYPES: dict[protobuf.Value, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}
_STOP, _LENGTH = 0, 1  # StopReason
UNSCORED, NO_TOKEN = -99999.0, 0  # in tables of likeliest tokens, where there are fewer


class Datum(NamedTuple):
    """One sequence: its tokens, and arrays of the loss by name, each as long as the tokens."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """A pass over data. options: of the loss. forward_only: no gradient is accumulated."""

    model_id: str
    seq_id: int
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


@contextlib.contextmanager
def _damage_refused() -> Generator[None]:
    """RequestRefused for bytes that are no message, or arrays that end within a number."""
    try:
        yield
    except RequestRefused:
        raise
    except ValueError as error:
        raise RequestRefused(f"the body: no message of protocol buffers ({error}).") from None


@_damage_refused()
def peek(body: bytes) -> tuple[str, int]:
    """The run and the number of a pass over data, before the rest is read.

    Raises:
      RequestRefused: a damaged message.
    """
    model_id, seq_id = "", 0
    for number, value in protobuf.fields(body):
        if number == 1:
            model_id = protobuf.text(value)
        elif number == 2 and isinstance(value, int):
            seq_id = protobuf.signed(value)
    return model_id, seq_id


@_damage_refused()
def read_forward_backward(body: bytes) -> ForwardBackward:
    """A pass over data.

    Raises:
      RequestRefused: a damaged message, or data that is no text.
    """
    data: list[Datum] = []
    loss, options, forward_only = "", {}, False
    for number, value in protobuf.fields(body):
        if number == 3:
            data.append(_read_datum(protobuf.message(value), f"data[{len(data)}]"))
        elif number == 4:
            loss = protobuf.text(value)
        elif number == 5:
            key, option = _entry(value)
            options[key] = protobuf.double(option)
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            key, option = _entry(value)
            if any(part == 2 for part, _ in protobuf.fields(protobuf.message(option))):
                raise RequestRefused(f"loss_fn_config: got text for {key!r}; allowed: numbers.")
    model_id, seq_id = peek(body)
    return ForwardBackward(model_id, seq_id, data, loss, options, forward_only)


def _entry(value: protobuf.Value) -> tuple[str, protobuf.Value]:
    """Key and value of an entry of a map."""
    parts = dict(protobuf.fields(protobuf.message(value)))
    return protobuf.text(parts.get(1, b"")), parts.get(2, b"")


def _read_datum(body: bytes, name: str) -> Datum:
    chunks: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in protobuf.fields(body):
        if number == 1:
            chunks.append(_read_chunk(protobuf.message(value), name))
        elif number == 2:
            key, tensor = _entry(value)
            inputs[key] = _read_tensor(protobuf.message(tensor), f"{name}.{key}")
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    return Datum(tokens, inputs)


def _read_chunk(body: bytes, name: str) -> np.ndarray:
    parts = dict(protobuf.fields(body))
    if 1 not in parts:
        raise RequestRefused(f"{name}.model_input: got an image or sound; allowed: tokens.")
    text = dict(protobuf.fields(protobuf.message(parts[1])))
    return np.frombuffer(protobuf.message(text.get(1, b"")), "<i4")


def _read_tensor(body: bytes, name: str) -> np.ndarray:
    parts = list(protobuf.fields(body))
    last = dict(parts)
    if 2 in last:
        raise RequestRefused(f"{name}: got a sparse array; allowed: one number a token.")
    kind = last.get(3, 0)
    if kind not in _DTYPES:
        raise RequestRefused(f"{name}: got type {kind}; allowed: float32 and int64.")
    shape = [size for number, value in parts if number == 4 for size in protobuf.integers(value)]
    if len(shape) > 1:
        raise RequestRefused(f"{name}: got shape {shape}; allowed: one number a token.")
    return np.frombuffer(protobuf.message(last.get(1, b"")), _DTYPES[kind])


def write_pass_result(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput`."""
    record = b""
    count = 0
    for name, arrays in result.outputs.items():
        count = len(arrays)
        ends = np.cumsum([0, *(4 * len(array) for array in arrays)], dtype="<i8")
        data = b"".join(np.asarray(array, "<f4").tobytes() for array in arrays)
        tensor = (
            protobuf.write_bytes(1, data)
            + protobuf.write_bytes(2, ends.tobytes())
            + protobuf.write_integer(3, _FLOAT32)
        )
        entry = protobuf.write_bytes(1, name) + protobuf.write_bytes(2, tensor)
        record += protobuf.write_bytes(2, entry)
    record += protobuf.write_integer(3, count)
    out = protobuf.write_bytes(1, "ArrayRecord") + protobuf.write_bytes(2, record)
    for name, value in result.metrics.items():
        out += protobuf.write_bytes(
            3, protobuf.write_bytes(1, name) + protobuf.write_double(2, value)
        )
    return out


def write_sample_result(result: SampleResult) -> bytes:
    """A `SampleResponse`."""
    out = b""
    for each in result.sequences:
        sequence = (
            protobuf.write_integer(1, _STOP if each.stopped else _LENGTH)
            + protobuf.write_bytes(2, np.asarray(each.tokens, "<i4").tobytes())
            + protobuf.write_bytes(3, np.asarray(each.logp, "<f4").tobytes())
        )
        if each.top is not None:
            sequence += protobuf.write_bytes(4, _write_top(each.top))
        out += protobuf.write_bytes(1, sequence)
    if result.prompt_logp is not None:
        out += protobuf.write_bytes(2, np.asarray(result.prompt_logp, "<f4").tobytes())
    if result.prompt_top is not None:
        out += protobuf.write_bytes(3, _write_top(result.prompt_top))
    return out + protobuf.write_integer(4, result.cached_tokens)


def _write_top(top: Sequence[Sequence[tuple[int, float]]]) -> bytes:
    most = max(map(len, top), default=0)
    token_LT = np.full((len(top), most), NO_TOKEN, "<i4")
    logp_LT = np.full((len(top), most), UNSCORED, "<f4")
    for place, likeliest in enumerate(top):
        for rank, (token, logp) in enumerate(likeliest):
            token_LT[place, rank], logp_LT[place, rank] = token, logp
    return (
        protobuf.write_bytes(1, token_LT.tobytes())
        + protobuf.write_bytes(2, logp_LT.tobytes())
        + protobuf.write_integer(3, most)
        + protobuf.write_integer(4, len(top))
    )


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
