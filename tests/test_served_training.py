"""Training on servers that sample: real servers and real runs, each in a process of its own."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import run_cases as cases
from loaded_python import LoadedPython
from places import TINY
from process_cases import environment, free_port
from safetensors.numpy import load_file, save_file

from seeupo_jax.agents.action_client import request_seed
from seeupo_jax.rollout.engine.sampling import task_number
from seeupo_jax.trajectories.reader import read_trajectories

KEY = "servers-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("served_training") / "model")


@contextlib.contextmanager
def serving(model, root, port):
    """A server that takes the weights of folders below a root; its process."""
    line = (f"--config={TINY}", f"--port={port}", f"--model={model}", f"--weight_updates={root}")
    small = ("--config.warm_start.stages=()", "--config.rollout.tasks=2")
    command = [sys.executable, "-m", "seeupo_jax.serve", *line, *small]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    own = environment() | {"SEEUPO_API_KEY": KEY}
    process = LoadedPython(command, env=own, **streams)
    try:
        assert "Serving" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def run(model, workdir, ports, *overrides, code=0):
    """A training run on servers; what it printed."""
    process = begin(model, workdir, ports, *overrides)
    out, errors = process.communicate(timeout=500)
    assert process.returncode == code, errors[-3000:]
    return out + errors


def begin(model, workdir, ports, *overrides, output=subprocess.PIPE):
    urls = ",".join(f"'{address(port)}'" for port in ports)
    choices = (
        "--config.rollout.engine=openai",
        f"--config.rollout.servers=({urls},)",
        "--config.rollout.deterministic=False",
        "--config.iterations=3",
        "--config.evaluation.every=0",
        "--config.evaluation.tasks=2",
        "--config.env.retries=1",
        "--config.env.retry_wait_s=0.1",
        "--config.telemetry.trajectory_share=1.0",
    )
    own = environment() | {"OPENAI_API_KEY": KEY}
    streams = {"stdout": output, "stderr": output, "text": True}
    command = cases.command(model, workdir, *choices, *overrides)
    return LoadedPython(command, env=own, **streams)


def address(port):
    return f"http://127.0.0.1:{port}"


def post(port, path, body):
    return httpx.post(address(port) + path, json=body, headers=HEADERS, timeout=60)


def version_of(port):
    return httpx.get(f"{address(port)}/weight_info", headers=HEADERS).json()["weight_version"]


def trained(workdir):
    """The records of the trajectories of each iteration."""
    found = {}
    for each in read_trajectories(workdir, evaluation=False):
        found.setdefault(each["iteration"], []).append(each)
    return found


def replay(port, record):
    """What a server answers to the requests of a trajectory's turns, and what is stored of them."""
    (segment,) = record["segments"]
    tokens_L, turn_L = np.array(segment["tokens"]), np.array(segment["turn"])
    task, member = task_number(record["task_id"]), record["member"]
    for turn in range(turn_L.max() + 1):
        places = np.flatnonzero(turn_L == turn)
        seed = request_seed(0, record["iteration"], task, member, turn)
        params = {"max_new_tokens": 8, "sampling_seed": seed, "temperature": 1.0, "top_k": -1}
        body = {"input_ids": tokens_L[: places[0]].tolist(), "sampling_params": params}
        answered = post(port, "/generate", body | {"return_logprob": True}).json()
        logp = [entry[0] for entry in answered["meta_info"]["output_token_logprobs"]]
        stored = [[segment[name][place] for place in places] for name in ("logp", "trainer_logp")]
        yield answered["output_ids"], logp, tokens_L[places].tolist(), *stored


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_run_on_two_servers_samples_each_iteration_from_its_version(model, tmp_path, dialect):
    workdir, ports = tmp_path / "run", (free_port(), free_port())
    with contextlib.ExitStack() as servers:
        for port in ports:
            servers.enter_context(serving(model, tmp_path, port))
        choice = f"--config.rollout.server_dialect={dialect}"
        run(model, workdir, ports, choice, "--config.evaluation.tasks=0")
        lines = cases.iterations(workdir)
        assert [line["iteration"] for line in lines] == [1, 2, 3]
        assert all(line["logp/sampler_trainer_gap"] < 1e-4 for line in lines)
        assert all(line["rollout/failed"] == 0 for line in lines)
        assert all(line["rollout/policy_lag"] == 0 for line in lines)
        for iteration, trajectories in trained(workdir).items():
            assert {each["policy_version"] for each in trajectories} == {iteration - 1}
        # The folder of the version that sampled the last iteration answers its requests again.
        published = sorted(each.name for each in (workdir / "served_weights").iterdir())
        assert published == ["1", "2"]
        (name,) = {version_of(port) for port in ports}
        assert re.fullmatch("2-[0-9a-f]{12}", name)
        compared = 0
        for record in trained(workdir)[3]:
            for tokens, logp, stored, sampler_logp, trainer_logp in replay(ports[0], record):
                assert tokens == stored
                np.testing.assert_allclose(logp, sampler_logp, atol=1e-5)
                np.testing.assert_allclose(logp, trainer_logp, atol=1e-4)
                compared += 1
        assert compared > 8


