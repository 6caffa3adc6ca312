"""Builds the page of benchmarks from the measured figures."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from seeupo_jax.benchmarks.comparison import JAX, Figures, OfSide, side, torch_name
from seeupo_jax.benchmarks.rollout import with_ratios
from seeupo_jax.benchmarks.update_benchmark import flops_once
from seeupo_jax.configuration.flags import Flags, output_file
from seeupo_jax.errors import name_file
from seeupo_jax.metrics.statistics import markdown_table
from seeupo_jax.trajectories.json_lines import read_file

_VARIED = {"turns": "turns", "prompt": "prompt, tokens", "group_size": "conversations per group"}
_SIZES = re.compile(rf"sizes_(?:{'|'.join(_VARIED)})_\d+")  # files of a plot
_HEAD = "head.md"  # of a folder whose page has its own beginning
_NEEDED = ("command", "workload", "model", "machine", "contenders")  # of a file's figures


def add_flags(parser: Flags) -> None:
    """Where figures are, and where the page goes."""
    parser.flag(
        "results",
        f"where figures are, and {_HEAD} if the page has its own",
        Path,
        default=Path("docs/benchmarks"),
    )
    parser.flag("output", "where the page goes", output_file, default="docs/benchmarks.md")


def run(flags: argparse.Namespace) -> None:
    """Writes the page, and its plots next to the figures.

    Raises:
      ValueError: there are no figures.
    """
    results, drawn = read(flags.results), {}
    for name, points in _plots(results).items():
        plot = flags.results / f"time_against_{name}.svg"
        draw(points, _VARIED[name], plot)
        drawn[name] = Path(os.path.relpath(plot, flags.output.parent)).as_posix()
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    head = own_head(flags.results)
    with name_file(flags.output):
        flags.output.write_text(page(results, drawn, head), encoding="utf-8")
    print(f"wrote {flags.output}, from {len(results)} files of {flags.results}")


def own_head(folder: Path) -> str | None:
    """The folder's own beginning of the page; None: the page begins as usual."""
    file = folder / _HEAD
    return file.read_text(encoding="utf-8") if file.is_file() else None


def read(folder: Path) -> dict[str, Figures]:
    """Figures by the names of their files.

    Raises:
      ValueError: no folder, or none in it; a file that holds something else.
    """
    results = figures_in(folder)
    if not results:
        raise ValueError(f"--results: got {folder}; allowed: a folder with figures of bench runs.")
    return results


def figures_in(folder: Path) -> dict[str, Figures]:
    """Like `read`, but the folder may contain no figures."""
    results = {}
    for file in sorted(folder.glob("*.json")):
        figures = read_file(file)
        benchmark = None if figures is None else figures.get("benchmark")
        if benchmark in _ELSEWHERE:
            print(f"{file}: left out, the page has no section for bench {benchmark}")
        elif figures is None or benchmark not in _SECTIONS:
            raise ValueError(
                f"--results: got {file}, which is no bench run's; allowed: what --json wrote."
            )
        elif missing := [name for name in _NEEDED if name not in figures]:
            raise ValueError(
                f"--results: got {file} without {', '.join(missing)}; allowed: what --json wrote."
            )
        elif file.stem.startswith("sizes_") and not _SIZES.fullmatch(file.stem):
            raise ValueError(
                f"--results: got {file}; allowed: sizes_NAME_NUMBER.json for a plot, with NAME one"
                f" of {', '.join(_VARIED)}, or a name that does not begin with sizes_."
            )
        else:
            results[file.stem] = figures
    for name, points in _plots(results).items():
        kinds = {_kind(figures) for figures in points.values()}
        if len(kinds) > 1:
            raise ValueError(
                f"--results: got sizes_{name}_* of {' and of '.join(sorted(kinds))}; allowed: one"
                " benchmark, workload and model for a plot."
            )
    return results


def _plots(results: Mapping[str, Figures]) -> dict[str, dict[int, Figures]]:
    """Figures of each plot by size, keyed by the name of the varied quantity."""
    plots: dict[str, dict[int, Figures]] = {}
    for name in _VARIED:
        prefix = f"sizes_{name}_"
        files = [file for file in results if file.startswith(prefix)]
        if files:
            plots[name] = {int(file.removeprefix(prefix)): results[file] for file in files}
    return plots


