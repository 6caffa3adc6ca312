"""Values that a format writes as plain text, in Lark's syntax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from seeupo_jax.envs.tool_formats.tool_format import literal
from seeupo_jax.envs.tool_formats.typed_values import main_type, resolve

# A text up to the first end, which it includes.
VALUE_RULES = '{name}[lazy]: /(?s:.*)/ "{end}"\n'


def value_rule(schema: Any, root: Mapping[str, Any], text_rule: str, end: str) -> str:
    """A value and its end: texts as they are, all others as JSON.

    Args:
      schema: of the value. root: of all arguments, which has the definitions.
      text_rule: the rule of a text with its end. end: the text after a value.
    """
    stated = resolve(schema, root)
    kind, _ = main_type(stated, "string")
    if kind != "string":
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        guidance = {key: root[key] for key in ("x-guidance",) if key in root}
        return f"%json {json.dumps({**stated, **definitions, **guidance})} {end}"
    texts = stated.get("enum")
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts) and texts:
        return f"({' | '.join(map(literal, texts))}) {end}"
    return text_rule
