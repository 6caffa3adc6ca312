"""What a chat template knows: how it writes calls, whether it lists tools, and thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from seeupo_jax.envs.base import THOUGHT, THOUGHT_TAGS
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS, choose_format
from seeupo_jax.envs.tool_formats.harmony import CHANNEL, HARMONY
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.policy.files.chat.call_format import find_format, sampled_text, writes_format
from seeupo_jax.policy.files.tokenizer import Tokenizer

AUTO = "auto"
_THOUGHT = "a-thought"
_TAG_AND_END = 2  # tokens of an action
_HEADER = 16  # tokens at the end of a context, among which is a `<think>` of its header


@lru_cache(maxsize=2)  # a process samples with one tokenizer, and reads it in one format
def template_writes(tokenizer: Tokenizer, tool_format: ToolFormat, after_text: bool = True) -> bool:
    """Whether a chat template writes calls in a tool format, also several, and after text."""
    if not tokenizer.writes_calls:
        return False
    return writes_format(tokenizer, tool_format, "content" if after_text else "")


def resolve_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """Returns the tool format of a name; `auto`: that of the calls which the chat template writes.

    Where a message lists the tools (`config.chat.tools`), `auto` is the format it asks for.

    Raises:
      ValueError: `auto` with a template that lists tools and writes calls in no known format, or
        harmony with a tokenizer of another format, or the reverse.
    """
    if name != AUTO:
        return _check_channels(choose_format(name), tokenizer, "config.agent.tool_format")
    listing = tokenizer.tool_listing
    if listing is not None:
        unnamed = HARMONY if _has_channels(tokenizer) else TOOL_FORMATS["hermes"]
        tool_format = TOOL_FORMATS.get(listing, unnamed)
        return _check_channels(tool_format, tokenizer, "config.chat.tools")
    found = find_format(tokenizer)
    if found is None:
        raise ValueError(
            "config.agent.tool_format: got 'auto' with a chat template that lists tools and writes"
            f" calls in no known format; allowed: {', '.join(TOOL_FORMATS)}, the one that the model"
            " was trained with."
        )
    return found


def _has_channels(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has the channels of gpt-oss as control tokens."""
    return len(tokenizer.action(CHANNEL)) == _TAG_AND_END


def _check_channels(tool_format: ToolFormat, tokenizer: Tokenizer, field: str) -> ToolFormat:
    """The format that a field names: harmony exactly where the tokenizer has channels."""
    channels = _has_channels(tokenizer)
    if channels and tool_format is not HARMONY:
        raise ValueError(
            f"{field}: got {tool_format.name!r} for a model whose messages have channels; allowed:"
            f" {AUTO}, {HARMONY.name}."
        )
    if tool_format is HARMONY and not channels:
        others = ", ".join(name for name in TOOL_FORMATS if name != HARMONY.name)
        raise ValueError(
            f"{field}: got {HARMONY.name!r} for a tokenizer without the control token {CHANNEL};"
            f" allowed: {AUTO}, {others}."
        )
    return tool_format


def opens_thoughts(tokenizer: Tokenizer, context: Sequence[int]) -> bool:
    """Whether the next action begins within thoughts, which the chat template has opened."""
    return tokenizer.text(context[-_HEADER:]).rstrip().endswith(THOUGHT)


@lru_cache(maxsize=1)
def thoughts_around(tokenizer: Tokenizer) -> tuple[str, str]:
    """The tags that a model writes around its thoughts: `<think>`, unless others are its tokens."""
    single = (tags for tags in THOUGHT_TAGS[1:] if len(tokenizer.action(tags[0])) == _TAG_AND_END)
    return next(single, THOUGHT_TAGS[0])


def knows_thoughts(tokenizer: Tokenizer) -> bool:
    """Whether a chat template opens thoughts in its header, or writes a message's.

    A tokenizer with Mistral's tags of thoughts is a reasoning model's, whatever its template takes.
    """
    if thoughts_around(tokenizer) != THOUGHT_TAGS[0]:
        return True
    message = {"role": "assistant", "content": "content", "reasoning_content": _THOUGHT}
    try:
        begun = tokenizer.begin([{"role": "user", "content": "?"}], ())
        if opens_thoughts(tokenizer, begun.tokens):
            return True
        return tokenizer.writes_calls and _THOUGHT in sampled_text(tokenizer, message)
    except Exception:  # a template may raise anything
        return False


@lru_cache(maxsize=1)
def lists_tools(tokenizer: Tokenizer) -> bool:
    """Whether a conversation's tools are among its tokens."""
    asked = [{"role": "user", "content": "?"}]
    tool = {"name": "name", "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        return tokenizer.begin(asked, (tool,)).tokens != tokenizer.begin(asked, ()).tokens
    except Exception:  # a template may raise anything
        return False
