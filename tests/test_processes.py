"""A training run in several processes is the run of one process on the same mesh."""

import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import run_cases as cases
from loaded_python import LoadedPython
from places import TINY
from process_cases import environment

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.lora import load_adapters
from seeupo_jax.policy.network import split_model

CHOICES = (
    "--config.iterations=2",
    "--config.rollout.group_size=4",
    "--config.optimizer.schedule=cosine",
    "--config.evaluation.every=0",
    "--config.evaluation.tasks=2",
    "--config.checkpoint.every=0",
)


# Two environments, tasks drawn by their success, and conversations that branch.
PARTS = (
    "--config.env.name=mixture",
    "--config.env.options={'environments': [{'name': 'run_environment:Echo', 'weight': 3},"
    " {'name': 'run_environment:Settled'}]}",
    "--config.curriculum.by=variance",
    "--config.algorithm.advantage=tree",
    "--config.algorithm.forks.kind=tree",
    "--config.algorithm.forks.factors=(2,2)",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("processes") / "model")


def run(model, processes, devices, *more):
    """A run of so many processes, and what each of them printed."""
    number = len([*model.parent.iterdir()])
    workdir = model.parent / f"of_{processes}_with_{devices}_{number}"
    started = cases.start(model, workdir, *CHOICES, *more, processes=processes, devices=devices)
    return workdir, cases.finish(started)


def without_times(line):
    parts = ("time/", "tokens_per_second", "programs_compiled", "checksum")
    return {name: x for name, x in line.items() if not any(part in name for part in parts)}


def test_two_processes_one_of_them_told_to_stop_are_one_to_the_last_bit(model):
    alone, _ = run(model, 1, 2, *PARTS)
    workdir = model.parent / "told_to_stop"
    first, second = cases.start(model, workdir, *CHOICES, *PARTS, processes=2)
    while not first.stdout.readline().startswith("compiled the sweep"):
        assert first.poll() is None
    second.send_signal(signal.SIGTERM)
    logged, _ = cases.finish([first, second])
    assert "; rerun the command to resume" in logged and "iteration 2/2" not in logged
    logged, silent = cases.finish(cases.start(model, workdir, *CHOICES, *PARTS, processes=2))
    assert "iteration 2/2" in logged and "iteration" not in silent
    assert cases.checksums(workdir) == cases.checksums(alone)
    lines, wanted = cases.read_metrics(workdir), cases.read_metrics(alone)
    assert list(map(without_times, lines)) == list(map(without_times, wanted))
    first, second = (line for line in lines if "sweep/learning_rate" in line)
    assert first["rollout/forks"] > 0 and first["rollout/trajectories/env=Settled"] == 4
    assert second["curriculum/known_tasks"] == 4
    assert second["sweep/learning_rate"] == pytest.approx(first["sweep/learning_rate"] / 2)
    shards = [
        {file.name: file.read_bytes() for file in (folder / "trajectories").iterdir()}
        for folder in (workdir, alone)
    ]
    assert shards[0] == shards[1] and {"train_000001.jsonl.gz", "train_000002.jsonl.gz"} <= {
        *shards[0]
    }


def test_four_processes_are_one_with_four_devices_to_rounding(model):
    # A sum over four devices of one process is made in another order than over four processes.
    alone, _ = run(model, 1, 4)
    together, _ = run(model, 4, 1)
    lines, wanted = cases.read_metrics(together), cases.read_metrics(alone)
    assert [line["iteration"] for line in lines] == [0, 1, 2, 2]
    for line, same in zip(map(without_times, lines), map(without_times, wanted), strict=True):
        assert line.keys() == same.keys()
        for name in line:
            np.testing.assert_allclose(line[name], same[name], rtol=1e-4, atol=1e-5, err_msg=name)
    _, params = split_model(from_pretrained(str(model), dtype="float32")[0])
    states = [
        Checkpoints(folder / "checkpoints", 1).restore({"params": params}, partial=True)
        for folder in (together, alone)
    ]
    (step, state, _), (same_step, same_state, _) = states
    assert step == same_step == 2
    difference = jax.tree.map(lambda x, y: abs(x - y).max(), state["params"], same_state["params"])
    assert 0 <= max(jax.tree.leaves(difference)) < 1e-5
    _, written = split_model(from_pretrained(str(together / "policy"), dtype="float32")[0])
    jax.tree.map(np.testing.assert_array_equal, written, state["params"])


# The first role of a game learns, the second is a model that does not.
GAME = (
    "--config.env.name=kuhn_poker",
    "--config.algorithm.advantage=rae",
    "--config.algorithm.scale=none",
    "--config.algorithm.dynamic_sampling=0",
)


def roles(**frozen):
    return f"--config.roles={[{'name': 'player_1'}, {'name': 'player_2', **frozen}]}"


def test_two_processes_against_a_frozen_model_are_one_to_the_last_bit(model):
    against = roles(path=str(model))
    alone, _ = run(model, 1, 2, *GAME, against)
    together, _ = run(model, 2, 1, *GAME, against)
    assert cases.checksums(together) == cases.checksums(alone)
    lines, wanted = cases.read_metrics(together), cases.read_metrics(alone)
    assert list(map(without_times, lines)) == list(map(without_times, wanted))
    trained = [line for line in lines if "sweep/turns" in line]
    assert [line["rollout/frozen_turns"] for line in trained] == [16, 16]


def test_each_of_two_processes_asks_the_server_of_a_frozen_role(model, monkeypatch):
    command = [sys.executable, "-m", "seeupo_jax.serve", f"--config={TINY}", "--port=0"]
    small = ("--config.rollout.tasks=1", "--config.warm_start.stages=()")
    own = environment() | {"SEEUPO_API_KEY": "key"}
    streams = {"stdout": subprocess.PIPE, "text": True}
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = LoadedPython([*command, f"--model={model}", *small], env=own, **streams)
    try:
        url = re.search(r"http://[^/]+", server.stdout.readline())[0]
        workdir, _ = run(model, 2, 1, *GAME, roles(server=url), "--config.iterations=1")
    finally:
        server.kill()
        server.communicate()
    *_, line = (line for line in cases.read_metrics(workdir) if "sweep/turns" in line)
    assert line["rollout/frozen_turns"] == 16 and line["rollout/failed"] == 0


def test_two_processes_make_a_policy_from_nothing_and_train_adapters_of_it(model, tmp_path):
    short = ("--config.evaluation.every=0", "--config.evaluation.tasks=2")
    demonstrations = {"skill": 0.5, "episodes": 20}
    stage = {"steps": 4, "learning_rate": 0.01, "demonstrations": demonstrations}
    desk = (
        "--config.iterations=0",
        "--config.model.path=none",
        "--config.env.name=order_desk",
        f"--config.env.options={{'data_dir': '{tmp_path / 'data'}'}}",
        f"--config.warm_start.stages=({stage},)",
    )
    cases.finish(cases.start(model, tmp_path / "warm", *short, *desk, processes=2))
    base = tmp_path / "warm" / "policy"
    made = from_pretrained(str(base), dtype="float32")[0]
    warm = from_pretrained(str(tmp_path / "warm" / "warm_start"), dtype="float32")[0]
    assert made.arch == warm.arch
    workdir, choices = tmp_path / "adapters", ("--config.iterations=1", "--config.lora.rank=2")
    cases.finish(cases.start(base, workdir, *short, *choices, processes=2))
    adapted = load_adapters(made, workdir / "policy")
    assert (adapted.layers[0].mlp.down.lora_b[...] != 0).any()
