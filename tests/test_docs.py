"""Every command in the README and in docs/ is one that works."""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import report_cases
from places import ROOT
from sandbox_cases import NO_SANDBOX, needs_bubblewrap

from docs.tools import hardware, reference
from seeupo_jax import envs, report
from seeupo_jax.configuration.flags import as_overrides
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config, Env
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.metrics.run_manifest import Resumption
from seeupo_jax.planning.chips import parse_topology
from seeupo_jax.policy.families import FAMILIES
from seeupo_jax.supervised.conversation_sources import open_conversations
from seeupo_jax.supervised.sft_config import check_sft
from seeupo_jax.training.checks import check_config, check_planned
from seeupo_jax.training.rollout_role import check_rollout
from seeupo_jax.trajectories import reader
from seeupo_jax.trajectories.trajectory_record import to_record
from seeupo_jax.types import Trajectory

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def raw_commands() -> list[str]:
    """The command lines of all bash blocks, line continuations resolved."""
    blocks = [
        block.replace("\\\n", " ")
        for page in PAGES
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def commands() -> list[str]:
    """The same without comments and quotes."""
    return [" ".join(shlex.split(line, comments=True)) for line in raw_commands()]


def with_config(*, aot: bool) -> list[str]:
    """The commands that name a configuration: those that only compile it, or the others."""
    lines = [line for line in commands() if "--config=" in line]
    return [line for line in lines if ("seeupo_jax.aot" in line) == aot]


def trainings() -> list[str]:
    return with_config(aot=False)


# A file whose teacher another command makes; here one that is there.
TAUGHT_BY = {"order_desk_distill.py": ["teacher.path=package:order_desk"]}
# The same of a policy that the supervised fine-tuning before it makes.
FINE_TUNED = {"runs/thrifty_sft/policy": "package:order_desk"}


def config_of(line: str) -> Config:
    """The configuration that a command means."""
    flags = dict(f.removeprefix("--").split("=", 1) for f in line.split() if f.startswith("--conf"))
    path = flags.pop("config")
    fields = {key.removeprefix("config."): value for key, value in flags.items()}
    overrides = [f"{key}={FINE_TUNED.get(value, value)}" for key, value in fields.items()]
    overrides = [*TAUGHT_BY.get(Path(path).name, []), *overrides]
    return load_config(ROOT / path, overrides)


def test_the_readme_is_short_and_its_commands_were_found():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert len(trainings()) >= 4 and any(line.startswith("make") for line in commands())


SANDBOXED = "sandboxed_tasks.py"  # a configuration that needs bubblewrap


@pytest.fixture(autouse=True)
def activated(monkeypatch):
    """The `python` of a command is that of this environment."""
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)


@pytest.fixture
def with_devices(monkeypatch):
    """Lets the code see so many of this process's devices."""
    every = jax.devices()
    return lambda count: monkeypatch.setattr(jax, "devices", lambda: every[:count])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("line", trainings())
def test_a_command_names_a_config_and_fields_that_pass_every_check(line, with_devices):
    if SANDBOXED in line and NO_SANDBOX:
        pytest.skip(NO_SANDBOX)
    processes, devices = (re.search(rf" {flag}[ =](\d+)", line) for flag in ("-n", "--devices"))
    with_devices(int(processes[1] if processes else 1) * int(devices[1] if devices else 1))
    check = check_planned if "--device_memory=" in line else check_config
    check(config_of(line))


