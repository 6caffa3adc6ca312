"""The page: what was measured on the accelerator, and what was not and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from seeupo_jax.bench.accelerator.record import DONE, FAILED, RUNNING, SKIPPED, STOPPED, TIMEOUT
from seeupo_jax.bench.bench_report import table
from seeupo_jax.bench.rollout import STATIC
from seeupo_jax.bench.update import OURS, flops_once

Values = Mapping[str, Any]

HEAD = """# Benchmarks on an accelerator

Written by `python -m seeupo_jax.bench accelerator`; no figure was entered by hand. Every piece is a
process of its own with a time limit; weights are random. What was not measured is at the end."""
REHEARSAL = """# Rehearsal of the benchmarks on an accelerator

**This page holds no measurements.** `python -m seeupo_jax.bench accelerator --rehearse` ran every
piece on CPU in its smallest size, to see that it runs."""
_STATUS = {
    DONE: "done",
    SKIPPED: "cannot run here",
    FAILED: "failed",
    TIMEOUT: "ended at its time limit",
    STOPPED: "ended with the budget",
    RUNNING: "interrupted",
}
_NOT_BEGUN = "not begun"


class Listed(Protocol):
    """What the page needs to know of a piece."""

    name: str
    section: str
    words: str


def page(
    pieces: Sequence[Listed],
    found: Mapping[str, Values],
    reasons: Mapping[str, str],
    device: Values,
    *,
    rehearsal: bool,
) -> str:
    """The page in Markdown.

    Args:
      found: records of pieces by name.
      reasons: of pieces that were not begun this time, by name, why.
      device: the machine, by `device.probe`.
    """
    if rehearsal:
        parts = [REHEARSAL, _states(pieces, found, reasons)]
    else:
        parts = [HEAD, _machine(device), _summary(pieces, found)]
        for section, (title, write) in _SECTIONS.items():
            own = {
                piece.name: found[piece.name]
                for piece in pieces
                if piece.section == section and found.get(piece.name, {}).get("status") is not None
            }
            text = write(own)
            if text:
                parts.append(f"## {title}\n\n{text}")
        parts.append(_left(pieces, found, reasons))
    return "\n\n".join(parts) + "\n"


def _machine(device: Values) -> str:
    versions = ", ".join(f"{lib} {version}" for lib, version in device["versions"].items())
    free = device["free_bytes"]
    memory = "free memory unknown" if free is None else f"{free / 2**30:.1f} GiB free"
    peak = device["peak_flops"]
    known = "not known" if peak is None else f"{peak / 1e12:,.0f} TFLOP/s in dense bfloat16"
    several = f" (one of {device['count']})" if device["count"] > 1 else ""
    return (
        f"## Machine\n\n{device['device']}{several}, {memory}; {device['cores']} cores,"
        f" {device['memory_gib']} GiB, {device['system']}; {versions}. Its peak by the vendor's"
        f" data sheet: {known}."
    )


def _summary(pieces: Sequence[Listed], found: Mapping[str, Values]) -> str:
    done = sum(found.get(piece.name, {}).get("status") == DONE for piece in pieces)
    checks = [check for values in found.values() for check in values.get("checks", ())]
    passed = sum(check["passed"] for check in checks)
    wrong = "" if passed == len(checks) else f" **{len(checks) - passed} did not.**"
    return (
        f"{done} of {len(pieces)} pieces were measured. {passed} of {len(checks)} comparisons were"
        f" within bounds.{wrong}"
    )


def _correctness(found: Mapping[str, Values]) -> str:
    """Comparisons of all pieces of the section."""
    text = (
        "The greatest difference of each comparison and its bound: attention relative to the"
        " largest number of plain attention in float32 with the highest precision of matrix"
        " products (outputs and gradients; in bfloat16 the bound is twice the difference of plain"
        " attention in bfloat16); logits and gradients by the Euclidean norm (in"
        " bfloat16 the bound is 1.5 times the difference of PyTorch in bfloat16 from PyTorch in"
        " float32); sweeps by losses, KL, weights M and parameters; log-probabilities in nats."
        " Milliseconds are of one call, forwards and backwards, kernel and plain attention."
    )
    rows = [_check(check) for values in found.values() for check in values["checks"]]
    if not rows:
        return ""
    head = ("comparison", "type", "shape", "difference", "bound", "", "ms", "ms, plain")
    return "\n\n".join([text, table(head, rows), *_notes(found)])


def _check(check: Values) -> tuple[str, ...]:
    about = (check["name"], check.get("dtype", "-"), check.get("shape", "-"))
    verdict = "pass" if check["passed"] else "**FAIL**"
    if not check["differences"]:
        return (*about, _cell(check.get("error", "-")), "-", verdict, "-", "-")
    name, worst = max(
        check["differences"].items(),
        # NaN is worse than any number.
        key=lambda item: (item[1]["difference"] != item[1]["difference"], _share(item[1])),
    )
    times = (f"{1000 * check[key]:.2f}" if key in check else "-" for key in ("kernel_s", "plain_s"))
    return (
        *about,
        f"{worst['difference']:.1e} ({name})",
        f"{worst['bound']:.1e}",
        verdict,
        *times,
    )


def _share(one: Values) -> float:
    return one["difference"] / one["bound"] if one["bound"] else float("inf")


def _updates(found: Mapping[str, Values]) -> str:
    head = ("ratio", "model", "workload", "side", "s per sweep", "least to most", "tokens/s")
    head += ("peak MiB", "FLOPs", "MFU", "same numbers")
    rows = []
    for values in found.values():
        f = values.get("figures")
        if f is None:
            continue
        same = {check["name"].removeprefix("a sweep against "): check for check in values["checks"]}
        for name, side in f["contenders"].items():
            first = ("", "", "")
            flops = mfu = "-"
            if name == OURS:
                first = (_ratio(f), f["model"], _cell(_workload(f)))
                once = flops_once(side)
                flops, mfu = f"{once:.2e}", _mfu(once, side["median_s"], f["peak_flops"])
            peak = side["peak_bytes"]
            rows.append(
                (
                    *first,
                    name,
                    f"{side['median_s']:.3f}",
                    f"{side['least_s']:.3f} to {side['most_s']:.3f}",
                    f"{side['tokens_per_second']:,.0f}",
                    "?" if peak is None else f"{peak / 2**20:,.0f}",
                    flops,
                    mfu,
                    {None: "-", True: "yes", False: "**NO**"}[same.get(name, {}).get("passed")],
                )
            )
    if not rows:
        return ""
    text = (
        "One sweep in bfloat16: every turn's step, and all that it needs; medians of the runs, in"
        " brackets the least and the greatest ratio of a round. PyTorch: scaled dot product"
        " attention by its fastest kernel, `torch.compile` where the name says so. MFU: FLOPs"
        " without what backward passes recompute, over the peak of the data sheet; ?: unknown."
        " Same numbers: losses, KL, weights M and parameters after one sweep from the same"
        " weights differ by at most 5%."
    )
    return "\n\n".join([text, table(head, rows), *_notes(found)])


def _mfu(flops: float, seconds: float, peak: float | None) -> str:
    return "?" if peak is None else f"{flops / seconds / peak:.1%}"


def _ratio(f: Values) -> str:
    if f["against"] is None:
        return "-"
    return f"**{f['ratio']:.2f}x** ({f['ratio_least']:.2f} to {f['ratio_most']:.2f})"


def _workload(f: Values) -> str:
    w = f["workload"]
    return (
        f"{w['name']}: {w['conversations']} by {w['group_size']}, prompts {w['prompt'][0]} to"
        f" {w['prompt'][1]}, turns {w['turns'][0]} to {w['turns'][1]}, {w['tokens']:,} tokens"
    )


def _rollouts(found: Mapping[str, Values]) -> str:
    head = ("ratio", "model", "workload", "side", "s", "sampled/s", "computed per sampled token")
    rows = []
    for values in found.values():
        f = values.get("figures")
        if f is None:
            continue
        for name in sorted(f["contenders"], key=lambda name: name != OURS):
            side = f["contenders"][name]
            first = (_ratio(f), f["model"], _cell(_workload(f))) if name == OURS else ("",) * 3
            numbers = (f"{side['median_s']:.2f}", f"{side['tokens_per_second']:,.0f}")
            rows.append((*first, name, *numbers, f"{side['computed_per_sampled']:.2f}"))
    if not rows:
        return ""
    text = (
        "The same conversations sampled in bfloat16. The ratio is to the first side below"
        f" {OURS}. `{STATIC}`: `transformers` compiles its decode steps; conversations that have"
        " ended stay in its batch."
    )
    return "\n\n".join([text, table(head, rows), *_notes(found)])


def _quickstart(found: Mapping[str, Values]) -> str:
    parts = []
    for values in found.values():
        f = values.get("figures")
        if f is None or not f["curve"]:
            continue
        (first, before), (last, after) = f["curve"][0], f["curve"][-1]
        parts.append(
            f"`configs/quickstart.py`, {f['iterations']} iterations: {f['metric']} of held-out"
            f" tasks {before:.3f} after iteration {first}, {after:.3f} after iteration {last};"
            f" {f['seconds']:.0f} s in all, {f['compile_s']:.0f} s of them compiling."
        )
    return "\n\n".join([*parts, *_notes(found)]) if parts else ""


def _notes(found: Mapping[str, Values]) -> list[str]:
    lines = [f"- `{name}`: {note}" for name, values in found.items() for note in values["notes"]]
    return ["\n".join(lines)] if lines else []


def _left(pieces: Sequence[Listed], found: Mapping[str, Values], reasons: Mapping[str, str]) -> str:
    """What is not done, each with its reason."""
    rows = [
        (f"`{piece.name}`", piece.words, state, _cell(why))
        for piece in pieces
        for state, why in [_state(piece.name, found, reasons)]
        if state != _STATUS[DONE]
    ]
    if not rows:
        return "## Not run\n\nNothing: every piece was measured to its end."
    text = (
        "Rerunning the command with the same `--out` resumes with these: first those that were"
        " never completed, then those that failed. What a piece measured before it ended is"
        " above."
    )
    return f"## Not run\n\n{text}\n\n{table(('piece', 'shows', 'state', 'why'), rows)}"


def _states(
    pieces: Sequence[Listed], found: Mapping[str, Values], reasons: Mapping[str, str]
) -> str:
    """Every piece and whether it ran; no figures."""
    rows = []
    for piece in pieces:
        state, why = _state(piece.name, found, reasons)
        checks = found.get(piece.name, {}).get("checks", ())
        kept = sum(check["passed"] for check in checks)
        compared = f"{kept} of {len(checks)} within bounds" if checks else "-"
        rows.append((f"`{piece.name}`", piece.words, state, compared, _cell(why)))
    return table(("piece", "would show", "rehearsed", "comparisons", "why not"), rows)


def _state(name: str, found: Mapping[str, Values], reasons: Mapping[str, str]) -> tuple[str, str]:
    values = found.get(name)
    if values is None:
        return _NOT_BEGUN, reasons.get(name, "the command ended before it")
    why = values.get("error") or "-"
    return _STATUS.get(values["status"], values["status"]), why


def _cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return text.replace("|", "\\|").replace("\n", " ")


_SECTIONS: dict[str, tuple[str, Callable[[Mapping[str, Values]], str]]] = {
    "correctness": ("Correctness", _correctness),
    "update": ("Update sweep", _updates),
    "rollout": ("Rollout", _rollouts),
    "quickstart": ("Quickstart", _quickstart),
}
