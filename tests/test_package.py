"""The wheel holds a working product: installed into an empty environment, it trains elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import CONFIGS, ROOT
from process_cases import QUICK_XLA

import seeupo_jax

uv = pytest.importorskip("uv")
LOCK = ROOT / "requirements.lock"
# What a shell of a user has; nothing of this checkout.
KEPT = ("PATH", "JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS")


def run(*command, folder, home):
    """What a command of the new environment leaves, in another folder and home."""
    own = {name: os.environ[name] for name in KEPT if name in os.environ}
    own |= {"HOME": str(home), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)


def copy_bytecode(source, target):
    """What Python compiled of the same libraries; it uses what is of the very file that is there.

    To compile them again takes longer than what the new environment is asked to do.
    """
    for folder, _, _ in os.walk(target):
        compiled = source / Path(folder).relative_to(target) / "__pycache__"
        if compiled.is_dir():
            shutil.copytree(compiled, Path(folder) / "__pycache__", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The commands of an environment that holds the wheel and what it asks for, and no more."""
    place = tmp_path_factory.mktemp("wheel")
    find = uv.find_uv_bin()
    for command in (
        ("build", "--out-dir", place, ROOT),  # the wheel from the source distribution
        ("venv", place / "venv"),
    ):
        subprocess.run([find, *command, "--quiet"], check=True)
    (wheel,) = place.glob("*.whl")
    into = ("--python", place / "venv" / "bin" / "python", "--constraints", LOCK)
    subprocess.run([find, "pip", "install", "--quiet", *into, wheel], check=True)
    (site,) = place.glob("venv/lib/python*/site-packages")
    copy_bytecode(Path(sysconfig.get_path("purelib")), site)
    return place / "venv" / "bin"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    return tmp_path_factory.mktemp("elsewhere")


def test_an_image_holds_nothing_that_git_ignores():
    """Git's pattern without a slash inside is one for every folder, Docker's one for the top."""

    def lines(name):
        return [line for line in (ROOT / name).read_text().split("\n") if line[:1] not in ("", "#")]

    left_out = set(lines(".dockerignore"))
    for line in lines(".gitignore"):
        pattern = line.rstrip("/")
        place = Path(pattern.lstrip("/") if "/" in pattern else f"**/{pattern}")
        assert left_out & {str(place), *map(str, place.parents)}, line


@pytest.mark.exhaustive
def test_the_installed_command_trains_a_shipped_configuration_from_any_folder(installed, elsewhere):
    small = {
        "iterations": 1,
        **{"rollout.tasks": 1, "rollout.group_size": 2, "rollout.max_turns": 1},
        **{"evaluation.every": 0, "evaluation.tasks": 1, "evaluation.k": 1},
        **{"batching.buckets": (128,), "rollout.prefill_tokens": 32},  # programs to compile
    }
    line = ("--config=package:quickstart", "--workdir=run", "--config.telemetry.trackers=()")
    fields = [f"--config.{name}={value}" for name, value in small.items()]
    done = run(installed / "seeupo-train", *line, *fields, folder=elsewhere, home=elsewhere)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (elsewhere / "run/metrics.jsonl").read_text().splitlines())
    assert [line["iteration"] for line in lines if "sweep/loss" in line] == [1]
    assert (elsewhere / "run/policy/model.safetensors").is_file()
    manifest = json.loads((elsewhere / "run/run.json").read_text())
    assert manifest["command"][:2] == ["seeupo-train", "--config=package:quickstart"]
    assert manifest["versions"]["seeupo_jax"] == seeupo_jax.__version__


@pytest.mark.exhaustive
def test_every_installed_command_can_be_imported_and_a_mistake_ends_with_2(installed, elsewhere):
    program = (
        "import pathlib, seeupo_jax, importlib.metadata as m, sys\n"
        "found = m.entry_points(group='console_scripts')\n"
        "own = {e.name: e for e in found if e.name.startswith('seeupo-')}\n"
        "assert all(callable(e.load()) for e in own.values())\n"
        "root = pathlib.Path(seeupo_jax.__path__[0])\n"
        "assert (root / 'py.typed').is_file() and (root / 'assets').is_dir()\n"
        "print(root, *sorted(own))\n"
        "sys.argv[:] = ['seeupo-train', '--config=package:no_such', '--workdir=other']\n"
        "sys.exit(own['seeupo-train'].load()())"
    )
    done = run(installed / "python", "-c", program, folder=elsewhere, home=elsewhere)
    names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.py")))
    assert done.returncode == 2 and not (elsewhere / "other").exists()
    assert done.stderr.startswith("error: --config: got 'package:no_such'; allowed: ")
    assert done.stderr.endswith(f"one of {names}.\n")
    root, *names = done.stdout.split()
    assert Path(root).is_relative_to(installed.parent)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert names == sorted(scripts)


def pins(text):
    """Name -> its pins as (version, marker), and how many hashes each line has."""
    found = {}
    for entry in re.split(r"\n(?=\S)", text):
        if entry.startswith("#") or not entry.strip():
            continue
        requirement = Requirement(entry.partition(" \\\n")[0])
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}", entry)
        assert hashes, entry
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append((pin.version, requirement.marker))
    return found


@pytest.mark.sampled("3.12")
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_satisfies_the_requirements_on_every_python(python):
    where = {"python_version": python, "python_full_version": f"{python}.5", "extra": ""}
    locked = {
        name: [each for each, marker in entries if marker is None or marker.evaluate(where)]
        for name, entries in pins(LOCK.read_text()).items()
    }
    asked = (ROOT / "requirements.txt").read_text().splitlines()
    asked = [line.partition("#")[0] for line in asked if line.partition("#")[0].strip()]
    assert len(asked) > 20
    for line in asked:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate(where):
            continue
        (pin,) = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{line}: {pin}; run make lock"


def test_metadata_has_what_an_installer_reads():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"tpu", "cuda13", "test"} <= set(project["optional-dependencies"])
    for extra in ("tpu", "cuda13"):
        (line,) = project["optional-dependencies"][extra]
        assert re.search(rf"\b{extra}\b", " ".join(requires("jax"))), f"jax has no extra {extra}"
        assert Requirement(line).extras == {extra}
    assert version("seeupo_jax") == seeupo_jax.__version__
