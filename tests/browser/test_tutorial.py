"""The tutorial, followed by a newcomer who types every command of it; its pictures are made here.

Training is cut short. With `SEEUPO_TUTORIAL=DIR SEEUPO_SCREENSHOTS=docs/images` it is as long as
the page says, in DIR, where a finished run stays; that makes the pictures of the page.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import loaded_python
import pytest
from places import ROOT
from playwright.sync_api import expect
from process_cases import environment

from seeupo_jax import read_trajectories

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
QUICKSTART = "python -m seeupo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart"
SHORT = ("iterations=2", "rollout.tasks=2", "evaluation.tasks=2", "checkpoint.every=0")
SHORT += ("batching.buckets=(128,)", "rollout.prefill_tokens=32", "rollout.slots=8")
SHORT += ("model.scan_layers=True", "checkpoint.keep_best=0")  # programs of one layer; one split


def commands():
    """The lines of the page's bash blocks; `make quickstart` is the training that it starts."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    made = [QUICKSTART if line == "make quickstart" else line for line in lines]
    return [line for line in made if line != "source .venv/bin/activate"]


def run(line, cwd):
    """Runs a command of the page; what it printed."""
    program, *arguments = shlex.split(line)
    assert program == "python", line
    if "SEEUPO_TUTORIAL" not in os.environ:
        if "seeupo_jax.train" in line:
            arguments += [f"--config.{field}" for field in SHORT]
        if "seeupo_jax.sft" in line:
            arguments += ["--config.sft.steps=2"]
    done = loaded_python.run([sys.executable, *arguments], cwd=cwd, env=environment())
    assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which all commands were run, and what each printed."""
    clone = Path(os.environ.get("SEEUPO_TUTORIAL") or tmp_path_factory.mktemp("clone"))
    for name in ("configs", "docs"):
        if not (clone / name).exists():
            (clone / name).symlink_to(ROOT / name)
    return clone, {line: run(line, clone) for line in commands()}


def failures(clone):
    """Of the first iteration of the quickstart."""
    workdir = clone / "runs" / "quickstart"
    records = read_trajectories(workdir, split="train", iterations=[1])
    return [record for record in records if record["success"] is False]


def shown(name):
    """Whether the page shows a picture, by its name."""
    return f"(images/{name}.png)" in PAGE


def test_every_command_runs_and_says_what_the_page_says(followed):
    clone, printed = followed
    assert len(printed) == 7
    for line, text in printed.items():
        if "--explain" in line:
            assert "programs" in text and "nothing written" in text
        if "seeupo_jax.report" in line:
            name = re.search(r"--workdir=(\S+)", line)[1]
            assert f"{name}/report.html" in text and f"{name}/trajectories/index.html" in text


def test_the_page_shows_the_environment_and_it_runs(followed):
    clone, _ = followed
    text = (ROOT / "docs" / "examples" / "thrifty_desk.py").read_text()
    assert f"```python\n{text}```" in PAGE
    for record in read_trajectories(clone / "runs" / "thrifty", split="train", iterations=[1]):
        paid = record["score"] - record["reward"]
        assert paid == pytest.approx(0.05 * record["turns"])


def test_the_example_that_reads_failures_prints_them(followed, monkeypatch, capsys):
    clone, _ = followed
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if "read_trajectories" in block
    )
    monkeypatch.chdir(clone)
    exec(example, {})
    lost = failures(clone)
    printed = capsys.readouterr().out
    assert lost and all(f"{record['task_id']} {record['stop']}" in printed for record in lost)


@pytest.mark.parametrize(
    ("run_name", "picture"), [("quickstart", "tutorial_report"), ("thrifty", "tutorial_compare")]
)
def test_a_report_opens(followed, new_page, screenshot, run_name, picture):
    clone, _ = followed
    page = new_page(width=1200, height=900)
    page.goto((clone / "runs" / run_name / "report.html").as_uri())
    page.wait_for_selector("body[data-drawn=all]", timeout=120_000)
    assert page.locator(".failed").count() == 0
    assert shown(picture)
    screenshot(page, picture)


def test_a_failure_is_found_read_and_compared_with_its_group(followed, new_page, screenshot):
    clone, _ = followed
    page = new_page(width=1200, height=1100)
    page.goto((clone / "runs" / "quickstart" / "trajectories" / "index.html").as_uri())
    page.wait_for_selector("body[data-ready]", state="attached")
    page.locator("#more summary").click()
    for field, value in (("split", "train"), ("iteration", "1"), ("outcome", "no success")):
        page.locator(f"select[name={field}]").select_option(value)
    page.locator("#more summary").click()
    expect(page.locator("#count")).to_have_text(re.compile(rf"^{len(failures(clone))} of "))
    page.locator(".row").first.click()
    expect(page.locator("#view .message").first).to_be_visible()
    while "tint=entropy" not in page.url:
        page.keyboard.press("t")
    assert shown("tutorial_failure")
    screenshot(page, "tutorial_failure")
    page.keyboard.press("s")
    expect(page.locator(".column")).to_have_count(8)
    assert shown("tutorial_group")
    screenshot(page, "tutorial_group")
