"""The page of an accelerator's measurements, with the reasons for missing ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seeupo_jax.benchmarks.benchmark_report import (
    RATIO,
    ROLLOUTS,
    SIZES,
    SWEEPS,
    machine_line,
    sides_table,
)
from seeupo_jax.benchmarks.comparison import JAX
from seeupo_jax.benchmarks.rollout import STATIC, phases, with_ratios
from seeupo_jax.benchmarks.update_benchmark import flops_once
from seeupo_jax.instruments.bench.accelerator.pieces import Piece
from seeupo_jax.instruments.bench.accelerator.runner import (
    DONE,
    FAILED,
    RUNNING,
    SKIPPED,
    STOPPED,
    TIMEOUT,
)
from seeupo_jax.metrics.statistics import markdown_table
from seeupo_jax.parallel.device_memory import GIB

Values = Mapping[str, Any]

HEAD = """# Benchmarks on an accelerator

Correctness and speed on one accelerator, measured by `python -m seeupo_jax.bench accelerator`. It
runs *pieces*, each in its own process with a time limit, with random weights. The last section
lists what was not measured. No figure was entered by hand except in notes on pieces."""
REHEARSAL = """# Rehearsal of the benchmarks on an accelerator

**This page holds no measurements.** `python -m seeupo_jax.bench accelerator --rehearse` ran every
piece on CPU in its smallest size, to check that it runs."""
_STATUS = {
    DONE: "done",
    SKIPPED: "cannot run here",
    FAILED: "failed",
    TIMEOUT: "ended at its time limit",
    STOPPED: "ended with the budget",
    RUNNING: "interrupted",
}


def page(
    pieces: Sequence[Piece],
    results: Mapping[str, Values],
    reasons: Mapping[str, str],
    device: Values,
    *,
    rehearsal: bool,
) -> str:
    """The page in Markdown.

    Args:
      results: records of pieces by name.
      reasons: of pieces that were not begun this time, by name, why.
      device: the machine, by the probe.
    """
    if rehearsal:
        return f"{REHEARSAL}\n\n{_rehearsed(pieces, results, reasons)}\n"
    parts = [HEAD, _machine(device), _summary(pieces, results)]
    for section, (title, write) in _SECTIONS.items():
        names = [piece.name for piece in pieces if piece.section == section]
        shown = {name: results[name] for name in names if name in results}
        text = write(shown)
        if text:
            notes = [f"- `{name}`: {note}" for name, v in shown.items() for note in v["notes"]]
            parts += [f"## {title}\n\n{text}", *(["\n".join(notes)] if notes else [])]
    parts.append(_left(pieces, results, reasons))
    return "\n\n".join(parts) + "\n"


def _machine(device: Values) -> str:
    free, peak = device["free_bytes"], device["peak_flops"]
    memory = "free memory unknown" if free is None else f"{free / GIB:.1f} GiB free"
    peak_text = "not known" if peak is None else f"{peak / 1e12:,.0f} TFLOP/s in dense bfloat16"
    several = f" One of {device['count']} devices." if device["count"] > 1 else ""
    return (
        f"## Machine\n\n{machine_line(device)}; {memory}.{several} Its peak according to the"
        f" vendor's data sheet: {peak_text}."
    )


def _summary(pieces: Sequence[Piece], results: Mapping[str, Values]) -> str:
    done = sum(results.get(piece.name, {}).get("status") == DONE for piece in pieces)
    checks = [check for values in results.values() for check in values.get("checks", ())]
    passed = sum(check["passed"] for check in checks)
    wrong = "" if passed == len(checks) else f" **{len(checks) - passed} were not.**"
    return (
        f"{done} of {len(pieces)} pieces were measured. {passed} of {len(checks)} comparisons were"
        f" within bounds.{wrong}"
    )


def _correctness(results: Mapping[str, Values]) -> str:
    """Comparisons of all pieces of the section."""
    text = (
        "The table has the largest difference of each comparison and its bound. Attention:"
        " outputs and gradients, relative to the largest value of plain attention in float32"
        " with the highest precision of matrix products; in bfloat16 the bound is twice the"
        " difference of plain attention in bfloat16. Logits and gradients: by the Euclidean"
        " norm; in bfloat16 the bound is 1.5 times the difference of PyTorch in bfloat16 from"
        " PyTorch in float32. Sweeps: losses, KL, weights M and parameters. Log-probabilities:"
        " in nats. The milliseconds are for one call, forward and backward, of the kernel and of"
        " plain attention."
    )
    rows = [_check(check) for values in results.values() for check in values["checks"]]
    head = ("comparison", "type", "shape", "difference", "bound", "", "ms", "ms, plain")
    return f"{text}\n\n{markdown_table(head, rows)}" if rows else ""


def _check(check: Values) -> tuple[str, ...]:
    about = (check["name"], check.get("dtype", "-"), check.get("shape", "-"))
    verdict = "pass" if check["passed"] else "**FAIL**"
    if not check["differences"]:
        return (*about, check.get("error", "-"), "-", verdict, "-", "-")

    def share(item: tuple[str, Values]) -> tuple[bool, float]:
        difference, bound = item[1]["difference"], item[1]["bound"]
        # NaN is worse than any number.
        return difference != difference, difference / bound if bound else float("inf")

    name, worst = max(check["differences"].items(), key=share)
    times = (f"{1000 * check[key]:.2f}" if key in check else "-" for key in ("kernel_s", "plain_s"))
    greatest = f"{worst['difference']:.1e} ({name})"
    return (*about, greatest, f"{worst['bound']:.1e}", verdict, *times)


def _runs(results: Mapping[str, Values]) -> list[dict[str, Any]]:
    """Figures of the pieces that have some, with their checks."""
    done = [values for values in results.values() if values.get("figures") is not None]
    return [values["figures"] | {"checks": values["checks"]} for values in done]


def _flops(figures: Values, name: str) -> str:
    return f"{flops_once(figures['contenders'][name]):.2e}" if name == JAX else "-"


def _mfu(figures: Values, name: str) -> str:
    if name != JAX:
        return "-"
    side, peak = figures["contenders"][name], figures["peak_flops"]
    return "?" if peak is None else f"{flops_once(side) / side['median_s'] / peak:.1%}"


def _same(figures: Values, name: str) -> str:
    for check in figures["checks"]:
        if check["name"] == f"a sweep against {name}":
            wrong = [
                f"{of} by {difference['difference']:.2g}"
                for of, difference in check["differences"].items()
                if not difference["difference"] <= difference["bound"]
            ]
            return f"**NO**: {', '.join(wrong)}" if wrong else "yes"
    return "-"


def _updates(results: Mapping[str, Values]) -> str:
    text = (
        "One sweep in bfloat16 consists of every turn's step and everything that the step"
        " needs. Times are medians of the runs; the brackets contain the lowest and the highest"
        " ratio of a round. PyTorch uses the fastest kernel of its scaled dot product attention,"
        " and `torch.compile` if the name contains compile. *MFU*: FLOPs over the peak of the"
        " data sheet (?: unknown); they include what rematerialised layers compute again, but"
        " not the logits and attention scores that backward passes compute again. *same"
        " numbers*: yes if, after one sweep from the same weights, losses, KL and weights M"
        " differ by at most 0.05 (5% for values above 1), and by at most half of the largest"
        " loss and KL and of the largest change of a weight M; parameters by at most half of the"
        " largest change that the sweep made; and gradient norms before clipping, in runs that"
        " compared them, by at most 5%. Otherwise the cell names what differs and by how much."
    )
    runs = _runs(results)
    of_side = SWEEPS | {"FLOPs": _flops, "MFU": _mfu, "same numbers": _same}
    return f"{text}\n\n{sides_table(runs, RATIO | SIZES, of_side)}" if runs else ""


def _rollouts(results: Mapping[str, Values]) -> str:
    text = (
        "The same conversations sampled in bfloat16. The ratio is to the fastest measured"
        f" variant of `generate`. With `{STATIC}`, `transformers` compiles its decode steps, and"
        " conversations that have ended stay in its batch."
    )
    runs = _runs(results)
    if not runs:
        return ""
    parts = [text, sides_table(map(with_ratios, runs), RATIO | SIZES, ROLLOUTS)]
    timed = [f for f in runs if "prefill_s" in f["contenders"][JAX]]
    parts += [f"{f['model']}, {f['workload']['name']}: {phases(f)}" for f in timed]
    return "\n\n".join(parts)


def _device_time(results: Mapping[str, Values]) -> str:
    text = (
        "One run of each under the profiler, after a run that compiled. The device is busy"
        " while any kernel runs on it. Names of kernels are without their numbers."
    )
    parts = []
    for figures in _runs(results):
        for name, run in figures["runs"].items():
            programs = ", ".join(
                f"`{row['program']}` {row['seconds']:.3f} s" for row in run["programs"][:4]
            )
            parts.append(
                f"{figures['model']}, {figures['workload']}, a {name}: {run['seconds']:.3f} s, the"
                f" device busy for {run['busy_s'] / run['seconds']:.0%} of it, {run['events']:,}"
                f" kernels. Programs: {programs}."
            )
            rows = [
                (
                    f"`{row['program']}`",
                    f"`{row['kernel']}`",
                    f"{row['seconds']:.3f}",
                    f"{row['events']:,}",
                    f"{1e6 * row['seconds'] / row['events']:.0f}",
                )
                for row in run["kernels"]
            ]
            parts.append(markdown_table(("program", "kernel", "s", "runs", "us each"), rows))
    return "\n\n".join([text, *parts]) if parts else ""


def _quickstart(results: Mapping[str, Values]) -> str:
    parts = []
    for f in _runs(results):
        if f["curve"]:
            (first, before), (last, after) = f["curve"][0], f["curve"][-1]
            parts.append(
                f"`configs/quickstart.py`, {f['iterations']} iterations: {f['metric']} of held-out"
                f" tasks {before:.3f} after iteration {first}, {after:.3f} after iteration {last};"
                f" {f['seconds']:.0f} s in total, {f['compile_s']:.0f} s of it compiling."
            )
    return "\n\n".join(parts)


def _left(
    pieces: Sequence[Piece], results: Mapping[str, Values], reasons: Mapping[str, str]
) -> str:
    """The missing measurements, each with its reason."""
    states = {piece: _state(piece.name, results, reasons) for piece in pieces}
    rows = [
        (f"`{piece.name}`", piece.words, state, why)
        for piece, (state, why) in states.items()
        if state != _STATUS[DONE]
    ]
    if not rows:
        return "## Not run\n\nNothing: every piece was measured to its end."
    text = (
        "Rerunning the command with the same `--out` resumes with these pieces: first those"
        " that were never completed, then those that failed. Measurements that a piece made"
        " before it ended are shown above."
    )
    return f"## Not run\n\n{text}\n\n{markdown_table(('piece', 'shows', 'state', 'why'), rows)}"


def _rehearsed(
    pieces: Sequence[Piece], results: Mapping[str, Values], reasons: Mapping[str, str]
) -> str:
    """Every piece and whether it ran; no figures."""
    rows = []
    for piece in pieces:
        state, why = _state(piece.name, results, reasons)
        checks = results.get(piece.name, {}).get("checks", ())
        passed = sum(check["passed"] for check in checks)
        compared = f"{passed} of {len(checks)} within bounds" if checks else "-"
        rows.append((f"`{piece.name}`", piece.words, state, compared, why))
    return markdown_table(("piece", "measures", "rehearsal", "comparisons", "reason"), rows)


def _state(name: str, results: Mapping[str, Values], reasons: Mapping[str, str]) -> tuple[str, str]:
    """The state of a piece, and why it is not done."""
    if name not in results:
        return "not begun", reasons.get(name, "the command ended before it")
    values = results[name]
    return _STATUS[values["status"]], values.get("error") or "-"


_SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Values]], str]]] = {
    "correctness": ("Correctness", _correctness),
    "update": ("Update sweep", _updates),
    "rollout": ("Rollout", _rollouts),
    "device_time": ("Time on the device", _device_time),
    "quickstart": ("Quickstart", _quickstart),
}
