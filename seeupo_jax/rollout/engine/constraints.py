"""The grammar of an action whose form its request determines; see `Constraint`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from seeupo_jax.envs.base import THOUGHT_TAGS, Tool
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat, literal
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.rollout.engine.grammar import (
    COMPILED,
    JSON_STYLE,
    Grammars,
    Matcher,
    arguments_schema,
    call_rules,
    check_grammar,
)
from seeupo_jax.rollout.engine.protocol import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Thoughts end at the first tag that ends them; white space that is free has no end.
_THOUGHTS = r"""
thoughts: {kinds}
LEAD: /[\s]{{0,4}}/
TEXT: /(?s:.*)/
"""


class Constraints:
    """Grammars of the forms that requests ask for, compiled once each; arguments as `Grammars`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, tool_format: ToolFormat):
        self._grammars = Grammars(None, tokenizer, vocab_size, tool_format)
        self._format = tool_format
        self._parsers = functools.lru_cache(COMPILED)(self._compile)

    def begin(self, constraint: Constraint, tools: Sequence[Tool]) -> Matcher:
        """A matcher at the start of an action of this form.

        Args:
          tools: that exist.

        Raises:
          ValueError: there is no grammar of it.
        """
        names = constraint.names
        allowed = [tool for tool in tools if not names or tool["name"] in names]
        if constraint.calls == "may" and not constraint.schema:
            return self._grammars.begin(allowed, single=constraint.single)
        parser = self._parsers(constraint, json.dumps(allowed))
        return self._grammars.matcher((parser,), constraint.field)

    def _compile(self, constraint: Constraint, listing: str) -> LLMatcher:
        tools, field = json.loads(listing), constraint.field
        grammar = constraint_grammar(constraint, tools, self._format)
        return self._grammars.compile(grammar, "it", field)


def check_schema(schema: Mapping[str, Any], field: str) -> None:
    """ValueError: texts cannot be constrained to a JSON schema; names the keyword."""
    check_grammar(f"start: {_json(schema)}", "the schema", field)


def constraint_grammar(
    constraint: Constraint, tools: Sequence[Tool], tool_format: ToolFormat
) -> str:
    """The grammar of actions of this form, in Lark's syntax.

    Raises:
      ValueError: calls in the format cannot be constrained, or not told from a text of a schema.
    """
    form = tool_format.grammar
    if form is not None and form.frame:
        raise ValueError(
            f"{constraint.field}: got a form of the answer; allowed: none, since the channels of"
            f" {tool_format.name!r} cannot be constrained to one."
        )
    texts, rules = [], ""
    if constraint.schema:
        texts.append("json")
        rules += f"json: {_json(json.loads(constraint.schema))}\n"
    if constraint.calls != "none":
        if form is None:
            raise ValueError(
                f"{constraint.field}: got a form of calls; allowed: none, since calls in the format"
                f" {tool_format.name!r} cannot be constrained."
            )
        if texts and not form.opening:
            raise ValueError(
                f"{constraint.field}: got a schema beside tools; allowed: one of the two, since"
                f" calls in the format {tool_format.name!r} are JSON as well."
            )
        more = "" if constraint.single else "(next call)*"
        texts.append(f"{literal(form.opening)} begin call {more} end")
        schemas = [arguments_schema(tool) for tool in tools]
        rules += call_rules(form, [tool["name"] for tool in tools], schemas)
    return _after_thoughts(constraint, " | ".join(texts)) + rules


def _after_thoughts(constraint: Constraint, text: str) -> str:
    """The first rules: the text, after what thoughts there may be."""
    if constraint.thoughts == "none":
        return f"start: {text}\n"
    opens = constraint.thoughts == "open"
    kinds = {
        f"thoughts_{i}": f"{'' if opens else f'LEAD {literal(opening)}'} TEXT {literal(closing)}"
        for i, (opening, closing) in enumerate(THOUGHT_TAGS)
    }
    rules = _THOUGHTS.format(kinds=" | ".join(kinds))
    rules += "".join(f"{name}[lazy]: {rule}\n" for name, rule in kinds.items())
    return f"start: thoughts{'' if opens else '?'} LEAD answer\nanswer: {text}\n{rules}"


def _json(schema: Mapping[str, Any]) -> str:
    style = {"x-guidance": JSON_STYLE, **schema}
    return f"%json {json.dumps(style)}"
