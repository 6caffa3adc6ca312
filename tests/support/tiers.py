"""Two tiers of tests, and the order of their files.

`make test` runs the first tier: the facts of the product. `make test-all` runs every test. In the
second tier are tests marked `exhaustive`, most cases of tests marked `sampled`, and SECOND_TIER. To
move a test or a file to the other tier, add or delete one line. With `--share=K/N` a run has the
first tier and a share of the second one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from places import ROOT

FIRST = "not exhaustive"  # what `make test` selects with pytest's -m
# Files and folders that the first tier does not even collect. It also installs nothing for them.
SECOND_TIER = (
    "tests/agents/test_trained_agents.py",
    "tests/browser",
    "tests/envs/appworld/test_environment.py",
    "tests/envs/test_textworld_express.py",
    "tests/instruments",
    "tests/policy/files/chat",
    "tests/policy/test_smollm2.py",
    "tests/rollout/test_control_tags_played.py",
    "tests/test_power_cut.py",
    "tests/test_processes.py",
    "tests/test_sft_parity.py",
    "tests/third_party",
)
# Of each file: seconds of its tests of the first tier, and of all; `make test-durations` writes it.
DURATIONS = ROOT / "tests" / "durations.json"
WHOLE = (1, 1)
SHARE_HELP = "of the second tier, the K-th of N equal shares"


def in_second_tier(path: Path) -> bool:
    """Whether SECOND_TIER holds this file, or a folder that it lies in."""
    relative = path.relative_to(ROOT)
    return any(str(place) in SECOND_TIER for place in (relative, *relative.parents))


def only_first(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == FIRST


def mark_exhaustive(items: Sequence[pytest.Item], whole_files: bool) -> None:
    """Marks the files of SECOND_TIER, and the cases that `sampled` leaves to the second tier.

    `sampled(N)` keeps N cases of a test in the first tier, evenly spread; `sampled(ID, ...)` keeps
    those with these ids, which are checked where `whole_files` are collected.
    """
    cases = {}
    for item in items:
        if in_second_tier(item.path):
            item.add_marker("exhaustive")
        elif mark := item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], ([], mark.args))[0].append(item)
    for test, (found, kept) in cases.items():
        names = [item.name for item in found]
        if isinstance(kept[0], int):
            stay = {names[number * len(names) // kept[0]] for number in range(kept[0])}
        else:
            stay = {f"{found[0].originalname}[{case}]" for case in kept}
            if whole_files and not stay <= set(names):
                raise pytest.UsageError(f"{test}: sampled{kept}: it has only the cases {names}.")
        for item in found:
            if item.name not in stay:
                item.add_marker("exhaustive")


def sort_longest_first(items: list[pytest.Item], second: float) -> None:
    """A worker that began a long file last would leave the others idle.

    A file without a duration counts as average. `second`: the part of the second tier that is run.
    """
    read = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    seconds = {
        ROOT / file: first + second * (every - first) for file, (first, every) in read.items()
    }
    average = sum(seconds.values()) / max(1, len(seconds))
    items.sort(key=lambda item: (-seconds.get(item.path, average), item.path))


def share_of(text: str) -> tuple[int, int]:
    """K and N of `--share=K/N`."""
    if match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text):
        part, parts = map(int, match.groups())
        if part <= parts:
            return part, parts
    raise argparse.ArgumentTypeError(f"got {text!r}; allowed: K/N with 1 <= K <= N")


def of_other_shares(items: Sequence[pytest.Item], part: int, parts: int) -> list[pytest.Item]:
    """Tests of the second tier, in the order of their files: all but every `parts`-th.

    Neighbours are cases of one test, or use one fixture: each share has some of each.
    """
    second = [item for item in items if item.get_closest_marker("exhaustive")]
    return [item for number, item in enumerate(second) if number % parts != part - 1]


class FailureNamer:
    """Names a failure when it happens: a run that is stopped has named those before."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid} ({report.when}, {report.duration:.1f} s)")
            terminal.write_line(str(crash or report.longreprtext)[:2_000])


class DurationRecorder:
    """Writes DURATIONS at the end of a run."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        pair = self._seconds[report.nodeid.partition("::")[0]]
        pair[0] += 0 if "exhaustive" in report.keywords else report.duration
        pair[1] += report.duration

    def pytest_sessionfinish(self) -> None:
        lines = (
            f'  "{file}": [{first:.1f}, {every:.1f}]'
            for file, (first, every) in sorted(self._seconds.items())
        )
        DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# Hooks of pytest, for conftest.py.


def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true", help=f"writes {DURATIONS.name}")
    parser.addoption("--share", metavar="K/N", type=share_of, default=WHOLE, help=SHARE_HELP)


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(FailureNamer(config))
    if config.getoption("record_durations"):
        config.pluginmanager.register(DurationRecorder())


def pytest_ignore_collect(collection_path, config):
    return True if only_first(config) and in_second_tier(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items, config):
    mark_exhaustive(items, whole_files=not any("::" in arg for arg in config.args))
    part, parts = config.getoption("share")
    sort_longest_first(items, 0 if only_first(config) else 1 / parts)
    if left := set(of_other_shares(items, part, parts)):
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=[*left])


def pytest_deselected(items):
    """In a worker: for the closing line, which the process that started it prints."""
    if not items:
        return
    output = getattr(items[0].config, "workeroutput", {})
    output["deselected"] = output.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    deselected = getattr(node, "workeroutput", {}).get("deselected", 0)
    stats = node.config.pluginmanager.get_plugin("terminalreporter").stats
    stats["deselected"] = max(stats.get("deselected", []), [None] * deselected, key=len)


def pytest_terminal_summary(terminalreporter, config):
    if only_first(config):
        files = [path for path in ROOT.glob("tests/**/test_*.py") if in_second_tier(path)]
        terminalreporter.write_line(
            f"Left to make test-all: {len(files)} files, and the tests that are deselected."
        )
    elif (share := config.getoption("share")) != WHOLE:
        terminalreporter.write_line(
            "Share {} of {} of the second tier; the others are the tests deselected.".format(*share)
        )
