"""Every command in the README and in docs/ is one that works."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from seeupo_jax import build, envs
from seeupo_jax.algorithms.recipes import RECIPES
from seeupo_jax.cli import parse_flags
from seeupo_jax.config import Env, load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """The command lines of all bash blocks, comments and line continuations resolved."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]
    return found


def trainings() -> list[str]:
    return [line for line in commands() if "--config=" in line]


def test_the_readme_is_short_and_its_commands_were_found():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert len(trainings()) >= 4 and any(line.startswith("make") for line in commands())


@pytest.fixture
def with_devices(monkeypatch):
    """Lets the code see so many of this process's devices."""
    every = jax.devices()
    return lambda count: monkeypatch.setattr(jax, "devices", lambda: every[:count])


@pytest.mark.parametrize("line", trainings())
def test_a_command_names_a_config_and_fields_that_pass_every_check(line, with_devices):
    pretended = re.search(r"--devices (\d+)", line)
    with_devices(int(pretended[1]) if pretended else 1)
    flags = dict(f.removeprefix("--").split("=", 1) for f in line.split() if f.startswith("--conf"))
    path = flags.pop("config")
    overrides = [f"{key.removeprefix('config.')}={value}" for key, value in flags.items()]
    build.check(load_config(ROOT / path, overrides, recipes=RECIPES))


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make")])
def test_a_make_target_exists(line):
    done = subprocess.run([*line.split(), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_config_file_passes_every_check_and_is_in_the_readme(with_devices):
    with_devices(1)
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "configs").glob("*.py")):
        assert f"configs/{path.name}" in readme
        if "14b" not in path.name:
            build.check(load_config(path, recipes=RECIPES))


# What the folders of the paper's models say of their networks, and whose tokenizer they have.
LARGE = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
PAPERS_MODELS = {
    "Qwen3-14B": ("qwen3", LARGE | {"num_hidden_layers": 40, "intermediate_size": 17_408}),
    "Qwen2.5-14B-Instruct": (
        "qwen2_5",
        LARGE | {"num_hidden_layers": 48, "intermediate_size": 13_824},
    ),
}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*14b*.py")), ids=lambda p: p.stem)
def test_the_papers_configs_pass_every_check_where_their_models_are(path, tmp_path, monkeypatch):
    config = load_config(path, recipes=RECIPES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"model path: got {config.model.path!r}"):
        build.check(dataclasses.replace(config, env=Env()))
    tokenizer, sizes = PAPERS_MODELS[Path(config.model.path).name]
    shutil.copytree(ROOT / "third_party" / "models" / tokenizer, config.model.path)
    family = {"qwen3": "qwen3", "qwen2_5": "qwen2"}[tokenizer]
    common = {"model_type": family, "vocab_size": 152_064, "max_position_embeddings": 32_768}
    (Path(config.model.path) / "config.json").write_text(json.dumps(common | LARGE | sizes))
    build.check(dataclasses.replace(config, env=Env()))
    if config.env.name == "appworld":
        with pytest.raises(ValueError, match="appworld (root|home)"):  # no other complaint
            envs.make("appworld", **config.env.options, root=str(tmp_path))
    else:
        build.check(config)


def test_overrides_reach_the_override_flag():
    line = ["train", "--config=f.py", "--config.seed=1", "--workdir=d"]
    assert parse_flags(line) == ["train", "--config=f.py", "--override=seed=1", "--workdir=d"]


def test_the_launch_script_helps_and_refuses():
    script = ROOT / "launch" / "local.sh"
    assert "usage" in subprocess.run([script, "--help"], capture_output=True, text=True).stdout
    wrong = subprocess.run([script, "--devices", "two"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "got 'two'" in wrong.stderr