def _kind(figures: Figures) -> str:
    """The benchmark, workload and model of the figures, as text."""
    benchmark, workload, model = (figures[key] for key in ("benchmark", "workload", "model"))
    return f"`bench {benchmark}`, workload `{workload['name']}`, model `{model}`"


def draw(points: Mapping[int, Figures], label: str, path: Path) -> None:
    """Plots seconds against one size, a line per contender: medians, bars from minimum to maximum.

    Args:
      points: a run's figures by size.
      label: the axis label of the size.
    """
    import altair  # here: measuring does without it

    rows = [
        {"size": size, "side": name, **side}
        for size, figures in points.items()
        for name, side in figures["contenders"].items()
    ]
    first, *_ = points.values()
    chart = altair.Chart(altair.Data(values=rows), width=480, height=260).encode(
        altair.X("size:Q", title=label, scale=altair.Scale(zero=True)),
        altair.Color("side:N", title=None, legend=altair.Legend(orient="top-left")),
    )
    median = altair.Y("median_s:Q", title=f"seconds per {_RUN[first['benchmark']]}")
    bars = chart.mark_rule(strokeWidth=2).encode(altair.Y("least_s:Q"), altair.Y2("most_s:Q"))
    altair.layer(chart.mark_line(point=True).encode(median), bars).save(path)


def page(results: dict[str, Figures], drawn: dict[str, str], head: str | None = None) -> str:
    """The page in Markdown.

    Args:
      drawn: paths of the plots relative to the page, by the name of the varied quantity.
      head: replaces the usual beginning; such a page has no section on accelerators.
    """
    parts = [_prose("page_head.md") if head is None else head, _machines(results)]
    for benchmark, (title, section) in _SECTIONS.items():
        runs = [
            figures
            for name, figures in results.items()
            if figures["benchmark"] == benchmark and not name.startswith("sizes_")
        ]
        if runs:
            parts.append(f"## {title}\n\n{section(runs)}")
    if drawn:
        words = "One size is varied. Points are medians; bars range from minimum to maximum."
        parts.append(f"## Time against sizes\n\n{words}")
    for name, path in drawn.items():
        first, *_ = _plots(results)[name].values()
        label = f"seconds per {_RUN[first['benchmark']]} against {_VARIED[name]}"
        parts.append(f"{_kind(first)}:\n\n![{label}]({path})")
    lines = "\n".join(f"{figures['command']}  # {name}" for name, figures in results.items())
    parts.append(f"## Commands\n\n```bash\n{lines}\n```")
    if head is None:
        parts.append(_prose("page_accelerator.md"))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _prose(name: str) -> str:
    folder = importlib.resources.files("seeupo_jax") / "assets" / "bench"
    return (folder / name).read_text(encoding="utf-8")


def _machines(results: dict[str, Figures]) -> str:
    """Each machine, and which figures were measured on it."""
    by_machine: dict[str, list[str]] = {}
    for name, figures in results.items():
        by_machine.setdefault(machine_line(figures["machine"]), []).append(name)
    loads = [figures["machine"]["load_before"] for figures in results.values()]
    lines = [
        about if len(by_machine) == 1 else f"- {about}: {', '.join(names)}"
        for about, names in by_machine.items()
    ]
    load = f"Load average at the start of a run: {min(loads)} to {max(loads)}."
    return "## Machine\n\n" + "\n".join(lines) + f"\n\n{load}"


def machine_line(m: Figures) -> str:
    """The machine that `machine.describe` returned, and the versions of its libraries."""
    versions = ", ".join(f"{lib} {version}" for lib, version in m["versions"].items())
    return f"{m['device']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}; {versions}"


OfRun = Callable[[Figures], str]


