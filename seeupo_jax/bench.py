"""Throughput, measured side by side with PyTorch in one run.

    python -m seeupo_jax.bench update    [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench rollout   [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench iteration [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench sft       [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench gain      [--workload=bfcl] [--model=tiny] [--json=OUT]
    python -m seeupo_jax.bench serving   [--model=tiny] [--clients=1,8,32] [--json=OUT]
    python -m seeupo_jax.bench agents    [--model=tiny] [--tasks=16] [--json=OUT]
    python -m seeupo_jax.bench processes [--model=tiny] [--processes=1,2,4] [--json=OUT]
    python -m seeupo_jax.bench asynchronous [--ways=synchronous,devices,workers] [--json=OUT]
    python -m seeupo_jax.bench all       [--suite=cpu] [--results=docs/benchmarks]
    python -m seeupo_jax.bench report    [--results=docs/benchmarks] [--output=docs/benchmarks.md]
    python -m seeupo_jax.bench estimates [--json=OUT]
    python -m seeupo_jax.bench accelerator --out=DIR [--minutes=30] [--rehearse]

The first nine measure; each has `--help`. `gain` scores reference answers behind every turn, as
branches of one pass and by a pass for each; it needs no PyTorch. `serving` compares `seeupo-serve`
with `transformers`, and `agents` rollouts with and without the endpoint. `processes` compares
several processes with one on the same work, by the time that their devices idle. `asynchronous`
compares synchronous with asynchronous collection where environments are slow. `all` runs the
measurements of the page (`--suite=accelerator`: for a GPU or a TPU), except those that have figures
already, and then `report`, which writes the page from the existing figures. `estimates` compares
the seconds that `aot` estimates for programs on this machine's CPU with those that they take.
`accelerator` measures what only a GPU or a TPU can show.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Both libraries are to find memory on a GPU: XLA takes most of it at once otherwise.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from seeupo_jax.benchmarks import (  # noqa: E402
    benchmark_report,  # noqa: E402
    rollout,
    settings,
    update_benchmark,
)
from seeupo_jax.cli.command_line import prepare_xla  # noqa: E402
from seeupo_jax.configuration.flags import Flags  # noqa: E402
from seeupo_jax.display.terminal import safe_output  # noqa: E402
from seeupo_jax.errors import file_sentences, sentence_errors  # noqa: E402
from seeupo_jax.instruments.bench import estimates, gain, suites, supervised_steps  # noqa: E402
from seeupo_jax.instruments.bench.accelerator import accelerator_command as accelerator  # noqa: E402
from seeupo_jax.instruments.bench.asynchronous import asynchronous_comparison
from seeupo_jax.instruments.bench.processes import process_comparison  # noqa: E402
from seeupo_jax.instruments.bench.serving import agent_rollout, served_requests  # noqa: E402
from seeupo_jax.trajectories.json_lines import write_json  # noqa: E402

BENCHMARKS = {
    "update": update_benchmark.run,
    "rollout": rollout.run_rollout,
    "iteration": rollout.run_iteration,
    "sft": supervised_steps.run,
    "gain": gain.run,
}
OTHERS = {
    "asynchronous": (asynchronous_comparison.add_flags, asynchronous_comparison.run),
    "agents": (agent_rollout.add_flags, agent_rollout.run),
    "processes": (process_comparison.add_flags, process_comparison.run),
    "serving": (served_requests.add_flags, served_requests.run),
    "all": (suites.add_flags, suites.run),
    "report": (benchmark_report.add_flags, benchmark_report.run),
    "estimates": (estimates.add_flags, estimates.run),
    "accelerator": (accelerator.add_flags, accelerator.run),
}


@safe_output()
@file_sentences()
def main(argv: Sequence[str] = sys.argv) -> None:
    """The command."""
    name = argv[1] if len(argv) > 1 else ""
    parser = Flags(f"bench {name}", __doc__)
    with sentence_errors():
        if name in OTHERS:
            add_flags, run = OTHERS[name]
            add_flags(parser)
            given = parser.read(argv[2:])
            figures = run(given)
        elif name in BENCHMARKS:
            settings.add_flags(parser, name)
            given = parser.read(argv[2:])
            prepare_xla()
            figures = BENCHMARKS[name](settings.read(given))
        elif name in ("-h", "--help"):
            Flags("bench", __doc__).print_help()
            sys.exit(0)
        else:
            allowed = ", ".join((*BENCHMARKS, *OTHERS))
            raise ValueError(f"bench: got {name!r}; allowed: one of {allowed}.")
        if figures is not None:
            write_json(given.json, figures)


if __name__ == "__main__":
    main()
