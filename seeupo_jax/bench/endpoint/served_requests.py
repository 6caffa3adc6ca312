"""`seeupo-serve` beside `transformers serve`: requests/s, and the time to the first text.

Both serve one model folder, and answer the same prompts at temperature 1 with as many tokens at
most. The clients are a process of their own. No prompt comes twice: no cache knows it. Where the
dependencies of `transformers serve` are not installed, `generate` runs behind a server of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from transformers.utils.import_utils import is_serve_available

from seeupo_jax.bench import comparison, machine
from seeupo_jax.bench.comparison import OURS
from seeupo_jax.bench.inputs import architecture
from seeupo_jax.bench.settings import writable_file
from seeupo_jax.configuration.flags import Flags, Wrong, names, whole
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.transformer import Transformer

TOKENIZER = "package:order_desk"  # of a random model
_START_S = 600.0  # that a server may take until it answers
_WORDS = "order ship late find open sold item cost none when paid gift"


def _counts(value: str) -> tuple[int, ...]:
    given = names(value)
    if not given or not all(each.isdecimal() and int(each) > 0 for each in given):
        raise Wrong(value, "numbers of clients, such as 1,8,32")
    return tuple(map(int, given))


def add_flags(parser: Flags) -> None:
    """What is asked, and of what."""
    parser.flag("model", "random weights of a size: nano, tiny, 135m", default="tiny")
    parser.flag("model_path", "a chat model's folder or GGUF file instead of random weights")
    parser.flag("clients", "that ask at once; default: 1,8,32", _counts, default=(1, 8, 32))
    parser.flag("requests", "of each client in a round", whole(1), default=4)
    parser.flag("words", "of a prompt", whole(1), default=64)
    parser.flag("answer", "tokens of an answer at most", whole(1), default=32)
    parser.flag("repeats", "rounds", whole(1), default=3)
    parser.flag("seed", "of weights and prompts", whole(0), default=0)
    parser.flag("json", "also write the figures to this file", writable_file)


class _Server(NamedTuple):
    """A server that runs. model: what requests name."""

    base_url: str
    key: str
    model: str


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints and returns the figures.

    Raises:
      ValueError: a wrong setting, or a server that does not start.
    """
    device = machine.only_device()
    dtype = machine.fast_dtype(device)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "model")
        tokenizer = _write_model(given, folder, dtype)
        prompts = _Prompts(given, tokenizer)
        theirs, command = _of_transformers(folder, device.platform, dtype)
        contenders = {
            OURS: stack.enter_context(_running(_ours(folder, given, prompts.longest, dtype))),
            theirs: stack.enter_context(_running(command)),
        }
        for server in contenders.values():
            _ask(server, 1, prompts.take(1), given.answer)  # warm
        each = {
            str(clients): _measure(contenders, clients, prompts, given) for clients in given.clients
        }
    figures = {
        "benchmark": "serving",
        "against": theirs,
        "model": given.model if given.model_path is None else given.model_path,
        "dtype": dtype,
        "prompt_words": given.words,
        "answer_tokens": given.answer,
        "machine": machine.describe(device),
        "clients": each,
    }
    _print(figures)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _write_model(given: argparse.Namespace, folder: Path, dtype: str) -> Tokenizer:
    """Writes the model that both serve; its tokenizer."""
    if given.model_path is None:
        tokenizer = read_tokenizer(TOKENIZER)
        assert tokenizer is not None
        arch = architecture(given.model, dtype)
        # Every token has a text, so that every first token shows.
        arch = dataclasses.replace(arch, vocab_size=tokenizer.vocab_size)
        model = Transformer(arch, nnx.Rngs(given.seed))
    else:
        model, found = from_pretrained(given.model_path, dtype=dtype)
        if found is None:
            raise ValueError(f"--model_path: {given.model_path} has no tokenizer; allowed: one.")
        tokenizer = found
    save_pretrained(model, folder, tokenizer, dtype=dtype)
    return tokenizer


class _Prompts:
    """Prompts of random words, none of them twice. longest: tokens of a conversation at most."""

    def __init__(self, given: argparse.Namespace, tokenizer: Tokenizer):
        self._rng, self._words = np.random.default_rng(given.seed), given.words
        self._tokenizer, self._answer = tokenizer, given.answer
        lengths = (len(tokenizer.begin(_message(text), ()).tokens) for text in self.take(32))
        self.longest = max(lengths) * 2 + given.answer  # some prompt may be longer than these

    def take(self, count: int) -> list[str]:
        words = _WORDS.split()
        return [" ".join(self._rng.choice(words, self._words)) for _ in range(count)]


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _ours(folder: Path, given: argparse.Namespace, longest: int, dtype: str) -> list[str]:
    fields = {
        "model.dtype": dtype,
        "rollout.max_context": longest,
        "rollout.max_action_tokens": given.answer,
        "rollout.concurrency": max(given.clients),
        "rollout.temperature": 1.0,
    }
    line = ["seeupo_jax.serve", "--config=package:quickstart", f"--model={folder}", "--port={port}"]
    return [*line, *(f"--config.{name}={value}" for name, value in fields.items())]


