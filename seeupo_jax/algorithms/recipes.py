"""Named choices over the shared parts of the algorithm."""

from __future__ import annotations

from typing import Any

# Recipe -> fields of `config.Algorithm` that it sets; a config's own values win over them.
RECIPES: dict[str, dict[str, Any]] = {
    # arXiv:2602.06554: turns in reverse order, each weighted by the ratios of those after it.
    "seeupo": {},
}
