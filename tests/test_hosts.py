"""Hosts that differ refuse to train together, before any work; those that are equal train."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import run_cases as cases
from loaded_python import LoadedPython
from process_cases import PYTHONPATH, environment, free_port, run_processes
from safetensors.numpy import load_file, save_file

CONFIG = """
import config_helper
from tiny_config import get_config as tiny


def get_config():
    return tiny()
"""
ENVIRONMENT = """
import user_helper
from run_environment import Echo


class Desk(Echo):
    pass


def by_length(episode):
    return 0.0
"""
CONVERSATION = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
}
FILES = {
    "config.py": CONFIG,
    "config_helper.py": "",
    "user_env.py": ENVIRONMENT,
    "user_helper.py": "",
    "user_reward.py": "def none(episode):\n    return 0.0\n",
    "template.jinja": "{{ messages }}",
    "data.jsonl": "".join(json.dumps(CONVERSATION) + "\n" for _ in range(8)),
}
CHOICES = (
    *(each for each in cases.CHOICES if "env.name" not in each),
    "--config=config.py",
    "--config.model.path=model",
    "--config.env.name=user_env:Desk",
    "--config.rewards=[{'function': 'user_reward:none'}]",
)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A folder with all that a run needs."""
    folder = tmp_path_factory.mktemp("hosts") / "first"
    cases.save_policy(folder / "model")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def start(folders, workdir, *more, module="train", env=None):
    """A process in each folder; `env`: further variables of the last one."""
    port, started = free_port(), []
    for number, folder in enumerate(folders):
        place = (
            f"--coordinator=localhost:{port}",
            f"--process_id={number}",
            f"--num_processes={len(folders)}",
        )
        own = env if env is not None and number == len(folders) - 1 else {}
        called = [sys.executable, "-m", f"seeupo_jax.{module}", f"--workdir={workdir}"]
        started.append(
            LoadedPython(
                [*called, *CHOICES, *more, *place],
                cwd=folder,
                env=environment() | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def refusals(started):
    """The sentence with which each process ends at once, with exit code 2."""
    try:
        printed = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [2] * len(started), printed
    assert {out for out, _ in printed} == {""}
    return [errors.strip().removeprefix("error: ") for _, errors in printed]


def refusal(started):
    """The one sentence with which all of them end."""
    (sentence,) = {*refusals(started)}
    return sentence


def other_weights(folder):
    file = folder / "model/model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + np.float32(1e-6)
    save_file(tensors, file, metadata={"format": "pt"})


def appended(name, text="\n"):
    def change(folder):
        with (folder / name).open("a") as file:
            file.write(text)

    return change


def other_package(folder):
    info = folder / "optax-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")


TEMPLATE = "--config.chat.template=template.jinja"
WAYS = {
    "weights": (other_weights, "file model.safetensors of config.model.path=model", ()),
    "tokenizer": (
        appended("model/tokenizer_config.json", "{}"),
        "file tokenizer_config.json of config.model.path=model",
        (),
    ),
    "chat": (appended("model/chat.json"), "file chat.json of config.model.path=model", ()),
    "template": (
        appended("template.jinja"),
        "file config.chat.template=template.jinja",
        (TEMPLATE,),
    ),
    "environment": (appended("user_env.py"), "code of user_env, for config.env.name", ()),
    "reward": (
        appended("user_reward.py"),
        "code of user_reward, for config.rewards[0].function",
        (),
    ),
    "imported": (appended("user_helper.py"), "code of user_helper, for config.env.name", ()),
    "configuration": (appended("config_helper.py"), "code of config_helper, for --config", ()),
    "package": (other_package, "version of optax", ()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_hosts_with_other_files_or_code_at_the_same_path_are_refused(host, tmp_path, way):
    change, named, more = WAYS[way]
    second = shutil.copytree(host, tmp_path / "second")
    change(second)
    env = {"PYTHONPATH": f"{second}:{PYTHONPATH}"}
    sentence = refusal(start([host, second], tmp_path / "run", *more, env=env))
    assert sentence.startswith(f"{named}: got ") and " in process 1 and " in sentence
    assert sentence.endswith(" in process 0; allowed: the same.")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "variable, value, named",
    [
        ("JAX_DEFAULT_PRNG_IMPL", "rbg", "jax_default_prng_impl: got rbg in process 1 and three"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "highest", "jax_default_matmul_precision: got highest"),
        (
            "XLA_FLAGS",
            f"{environment()['XLA_FLAGS']} --xla_cpu_enable_fast_math=true",
            "xla_cpu_enable_fast_math of XLA_FLAGS: got true in process 1 and None in process 0",
        ),
    ],
)
def test_hosts_that_compute_otherwise_are_refused(host, tmp_path, variable, value, named):
    sentence = refusal(start([host, host], tmp_path / "run", env={variable: value}))
    assert sentence.startswith(named)


def test_hosts_with_other_conversations_are_refused_by_sft(host, tmp_path):
    second = shutil.copytree(host, tmp_path / "second")
    lines = (second / "data.jsonl").read_text()
    (second / "data.jsonl").write_text(lines.replace('"b"', '"c"', 1))
    folders = [host, second]
    sentence = refusal(start(folders, tmp_path / "run", "--data=data.jsonl", module="sft"))
    assert sentence.startswith("file config.sft.data=data.jsonl: got ")


def test_three_processes_of_which_one_differs_all_end_and_evaluations_too(host, tmp_path):
    second = shutil.copytree(host, tmp_path / "second")
    other_weights(second)
    folders = [host, second, host]
    sentence = refusal(start(folders, tmp_path / "run", "--untrained", module="evaluate"))
    assert sentence.startswith("file model.safetensors of config.model.path=model: got ")
    assert " in process 1 and " in sentence


def test_a_host_that_cannot_read_the_configuration_ends_the_others(host, tmp_path):
    second = shutil.copytree(host, tmp_path / "second")
    (second / "config_helper.py").write_text("import nowhere_at_all")
    first, failing = refusals(start([host, second], tmp_path / "run"))
    assert first == f"process 1: {failing}" and "\n" not in failing
    assert failing.startswith("--config: ") and "No module named 'nowhere_at_all'" in failing


def test_processes_of_python_code_that_have_met_already_are_compared_too(tmp_path):
    read = run_processes("met_process.py", 2, 1, tmp_path, 0, 5, read=bytes.decode)
    assert read == ["config.seed: got 5 in process 1 and 0 in process 0; allowed: the same."] * 2


@pytest.mark.exhaustive
def test_equal_hosts_in_other_folders_train_together(host, tmp_path):
    second = shutil.copytree(host, tmp_path / "elsewhere/second")
    (second / "notes.txt").write_text("of this host alone")
    quiet = ("--config.iterations=1", "--config.evaluation.every=0", "--config.evaluation.tasks=2")
    env = {"JAX_LOG_COMPILES": "0", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    started = start([host, second], tmp_path / "run", *quiet, env=env)
    cases.finish(started)
    assert [line["iteration"] for line in cases.iterations(tmp_path / "run")] == [1]
