"""Training templates: chat templates that keep the thoughts of earlier messages.

Many models' templates remove a message's thought once another message follows. The next context
then does not begin with the tokens that were sampled, and each turn becomes a segment of its own.
`chat.template="keep_thoughts"` selects the template here that writes what the model's own writes,
and keeps the thoughts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Protocol

from seeupo_jax.envs.base import THOUGHT, THOUGHT_END, Message
from seeupo_jax.policy.files.chat.channels import keep_channels, writes_channels
from seeupo_jax.policy.files.chat.template_probe import FUNCTION, make_call
from seeupo_jax.policy.files.messages import KEEP_THOUGHTS


class Render(Protocol):
    """Renders a conversation by a template, with or without the next header."""

    def __call__(
        self,
        template: str,
        messages: Sequence[Message],
        functions: list[Any] | None,
        *,
        header: bool,
    ) -> str: ...


# Family -> its file, and what its variants set: models of a family differ in their headers.
_FAMILIES: dict[str, tuple[str, tuple[dict[str, str], ...]]] = {
    "Qwen3": ("qwen3.jinja", ({"opens_thought": "false"}, {"opens_thought": "true"})),
    "Qwen3.5": ("qwen3_5.jinja", ({"thinks": "true"}, {"thinks": "false"})),
    "GLM-4.5": ("glm4_5.jinja", ({},)),
}
# Variables by which some models' own templates keep thoughts (Qwen3.6 and GLM-4.7, say).
_SWITCHES = {"preserve_thinking": "true", "clear_thinking": "false"}
_OTHER = (
    "whose chat template removes earlier thoughts and writes conversations as none of"
    f" {', '.join(_FAMILIES)} does, for which one that keeps them is shipped"
)

_THOUGHT, _ANSWER = "the-thought", "the-answer"
_SYSTEM = {"role": "system", "content": " the rules\n"}
_QUESTION = {"role": "user", "content": " the question\n"}
_RESULT = {"role": "tool", "content": " the result\n"}
_PLAIN = {"role": "assistant", "content": _ANSWER}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [make_call("0"), make_call("1")]}
_TEXT_AND_CALL = _PLAIN | {"tool_calls": [make_call("2")]}
_INLINE = _PLAIN | {"content": f"{THOUGHT}\n{_THOUGHT}\n{THOUGHT_END}\n\n{_ANSWER}"}
_THINKS = _PLAIN | {"reasoning_content": _THOUGHT}
# Conversations without earlier thoughts, which a training template writes as the model's own does;
# but for empty thoughts of earlier messages, which stay too.
_SAME = (
    (_QUESTION,),
    (_SYSTEM, _QUESTION),
    (_QUESTION, _INLINE),
    (_QUESTION, _THINKS),
    (_QUESTION, _THINKS | {"tool_calls": _CALLS["tool_calls"]}, _RESULT, _RESULT),
)
_SAME_BUT_EMPTY_THOUGHTS = (
    (_SYSTEM, _QUESTION, _PLAIN, _QUESTION, _PLAIN, _QUESTION),
    (_QUESTION, _CALLS, _RESULT, _RESULT, _PLAIN, _QUESTION, _THINKS),
    (_QUESTION, _TEXT_AND_CALL, _RESULT, _PLAIN, _QUESTION),
)
_EMPTY_THOUGHT = re.compile(rf"{THOUGHT}\s*{THOUGHT_END}\s*")


def keeps_thoughts(template: str, render: Render) -> bool:
    """Whether a sampled message stays as it is, its thought included, when others follow it.

    Where the header writes an empty thought (`enable_thinking=False`), that one has to stay.
    """
    begin = _text(render, template, (_QUESTION,), header=True)
    header = begin.removeprefix(_text(render, template, (_QUESTION,)))
    has_empty = THOUGHT_END in header  # some write only the end
    opening = "".join(header.partition(THOUGHT)[1:]) if not has_empty else ""
    last = _text(render, template, (_QUESTION, _PLAIN if has_empty else _INLINE))
    written, answer, _ = last.removeprefix(begin).partition(_ANSWER)
    if not (begin and last.startswith(begin) and answer and (has_empty or _THOUGHT in written)):
        return False
    sampled = _PLAIN | {"content": opening + written + answer}
    for reply in (_QUESTION, _RESULT):
        text = _text(render, template, (_QUESTION, sampled, reply), header=True)
        if not text.startswith(begin + written + answer) and (text or reply is _QUESTION):
            return False  # a reply of a tool may be refused
    return _THOUGHT in _text(render, template, (_QUESTION, _INLINE, _QUESTION))


def training_template(own: str, render: Render, where: str) -> str:
    """The template that writes what a model's own does, and keeps the thoughts of all messages.

    Its own, where that keeps them. A family is known by what its template writes.

    Args:
      own: the model's template. where: the model, in errors.

    Raises:
      ValueError: there is none.
    """
    if keeps_thoughts(own, render):
        return own
    template = _find(own, render)
    if template is None:
        raise ValueError(
            f"config.chat.template: got {KEEP_THOUGHTS!r} for {where}, {_OTHER}; allowed: a Jinja"
            " file that keeps them, or none."
        )
    return template


def why_rewritten(own: str, render: Render) -> str:
    """Why a model's template may rewrite earlier messages, and what to do, in a sentence."""
    if keeps_thoughts(own, render):
        return (
            "The chat template keeps earlier thoughts, but writes messages otherwise than the model"
            " does: read a conversation on the trajectory pages."
        )
    if _find(own, render) is None:
        return (
            f"There is no training template for this model, {_OTHER}: a Jinja file in"
            " config.chat.template may keep them."
        )
    return (
        f"The chat template removes earlier thoughts; config.chat.template={KEEP_THOUGHTS} keeps"
        " them."
    )


def _find(own: str, render: Render) -> str | None:
    if writes_channels(own):
        kept = keep_channels(own)
        return kept if keeps_thoughts(kept, render) else None
    switched = (_setting({name: value}) + own for name, value in _SWITCHES.items() if name in own)
    for template in itertools.chain(switched, _shipped()):
        if keeps_thoughts(template, render) and _agree(own, template, render):
            return template
    return None


def _shipped() -> Iterator[str]:
    folder = resources.files("seeupo_jax") / "assets" / "chat_templates"
    for file, variants in _FAMILIES.values():
        text = (folder / file).read_text("utf-8")
        yield from (_setting(variant) + text for variant in variants)


def _setting(values: Mapping[str, str]) -> str:
    return "".join(f"{{%- set {name} = {value} %}}\n" for name, value in values.items())


def _agree(own: str, other: str, render: Render) -> bool:
    """Whether two templates write the same, but for earlier thoughts."""

    def texts(template: str) -> Iterator[str]:
        for functions in (None, [FUNCTION]):
            for each in (*_SAME, *_SAME_BUT_EMPTY_THOUGHTS):
                header = each[-1]["role"] != "assistant"
                text = _text(render, template, each, functions, header=header)
                yield text if each in _SAME else _EMPTY_THOUGHT.sub("", text)

    return all(a == b for a, b in zip(texts(own), texts(other), strict=True))


def _text(
    render: Render,
    template: str,
    conversation: Sequence[Message],
    functions: list[Any] | None = None,
    *,
    header: bool = False,
) -> str:
    """As rendered; "" where the template refuses it."""
    try:
        return render(template, conversation, functions, header=header)
    except Exception:  # a template may raise anything
        return ""
