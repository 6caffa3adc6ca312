"""Throughput, measured side by side in one run.

python -m seeupo_jax.bench rollout [--shape=bfcl] [--model=tiny] [--scale=0.125] [--json=OUT]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from seeupo_jax.bench import rollout
from seeupo_jax.errors import sentence_errors

_JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")

BENCHMARKS = {"rollout": rollout.run}


def main(argv: Sequence[str]) -> None:
    with sentence_errors():
        if len(argv) != 2 or argv[1] not in BENCHMARKS:
            raise ValueError(
                f"bench: got {' '.join(argv[1:])!r}; allowed: one of {', '.join(BENCHMARKS)}."
            )
        figures = BENCHMARKS[argv[1]]()
    if _JSON.value is not None:
        Path(_JSON.value).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
