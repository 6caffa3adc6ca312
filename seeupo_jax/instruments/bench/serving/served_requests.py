"""`seeupo-serve` against another server: requests/s, and the time to the first text.

Both serve one model, and answer the same prompts at one temperature with as many tokens at most.
The clients are a process of their own. No prompt comes twice: no cache knows it. The other server
is the one at `--against`, or `transformers serve`; where its dependencies are not installed,
`generate` runs behind a small server.
"""

from __future__ import annotations

import argparse
import asyncio
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from transformers.utils.import_utils import is_serve_available

from seeupo_jax.benchmarks import comparison, machine
from seeupo_jax.benchmarks.comparison import JAX
from seeupo_jax.benchmarks.settings import MODELS, architecture, write_model
from seeupo_jax.configuration.flags import Flags, Wrong, integer, names, one_of, output_file
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.folder_files import read_json_object
from seeupo_jax.policy.files.huggingface_tokenizer import GENERATION_FILE
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.files.weights import read_tokenizer

if TYPE_CHECKING:
    import httpx

TOKENIZER = "package:order_desk"  # of a random model
_TIMEOUT_S = 3600.0  # of a request
_START_S = 600.0  # that a server may take until it answers
_END_S = 30.0  # that it may take to end
_WORDS = "order ship late find open sold item cost none when paid gift"


def _counts(value: str) -> tuple[int, ...]:
    given = names(value)
    if not given or not all(each.isdecimal() and int(each) > 0 for each in given):
        raise Wrong(value, "numbers of clients, such as 1,8,32")
    return tuple(map(int, given))


def add_flags(parser: Flags) -> None:
    """The requests and the model of the measurement."""
    sizes = f"random weights of a size: {', '.join(MODELS)}"
    parser.flag("model", sizes, one_of(*MODELS), default="tiny")
    parser.flag("model_path", "a chat model's folder or GGUF file instead of random weights")
    parser.flag("clients", "that ask at once; default: 1,8,32", _counts, default=(1, 8, 32))
    parser.flag("against", "the address of a server that runs, such as http://127.0.0.1:8080/v1")
    parser.flag("against_model", "what requests to it name; default: the first that it lists")
    parser.flag("requests", "of each client in a round", integer(1), default=4)
    parser.flag("words", "of a prompt", integer(1), default=64)
    parser.flag("answer", "tokens of an answer at most", integer(1), default=32)
    parser.flag("repeats", "rounds", integer(1), default=3)
    parser.flag("seed", "of weights and prompts", integer(0), default=0)
    parser.switch("sample", "at temperature 1; default: the likeliest tokens.")
    parser.flag("json", "also write the figures to this file", output_file)


