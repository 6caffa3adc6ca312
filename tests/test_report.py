"""The command that writes a run's page."""

import os
import re
import subprocess
import sys

import loaded_python
import report_cases
import telemetry_cases
from process_cases import environment

from seeupo_jax.parallel.file_lock import exclusive
from seeupo_jax.report import main


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "seeupo_jax.report", *map(str, arguments)]
    return loaded_python.run(command, cwd=cwd, env=environment())


def test_more_runs_follow_compare_in_any_order(tmp_path, monkeypatch, capsys):
    for name in "abc":
        report_cases.write_run(tmp_path / name, iterations=1)
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("--workdir=a", "--compare", "b", "c"),
        ("--compare=b,c", "--workdir=a"),
        ("--compare", "b", "c", "--workdir", "a"),
    ):
        main(["report", *arguments])
        printed = capsys.readouterr().out
        assert printed.startswith(f"wrote {tmp_path / 'a' / 'report.html'} (")
        page = (tmp_path / "a" / "report.html").read_text()
        assert all(f"<h2>{name}</h2>" in page for name in "abc")


def test_the_pages_of_trajectories_are_written_beside_it_and_lead_back(
    tmp_path, monkeypatch, capsys
):
    report_cases.write_run(tmp_path / "a", iterations=1)
    telemetry_cases.write_run(tmp_path / "a", iterations=2)
    monkeypatch.chdir(tmp_path)
    for output in ("a/report.html", "elsewhere.html"):
        main(["report", "--workdir=a", f"--output={output}"])
        pages = tmp_path / "a" / "trajectories"
        assert capsys.readouterr().out.splitlines()[1] == f"wrote {pages / 'index.html'}"
        (link,) = re.findall(r'"report": ?"([^"]+)"', (pages / "data" / "index.js").read_text())
        assert (pages / link).resolve() == tmp_path / output
        (forth,) = re.findall(r'href="([^"]*index\.html)"', (tmp_path / output).read_text())
        assert ((tmp_path / output).parent / forth).resolve() == pages / "index.html"


def test_a_mistake_is_one_sentence(tmp_path):
    for arguments, sentence in (
        ([f"--workdir={tmp_path / 'no'}"], f"got {tmp_path / 'no'}; allowed: the folder of a run."),
        ([f"--workdir={tmp_path}", "b"], "got 'b'; allowed: flags only, as --NAME=VALUE."),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and done.stderr.strip().endswith(sentence)


def test_one_report_at_a_time_and_while_a_run_writes(tmp_path):
    report_cases.write_run(tmp_path / "a", iterations=2)
    with exclusive(tmp_path / "a" / ".lock", "the run"):
        with exclusive(tmp_path / "a" / ".report.html.lock", "a report"):
            done = run("--workdir=a", cwd=tmp_path)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith(
                f"error: --output: got {tmp_path / 'a' / 'report.html'}, in use by process"
                f" {os.getpid()} on "
            )
        assert run("--workdir=a", cwd=tmp_path).returncode == 0
    assert not list((tmp_path / "a").glob(".*"))


def test_the_command_needs_no_jax():
    program = "import sys, seeupo_jax.report; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
