"""Throughput, measured side by side with PyTorch in one run.

    python -m seeupo_jax.bench update    [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench rollout   [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench iteration [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench all       [--suite=cpu] [--results=docs/benchmarks]
    python -m seeupo_jax.bench report    [--results=docs/benchmarks] [--output=docs/benchmarks.md]
    python -m seeupo_jax.bench accelerator --out=DIR [--minutes=30] [--rehearse]

The first three measure; each has `--help`. `all` runs the measurements of the page
(`--suite=accelerator`: for a GPU or a TPU), except those that have figures already, and then
`report`, which writes the page from the existing figures. `accelerator` measures what only a GPU or
a TPU can show.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

# Both libraries are to find memory on a GPU: XLA takes most of it at once otherwise.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from seeupo_jax.bench import bench_report, iteration, rollout, suite, update  # noqa: E402
from seeupo_jax.bench.accelerator import command as accelerator  # noqa: E402
from seeupo_jax.bench.settings import add_flags, check_json, read, split  # noqa: E402
from seeupo_jax.configuration.flags import Flags  # noqa: E402
from seeupo_jax.errors import sentence_errors  # noqa: E402
from seeupo_jax.runtime.cli import prepare_xla  # noqa: E402

BENCHMARKS = {"update": update.run, "rollout": rollout.run, "iteration": iteration.run}
PAGES = {"all": suite, "report": bench_report, "accelerator": accelerator}


def main(argv: Sequence[str]) -> None:
    """The command."""
    with sentence_errors():
        name = split(argv, (*BENCHMARKS, *PAGES))
        parser = Flags(f"bench {name}", __doc__)
        if name in PAGES:
            page = PAGES[name]
            page.add_flags(parser)
            page.run(parser.read(argv[2:]))
        elif name in BENCHMARKS:
            add_flags(parser, name)
            given = parser.read(argv[2:])
            check_json(given.json)
            prepare_xla()
            figures = BENCHMARKS[name](read(given))
            if given.json is not None:
                given.json.write_text(json.dumps(figures, indent=2) + "\n")
        else:
            print(__doc__)


if __name__ == "__main__":
    main(sys.argv)
