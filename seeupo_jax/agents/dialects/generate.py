"""SGLang's own generation of tokens from tokens: /generate; servers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic

from seeupo_jax.agents.calls import CallRefused, Completion, ModelCall
from seeupo_jax.agents.dialects.exchange import (
    NOT_STATED,
    Caller,
    Dialect,
    Event,
    OneAnswer,
    openai_error,
    reply_id,
)
from seeupo_jax.agents.dialects.request_body import Fields, Stops, read_fields, refuse

DEFAULT_TOKENS = 128

Ids = Annotated[list[Annotated[int, pydantic.Field(ge=0)]], pydantic.Field(min_length=1)]


class GenerateSampling(Fields):
    """How an answer is sampled, by SGLang's names."""

    max_new_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: int | None = None
    n: Literal[1] | None = None
    stop: Stops | None = None
    stop_token_ids: list[int] | None = None
    # Of the text only, or without effect.
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: Literal[False] | None = None
    min_new_tokens: Literal[0] | None = None


class GenerateRequest(Fields):
    """A request for an answer to one context."""

    input_ids: Ids | None = None
    text: str | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    return_logprob: bool | None = None
    return_text_in_logprobs: bool | None = None
    logprob_start_len: Literal[-1] | None = None
    top_logprobs_num: Literal[0] | None = None
    stream: Literal[False] | None = None
    rid: str | None = None
    model: str = ""


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class GenerateExchange(OneAnswer):
    """A request for an answer to a context, and the answer."""

    stream = False

    def __init__(self, tree: Any, caller: Caller):
        if not caller.rules.serves:
            raise CallRefused(
                "/generate: got a request in an episode; allowed: /v1/chat/completions,"
                " /v1/responses, /v1/messages.",
                status=404,
                code="unknown_url",
            )
        request, unknown = read_fields(GenerateRequest, tree, ignore=caller.rules.ignore)
        if (request.input_ids is None) == (request.text is None):
            refuse("input_ids", "input_ids: got none, or text too; allowed: one of the two.")
        params = request.sampling_params
        fields = {name: getattr(params, name) for name in _SAMPLING}
        sampling, others = caller.rules.read(fields | {"seed": params.sampling_seed})
        caller.ignored += unknown + others
        prompt = request.text if request.input_ids is None else tuple(request.input_ids)
        limit = DEFAULT_TOKENS if params.max_new_tokens is None else params.max_new_tokens
        call = ModelCall((), (), limit, tuple(params.stop or ()), prompt=prompt)
        call = dataclasses.replace(call, end_ids=tuple(params.stop_token_ids or ()))
        self.call = dataclasses.replace(call, **sampling._asdict())
        self._logprobs = bool(request.return_logprob)
        self._texts = bool(request.return_text_in_logprobs)
        self._id = reply_id() if request.rid is None else request.rid

    def reply(self, *completions: Completion) -> dict[str, Any]:
        (completion,) = completions
        tokens = list(completion.tokens)
        about = {
            "id": self._id,
            "finish_reason": _reason(completion),
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(tokens),
            "cached_tokens": completion.cached_tokens,
        }
        if completion.versions:
            about["weight_version"] = completion.versions[-1].version
            about["weight_versions"] = [span._asdict() for span in completion.versions]
        if self._logprobs:
            about["output_token_logprobs"] = self._write_logprobs(completion)
        return {"text": completion.text, "output_ids": tokens, "meta_info": about}

    def _write_logprobs(self, completion: Completion) -> list[list[Any]]:
        """Each token's log-probability, id, and text where it is asked for."""
        texts = (piece.decode(errors="replace") for piece in completion.pieces)
        entries = zip(completion.logp, completion.tokens, texts, strict=True)
        return [
            [max(p, NOT_STATED), id_, text if self._texts else None] for p, id_, text in entries
        ]

    def begin(self) -> Iterator[Event]:
        yield from ()

    def think(self, piece: str) -> Iterator[Event]:
        yield from ()

    def text(self, piece: str) -> Iterator[Event]:
        yield from ()

    def end(self, completion: Completion, rest: str) -> Iterator[Event]:
        yield from ()

    def fail(self, refusal: CallRefused) -> Iterator[Event]:
        yield openai_error(refusal)


def _reason(completion: Completion) -> dict[str, Any]:
    """Why an answer ended: the stop string or the end token, its length, or an abortion."""
    match completion.finish:
        case "length":
            return {"type": "length", "length": len(completion.tokens)}
        case "abort":
            return {"type": "abort", "message": "Sampling was aborted by an update of the weights."}
        case _:
            last = completion.tokens[-1] if completion.stopped_at is None else None
            return {"type": "stop", "matched": completion.stopped_at or last}


DIALECT = Dialect(GenerateExchange, openai_error)