def sides_table(
    runs: Iterable[Figures], of_run: Mapping[str, OfRun], of_side: Mapping[str, OfSide]
) -> str:
    """A row per contender of each run, JAX's first; cells of the run only in its first row.

    Sweeps without a technique are left out; they have their own table.

    Args:
      of_run, of_side: functions that return a cell, by the column's heading.
    """
    rows = []
    for figures in runs:
        for name in sorted(figures["contenders"], key=lambda name: name != JAX):
            if " without " not in name:
                first = [cell(figures) if name == JAX else "" for cell in of_run.values()]
                rows.append([*first, name, *(cell(figures, name) for cell in of_side.values())])
    return markdown_table([*of_run, "side", *of_side], rows)


def least_to_most(figures: Figures, name: str) -> str:
    """A contender's minimum and maximum seconds."""
    one = figures["contenders"][name]
    return f"{one['least_s']:.3f} to {one['most_s']:.3f}"


def _ratio(figures: Figures) -> str:
    if figures["against"] is None:
        return "-"
    least, most = figures["ratio_least"], figures["ratio_most"]
    return f"**{figures['ratio']:.2f}x** ({least:.2f} to {most:.2f})"


def _over(name: str) -> OfRun:
    """A ratio that older figures may lack."""
    return lambda f: "-" if f.get(name) is None else f"{f[name]['ratio']:.2f}x"


def _workload(figures: Figures) -> str:
    w = figures["workload"]
    prompt, turns = (
        str(least) if least == most else f"{least} to {most}"
        for least, most in (w["prompt"], w["turns"])
    )
    return (
        f"{w['name']}: {w['conversations']} conversations in groups of {w['group_size']},"
        f" prompts {prompt}, turns {turns}, {w['tokens']:,} tokens"
    )


RATIO: dict[str, OfRun] = {"ratio": _ratio}
_OVER = {"over the recipe": _over("over_recipe"), "over packed rows": _over("over_packed")}
_RESENT = {"over resending": _over("over_resent")}
SIZES: dict[str, OfRun] = {"model": lambda f: f["model"], "workload": _workload}
SWEEPS: dict[str, OfSide] = {
    "s per sweep": side("median_s", "{:.3f}"),
    "min to max": least_to_most,
    "tokens/s": side("tokens_per_second", "{:,.0f}"),
    "peak MiB": side("peak_bytes", "{:,.0f}", 2**20),
}
ROLLOUTS: dict[str, OfSide] = {
    "s": side("median_s", "{:.2f}"),
    "sampled/s": side("tokens_per_second", "{:,.0f}"),
    "computed per sampled token": side("computed_per_sampled", "{:.2f}"),
}


def _updates(runs: list[Figures]) -> str:
    text = (
        "One sweep consists of every turn's step and everything that the step needs. Tokens/s count"
        " each token of the trajectories once, for both sides. Peak memory includes the weights,"
        " the reference policy, the optimizer state, and what a sweep allocates in addition."
    )
    sides = sides_table(
        [f for f in runs if any(name.startswith(torch_name("")) for name in f["contenders"])],
        RATIO | _OVER | SIZES,
        SWEEPS | {"computed tokens": side("positions", "{:,.0f}")},
    )
    return "\n\n".join([text, sides, _flops(runs), *_contributions(runs)])


