"""The first tier is what is not marked, and prints what it leaves out; both are every test."""

import json
import subprocess
import sys

import pytest
import tiers
from places import ROOT, SUPPORT

CASES = """
import pytest

@pytest.mark.exhaustive
def test_rare(): pass

def test_plain(): pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(10))
def test_seeds(seed): pass

@pytest.mark.sampled("b", "d")
@pytest.mark.parametrize("name", "abcd")
def test_names(name): pass
"""
IN_FIRST = {"test_plain", "test_seeds[0]", "test_seeds[5]", "test_names[b]", "test_names[d]"}


@pytest.fixture
def run(tmp_path):
    """Runs pytest, with these tiers, on CASES and a folder of the second tier."""
    (tmp_path / "tests" / "browser").mkdir(parents=True)
    (tmp_path / "tests" / "browser" / "test_page.py").write_text("def test_page(): pass")
    (tmp_path / "tests" / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "import pathlib, places; places.ROOT = pathlib.Path(__file__).parent\n"
        "from tiers import *\n"
    )
    marks = ("exhaustive: rare", "sampled: few")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =" + "".join(f"\n  {x}" for x in marks))

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run(command, cwd=tmp_path, **streams).stdout

    return run


def passed(output):
    lines = [line.split("::") for line in output.splitlines() if "PASSED" in line]
    return {line[-1].split(" PASSED")[0].strip() for line in lines}


def test_the_first_tier_is_what_is_not_marked(run):
    output = run("-v", "-m", tiers.FIRST)
    assert passed(output) == IN_FIRST
    assert "Left to make test-all: 1 files, and the tests that are deselected." in output


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_the_closing_line_counts_what_is_deselected(run, workers):
    assert (
        run("-q", "-m", tiers.FIRST, *workers)
        .splitlines()[-1]
        .startswith("5 passed, 11 deselected in ")
    )


def test_both_tiers_are_every_test(run):
    assert run("-q").splitlines()[-1].startswith("17 passed in ")


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_shares_of_the_second_tier_are_equal_and_together_all_of_it(run, workers):
    found = []
    for part in (1, 2, 3):
        output = run("-v", f"--share={part}/3", *workers)
        assert f"Share {part} of 3 of the second tier" in output
        assert IN_FIRST <= passed(output)
        found.append(passed(output) - IN_FIRST)
    assert [len(tests) for tests in found] == [4, 4, 4] and len(set().union(*found)) == 12


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", ""])
def test_a_share_is_one_of_so_many(run, text):
    assert f"--share: got {text!r}; allowed: K/N with 1 <= K <= N" in run(f"--share={text}")


def test_a_failure_is_named_when_it_happens(run, tmp_path):
    """Before the tests that follow, and as well by the workers' names as by one process."""
    failing = "import pytest\n\ndef test_wrong(): assert 1 == 2\n\ndef test_rest(): pass\n"
    (tmp_path / "tests" / "test_wrong.py").write_text(failing)
    for workers in ((), ("-n", "1")):
        output = run("-v", "tests/test_wrong.py", *workers)
        named = output.index("tests/test_wrong.py::test_wrong (call, ")
        assert named < output.index("assert 1 == 2") < output.index("= FAILURES =")
        assert named < output.rindex("test_rest")


def test_a_case_that_is_not_there_is_named(run, tmp_path):
    cases = tmp_path / "tests" / "test_cases.py"
    cases.write_text(CASES.replace('sampled("b", "d")', 'sampled("b", "x")'))
    wanted = "test_names: sampled('b', 'x'): it has only the cases"
    assert wanted in run("tests/test_cases.py")
    assert passed(run("-v", "tests/test_cases.py::test_names[a]")) == {"test_names[a]"}


def test_durations_are_recorded_for_each_tier_and_order_the_files(run, tmp_path):
    slow = "import time\n\ndef test_slow(): time.sleep(0.3)\n"
    (tmp_path / "tests" / "test_slow.py").write_text(slow)
    cases = tmp_path / "tests" / "test_cases.py"
    cases.write_text(CASES.replace("test_rare(): pass", "test_rare(): __import__('time').sleep(1)"))
    run("--record-durations")
    recorded = json.loads((tmp_path / "tests" / "durations.json").read_text())
    assert set(recorded) == {
        "tests/browser/test_page.py",
        "tests/test_cases.py",
        "tests/test_slow.py",
    }
    first, every = recorded["tests/test_cases.py"]
    assert first < 0.5 < 0.9 < every
    assert recorded["tests/browser/test_page.py"][0] == 0

    def order(*arguments):
        output = run("--collect-only", "-q", "-k", "plain or slow", *arguments)
        return [line.split("::")[1] for line in output.splitlines() if "::" in line]

    assert order() == ["test_plain", "test_slow"]
    assert order("-m", tiers.FIRST) == ["test_slow", "test_plain"]


def test_what_is_named_as_the_second_tier_is_there():
    assert [place for place in tiers.SECOND_TIER if not (ROOT / place).exists()] == []