WORKERS = [line for line in trainings() if line.endswith(" --role=rollout")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", WORKERS)
def test_a_workers_command_is_its_trainers_with_a_role(line, with_devices):
    with_devices(1)
    of_trainers = {other[other.index("--config=") :] for other in trainings()}
    assert line[line.index("--config=") :].removesuffix(" --role=rollout") in of_trainers
    check_rollout(config_of(line), None)


TUNINGS = [line for line in trainings() if "seeupo_jax.sft" in line]


@pytest.mark.parametrize("line", TUNINGS)
def test_a_supervised_command_names_conversations_that_are_there(line, with_devices):
    with_devices(1)
    (data,) = re.findall(r"--data=(\S+)", line)
    config = config_of(line)
    config = dataclasses.replace(config, sft=dataclasses.replace(config.sft, data=data))
    check_sft(config)
    if data == "demonstrations":
        return
    given = open_conversations(config, str(ROOT / data), "train", {}, "--data")
    assert all(given[index].messages for index in range(len(given)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("line", with_config(aot=True))
def test_a_command_that_compiles_names_a_mesh_for_its_slice(line):
    config = config_of(line)
    topology = parse_topology(re.search(r"--topology=(\S+)", line)[1])
    sizes = vars(config.mesh).values()
    known = math.prod(size for size in sizes if size != -1)
    assert topology.devices % known == 0 and (-1 in sizes or topology.devices == known)


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make")])
def test_a_make_target_exists(line):
    done = subprocess.run([*line.split(), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_folder_of_the_quickstart_may_have_spaces():
    line = ["make", "-n", "quickstart", "WORKDIR=my runs/x"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    (training,) = [x for x in done.stdout.splitlines() if "seeupo_jax.train" in x]
    assert shlex.split(training)[-1] == "--workdir=my runs/x"


# A file that begins with a policy that another one makes; here with one that is there.
BEGINS_WITH = {
    "study_bfcl_worlds.py": ["model.path=package:order_desk"],
    "study_order_desk_referral.py": ["model.path=package:order_desk"],
    **TAUGHT_BY,
}


def test_every_config_file_passes_every_check_and_is_in_the_readme(with_devices):
    with_devices(1)
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "configs").glob("*.py")):
        assert f"configs/{path.name}" in readme
        if "14b" not in path.name and path.name != SANDBOXED:
            check_config(load_config(path, BEGINS_WITH.get(path.name, [])))


@needs_bubblewrap
def test_the_config_of_sandboxed_tasks_passes_every_check(with_devices):
    with_devices(1)
    check_config(load_config(ROOT / "configs" / SANDBOXED))


ARCHITECTURES = ROOT / "seeupo_jax" / "assets" / "architectures"
TOKENIZERS = {"qwen3": "qwen3", "qwen2": "qwen2_5"}  # of third_party/models, by family


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*14b*.py")), ids=lambda p: p.stem)
def test_the_papers_configs_pass_every_check_where_their_models_are(path, tmp_path, monkeypatch):
    config = load_config(path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"model path: got {config.model.path!r}"):
        check_config(dataclasses.replace(config, env=Env()))
    values = ARCHITECTURES / Path(config.model.path).name / "config.json"
    tokenizer = TOKENIZERS[json.loads(values.read_text())["model_type"]]
    shutil.copytree(ROOT / "third_party" / "models" / tokenizer, config.model.path)
    shutil.copy(values, config.model.path)
    check_config(dataclasses.replace(config, env=Env()))
    if config.env.name == "appworld":
        with pytest.raises(ValueError, match="appworld (root|home)"):  # no other complaint
            envs.make("appworld", **config.env.options, root=str(tmp_path))
    else:
        check_config(config)


REPORTS = dict.fromkeys(line for line in commands() if "seeupo_jax.report" in line)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("line", REPORTS)
def test_a_report_command_writes_its_page(line, tmp_path, monkeypatch, capsys):
    python, flag, module, *arguments = line.split()
    assert (python, flag, module) == ("python", "-m", "seeupo_jax.report")
    for folder in (word.removeprefix("--workdir=") for word in arguments if "runs/" in word):
        report_cases.write_run(tmp_path / folder, iterations=2)
    monkeypatch.chdir(tmp_path)
    report.main([module, *arguments])
    written = Path(capsys.readouterr().out.removeprefix("wrote ").partition(" (")[0])
    assert written.is_relative_to(tmp_path) and written.read_text().startswith("<!doctype html>")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_and_module_of_a_page_leads_somewhere(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" not in path:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for module in re.findall(r"`([a-z0-9_/]+\.py)\b", text):
        assert any((root / module).exists() for root in (ROOT, ROOT / "seeupo_jax")), module


def test_overrides_reach_the_override_flag():
    line = ["train", "--config=f.py", "--config.seed=1", "--workdir=d"]
    assert as_overrides(line) == ["train", "--config=f.py", "--override=seed=1", "--workdir=d"]


def test_a_launch_command_passes_every_check_of_its_script():
    lines = [line for line in raw_commands() if line.startswith("launch/")]
    assert {line.split()[0] for line in lines} == {
        f"launch/{name}.sh"
        for name in (
            *("jobset", "gcluster", "tpu_vm", "gke_xpk"),
            *("gpu_slurm", "gpu_local", "cpu_processes"),
        )
    }
    for line in lines:
        script, *arguments = shlex.split(line, comments=True)
        where = [i for i, word in enumerate(arguments) if word.startswith("--config")]
        arguments.insert(where[0] if where else len(arguments), "--dry-run")
        done = subprocess.run([script, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, f"{line}: {done.stderr}"


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_tables_that_the_package_declares_are_those_of_the_page(name):
    page = (ROOT / "docs" / name).read_text()
    assert reference.PAGES[name](page) == page, "run `python docs/tools/reference.py`"


def test_the_numbers_of_the_page_on_debugging_are_printed(tmp_path, capsys, monkeypatch):
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "debugging.md").read_text(), re.DOTALL
    )
    report_cases.write_run(tmp_path / "runs" / "quickstart", iterations=2)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1  success_rate 0.") and "stop_max_tokens 0" in first
    assert second.startswith("2  ") and "sampler_trainer_gap 4e-06" in second


def test_a_row_of_the_table_of_gpus_is_what_its_command_estimates():
    row = " | ".join(hardware.row("Qwen2.5-0.5B-Instruct", 1, 32))
    assert f"\n| {row} |\n" in (ROOT / "docs" / "hardware.md").read_text()


@pytest.mark.exhaustive
def test_files_that_pages_link_to_are_pages_of_the_site(tmp_path):
    from docs.tools import source_pages  # it imports mkdocs

    cells = [
        {"cell_type": "markdown", "source": ["# Train\n", "[curves](../docs/report.md)"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": []},
    ]
    notebook = tmp_path / "quickstart.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    page = "# Train\n[curves](../docs/report.md)\n\n```python\nprint(1)\n```"
    assert source_pages.render(notebook) == page
    uri = "source/notebooks/quickstart.ipynb.md"
    assert source_pages.site_path("notebooks/quickstart.ipynb") == uri
    assert source_pages.repository_path(uri) == "notebooks/quickstart.ipynb"
    assert source_pages.resolve("notebooks/quickstart.ipynb", "../docs/x.md") == "docs/x.md"
    for path in ("README.md", "CONTRIBUTING.md", "docs/metrics.md", "launch/tpu_vm.sh"):
        assert source_pages.repository_path(source_pages.site_path(path)) == path


def tables(page: str, column: str) -> list[str]:
    """The names in code of the first column of every table whose first heading this is."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(rf"\| {column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text)
    cells = (row.split("|")[1] for table in found for row in table.splitlines())
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_page_on_trajectories_has_every_field():
    of_runs = ["config", "config_file", "command", "began", "resumed", "versions", "devices"]
    assert tables("trajectories.md", "field") == [
        *reader.FIELDS,
        *reader.SEGMENT_FIELDS,
        *("schema", "name", *of_runs, "model", "ended", "checkpoints"),
        *Resumption._fields,
    ]
    assert tables("trajectories.md", "field") and tables(
        "trajectories.md", "field of `config.telemetry`"
    ) == ["trajectory_share", "trajectory_mib", "entropy"]
    names = {field.name for field in dataclasses.fields(Config().telemetry)}
    assert {"trajectory_share", "trajectory_mib", "entropy"} <= names


def test_the_example_that_reads_trajectories_runs(tmp_path, capsys, monkeypatch):
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "trajectories.md").read_text(), re.DOTALL
    )
    lost = Trajectory.of(
        (),
        0.0,
        0,
        task_id="t7",
        messages=({"role": "user", "content": "hello"},),
        info={"score": 0.0},
    )
    record = to_record(lost, split="train", iteration=3, labels={}, texts=list)
    shard = reader.TrajectoryFile(3, "train", False)
    data = reader.pack_shard([record])
    reader.write_shard(tmp_path / "runs" / "quickstart", shard, data)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out == "t7 done hello\n"


def test_the_table_of_models_has_a_row_with_figures_for_every_family():
    page = (ROOT / "docs" / "models.md").read_text()
    (head, table) = re.search(
        r"(\| `model_type` .* logits .*)\n\|[-|]+\n((?:\|.*\n)+)", page
    ).groups()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [
        dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in table.splitlines()
    ]
    named = [row["`model_type`"].strip("`") for row in rows]
    assert named == list(dict.fromkeys(named))
    assert set(FAMILIES) - set(named) == set()
    assert set(named) - set(FAMILIES) == set()
    for row in rows:
        assert 0 < float(row["logits"]) <= 1e-4 and 0 < float(row["gradients"]) <= 1e-4, row
        here, torch = map(float, row["bfloat16"].split(" / "))
        assert 0 < here and 0 < torch, row
        formats = re.findall("`(.*?)`", row["tool format"])
        assert set(formats) <= set(TOOL_FORMATS) and row["tool format"], row
        assert all(f"*{limit}*:" in page for limit in row["limits"].split(", ") if limit), row
