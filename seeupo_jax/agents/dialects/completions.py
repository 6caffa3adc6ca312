"""OpenAI's completions of plain prompts, which evaluation harnesses use; servers only."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import pydantic

from seeupo_jax.agents.calls import CallRefused, Completion, EchoedContext, ModelCall
from seeupo_jax.agents.dialects.chat_completions import (
    SamplingFields,
    StreamOptions,
    usage_of,
)
from seeupo_jax.agents.dialects.exchange import (
    NOT_STATED,
    Caller,
    Dialect,
    Event,
    openai_error,
    reply_id,
    version_metadata,
    written_ids,
)
from seeupo_jax.agents.dialects.request_body import Stops, read_fields, refuse

PROMPTS, LIKELIEST, DEFAULT_TOKENS = 256, 20, 16

Tokens = Annotated[list[Annotated[int, pydantic.Field(ge=0)]], pydantic.Field(min_length=1)]
Texts = Annotated[list[str], pydantic.Field(min_length=1)]


class CompletionsRequest(SamplingFields):
    """A request for continuations of prompts."""

    model: str
    prompt: str | Tokens | Texts | Annotated[list[Tokens], pydantic.Field(min_length=1)]
    max_tokens: Annotated[int, pydantic.Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, pydantic.Field(ge=0, le=LIKELIEST)] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # As vLLM has them.
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stop_token_ids: list[int] | None = None
    # Without effect on sampling.
    user: str | None = None


class CompletionsExchange:
    """A request for continuations, and the answers to it: `n` for each prompt, in their order."""

    def __init__(self, tree: Any, caller: Caller):
        if not caller.rules.serves:
            raise CallRefused(
                "prompt: got a plain prompt in an episode; allowed: /v1/chat/completions,"
                " /v1/responses, /v1/messages.",
                status=404,
                code="unknown_url",
                param="prompt",
            )
        request, unknown = read_fields(CompletionsRequest, tree, ignore=caller.rules.ignore)
        fields = {name: getattr(request, name) for name in SamplingFields.model_fields}
        sampling, others = caller.rules.read(fields | {"top_logprobs": request.logprobs})
        caller.ignored += unknown + others
        self._prompts = _prompts(request.prompt)
        if len(self._prompts) * sampling.answers > PROMPTS:
            refuse("prompt", f"prompt: got more than {PROMPTS} answers' worth; allowed: fewer.")
        if request.stream and request.echo:
            refuse("echo", "echo: got true with stream; allowed: one of the two.")
        if request.max_tokens == 0 and not request.echo:
            refuse("max_tokens", "max_tokens: got 0; allowed: at least 1, or 0 with echo.")
        limit = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        call = ModelCall((), (), limit, tuple(request.stop or ()), prompt=self._prompts[0])
        call = dataclasses.replace(call, echo=bool(request.echo), scores=request.logprobs)
        call = dataclasses.replace(call, end_ids=tuple(request.stop_token_ids or ()))
        self.call = dataclasses.replace(call, **sampling._asdict())
        self.stream = bool(request.stream)
        self._logprobs = request.logprobs is not None
        self._token_ids = bool(request.return_token_ids)
        self._names_ids = bool(request.return_tokens_as_token_ids)
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._index = 0
        self._head = {
            "id": f"cmpl-{reply_id()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": caller.model,
        }

    @property
    def branches(self) -> tuple[CompletionsExchange, ...]:
        pairs = itertools.product(self._prompts, range(self.call.answers))
        return tuple(self._branch(i, prompt, n) for i, (prompt, n) in enumerate(pairs))

    def _branch(self, index: int, prompt: str | tuple[int, ...], answer: int) -> Any:
        branch = copy.copy(self)
        branch._index = index
        branch.call = dataclasses.replace(self.call, prompt=prompt, answer=answer)
        return branch

    def reply(self, *completions: Completion) -> dict[str, Any]:
        pairs = zip(self.branches, completions, strict=True)
        choices = [branch._choice(completion) for branch, completion in pairs]
        usage = {"choices": choices, "usage": self._all_usage(completions)}
        return self._head | usage | version_metadata(completions)

    def begin(self) -> Iterator[Event]:
        yield from ()

    def think(self, piece: str) -> Iterator[Event]:
        yield from self.text(piece)

    def text(self, piece: str) -> Iterator[Event]:
        yield self._chunk(text=piece)

    def end(self, completion: Completion, rest: str) -> Iterator[Event]:
        if rest:
            yield from self.text(rest)
        yield self._chunk(**self._choice(completion) | {"text": ""})

    def close(self, *completions: Completion) -> Iterator[Event]:
        if self._usage:
            yield self._head | {"choices": [], "usage": self._all_usage(completions)}
        yield "[DONE]"

    def fail(self, refusal: CallRefused) -> Iterator[Event]:
        yield openai_error(refusal)

    def _chunk(self, **fields: Any) -> Event:
        choice = {"index": self._index, "text": "", "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if self._usage else {}
        return self._head | {"choices": [choice | fields]} | usage

    def _choice(self, completion: Completion) -> dict[str, Any]:
        context, logprobs = completion.context, None
        if self._logprobs:
            logprobs = _write_logprobs(completion, context)
            if self._names_ids:
                echoed = () if context is None else completion.prompt
                ids = (*echoed, *completion.tokens)
                logprobs["tokens"] = [f"token_id:{token}" for token in ids]
        return {
            "index": self._index,
            "text": ("" if context is None else context.text) + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish,
            **(written_ids(completion) if self._token_ids else {}),
        }

    def _all_usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Each prompt counts once."""
        first = completions[:: self.call.answers]
        sampled = sum(len(each.pieces) for each in completions)
        return usage_of(
            sum(each.prompt_tokens for each in first),
            sampled,
            sum(each.cached_tokens for each in first),
        )


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in given)


def _write_logprobs(completion: Completion, context: EchoedContext | None) -> dict[str, Any]:
    """Tokens of the text, each with its log-probability and the likeliest ones by their text."""
    pieces, logp = list(completion.pieces), list[float | None](completion.logp)
    top: list[Any] = list(completion.top or [()] * len(pieces))
    if context is not None:
        # The first token of a text has no log-probability.
        pieces = [*context.pieces, *pieces]
        logp = [None, *context.logp, *logp]
        top = [None, *context.top, *top]
    shown = [piece.decode(errors="replace") for piece in pieces]
    lengths = itertools.accumulate(map(len, shown), initial=0)
    return {
        "tokens": shown,
        "token_logprobs": [None if p is None else max(p, NOT_STATED) for p in logp],
        "top_logprobs": [
            None if likeliest is None else _likeliest(token, p, likeliest)
            for token, p, likeliest in zip(shown, logp, top, strict=True)
        ],
        "text_offset": list(lengths)[:-1],
    }


def _likeliest(
    token: str, logp: float | None, likeliest: Sequence[tuple[bytes, float]]
) -> dict[str, float]:
    """The likeliest tokens, and the one that is there; of two with one text, the likelier."""
    shown: dict[str, float] = {}
    for piece, p in likeliest:
        shown.setdefault(piece.decode(errors="replace"), max(p, NOT_STATED))
    if logp is not None:
        shown.setdefault(token, max(logp, NOT_STATED))
    return shown


DIALECT = Dialect(CompletionsExchange, openai_error)