class ServedEndpoint(NamedTuple):
    """A server that runs. model: what requests name."""

    base_url: str
    key: str
    model: str


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints and returns the figures.

    Raises:
      ValueError: a TPU; a wrong setting, a package that is missing, a server that does not start.
    """
    if jax.default_backend() == "tpu":
        raise ValueError(
            "bench serving: got a TPU; allowed: a CPU or a GPU. A TPU is one process's, and the"
            " servers are processes of their own."
        )
    from seeupo_jax.agents import endpoint  # noqa: F401  # its error names the missing package

    device = machine.only_device()
    about = machine.describe(device)  # its load, before there is ours
    dtype = machine.fast_dtype(device)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "model")
        tokenizer = _write_model(given, folder, dtype)
        prompts = _Prompts(given, tokenizer)
        baseline, other = (
            given.against,
            given.against and _reached(given.against, given.against_model),
        )
        if other is None:
            baseline, command = _of_transformers(folder, device.platform, dtype)
            _sample_all(folder)
            other = stack.enter_context(_running(command))
        line = _seeupo_jax(folder, given, prompts.longest, dtype)
        contenders = {JAX: stack.enter_context(_running(line)), baseline: other}
        pool = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        for server in contenders.values():  # warm
            asked = server, 1, prompts.take(1), given.answer, float(given.sample)
            pool.submit(ask, *asked).result()
        each = {
            str(clients): _measure(contenders, pool, clients, prompts, given)
            for clients in given.clients
        }
    figures = {
        "benchmark": "serving",
        "against": baseline,
        "model": given.model if given.model_path is None else given.model_path,
        "dtype": dtype,
        "temperature": float(given.sample),
        "prompt_words": given.words,
        "answer_tokens": given.answer,
        "machine": about,
        "clients": each,
    }
    _print(figures)
    return figures


def _write_model(given: argparse.Namespace, folder: Path, dtype: str) -> Tokenizer:
    """Writes the model that both serve; its tokenizer."""
    if given.model_path is None:
        tokenizer = read_tokenizer(TOKENIZER)
        assert tokenizer is not None
        arch = architecture(given.model, dtype)
        # Every token has a text, so that every first token shows.
        arch = dataclasses.replace(arch, vocab_size=tokenizer.vocab_size)
        write_model(arch, folder, tokenizer, seed=given.seed, dtype=dtype)
    else:
        model, tokenizer = from_pretrained(given.model_path, dtype=dtype)
        if tokenizer is None:
            raise ValueError(f"--model_path: {given.model_path} has no tokenizer; allowed: one.")
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


def _seeupo_jax(folder: Path, given: argparse.Namespace, longest: int, dtype: str) -> list[str]:
    fields = {
        "model.dtype": dtype,
        "rollout.max_context": longest,
        "rollout.max_action_tokens": given.answer,
        "rollout.concurrency": max(given.clients),
    }
    line = ["seeupo_jax.serve", "--config=package:quickstart", f"--model={folder}", "--port={port}"]
    return [*line, *(f"--config.{name}={value}" for name, value in fields.items())]


def _sample_all(folder: Path) -> None:
    """Has `transformers` sample of all tokens, as the other side does."""
    file = folder / GENERATION_FILE
    values = read_json_object(file) if file.is_file() else {}
    values |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    file.write_text(json.dumps(values), encoding="utf-8")


def _of_transformers(folder: Path, platform: str, dtype: str) -> tuple[str, list[str]]:
    """The other side's name, and the module and arguments that serve a folder."""
    if is_serve_available():
        device = "cpu" if platform == "cpu" else "cuda"
        line = ["transformers.cli.transformers", "serve", str(folder), "--port={port}"]
        return "transformers serve", [*line, f"--device={device}", f"--dtype={dtype}"]
    line = ["seeupo_jax.instruments.bench.serving.generate_server", str(folder), "{port}", dtype]
    return "transformers generate", line


def _reached(address: str, model: str | None) -> ServedEndpoint:
    """A server that runs, whose key is that of SEEUPO_API_KEY if it needs one."""
    base_url, key = address.rstrip("/"), os.environ.get("SEEUPO_API_KEY", "none")
    try:
        with _get(f"{base_url}/models", key) as reply:
            listed = json.load(reply)["data"]
            return ServedEndpoint(base_url, key, model or listed[0]["id"])
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(
            f"--against: got {address}, which lists no model at /models ({error}); allowed: the"
            " address of a server of OpenAI's API, which mostly ends in /v1, and its key in"
            " SEEUPO_API_KEY."
        ) from None


@contextlib.contextmanager
def _running(line: Sequence[str]) -> Iterator[ServedEndpoint]:
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
            url = f"http://127.0.0.1:{port}"
            # `transformers serve` lists the models of the hub's cache, and serves its folder only.
            lists = "serve" not in line
            reply = _first_reply(process, url + ("/v1/models" if lists else "/health"), key)
            if reply is None:
                log.seek(0)
                raise ValueError(f"{line[0]}: does not answer: {log.read()[-500:].strip()}")
            yield ServedEndpoint(f"{url}/v1", key, reply["data"][0]["id"] if lists else line[2])
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _first_reply(process: subprocess.Popen[Any], url: str, key: str) -> dict[str, Any] | None:
    """A new server's answer at an address; None: it ended, or took too long."""
    until = time.monotonic() + _START_S
    while process.poll() is None and (remaining_s := until - time.monotonic()) > 0:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            with _get(url, key, remaining_s) as reply:
                return json.load(reply)
        time.sleep(0.2)
    return None


def _get(url: str, key: str, timeout_s: float = _END_S) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s)


