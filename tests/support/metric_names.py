"""Which declared metric a name of metrics.jsonl is of."""

import re

from seeupo_jax.metric_table import METRICS

_PLACEHOLDERS = {
    "turn=T": r"turn=\d+",
    "turns=N": r"turns=\d+",
    "LABEL=VALUE": "[^=]+=.*",
    "cause=TEXT": "cause=.*",
    "NAME": r"[\w.-]+",
    "CAUSE": r"\w+",
    "stop_STOP": "stop_(done|max_turns|max_tokens|unchosen|env_error|timeout)",
    "@K": r"@\d+",
}


def _pattern(name):
    for placeholder, pattern in _PLACEHOLDERS.items():
        name = name.replace(placeholder, pattern)
    if name.startswith("eval/"):
        name = f"eval(_[^/]+)?{name.removeprefix('eval')}(/[^=]+=.*)?"
    return re.compile(name, re.DOTALL)


_PATTERNS = [_pattern(name) for name in METRICS]


def undeclared(names):
    """Those that no declaration is of."""
    return {name for name in names if not any(p.fullmatch(name) for p in _PATTERNS)}


def checked(lines):
    """Lines of metrics.jsonl, all of whose metrics are declared."""
    for line in lines:
        assert not undeclared(line.keys() - {"iteration"})
    return lines
