"""Questions for a conversation's tokens: Anthropic's count_tokens, and vLLM's /tokenize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from seeupo_jax.agents.calls import CallRefused, ModelCall
from seeupo_jax.agents.dialects import anthropic_messages, chat_completions
from seeupo_jax.agents.dialects.exchange import Caller, openai_error
from seeupo_jax.agents.dialects.request_body import Fields, read_fields, refuse


class TokenQuestion(NamedTuple):
    """An API that answers with the tokens of a call's context.

    read: makes the call of a request's JSON; raises CallRefused. reply: makes the JSON of the
      answer, of the tokens and the most that a conversation may have. error: as of `Dialect`.
    """

    read: Callable[[Any, Caller], ModelCall]
    reply: Callable[[Sequence[int], int], dict[str, Any]]
    error: Callable[[CallRefused], dict[str, Any]]


class TokenizeRequest(Fields):
    """A request for the tokens of messages in the form of chat completions, or of a text."""

    messages: list[Any] | None = None
    prompt: str | None = None
    model: str = ""
    tools: list[Any] | None = None
    add_generation_prompt: Literal[True] | None = None


def _read_tokenize(tree: Any, caller: Caller) -> ModelCall:
    request, unknown = read_fields(TokenizeRequest, tree, ignore=caller.rules.ignore)
    caller.ignored += unknown
    if (request.messages is None) == (request.prompt is None):
        refuse("messages", "messages: got none, or a prompt too; allowed: one of the two.")
    if request.prompt is not None:
        if not caller.rules.serves:
            refuse("prompt", "prompt: got one; allowed: messages, in an episode.")
        return ModelCall((), prompt=request.prompt)
    chat = {"model": request.model, "messages": request.messages, "tools": request.tools}
    return chat_completions.DIALECT.read(chat, caller).call


def _read_count(tree: Any, caller: Caller) -> ModelCall:
    # A request for a message, without the limit that this one needs.
    limited = {"max_tokens": 1, **tree} if isinstance(tree, dict) else tree
    return anthropic_messages.DIALECT.read(limited, caller).call


COUNT_TOKENS = TokenQuestion(
    _read_count, lambda tokens, _: {"input_tokens": len(tokens)}, anthropic_messages.DIALECT.error
)
TOKENIZE = TokenQuestion(
    _read_tokenize,
    lambda tokens, most: {"count": len(tokens), "max_model_len": most, "tokens": list(tokens)},
    openai_error,
)
