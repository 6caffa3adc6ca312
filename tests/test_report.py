"""The command that writes a run's page."""

import os
import re
import subprocess
import sys

import loaded_python
import pytest
import report_cases
import telemetry_cases
from process_cases import environment

from seeupo_jax.parallel.file_lock import exclusive
from seeupo_jax.report import main
from seeupo_jax.reports.run_data import check_run


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
        ("--compare=b", "--compare=c", "--workdir=a"),
        ("--compare", "b", "c", "--workdir", "a"),
    ):
        main(["report", *arguments])
        printed = capsys.readouterr().out
        assert printed.startswith(f"wrote {tmp_path / 'a' / 'report.html'} (")
        page = (tmp_path / "a" / "report.html").read_text()
        assert all(f"<h2>{name}</h2>" in page for name in "abc")


def test_a_folder_that_is_compared_may_have_a_comma_in_its_name(tmp_path):
    for name in ("a", "b=1,2"):
        report_cases.write_run(tmp_path / name, iterations=1)
    main(["report", f"--workdir={tmp_path / 'a'}", f"--compare={tmp_path / 'b=1,2'}"])
    assert "<h2>b=1,2</h2>" in (tmp_path / "a" / "report.html").read_text()


def test_links_may_have_names_that_are_not_utf_8(tmp_path):
    workdir = tmp_path / os.fsdecode(b"lauf\xe4")
    report_cases.write_run(workdir, iterations=1)
    telemetry_cases.write_shard(workdir, [telemetry_cases.record()])
    page = tmp_path / os.fsdecode(b"seite\xe4.html")
    main(["report", f"--workdir={workdir}", f"--output={page}"])
    assert 'href="lauf%E4/trajectories/index.html"' in page.read_text()
    index = (workdir / "trajectories" / "data" / "index.js").read_text()
    assert '"report":"../../seite%E4.html"' in index


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


def test_pages_show_no_trajectories_that_the_run_has_removed(tmp_path):
    report_cases.write_run(tmp_path, iterations=1)
    shard = telemetry_cases.write_shard(tmp_path, [telemetry_cases.record()])
    index = tmp_path / "trajectories" / "data" / "index.js"
    for count in (1, 0):
        main(["report", f"--workdir={tmp_path}"])
        assert re.search(r'"rows": ?(\d+)', index.read_text())[1] == str(count)
        shard.unlink(missing_ok=True)
    assert [file.name for file in index.parent.iterdir()] == ["index.js"]


def test_a_run_that_is_compared_has_a_link_only_to_pages_that_are_there(tmp_path, monkeypatch):
    for name in "ab":
        report_cases.write_run(tmp_path / name, iterations=1)
        telemetry_cases.write_shard(tmp_path / name, [telemetry_cases.record()])
    monkeypatch.chdir(tmp_path)
    own, others = "trajectories/index.html", "../b/trajectories/index.html"
    for arguments, links in (
        (["--workdir=a", "--compare=b"], [own]),
        (["--workdir=b", "--compare=a"], [others, own]),
    ):
        main(["report", *arguments, "--output=a/r.html"])
        page = (tmp_path / "a" / "r.html").read_text()
        assert re.findall(r'href="([^"]*index\.html)"', page) == links


def test_the_report_is_written_where_the_pages_of_trajectories_cannot_be(tmp_path, capsys):
    report_cases.write_run(tmp_path, iterations=1)
    telemetry_cases.write_shard(tmp_path, [telemetry_cases.record()])
    (tmp_path / "trajectories" / "data").write_text("a file")
    with pytest.raises(SystemExit) as ended:
        main(["report", f"--workdir={tmp_path}"])
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out.startswith(f"wrote {tmp_path / 'report.html'} (")
    assert (
        output.err.startswith(f"error: workdir: got {tmp_path} (") and output.err.count("\n") == 1
    )
    assert "index.html" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ("--compare=nowhere", "--compare: got nowhere; allowed: the folder of a run."),
        (
            "--output=/dev/null/report.html",
            "--output: got '/dev/null/report.html'; allowed: a file that can be written.",
        ),
    ],
)
def test_a_mistake_is_told_before_the_pages_of_trajectories_are_written(
    tmp_path, capsys, wrong, sentence
):
    report_cases.write_run(tmp_path, iterations=1)
    telemetry_cases.write_shard(tmp_path, [telemetry_cases.record()])
    with pytest.raises(SystemExit):
        main(["report", f"--workdir={tmp_path}", wrong])
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert not (tmp_path / "trajectories" / "index.html").exists()


def test_a_run_that_cannot_be_read_is_one_sentence(tmp_path, capsys):
    workdir = tmp_path / "\x1b[2J"  # which would clear a terminal
    (workdir / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(SystemExit) as ended:
        main(["report", f"--workdir={workdir}"])
    output = capsys.readouterr().err
    assert ended.value.code == 2 and output.startswith("error: ") and output.count("\n") == 1
    assert str(tmp_path / r"\x1b[2J" / "metrics.jsonl") in output


def test_a_mistake_is_one_sentence(tmp_path):
    for arguments, sentence in (
        ([f"--workdir={tmp_path / 'no'}"], f"got {tmp_path / 'no'}; allowed: the folder of a run."),
        ([f"--workdir={tmp_path}", "b"], "got 'b'; allowed: flags only, as --NAME=VALUE."),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and done.stderr.strip().endswith(sentence)


@pytest.mark.parametrize("flag", ["workdir", "compare"])
def test_a_folder_that_is_no_run_has_no_report(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "report.md").touch()
    report_cases.write_run(tmp_path / "runs" / "b10", iterations=1)
    report_cases.write_run(tmp_path / "runs" / "b9", iterations=1)
    given = {"workdir": [], "compare": ["--workdir=runs/b9"]}[flag]
    for folder, holds in (("docs", "nothing of a run"), ("runs", "runs: b9, b10")):
        with pytest.raises(SystemExit) as ended:
            main(["report", *given, f"--{flag}={folder}"])
        output = capsys.readouterr()
        assert (ended.value.code, output.out) == (2, "")
        assert output.err.startswith(f"error: --{flag}: got ")
        assert output.err.endswith(
            f"{folder}, which holds {holds}; allowed: the folder of a run.\n"
        )
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize("name", ["run.json", "evaluation", "trajectories", "checkpoints"])
def test_a_run_just_begun_or_only_evaluated_has_a_report(tmp_path, name):
    if name == "run.json":
        report_cases.write_run(tmp_path, iterations=1)
        (tmp_path / "metrics.jsonl").unlink()
    else:
        (tmp_path / name).mkdir()
    check_run("workdir", tmp_path)


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
