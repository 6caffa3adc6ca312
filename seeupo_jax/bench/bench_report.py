"""The page of benchmarks, from the figures that runs have written."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from seeupo_jax.bench import plots
from seeupo_jax.bench.update import OURS, flops_once
from seeupo_jax.configuration.flags import Flags

Figures = dict[str, Any]
_VARIED = {"turns": "turns", "prompt": "prompt, tokens", "group_size": "conversations a group"}

HEAD = """# Benchmarks

Written by `python -m seeupo_jax.bench all`; no figure was entered by hand. Both sides of a run are
measured in one process, in turns. A ratio is that of the medians; in brackets are the least and the
greatest ratio of a single round.

The other side is `third_party/torch_baseline`: SeeUPO on Hugging Face models, by the recipe of the
reference implementation, in two variants: without the turns that the reference pads, where the
faster of the measured modes (eager, `torch.compile`) counts; and with them, as in the recipe.
Before anything is timed, one sweep of each side, from the same weights over the same trajectories,
must give the same losses, KL, weights M and parameters; otherwise the run ends with an error.
Weights are random; lengths are those of the workloads (`bench/workloads.py`), times `--scale`.
"""

ACCELERATOR = """
## On a GPU or a TPU

No figure above is from an accelerator. One command measures there what a CPU cannot show:

```bash
python -m seeupo_jax.bench accelerator --out=runs/accelerator --minutes=30
```

It runs pieces, the most valuable first, each in its own process with a time limit of 7.5 minutes:

1. `trees_bfloat16`, `trees_float32`: attention over token trees by the platform's kernel (Triton on
   GPU, Pallas on TPU) against plain attention, outputs and gradients, in realistic shapes;
2. `rows`: cuDNN's (GPU) or splash (TPU) attention over rows, and attention over pages of the KV
   cache, against plain attention;
3. `parity`: logits and gradients against PyTorch from the same random weights;
4. `sweep`: a sweep with fused against separate refresh and against PyTorch, and the sampler's
   log-probabilities against the trainer's;
5. `update_bfcl_0.5b`, `update_order_desk_0.5b`, `rollout_0.5b`: `bench update` against compiled
   PyTorch, with MFU, and `bench rollout` against `generate` with a static KV cache;
6. `quickstart`: `configs/quickstart.py` trained, with its first and last avg@4;
7. `update_bfcl_1.5b`, `update_order_desk_1.5b`, `rollout_1.5b`.

Comparisons are made in float32 (matrix products with the highest precision) and in bfloat16; each
reports its greatest difference and its bound.

- **Results**: `OUT/NAME.json` for each piece, rewritten after every measurement; `OUT/NAME.log`,
  the output of a piece that did not finish; and the page `OUT/benchmarks_gpu.md`, in a checkout
  also `docs/benchmarks_gpu.md` (`--page=FILE` changes that), which ends with what was not run and
  why.
- **Resuming**: rerunning the command with the same `--out` runs the remaining pieces: first those
  that were never completed, then those that failed. Completed pieces are not repeated; delete the
  JSON file of a piece to measure it again. `--minutes` is the budget of one start: where a machine
  is available for ten minutes at a time, `--minutes=9` several times equals one long run.
- **Failures** of a piece (an error, a crash, its time limit) are recorded with their last sentence,
  and the next piece runs. The exit code is 0; 1 where a piece failed or a comparison exceeded its
  bound; 2 where there is no accelerator, or a wrong flag.
- **Memory**: sizes that do not fit into the free memory are left out. Where memory runs out, the
  piece is repeated in its next smaller size; its notes on the page say so.
- **Requirements**: no network. Without PyTorch (`torch` with CUDA and `transformers`) only
  seeupo_jax is measured. Only `quickstart` needs `ml_collections`, `grain` and `array_record`; no
  piece needs `gguf`, `llguidance`, `tensorflow-datasets`, `tensorboardX` or `vl-convert-python`. Of
  several devices the first is used.
