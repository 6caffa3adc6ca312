"""Whether most turns of a run began a segment of their own, in a sentence with figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_TURNS, _SEGMENTS = "rollout/turns_mean", "rollout/segments_mean"
_LINEAGES = "rollout/lineages_mean"  # an agent's conversations, each of which is a segment
_ROLES = "rollout/role_turns/"  # each of which has a conversation of its own
_SHARE = 0.5  # of the turns after the first, above which a warning is due


def rewritten_turns(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning on the newest iteration; None if most turns continue the segment before them.

    Args:
      lines: of metrics.jsonl; those of evaluations are not read.
    """
    found = [line for line in lines if _TURNS in line and _SEGMENTS in line]
    values = [found[-1].get(name, 1) for name in (_TURNS, _SEGMENTS, _LINEAGES)] if found else []
    if not values or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return None
    turns, segments, lineages = values
    roles = any(name.startswith(_ROLES) for name in found[-1])
    if roles or lineages > 1 or segments - 1 <= _SHARE * (turns - 1):
        return None
    return (
        f"{segments:.1f} segments per trajectory at {turns:.1f} turns: the chat template rewrites"
        " earlier messages; docs/models.md, Training templates, has what keeps them"
    )