LAGGING = (
    "--config.rollout.max_lag=1",
    "--config.algorithm.importance.clip=2",
    "--config.evaluation.tasks=0",
)


def versions_of(record):
    """The version of each sampled token of a trajectory's only segment, by turn."""
    (segment,) = record["segments"]
    turn_L = np.array(segment["turn"])
    version_L = np.array(segment.get("version", [record["policy_version"]] * len(turn_L)))
    return [set(version_L[turn_L == turn].tolist()) for turn in range(turn_L.max() + 1)]


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_with_a_lag_servers_sample_beside_the_sweep_what_their_versions_say(
    model, tmp_path, dialect
):
    workdir, ports = tmp_path / "run", (free_port(), free_port())
    with contextlib.ExitStack() as servers:
        for port in ports:
            servers.enter_context(serving(model, tmp_path, port))
        choices = ("--config.iterations=4", f"--config.rollout.server_dialect={dialect}")
        run(model, workdir, ports, *choices, *LAGGING)
        lines = cases.iterations(workdir)
        assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
        lags = [line["rollout/policy_lag"] for line in lines]
        assert lags[0] == 0 and 1 in lags and max(lags) == 1
        for line in lines:
            assert line["rollout/failed"] == line["rollout/servers_left_out"] == 0
            assert line["rollout/workers"] == 1 and 0 < line["sweep/importance_ess"] <= 1
        for iteration, trajectories in trained(workdir).items():
            sampled = set().union(*(turn for each in trajectories for turn in versions_of(each)))
            assert sampled <= {iteration - 1, iteration - 2}
        # What either version has sampled for the last iteration is answered again.
        compared = 0
        for version in (2, 3):
            update = {"model_path": str(workdir / "served_weights" / str(version))}
            assert post(ports[0], "/update_weights_from_disk", update).json()["success"] is True
            for record in trained(workdir)[4]:
                replayed = zip(versions_of(record), replay(ports[0], record), strict=True)
                for sampled_by, (tokens, logp, stored, sampler_logp, _) in replayed:
                    if sampled_by == {version}:
                        assert tokens == stored
                        np.testing.assert_allclose(logp, sampler_logp, atol=1e-5)
                        compared += 1
        assert compared > 8


