"""The command: what it prints, what it refuses before a policy is loaded, and its end."""

import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from places import CONFIGS
from tinker_cases import HttpClient, Server, pass_body, sample_body, step_body

from seeupo_jax.train_server import main
from seeupo_jax.train_service.message_schema import ForwardBackwardOutput, SampleResponse

SAMPLES = 400
QUICKSTART = f"--config={CONFIGS / 'quickstart.py'}"


def test_it_says_where_it_is_refuses_what_has_no_key_and_ends_by_a_signal(tmp_path):
    server = Server(tmp_path / "saved", key="tml-the-users.key")
    served, limits, key = server.lines
    assert re.match(r"Serving package:order_desk as '\S+' at http://127\.0\.0\.1:\d+\n", served)
    assert limits.startswith("sequences: at most 128 tokens; samples: at most 16; saved in ")
    assert key == "Key: as in SEEUPO_API_KEY\n"
    assert httpx.get(f"{server.url}/api/v1/healthz").status_code == 200
    asked = f"{server.url}/api/v1/get_server_capabilities"
    assert httpx.get(asked, headers={"X-API-Key": server.key}).status_code == 200
    assert httpx.get(asked, headers={"Authorization": f"Bearer {server.key}"}).status_code == 200
    refused = httpx.get(asked, headers={"X-API-Key": "another"})
    assert refused.status_code == 401 and "the key: got no known key" in refused.json()["detail"]
    unknown = httpx.get(f"{server.url}/api/v1/nowhere", headers={"X-API-Key": server.key})
    assert unknown.status_code == 404 and "/api/v1/nowhere" in unknown.json()["detail"]
    server.process.send_signal(signal.SIGTERM)
    printed, _ = server.process.communicate(timeout=60)
    assert printed == "Stopped by SIGTERM.\n" and server.process.returncode == 0


def saved_loss(client, path):
    """The loss of a new run that begins with saved weights, and after one more step."""
    session = client.ask("create_session", {}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    run = client.wait(client.ask("load_weights", body)).json()["model_id"]
    return losses(client, run, 1)


def losses(client, run, first):
    """Of two passes, with a step between them."""
    before = client.ask("forward_backward", pass_body(run, first))
    client.ask("optim_step", step_body(run, first + 1))
    after = client.ask("forward_backward", pass_body(run, first + 2))
    results = [client.wait(each).content for each in (before, after)]
    return [ForwardBackwardOutput.FromString(each).metrics["loss:sum"] for each in results]


def test_a_signal_tells_those_that_wait_and_loses_nothing_that_was_saved(tmp_path):
    server = Server(tmp_path / "saved")
    with HttpClient(server) as client:
        _, run = client.open_run()
        losses(client, run, 1)
        client.ask("optim_step", step_body(run, 4))
        body = {"model_id": run, "seq_id": 5, "path": "one"}
        path = client.wait(client.ask("save_weights", body)).json()["path"]
        expected = losses(client, run, 6)
        body = sample_body(SAMPLES, max_tokens=16) | {"base_model": client.model}
        asked = [
            client.ask("asample", body),  # is being done when the signal comes
            client.ask("forward_backward", pass_body(run, 9)),  # is the next one
            client.ask("optim_step", step_body(run, 11)),  # is for the number 10
        ]
        with ThreadPoolExecutor(len(asked)) as threads:
            waiting = [threads.submit(client.wait, each) for each in asked]
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            sampled, *told = [each.result() for each in waiting]
        printed, warned = server.process.communicate(timeout=60)
    assert len(SampleResponse.FromString(sampled.content).sequences) == SAMPLES
    for each in told:
        assert each.json()["error"] == "the server is shutting down; ask again later."
    assert (printed, server.process.returncode) == ("Stopped by SIGTERM.\n", 0)
    assert "Traceback" not in warned
    another = Server(tmp_path / "saved")
    try:
        with HttpClient(another) as client:
            assert saved_loss(client, path) == expected
    finally:
        another.kill()


REFUSED = {
    "--model: got none; allowed: a model folder, since the configuration makes its policy from": [
        f"--config={CONFIGS / 'order_desk_warm_start.py'}"
    ],
    "--port: got 8000 at 203.0.113.7, which cannot be had": [QUICKSTART, "--host=203.0.113.7"],
    "config.lora.per_turn: got 2; allowed: 0 and 1, since a client's": [
        QUICKSTART,
        "--port=0",
        "--config.lora.rank=4",
        "--config.lora.per_turn=2",
    ],
    "config.lora.path: got 'adapters'; allowed: none, since clients' adapters are on the model": [
        QUICKSTART,
        "--port=0",
        "--config.lora.path=adapters",
    ],
    "config.rollout.grammar: got 'tool_calls'; allowed: none, since clients sample any tokens": [
        QUICKSTART,
        "--port=0",
        "--config.rollout.grammar=tool_calls",
    ],
    "config.rollout.engine: got 'openai'; allowed: built_in, which samples from adapters that": [
        QUICKSTART,
        "--port=0",
        "--config.rollout.engine=openai",
        "--config.rollout.deterministic=False",
        "--config.rollout.servers=('http://127.0.0.1:1',)",
    ],
    "config.optimizer.groups: got some; allowed: none, since clients train adapters": [
        QUICKSTART,
        "--port=0",
        "--config.optimizer.groups=({'pattern': '*norm*', 'frozen': True},)",
    ],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_mistake_is_one_sentence_before_anything_is_made(tmp_path, capsys, sentence):
    workdir = tmp_path / "saved"
    with pytest.raises(SystemExit) as ended:
        main(["train_server", *REFUSED[sentence], f"--workdir={workdir}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1 and not workdir.exists()


def test_a_key_that_the_sdk_would_not_send_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SEEUPO_API_KEY", "kV1")
    with pytest.raises(SystemExit) as ended:
        main(["train_server", QUICKSTART, "--port=0", f"--workdir={tmp_path / 'saved'}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "kV1" not in error
    assert (
        "SEEUPO_API_KEY: got a key that begins otherwise; allowed: one that begins with tml-"
        in error
    )


def test_a_port_that_is_taken_and_a_folder_that_is_a_file_are_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, sentence in (
            (
                [f"--port={port}", f"--workdir={tmp_path}"],
                f"--port: got {port} at 127.0.0.1, which cannot be had (Address already in use",
            ),
            (
                ["--port=0", f"--workdir={file}"],
                f"--workdir: got {file} (File exists); allowed: a folder that can be made and"
                " written to.",
            ),
        ):
            with pytest.raises(SystemExit) as ended:
                main(["train_server", QUICKSTART, *flags])
            assert ended.value.code == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {sentence}") and error.count("\n") == 1
