"""The form of requests for actions and of replies, for each kind of server (vLLM, sglang)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from seeupo_jax.agents.calls import VersionSpan
from seeupo_jax.rollout.engine.sampling import Sampling


class Reply(NamedTuple):
    """A sampled action.

    reason: why it ended: stop | length. stop: the token at which it stopped, if the server names
      it. usage: of `Engine.usage`, where the server reports it.
    versions: the weights that sampled the tokens, by the names that the server has for them; empty:
      it does not say.
    """

    tokens: list[int]
    logp: list[float]
    reason: str
    stop: Any = None
    usage: dict[str, int] = {}  # noqa: RUF012  # never changed
    versions: tuple[VersionSpan, ...] = ()


class ServerDialect(NamedTuple):
    """The requests and replies of a kind of server.

    greedy_trial: whether its first request is for the likeliest tokens, which identify a policy.
    """

    path: str
    body: Callable[[str, Sequence[int], Sampling, int | None], dict[str, Any]]
    read: Callable[[Any], Reply]
    needs: str
    greedy_trial: bool = True


def _common(sampling: Sampling) -> dict[str, Any]:
    # Neutral values are sent too: the defaults come from the model's generation_config.json.
    return {
        "temperature": sampling.temperature,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.end_ids),
    }


def _completions_body(
    model: str, context: Sequence[int], sampling: Sampling, seed: int | None
) -> dict[str, Any]:
    return _common(sampling) | {
        "model": model,
        "prompt": list(context),
        "max_tokens": sampling.max_tokens,
        "logprobs": 0,  # of the sampled token only
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # for vLLM before 0.10.2
        **({} if seed is None else {"seed": seed}),
    }


def _read_completions(reply: Any) -> Reply:
    (choice,) = reply["choices"]
    tokens, logprobs = choice.get("token_ids"), choice["logprobs"]
    if tokens is None:
        tokens = [token.removeprefix("token_id:") for token in logprobs["tokens"]]
    logp = logprobs["token_logprobs"]
    usage = read_usage(reply.get("usage"))
    versions = _read_versions(reply.get("metadata") or {}, len(tokens))
    return Reply(tokens, logp, choice["finish_reason"], choice.get("stop_reason"), usage, versions)


def _generate_body(
    model: str, context: Sequence[int], sampling: Sampling, seed: int | None
) -> dict[str, Any]:
    native = {"max_new_tokens": sampling.max_tokens} | (
        {} if seed is None else {"sampling_seed": seed}
    )
    return {
        "input_ids": list(context),
        "sampling_params": _common(sampling) | native,
        "return_logprob": True,
        "return_text_in_logprobs": False,
    }


def _read_generate(reply: Any) -> Reply:
    sampled = reply["meta_info"]["output_token_logprobs"]
    finish = reply["meta_info"]["finish_reason"]
    tokens, logp = [entry[1] for entry in sampled], [entry[0] for entry in sampled]
    usage = read_usage(reply["meta_info"])
    versions = _read_versions(reply["meta_info"], len(tokens))
    return Reply(tokens, logp, finish["type"], finish.get("matched"), usage, versions)


def _read_versions(about: Any, count: int) -> tuple[VersionSpan, ...]:
    """The weights that sampled so many tokens: all of them, or spans, as SGLang states them."""
    spans = about.get("weight_versions")
    if spans is not None:
        return tuple(
            VersionSpan(str(each["version"]), int(each["start"]), int(each["end"]))
            for each in spans
        )
    version = about.get("weight_version")
    return () if version is None else (VersionSpan(str(version), 0, count),)


# sglang's own endpoint returns token ids in every version; its /v1/completions only in the latest.
DIALECTS: dict[str, ServerDialect] = {
    "vllm": ServerDialect(
        "/v1/completions",
        _completions_body,
        _read_completions,
        "a server as vLLM >= 0.10.2, which returns token ids and log-probabilities",
    ),
    "sglang": ServerDialect(
        "/generate",
        _generate_body,
        _read_generate,
        "a server as sglang, which returns token ids and log-probabilities",
    ),
}


CHAT = "chat"  # any OpenAI-compatible server; see `chat_messages`


def owners_dialect(card: Mapping[str, Any]) -> str:
    """The dialect of a server that describes its model so."""
    owner = str(card.get("owned_by"))
    return owner if owner in DIALECTS else CHAT


def read_usage(usage: Any) -> dict[str, int]:
    """The tokens of a request, as `usage` of a reply or sglang's `meta_info` counts them."""
    names = {"prompt_tokens": "prompt_tokens", "completion_tokens": "decoded_tokens"}
    usage = usage or {}
    return {ours: int(usage[name]) for name, ours in names.items() if usage.get(name) is not None}


def complete(reply: Reply, sampling: Sampling) -> Reply:
    """Returns an action with all its tokens, including the end token.

    vLLM and sglang return the end token with its log-probability. Other servers only name it, or
    return tokens after it if they sample several per step.
    """
    tokens, logp = list(map(int, reply.tokens)), list(map(float, reply.logp))
    if len(tokens) != len(logp) or reply.reason not in ("stop", "length"):
        raise ValueError("not a whole action")
    end_ids = sampling.end_ids
    end = next((place for place, token in enumerate(tokens) if token in end_ids), None)
    if end is not None:
        return reply._replace(tokens=tokens[: end + 1], logp=logp[: end + 1])
    if reply.stop in end_ids:
        return reply._replace(tokens=[*tokens, reply.stop], logp=[*logp, math.nan])
    if not tokens:
        raise ValueError("an empty action")
    return reply._replace(tokens=tokens, logp=logp)