def sampled_tokens(port):
    text = httpx.get(f"{address(port)}/metrics", headers=HEADERS).text
    return float(text.split("seeupo_sampled_tokens_total ")[-1].split()[0])


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_with_a_lag_a_server_that_restarts_takes_part_again(model, tmp_path, dialect):
    workdir, stays, restarts = tmp_path / "run", free_port(), free_port()
    with contextlib.ExitStack() as servers:
        servers.enter_context(serving(model, tmp_path, stays))
        mortal = servers.enter_context(serving(model, tmp_path, restarts))
        choices = ("--config.iterations=1000", f"--config.rollout.server_dialect={dialect}")
        slow = "--config.env.name=run_environment:Slow"
        printed = servers.enter_context(open(tmp_path / "printed", "w+"))
        ports = (stays, restarts)
        process = begin(model, workdir, ports, *choices, *LAGGING, slow, output=printed)
        servers.callback(process.kill)
        wait_for(process, lambda: len(cases.iterations(workdir)) >= 2)
        mortal.kill()
        mortal.wait()
        servers.enter_context(serving(model, tmp_path, restarts))
        wait_for(process, lambda: version_of(restarts) != "default")
        trial = sampled_tokens(restarts)
        wait_for(process, lambda: sampled_tokens(restarts) > trial + 32)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
        said = (tmp_path / "printed").read_text()
    assert f"{address(restarts)} is left out" in said
    assert re.search(rf"{address(restarts)} serves \S+ and takes part again", said)
    lines = cases.iterations(workdir)
    assert all(line["rollout/failed"] == 0 for line in lines)
    assert max(line["rollout/policy_lag"] for line in lines) == 1
    assert {line["rollout/servers_left_out"] for line in lines} == {0, 1}


def wait_for(process, holds):
    deadline = time.monotonic() + 400
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_servers_that_die_or_refuse_their_weights_are_named_and_left_out(model, tmp_path):
    workdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    good, refusing, dying = ports = (free_port(), free_port(), free_port())
    with contextlib.ExitStack() as servers:
        servers.enter_context(serving(model, tmp_path, good))
        servers.enter_context(serving(model, elsewhere, refusing))
        mortal = servers.enter_context(serving(model, tmp_path, dying))
        process = begin(model, workdir, ports, "--config.iterations=4")
        deadline = time.monotonic() + 400
        while not (workdir / "checkpoints" / "1" / "manifest.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        mortal.kill()
        out, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors[-3000:]
        said = out + errors
        assert re.search(
            rf"{address(refusing)} is left out until an update works: .* allowed", said
        )
        assert f"{address(dying)} is left out until an update works" in said
        assert f"{address(good)} is left out" not in said
        lines = cases.iterations(workdir)
        assert len(lines) == 4 and all(line["rollout/failed"] == 0 for line in lines)
        assert all(line["logp/sampler_trainer_gap"] < 1e-4 for line in lines)
        assert version_of(refusing) == "default"
        for iteration, trajectories in trained(workdir).items():
            assert {each["policy_version"] for each in trajectories} == {iteration - 1}


def test_a_run_without_a_server_ends_with_one_sentence(model, tmp_path):
    workdir, port = tmp_path / "run", free_port()
    said = run(model, workdir, [port], code=2)
    assert f"config.rollout.servers: got none that samples ({address(port)}: " in said
    assert "Traceback" not in said


def test_a_damaged_folder_changes_nothing_and_a_whole_one_is_served(model, tmp_path):
    damaged, other = tmp_path / "damaged", tmp_path / "other"
    for copy in (damaged, other):
        shutil.copytree(model, copy)
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: -x if "norm" in name else x for name, x in tensors.items()}, weights)
    port = free_port()
    body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with serving(model, tmp_path, port):
        before = post(port, "/generate", body).json()
        update = {"model_path": str(damaged), "weight_version": "damaged"}
        refused = post(port, "/update_weights_from_disk", update)
        assert refused.status_code == 400 and refused.json()["success"] is False
        assert "Version 'default' is served on." in refused.json()["message"]
        after = post(port, "/generate", body).json()
        assert after["output_ids"] == before["output_ids"]
        assert after["meta_info"]["weight_version"] == "default"
        outside = post(port, "/update_weights_from_disk", {"model_path": "/etc"})
        assert outside.status_code == 403 and "--weight_updates" in json.dumps(outside.json())
        update = {"model_path": str(other), "weight_version": "7"}
        assert post(port, "/update_weights_from_disk", update).json()["success"] is True
        last = post(port, "/generate", body).json()
        assert last["meta_info"]["weight_version"] == "7"
        assert last["output_ids"] != before["output_ids"]
