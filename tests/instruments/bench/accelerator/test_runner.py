"""Pieces as real processes: they resume, fail, run out of time, memory and budget."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from seeupo_jax.instruments.bench.accelerator.runner import (
    BenchJob,
    Record,
    order,
    read,
    work_through,
)

# A piece: writes its record as it goes, then does what it is told.
PIECE = """
import json, os, sys, time
file, told = sys.argv[1:]
put = lambda **more: open(file, "w").write(json.dumps({"piece": "x", "notes": [], **more}))
check = {"name": "one", "differences": {}, "passed": True}
put(status="running", checks=[check])
print("some words")
if told == "wait": time.sleep(60)
if told == "crash": os.abort()
if told == "memory": sys.exit("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
if told == "error":
    put(status="failed", checks=[check], error="ValueError: no such thing")
    sys.exit(1)
put(status="done", checks=[check], error=None)
"""


def job(out, name, *reported, limit_s=30.0, about_s=0.0):
    file = str(out / f"{name}.json")
    commands = [[sys.executable, "-S", "-c", PIECE, file, each] for each in reported]
    return BenchJob(name, commands, limit_s, about_s)


def run(jobs, out, budget_s=60.0):
    received = []
    reasons = work_through(
        jobs, out, budget_s=budget_s, environment=os.environ, report=received.append
    )
    return reasons, received


def test_whatever_becomes_of_a_piece_the_next_one_runs(tmp_path):
    jobs = [
        job(tmp_path, "crashes", "crash"),
        job(tmp_path, "raises", "error"),
        job(tmp_path, "hangs", "wait", limit_s=4.0),
        job(tmp_path, "works", ""),
    ]
    reasons, received = run(jobs, tmp_path)
    found = {each.name: read(tmp_path / f"{each.name}.json") for each in jobs}
    assert reasons == {}
    assert {name: values["status"] for name, values in found.items()} == {
        "crashes": "failed",
        "raises": "failed",
        "hangs": "timeout",
        "works": "done",
    }
    assert found["crashes"]["error"] == "ended by signal SIGABRT: some words"
    assert found["raises"]["error"] == "ValueError: no such thing"
    assert found["hangs"]["error"] == "it took longer than its limit of 4 s"
    # What was measured before a piece ended stays.
    assert [len(values["checks"]) for values in found.values()] == [1, 1, 1, 1]
    assert [name for name in found if (tmp_path / f"{name}.log").exists()] == [
        "crashes",
        "raises",
        "hangs",
    ]
    assert received[-1].startswith("works: done in ")


def test_a_second_start_runs_what_is_left_and_what_failed_last(tmp_path):
    jobs = [job(tmp_path, "raises", "error"), job(tmp_path, "works", ""), job(tmp_path, "new", "")]
    run(jobs[:2], tmp_path)
    before = (tmp_path / "works.json").read_bytes()
    # As a process leaves it that was killed with the command.
    Record.begin(tmp_path / "killed.json")
    jobs.append(job(tmp_path, "killed", ""))
    assert [each.name for each in order(jobs, tmp_path)] == ["new", "killed", "raises"]
    run(jobs, tmp_path)
    assert (tmp_path / "works.json").read_bytes() == before
    assert read(tmp_path / "raises.json")["attempts"] == 2
    assert [each.name for each in order(jobs, tmp_path)] == ["raises"]


def test_the_budget_ends_a_piece_and_begins_none_that_it_is_too_short_for(tmp_path):
    jobs = [
        job(tmp_path, "long", "", about_s=100.0),
        job(tmp_path, "hangs", "wait"),
        job(tmp_path, "late", ""),
    ]
    began = time.monotonic()
    reasons, _ = run(jobs, tmp_path, budget_s=2.0)
    assert time.monotonic() - began < 20
    assert reasons["long"] == "2 s of the budget were left, and it may take 100 s"
    assert reasons["late"] == "0 s of the budget were left, and it may take 1 s"
    found = read(tmp_path / "hangs.json")
    assert (found["status"], found["error"]) == ("stopped", "the budget ended after 2 s of it")
    # Next time it has all of its own limit, and comes before what was never begun.
    assert [each.name for each in order(jobs, tmp_path)] == ["long", "hangs", "late"]


def test_where_memory_runs_out_the_next_smaller_size_is_run(tmp_path):
    jobs = [job(tmp_path, "large", "memory", "memory", ""), job(tmp_path, "other", "error", "")]
    run(jobs, tmp_path)
    found = read(tmp_path / "large.json")
    assert (found["status"], found["attempts"]) == ("done", 1)
    assert [note[:29] for note in found["notes"]] == [
        "Memory ran out with size 1: e",
        "Memory ran out with size 2: e",
    ]
    assert read(tmp_path / "other.json")["status"] == "failed"  # of something else


def test_what_a_piece_has_started_ends_with_it(tmp_path):
    child = tmp_path / "child"
    program = (
        "import subprocess, sys, time\n"
        "started = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(started.pid))\n"
        "time.sleep(60)\n"
    )
    run([BenchJob("x", [[sys.executable, "-S", "-c", program]], limit_s=4.0)], tmp_path)
    pid = int(child.read_text())
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":  # nobody has waited for it yet
            break
        time.sleep(0.1)
    else:
        pytest.fail("it still runs")


def test_a_record_is_whole_or_not_there(tmp_path):
    record = Record.begin(tmp_path / "x.json", rehearsal=False)
    record.check("a", {"out": (1e-6, 1e-5)}, dtype="float32")
    record.check("b", {"out": (float("nan"), 1e-5)})
    record.check("c", {}, error=RuntimeError("first line\nsecond"), dtype="float32")
    values = json.loads((tmp_path / "x.json").read_text())
    assert [check["passed"] for check in values["checks"]] == [True, False, False]
    assert values["checks"][2]["error"] == "RuntimeError: first line"
    assert values["status"] == "running" and [f.name for f in tmp_path.iterdir()] == ["x.json"]
    (tmp_path / "x.json").write_text('{"status": "do')
    assert read(tmp_path / "x.json") is None and read(tmp_path / "none.json") is None