def _flops(runs: list[Figures]) -> str:
    rows = []
    for f in runs:
        swept, budget = f["contenders"][JAX], f["budgets"]
        metrics = swept["metrics"]
        # Older figures do not separate recomputed FLOPs: all count against the budget.
        separate = "flops_again" in swept
        once = flops_once(swept) if separate else swept["flops"]
        cells = {
            "model": f["model"],
            "workload": f["workload"]["name"],
            "FLOPs per sweep": f"{swept['flops']:.3g}",
            "attention": f"{swept['flops_attention'] / swept['flops']:.0%}",
            "recomputed": f"{swept['flops_again'] / swept['flops']:.0%}" if separate else "?",
            "budget": f"{budget['budget']:.3g}",
            "of the budget": f"{once / budget['budget']:.2f}",
            "reference recipe": f"{budget['recipe']:.3g}",
            "padding": f"{metrics['sweep/padding_fraction']:.1%}",
            "shared": f"{metrics['sweep/shared_fraction']:.1%}",
            "MFU": f"{f['mfu']:.1%}" if "mfu" in f else "-",
        }
        rows.append(list(cells.values()))
    text = (
        "FLOPs are those that the programs executed, counted in the compiled programs with the"
        " actual trip counts of their loops; a multiply-add counts as two. P is the number of all"
        " parameters. Columns: *recomputed*: what backward passes compute again instead of storing"
        " it (logits, attention scores). Neither the budget nor MFU counts it, except where it was"
        " not measured separately: in older figures, marked by a question mark, and in"
        " rematerialised layers. *budget*: 1.15 x [6 P x tokens of every turn's pool, with a"
        " group's prompt counted once + 4 P x tokens of the trajectories, counted likewise]."
        " *reference recipe*: 12 P x tokens of every turn's rows. These formulas assume logits at"
        " every token and exclude attention; the counts include it. *MFU*: share of the matrix"
        " product's peak measured in the same run, on accelerators only."
    )
    return f"### FLOPs\n\n{text}\n\n{markdown_table(cells, rows)}"


def _contributions(runs: list[Figures]) -> list[str]:
    parts = []
    for f in runs:
        rows = [
            (name, one["words"], *(f"{one[key]:.2f}x" for key in ("time", "computed", "flops")))
            for name, one in f["without"].items()
        ]
        if rows:
            head = ("without", "instead", "time", "computed tokens", "FLOPs")
            parts.append(f"{_workload(f)}; model {f['model']}:\n\n{markdown_table(head, rows)}")
    words = "A sweep with one technique disabled, relative to the sweep with all techniques."
    title = f"### What each technique contributes\n\n{words} The results are the same."
    return [title, *parts] if parts else []


def _rollouts(runs: list[Figures]) -> str:
    text = (
        "The same conversations are sampled by seeupo_jax, by `generate` of `transformers` as agent"
        " loops use it (every turn sends the conversation again), and by `generate` with its KV"
        " cache kept. Waste: computed tokens divided by the minimum."
    )
    of_run, of_side = RATIO | _RESENT | SIZES, ROLLOUTS | {"waste": side("waste", "{:.2f}")}
    return f"{text}\n\n{sides_table(map(with_ratios, runs), of_run, of_side)}"


def _iterations(runs: list[Figures]) -> str:
    text = (
        "A rollout and a sweep over it. Each side sweeps over the tokens that it sampled, with the"
        " lengths of the workload."
    )
    seconds = {"s": "median_s", "rollout s": "rollout_s", "sweep s": "sweep_s"}
    of_run = RATIO | _RESENT | _OVER | SIZES
    of_side = {head: side(key, "{:.2f}") for head, key in seconds.items()}
    return f"{text}\n\n{sides_table(map(with_ratios, runs), of_run, of_side)}"


def _supervised(runs: list[Figures]) -> str:
    text = (
        "One optimizer step of supervised fine-tuning on all conversations, including building the"
        " batch. `transformers` gets the batch padded or packed, in float32 on CPU, in eager mode;"
        " unlike for update sweeps, `torch.compile` is not measured. Losses and weights are the"
        " same on all sides. Logits are computed at assistant tokens only."
    )
    of_side: dict[str, OfSide] = {
        "s": side("median_s", "{:.3f}"),
        "min to max": least_to_most,
        "tokens/s": side("tokens_per_second", "{:,.0f}"),
        "computed tokens": side("positions", "{:,.0f}"),
    }
    return f"{text}\n\n{sides_table(runs, RATIO | SIZES, of_side)}"


# Benchmarks described on other pages.
_ELSEWHERE = ("gain", "serving", "agents", "estimates", "processes")
_RUN = {"update": "sweep", "rollout": "rollout", "iteration": "iteration", "sft": "step"}
_SECTIONS: dict[str, tuple[str, Callable[[list[Figures]], str]]] = {
    "update": ("Update sweep", _updates),
    "rollout": ("Rollout", _rollouts),
    "iteration": ("Iteration", _iterations),
    "sft": ("Supervised step", _supervised),
}
