"""WORKDIR/report.html: one self-contained page on one or several runs."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from seeupo_jax.configuration.user_code import escaped
from seeupo_jax.display.terminal import format_count, format_duration
from seeupo_jax.durable_files import write_atomically
from seeupo_jax.errors import file_error
from seeupo_jax.metrics.flat_outcomes import flat_outcome
from seeupo_jax.metrics.rewritten_turns import rewritten_turns
from seeupo_jax.parallel.file_lock import exclusive
from seeupo_jax.reports.charts import unchecked
from seeupo_jax.reports.curves import curves_section, first_and_last, kinds_section
from seeupo_jax.reports.run_data import RunData
from seeupo_jax.reports.sections import (
    Section,
    lengths_section,
    optimization_section,
    parts_section,
    stops_section,
    supervised_section,
    time_section,
    turns_section,
)
from seeupo_jax.reports.settings_tables import (
    changes_table,
    configuration_table,
    failures_section,
    unrecorded,
    versions_table,
)
from seeupo_jax.trajectories.reader import FOLDER

REPORT_FILE = "report.html"
_VEGA_LITE = "6.4"
_SECTIONS = (
    curves_section,
    kinds_section,
    turns_section,
    lengths_section,
    stops_section,
    optimization_section,
    parts_section,
    time_section,
    failures_section,
)
_SUPERVISED_SECTIONS = (supervised_section, time_section, failures_section)
_RECENT = 10  # iterations whose speed is shown


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    detail: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Head:
    """A run at the top of the page; `pages` is where those of its trajectories are, if any."""

    name: str
    tiles: Sequence[Tile]
    pages: str | None


def write_report(runs: Sequence[RunData], file: Path) -> Path:
    """Writes the report that shows runs, finished or not, side by side.

    Args:
      runs: in the order of the report. A run that has pages of trajectories gets a link to them:
        call `write_pages` first.
      file: replaced atomically; of a symbolic link the target is. Its folder is made.

    Returns: the file.

    Raises:
      ValueError: a file that cannot be written, or that another report is writing.
      OSError: as of `file_error`: the disk failed, or is full.
    """
    target = Path(os.path.realpath(file))  # whatever its links are named, a file has one lock
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.with_name(f".{target.name}.lock"), f"--output: got {file}"):
            write_atomically(file, escaped(render(runs, file.parent)).encode())
    except OSError as error:
        if file_error(error) is not None:
            raise
        raise ValueError(f"--output: got {file} ({error.strerror}); allowed: a file.") from None
    return file


def report_file(workdir: str | Path, output: str | Path | None = None) -> Path:
    """Where the report of a run is written."""
    return Path(os.path.abspath(Path(workdir) / REPORT_FILE if output is None else output))


def render(runs: Sequence[RunData], folder: Path) -> str:
    """The page as it lies in a folder, from which its links start."""
    from jinja2 import Environment, StrictUndefined

    with unchecked():
        made = [make(runs) for make in _wanted(runs)]
    sections = [section for section in made if section is not None]
    assets = resources.files("seeupo_jax") / "assets" / "report"
    style, page = ((assets / name).read_text("utf-8") for name in ("report.css", "report.js"))
    vega = _vega()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    template = environment.from_string((assets / "report.html.j2").read_text("utf-8"))
    return template.render(
        title=", ".join(run.name for run in runs),
        heads=[_head(run, folder) for run in runs],
        sections=sections,
        specs={  # by the place where they are drawn
            f"{section.key}-{i}": {**chart.spec, "description": chart.title}
            for section in sections
            for i, chart in enumerate(section.charts)
        },
        configuration=configuration_table(runs),
        versions=versions_table(runs),
        changes=changes_table(runs),
        unrecorded=unrecorded(runs),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=style,
        scripts=[vega, page],
        # Only these scripts run, and nothing is loaded, whatever a text of the run holds.
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src "
        + " ".join(_hashed(script) for script in (vega, page)),
    )


def _wanted(runs: Sequence[RunData]) -> list[Callable[[Sequence[RunData]], Section | None]]:
    """The page's contents for runs of these kinds."""
    supervised = {run.supervised for run in runs if run.lines}
    wanted = [*_SECTIONS] if False in supervised else []
    more = _SUPERVISED_SECTIONS if True in supervised else ()
    return [*wanted, *(make for make in more if make not in wanted)]


@functools.cache  # it takes seconds to make
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, out of their Python package."""
    import vl_convert

    script = vl_convert.javascript_bundle(vl_version=_VEGA_LITE).replace("\r\n", "\n")
    # Inside HTML a script ends at its end tag, even in a text.
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hashed(script: str) -> str:
    """How a content security policy names a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _head(run: RunData, folder: Path) -> Head:
    each = f"{run.seconds / run.done:.1f} s per iteration" if run.seconds and run.done else ""
    tiles = [
        Tile("state", *_state(run)),
        Tile("iterations", str(run.done), "" if run.planned is None else f"of {run.planned}"),
        _result(run),
        Tile("tokens per second", *_speed(run)),
        Tile("time", format_duration(run.seconds) if run.seconds else "-", each),
    ]
    index, pages = run.workdir / FOLDER / "index.html", None
    if os.path.isfile(index):
        pages = quote(os.fsencode(os.path.relpath(index, folder)))
    return Head(run.name, tiles, pages)


def _result(run: RunData) -> Tile:
    """The run's main result: success, or the held-out loss of supervised fine-tuning."""
    if run.supervised:
        losses = [value for _, value in run.series("eval/loss")]
        ends = [losses[0], losses[-1]] if len(losses) > 1 else losses
        lowest = f"lowest {min(losses[1:]):.4f}" if len(losses) > 1 else ""
        return Tile("held-out loss", " → ".join(f"{loss:.4f}" for loss in ends) or "-", lowest)
    measure, points = first_and_last(run)
    measured = all(point.low is not None for point in points)
    intervals = [f"[{p.low:.2f}, {p.high:.2f}]" for p in points] if measured else []
    values = " → ".join(f"{point.value:.2f}" for point in points) or "-"
    warnings = (_selected_on(run), flat_outcome(run.lines), rewritten_turns(run.lines))
    warning = "; ".join(filter(None, warnings))
    return Tile(f"success, {measure}", values, " → ".join(intervals), warning)


def _state(run: RunData) -> tuple[str, str]:
    if run.age_s is None or not run.lines:
        return "nothing recorded yet", ""
    if run.finished:
        return "finished", ""
    age = f"last line {format_duration(run.age_s)} before this page"
    patience = 60.0 + 3 * run.seconds / max(run.done, 1)  # of an iteration, an evaluation, a save
    return ("running" if run.age_s < patience else "stopped or waiting"), age


def _selected_on(run: RunData) -> str:
    """A warning where the best checkpoint was selected by the figures that are shown."""
    if not any(value for _, value in run.series("eval/selected_on")):
        return ""
    return f"the best checkpoint is selected on {run.split} too: its figure there is biased upwards"


def _speed(run: RunData) -> tuple[str, str]:
    """The median of the last iterations' speeds, of the rollout and of the sweep."""
    speeds = {}
    for part in ("rollout", "sweep", "sft"):
        values = [v for _, v in run.series(f"{part}/tokens_per_second")[-_RECENT:]]
        if values:
            speeds[part] = format_count(statistics.median(values))
    sweep = f"rollout; {speeds['sweep']} sweep" if "sweep" in speeds else "rollout"
    if "sft" in speeds:
        return speeds["sft"], "of conversations"
    return (speeds["rollout"], sweep) if "rollout" in speeds else ("-", "")
