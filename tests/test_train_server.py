"""The command: what it prints, what it refuses before a policy is loaded, and its end."""

import re
import signal
import socket

import httpx
import pytest
from places import CONFIGS
from tinker_cases import KEY, Server

from seeupo_jax.train_server import main

QUICKSTART = f"--config={CONFIGS / 'quickstart.py'}"


def test_it_says_where_it_is_refuses_what_has_no_key_and_ends_by_a_signal(tmp_path):
    server = Server(tmp_path / "saved")
    served, limits, key = server.lines
    assert re.match(r"Serving package:order_desk as '\S+' at http://127\.0\.0\.1:\d+\n", served)
    assert limits.startswith("sequences: at most 128 tokens; samples: at most 16; saved in ")
    assert key == "Key: as in SEEUPO_API_KEY\n"
    assert httpx.get(f"{server.url}/api/v1/healthz").status_code == 200
    asked = f"{server.url}/api/v1/get_server_capabilities"
    assert httpx.get(asked, headers={"X-API-Key": KEY}).status_code == 200
    assert httpx.get(asked, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    refused = httpx.get(asked, headers={"X-API-Key": "another"})
    assert refused.status_code == 401 and "the key: got no known key" in refused.json()["detail"]
    unknown = httpx.get(f"{server.url}/api/v1/nowhere", headers={"X-API-Key": KEY})
    assert unknown.status_code == 404 and "/api/v1/nowhere" in unknown.json()["detail"]
    server.process.send_signal(signal.SIGTERM)
    printed, _ = server.process.communicate(timeout=60)
    assert printed == "Stopped by SIGTERM.\n" and server.process.returncode == 0


REFUSED = {
    "--model: got none; allowed: a model folder, since the configuration makes its policy from": [
        f"--config={CONFIGS / 'order_desk_warm_start.py'}"
    ],
    "--port: got 8000 at 203.0.113.7, which cannot be had": [QUICKSTART, "--host=203.0.113.7"],
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
