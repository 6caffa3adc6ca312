"""A training service in a process of its own, and programs of Tinker's SDK that call it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from loaded_python import LoadedPython
from places import CONFIGS, ROOT
from process_cases import environment

from seeupo_jax.train_service.api import PROTOBUF
from seeupo_jax.train_service.message_schema import ForwardBackwardRequest

TINKER = ROOT / "third_party" / "tinker"
PYTHON = TINKER / ".venv" / "bin" / "python"
TOKENS = np.arange(5, 17)


def needs_sdk(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test of the second tier, which is skipped where the SDK is not set up."""
    reason = "Tinker's SDK is not set up: sh third_party/tinker/setup.sh"
    there = (TINKER / ".venv" / "installed.txt").is_file()
    return pytest.mark.exhaustive(pytest.mark.skipif(not there, reason=reason)(test))


class Server:
    """A server of the bundled policy, or of another one, until it is killed.

    key: the environment's, or the one that the server has made and printed.
    """

    def __init__(self, workdir: Path, *flags: str, key: str | None = None):
        config = f"--config={CONFIGS / 'quickstart.py'}"
        command = [sys.executable, "-m", "seeupo_jax.train_server", config, "--port=0"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        own = environment() | ({} if key is None else {"SEEUPO_API_KEY": key})
        self.process = LoadedPython([*command, f"--workdir={workdir}", *flags], env=own, **streams)
        self.lines = [self.process.stdout.readline() for _ in range(3)]
        found = re.search(r"http://\S+", self.lines[0])
        if found is None:
            self.process.kill()
            pytest.fail(f"the server did not start: {self.process.communicate()[1]}")
        self.url = found[0]
        self.key = key or self.lines[2].split()[1]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def run_client(server: Server, *arguments: str | Path) -> str:
    """What a program of the SDK's Python printed."""
    own = environment() | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
    own |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    own.pop("PYTHONPATH", None)
    command = [PYTHON, *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


class HttpClient:
    """Calls a service by bare HTTP, as no SDK would; to be used in a `with`."""

    def __init__(self, server: Server):
        self.http = httpx.Client(
            base_url=f"{server.url}/api/v1/", headers={"X-API-Key": server.key}, timeout=120
        )
        (served,) = self.http.get("get_server_capabilities").json()["supported_models"]
        self.model = served["model_name"]

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
        """Posts JSON, or a message."""
        if isinstance(body, bytes):
            return self.http.post(path, content=body, headers={"Content-Type": PROTOBUF})
        return self.http.post(path, json=body)

    def wait(self, answer: httpx.Response) -> httpx.Response:
        """The result of a request, once it is there."""
        asked = {"request_id": answer.json()["request_id"]}
        while (result := self.ask("retrieve_future", asked)).status_code == 408:
            pass
        return result

    def open_run(self, **lora: Any) -> tuple[str, str]:
        """A session and its only run."""
        session = self.ask("create_session", {"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": self.model}
        made = self.ask("create_model", body | {"lora_config": {"rank": 4, "seed": 1, **lora}})
        assert self.wait(made).json()["model_id"] == made.json()["model_id"]
        return session, made.json()["model_id"]


def pass_body(run: str, number: int | None) -> bytes:
    """A pass over one sequence by cross entropy."""
    message = ForwardBackwardRequest(model_id=run, seq_id=number, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = TOKENS[:-1].astype("<i4").tobytes()
    targets, weights = (datum.loss_fn_inputs[name] for name in ("target_tokens", "weights"))
    targets.dense, targets.dtype = TOKENS[1:].astype("<i8").tobytes(), 2
    weights.dense, weights.dtype = np.ones(11, "<f4").tobytes(), 1
    return message.SerializeToString()


def step_body(run: str, number: Any, **adam: float) -> dict[str, Any]:
    """A step of the optimizer."""
    return {"model_id": run, "seq_id": number, "adam_params": {"learning_rate": 1e-2, **adam}}


def sample_body(samples: int = 1, **params: Any) -> dict[str, Any]:
    """A request to sample, which names no weights yet."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:5].tolist()}]}
    return {"num_samples": samples, "prompt": prompt, "sampling_params": params}