def _of_transformers(folder: Path, platform: str, dtype: str) -> tuple[str, list[str]]:
    """The other side's name, and the module and arguments that serve a folder."""
    if is_serve_available():
        device = "cpu" if platform == "cpu" else "cuda"
        line = ["transformers.cli.transformers", "serve", str(folder), "--port={port}"]
        return "transformers serve", [*line, f"--device={device}", f"--dtype={dtype}"]
    line = ["seeupo_jax.bench.endpoint.generate_server", str(folder), "{port}", dtype]
    return "transformers generate", line


@contextlib.contextmanager
def _running(line: Sequence[str]) -> Iterator[_Server]:
    """Runs a server, a module and its arguments, until the end; it answers already."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    key = secrets.token_urlsafe(16)
    command = [sys.executable, "-m", *(word.replace("{port}", str(port)) for word in line)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"SEEUPO_API_KEY": key}
        )
        try:
            url, model = f"http://127.0.0.1:{port}/v1", _first_model(process, port, key)
            if model is None:
                log.seek(0)
                raise ValueError(f"{line[0]}: does not answer: {log.read()[-500:].strip()}")
            yield _Server(url, key, model)
        finally:
            process.terminate()
            process.wait()


def _first_model(process: subprocess.Popen[Any], port: int, key: str) -> str | None:
    """The model that a new server lists; None: it ended, or took too long."""
    url, headers = f"http://127.0.0.1:{port}/v1/models", {"Authorization": f"Bearer {key}"}
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
                return json.load(reply)["data"][0]["id"]
        time.sleep(0.2)
    return None


def _measure(
    contenders: dict[str, _Server], clients: int, prompts: _Prompts, given: argparse.Namespace
) -> dict[str, Any]:
    """Rounds of one number of clients."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    rounds = [prompts.take(clients * given.requests) for _ in range(given.repeats)]

    def asks(name: str) -> Callable[[int], float]:
        def contend(number: int) -> float:
            answered = _ask(contenders[name], clients, rounds[number], given.answer)
            found[name] += answered["requests"]
            return answered["seconds"]

        return contend

    timings = comparison.alternate({name: asks(name) for name in contenders}, given.repeats)
    count = clients * given.requests
    sides = {}
    for name, timing in timings.items():
        firsts = [one["first_s"] for one in found[name] if one["first_s"] is not None]
        tokens = sum(one["tokens"] for one in found[name])
        sides[name] = timing.as_json() | {
            "requests_per_second": count / timing.median,
            "tokens_per_second": tokens / sum(timing.each),
            "tokens_per_request": tokens / len(found[name]),
            "first_text_s": statistics.median(firsts),
            "first_text_most_s": max(firsts),
        }
    ours, theirs = contenders
    first = sides[theirs]["first_text_s"] / sides[ours]["first_text_s"]
    ratio = comparison.ratio(timings[theirs], timings[ours])
    return {"requests": count, **ratio, "first_text_ratio": first, "contenders": sides}


def _ask(server: _Server, clients: int, prompts: Sequence[str], answer: int) -> dict[str, Any]:
    """What `load_client` reports of its requests."""
    asked = server._asdict() | {"clients": clients, "prompts": prompts, "max_tokens": answer}
    done = subprocess.run(
        [sys.executable, "-m", "seeupo_jax.bench.endpoint.load_client"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"{server.base_url}: a request failed: {done.stderr[-500:].strip()}")
    return json.loads(done.stdout)


def _print(figures: dict[str, Any]) -> None:
    print(
        f"{OURS} against {figures['against']}: model {figures['model']}, {figures['dtype']},"
        f" prompts of {figures['prompt_words']} words, answers of {figures['answer_tokens']} tokens"
        f" at most, {figures['machine']['device']}"
    )
    for clients, found in figures["clients"].items():
        print(
            f"{clients} clients: {found['ratio']:.2f}x ({found['ratio_least']:.2f} to"
            f" {found['ratio_most']:.2f} by rounds) the requests/s;"
            f" {found['first_text_ratio']:.2f}x sooner to the first text"
        )
        for name, side in found["contenders"].items():
            print(
                f"  {name}: {side['requests_per_second']:.2f} requests/s,"
                f" {side['tokens_per_second']:.0f} tokens/s, first text after"
                f" {side['first_text_s'] * 1000:.0f} ms (at most"
                f" {side['first_text_most_s'] * 1000:.0f}), {side['tokens_per_request']:.1f} tokens"
                " a request"
            )