- `--rehearse` runs all pieces on CPU in their smallest sizes; its page holds no figures.
"""


def add_flags(parser: Flags) -> None:
    """Where figures are and where the page goes."""
    parser.flag("results", "where figures are", Path, default=Path("docs/benchmarks"))
    parser.flag("output", "where the page goes", Path, default=Path("docs/benchmarks.md"))


def run(flags: argparse.Namespace) -> None:
    """Writes the page, and beside the figures its plots.

    Raises:
      ValueError: there is nothing to write about; no place to write to.
    """
    found = read(flags.results)
    if not flags.output.absolute().parent.is_dir():
        raise ValueError(f"--output: got {flags.output}; allowed: a file in an existing folder.")
    drawn = {}
    for name, label in _VARIED.items():
        points = {n: f for n, f in found.items() if n.startswith(f"sizes_{name}_")}
        if points:
            plot = flags.results / f"time_against_{name}.svg"
            plots.draw(_points(points, name), label, plot)
            drawn[name] = Path(os.path.relpath(plot, flags.output.parent)).as_posix()
    flags.output.write_text(page(found, drawn))
    print(f"wrote {flags.output}, from {len(found)} files of {flags.results}")


def read(folder: Path) -> dict[str, Figures]:
    """Figures by the names of their files.

    Raises:
      ValueError: no folder, or none in it; a file that holds something else.
    """
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"--results: got {folder}; allowed: a folder with figures of bench runs.")
    found = {}
    for file in files:
        try:
            found[file.stem] = json.loads(file.read_text())
        except (ValueError, RecursionError):
            found[file.stem] = None
        figures = found[file.stem]
        if not isinstance(figures, dict) or figures.get("benchmark") not in _SECTIONS:
            raise ValueError(
                f"--results: got {file}, which is no bench run's; allowed: what --json wrote."
            )
    return found


def page(found: dict[str, Figures], drawn: dict[str, str]) -> str:
    """The page in Markdown.

    Args:
      drawn: paths of the plots from the page on, by what is varied.
    """
    parts = [HEAD, _machines(found)]
    for benchmark, (title, section) in _SECTIONS.items():
        own = {
            name: figures
            for name, figures in found.items()
            if figures["benchmark"] == benchmark and not name.startswith("sizes_")
        }
        if own:
            parts.append(f"## {title}\n\n{section(own)}")
    if drawn:
        parts.append(_plots(drawn))
    parts += [_commands(found), ACCELERATOR]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _machines(found: dict[str, Figures]) -> str:
    """Each machine that figures are of, and which."""
    by_machine: dict[str, list[str]] = {}
    for name, figures in found.items():
        m = figures["machine"]
        versions = ", ".join(f"{lib} {version}" for lib, version in m["versions"].items())
        about = (
            f"{m['device']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}; {versions}"
        )
        by_machine.setdefault(about, []).append(name)
    loads = [figures["machine"]["load_before"] for figures in found.values()]
    lines = [
        about if len(by_machine) == 1 else f"- {about}: {', '.join(names)}"
        for about, names in by_machine.items()
    ]
    load = f"Load when a run began: {min(loads)} to {max(loads)}."
    return "## Machine\n\n" + "\n".join(lines) + f"\n\n{load}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _ratio(figures: Figures) -> str:
    if figures["against"] is None:
        return "-"
    least, most = figures["ratio_least"], figures["ratio_most"]
    return f"**{figures['ratio']:.2f}x** ({least:.2f} to {most:.2f})"


def _over(figures: Figures, name: str) -> str:
    over = figures[name]
    return "-" if over is None else f"{over['ratio']:.2f}x"


def _workload(figures: Figures) -> str:
    w = figures["workload"]
    span = lambda pair: str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"  # noqa: E731
    return (
        f"{w['name']}: {w['conversations']} by {w['group_size']}, prompts {span(w['prompt'])},"
        f" turns {span(w['turns'])}, {w['tokens']:,} tokens"
    )


def _megabytes(count: float | None) -> str:
    return "?" if count is None else f"{count / 2**20:,.0f}"


def _updates(found: dict[str, Figures]) -> str:
    head = (
        *("ratio", "over the recipe", "model", "workload", "side", "s per sweep"),
        *("least to most", "tokens/s"),
        *("peak MiB", "computed tokens"),
    )
    rows = []
    for f in found.values():
        for name, side in f["contenders"].items():
            # What only tells what each technique contributes has a table of its own.
            if " without " in name or f["against"] is None:
                continue
            first = ("",) * 4
            if name == OURS:
                first = (_ratio(f), _over(f, "over_recipe"), f["model"], _workload(f))
            spread = f"{side['least_s']:.3f} to {side['most_s']:.3f}"
            cells = (name, f"{side['median_s']:.3f}", spread, f"{side['tokens_per_second']:,.0f}")
            rows.append((*first, *cells, _megabytes(side["peak_bytes"]), f"{side['positions']:,}"))
    text = (
        "One sweep: every turn's step, and all that it needs. Tokens/s count the tokens of the"
        " trajectories, each once, for both sides. Peak memory includes the weights, the reference"
        " policy, the optimizer state, and what a sweep adds to them."
    )
    return "\n\n".join([text, table(head, rows), _flops(found), *_contributions(found)])


def _flops(found: dict[str, Figures]) -> str:
    head = (
        *("model", "workload", "FLOPs per sweep", "attention", "recomputed", "budget"),
        *("of the budget", "reference recipe", "padding", "shared", "MFU"),
    )
    rows = []
    for f in found.values():
        ours, budget = f["contenders"][OURS], f["budgets"]
        mfu = f"{f['mfu']:.1%}" if "mfu" in f else "-"
        metrics = ours["metrics"]
        # Older figures do not separate recomputed FLOPs: all count against the budget.
        separate = "flops_again" in ours
        again = f"{ours['flops_again'] / ours['flops']:.0%}" if separate else "?"
        once = flops_once(ours) if separate else ours["flops"]
        rows.append(
            (
                f["model"],
                f["workload"]["name"],
                f"{ours['flops']:.3g}",
                f"{ours['flops_attention'] / ours['flops']:.0%}",
                again,
                f"{budget['goal']:.3g}",
                f"{once / budget['goal']:.2f}",
                f"{budget['recipe']:.3g}",
                f"{metrics['sweep/padding_fraction']:.1%}",
                f"{metrics['sweep/shared_fraction']:.1%}",
                mfu,
            )
        )
    text = (
        "FLOPs that the programs executed, counted in the compiled programs with the actual trip"
        " counts of their loops; a multiply-add is two. Recomputed: what backward passes compute"
        " again instead of storing it (logits, attention scores). Neither the budget nor MFU counts"
        " it, except where it was not measured separately: in older figures, marked by a question"
        " mark, and in rematerialised layers. The budget is 1.15 x [6 P x tokens of every turn's"
        " pool, a group's prompt once + 4 P x tokens of the trajectories, likewise]; the reference"
        " recipe 12 P x tokens of every turn's rows. P: all parameters, as if logits were computed"
        " everywhere; the formulas exclude attention, the counts include it. MFU: share of the"
        " matrix product's peak measured in the same run, on accelerators only."
    )
    return f"### FLOPs\n\n{text}\n\n{table(head, rows)}"


def _contributions(found: dict[str, Figures]) -> list[str]:
    parts = []
    for f in found.values():
        if not f["without"]:
            continue
        rows = [
            (name, one["words"], *(f"{one[key]:.2f}x" for key in ("time", "computed", "flops")))
            for name, one in f["without"].items()
        ]
        head = ("without", "instead", "time", "computed tokens", "FLOPs")
        parts.append(f"{_workload(f)}; model {f['model']}:\n\n{table(head, rows)}")
    if parts:
        words = "A sweep with one technique disabled, relative to the sweep with all of them."
        return [
            f"### What each technique contributes\n\n{words} Results stay the same.",
            *parts,
        ]
    return []


def _rollouts(found: dict[str, Figures]) -> str:
    head = (
        *("ratio", "over the cache kept", "model", "workload", "side", "s", "sampled/s"),
        *("computed per sampled token", "waste"),
    )
    rows = []
    for f in found.values():
        for name in sorted(f["contenders"], key=lambda name: name != OURS):
            side, first = f["contenders"][name], ("", "", "", "")
            if name == OURS:
                first = (_ratio(f), _over(f, "over_kept"), f["model"], _workload(f))
            numbers = (side[key] for key in ("computed_per_sampled", "waste"))
            cells = (name, f"{side['median_s']:.2f}", f"{side['tokens_per_second']:.0f}")
            rows.append((*first, *cells, *(f"{number:.2f}" for number in numbers)))
    text = (
        "The same conversations are sampled by `generate` of `transformers` as agent loops use it"
        " (every turn sends the conversation again), by `generate` with its KV cache kept, and by"
        " seeupo_jax. Waste: computed tokens over the minimum."
    )
    return f"{text}\n\n{table(head, rows)}"


def _iterations(found: dict[str, Figures]) -> str:
    head = (
        *("ratio", "over the recipe", "over the cache kept", "model", "workload", "side", "s"),
        *("rollout s", "sweep s"),
    )
    rows = []
    for f in found.values():
        for name, side in f["contenders"].items():
            first = ("",) * 5
            if name == OURS:
                over = (_over(f, name) for name in ("over_recipe", "over_kept"))
                first = (_ratio(f), *over, f["model"], _workload(f))
            keys = ("median_s", "rollout_s", "sweep_s")
            rows.append((*first, name, *(f"{side[key]:.2f}" for key in keys)))
    text = (
        "A rollout and a sweep over it. Each side sweeps over the tokens that it has sampled, with"
        " the lengths of the workload."
    )
    return f"{text}\n\n{table(head, rows)}"


def _points(found: dict[str, Figures], name: str) -> dict[int, dict[str, Any]]:
    """Contenders' figures by the value of what is varied."""
    return {
        int(file.removeprefix(f"sizes_{name}_")): figures["contenders"]
        for file, figures in found.items()
    }


def _plots(drawn: dict[str, str]) -> str:
    lines = [
        f"![seconds per sweep against {_VARIED[name]}]({path})" for name, path in drawn.items()
    ]
    text = "The workload `long` at model `tiny`, one size varied; medians, bars from least to most."
    return f"## Time against sizes\n\n{text}\n\n" + "\n\n".join(lines)


def _commands(found: dict[str, Figures]) -> str:
    lines = [f"{figures['command']}  # {name}" for name, figures in found.items()]
    return "## Commands\n\n```bash\n" + "\n".join(lines) + "\n```"


_SECTIONS: dict[str, tuple[str, Callable[[dict[str, Figures]], str]]] = {
    "update": ("Update sweep", _updates),
    "rollout": ("Rollout", _rollouts),
    "iteration": ("Iteration", _iterations),
}
