"""The service as users reach it: a process of its own, and Tinker's SDK in its own environment."""

import json
import re
import subprocess
import sys

import httpx
import pytest
from loaded_python import LoadedPython
from places import CONFIGS, ROOT, SUPPORT
from process_cases import environment

PYTHON = ROOT / "third_party" / "tinker" / ".venv" / "bin" / "python"
KEY = "tml-the-users.key"
needs_sdk = pytest.mark.skipif(
    not (PYTHON.parent.parent / "installed.txt").is_file(),
    reason="third_party/tinker/.venv is missing: sh third_party/tinker/setup.sh",
)


class Server:
    """A server, until it is killed."""

    def __init__(self, workdir):
        config = f"--config={CONFIGS / 'quickstart.py'}"
        command = [sys.executable, "-m", "seeupo_jax.train_server", config, "--port=0"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        own = environment() | {"SEEUPO_API_KEY": KEY}
        self.process = LoadedPython([*command, f"--workdir={workdir}"], env=own, **streams)
        self.lines = [self.process.stdout.readline() for _ in range(3)]
        self.url = re.search(r"http://\S+", self.lines[0])[0]

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def server(workdir):
    made = Server(workdir)
    yield made
    made.kill()


def client(server, *arguments):
    """What the SDK saw."""
    own = environment() | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    own |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONPATH", None)
    command = [PYTHON, SUPPORT / "tinker_client.py", *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_says_where_it_is_and_refuses_what_has_no_key(server):
    served, limits, key = server.lines
    assert re.match(r"Serving package:order_desk as '\S+' at http://127\.0\.0\.1:\d+\n", served)
    assert limits.startswith("sequences: at most 128 tokens; samples: at most 16; saved in ")
    assert key == "Key: as in SEEUPO_API_KEY\n"
    asked = f"{server.url}/api/v1/get_server_capabilities"
    assert httpx.get(asked, headers={"X-API-Key": KEY}).status_code == 200
    refused = httpx.get(asked, headers={"X-API-Key": "another"})
    assert refused.status_code == 401 and "the key: got no known key" in refused.json()["detail"]
    unknown = httpx.get(f"{server.url}/api/v1/nowhere", headers={"X-API-Key": KEY})
    assert unknown.status_code == 404 and "/api/v1/nowhere" in unknown.json()["detail"]


@needs_sdk
def test_the_sdk_trains_samples_saves_and_goes_on_after_a_kill(server, workdir):
    saw = client(server)
    assert (saw["context"], saw["rank"]) == (128, 8)
    assert saw["loss_is_the_sum"] and saw["runs_are_apart"]
    assert saw["losses"] == sorted(saw["losses"], reverse=True)
    assert saw["a_seed_repeats"] == [True, True] and saw["stops"]
    assert max(saw["gap"], saw["prompt_gap"]) < 1e-3 and saw["first_is_none"]
    assert saw["rl"] == pytest.approx(saw["expected"], rel=1e-3)
    assert saw["loaded"] and saw["saved"] == ["sampler_weights", "for-later"]
    assert saw["refusal"] == ["user", True]
    server.kill()
    another = Server(workdir)
    try:
        resumed = client(another, saw["path"])
    finally:
        another.kill()
    assert 1 <= resumed["tokens"] <= 6 and len(resumed["logprobs"]) == 11