def _measure(
    contenders: dict[str, ServedEndpoint],
    pool: Executor,
    clients: int,
    prompts: _Prompts,
    given: argparse.Namespace,
) -> dict[str, Any]:
    """Rounds of one number of clients, which are in the pool's process."""
    requests: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    rounds = [prompts.take(clients * given.requests) for _ in range(given.repeats)]

    def asks(name: str) -> Callable[[int], float]:
        def contend(number: int) -> float:
            asked = contenders[name], clients, rounds[number], given.answer, float(given.sample)
            answered = pool.submit(ask, *asked).result()
            requests[name] += answered["requests"]
            return answered["seconds"]

        return contend

    timings = comparison.alternate({name: asks(name) for name in contenders}, given.repeats)
    count = clients * given.requests
    sides = {}
    for name, timing in timings.items():
        firsts = [one["first_s"] for one in requests[name] if one["first_s"] is not None]
        tokens = sum(one["tokens"] for one in requests[name]) / given.repeats
        sides[name] = timing.as_json() | {
            "requests_per_second": count / timing.median,
            "tokens_per_second": tokens / timing.median,
            "tokens_per_request": tokens / count,
            "first_text_s": statistics.median(firsts) if firsts else None,
            "first_text_most_s": max(firsts, default=None),
        }
    jax_name, baseline = contenders
    sooner, later = (sides[name]["first_text_s"] for name in (jax_name, baseline))
    first = later / sooner if sooner and later else None
    ratio = comparison.ratio(timings[baseline], timings[jax_name])
    return {"requests": count, **ratio, "first_text_ratio": first, "contenders": sides}


def ask(
    server: ServedEndpoint,
    clients: int,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Requests an answer to every prompt, with `clients` requests at a time.

    Args:
      temperature: None: the server's.

    Returns: `seconds` of all and, for each request, `first_s`, seconds to its first text (None: no
    text), and `tokens`, the sampled tokens by the server's count.

    Raises:
      ValueError: a request failed.
    """
    import httpx  # comes with the extra `agents`

    waiting = iter(prompts)
    fixed = {"model": server.model, "max_tokens": max_tokens, "temperature": temperature}
    fixed |= {"stream": True, "stream_options": {"include_usage": True}}
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    headers = {"Authorization": f"Bearer {server.key}"}

    async def converse(http: httpx.AsyncClient) -> list[dict[str, Any]]:
        return [await _request(http, fixed, prompt) for prompt in waiting]

    async def ask_all() -> dict[str, Any]:
        async with httpx.AsyncClient(
            base_url=server.base_url, headers=headers, limits=limits, timeout=_TIMEOUT_S
        ) as http:
            began = time.perf_counter()
            each = await asyncio.gather(*(converse(http) for _ in range(clients)))
            seconds = time.perf_counter() - began
        return {"seconds": seconds, "requests": [one for client in each for one in client]}

    return asyncio.run(ask_all())


async def _request(
    http: httpx.AsyncClient, fixed: Mapping[str, Any], prompt: str
) -> dict[str, Any]:
    body = {**fixed, "messages": _message(prompt)}
    began, first_s, tokens = time.perf_counter(), None, None
    async with http.stream("POST", "/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            text = (await reply.aread()).decode()[:500]
            raise ValueError(f"{reply.url}: a request failed with {reply.status_code}: {text}")
        async for line in reply.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            event = json.loads(data)
            texts = (choice["delta"].get("content") for choice in event.get("choices", ()))
            # `transformers serve` may send the prompt before it has sampled anything.
            if first_s is None and any(text and prompt not in text for text in texts):
                first_s = time.perf_counter() - began
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    if tokens is None:
        raise ValueError(
            f"{reply.url}: the reply has no usage; allowed: a server that counts the tokens of a"
            " stream (stream_options.include_usage)."
        )
    return {"first_s": first_s, "tokens": tokens}


def _print(figures: dict[str, Any]) -> None:
    print(
        f"{JAX} against {figures['against']}: model {figures['model']}, {figures['dtype']},"
        f" temperature {figures['temperature']:g}, prompts of {figures['prompt_words']} words,"
        f" answers of {figures['answer_tokens']} tokens at most, {figures['machine']['device']}"
    )
    for clients, measured in figures["clients"].items():
        print(
            f"{clients} clients: {measured['ratio']:.2f}x ({measured['ratio_least']:.2f} to"
            f" {measured['ratio_most']:.2f} by rounds) the requests/s;"
            f" {_shown(measured['first_text_ratio'], 1, '.2f')}x sooner to the first text"
        )
        for name, side in measured["contenders"].items():
            print(
                f"  {name}: {side['requests_per_second']:.2f} requests/s,"
                f" {side['tokens_per_second']:.0f} tokens/s, first text after"
                f" {_shown(side['first_text_s'], 1000)} ms (at most"
                f" {_shown(side['first_text_most_s'], 1000)}), {side['tokens_per_request']:.1f}"
                " tokens a request"
            )


def _shown(value: float | None, factor: float, form: str = ".0f") -> str:
    return "-" if value is None else f"{factor * value:{form}}"
