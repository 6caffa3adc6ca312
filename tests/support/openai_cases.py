"""A server that samples from a policy of ours and answers as vLLM or sglang does."""

import collections
import contextlib
import functools
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import numpy as np
import rollout_cases
from flax import nnx

from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer

SIZES = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
LENGTH = 40  # of the rows that the network is compiled for
MODEL = "tiny/policy"

NEUTRAL = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def logits_of(made, params, length):
    """What a network computes from a whole sequence, in rows of this length: [L, V]."""
    forward = jax.jit(lambda tokens_NL: made.bind(params)(tokens_NL))

    def logits_LV(tokens):
        row_1L = np.zeros((1, length), np.int32)
        row_1L[0, : len(tokens)] = tokens
        return np.asarray(forward(row_1L))[0, : len(tokens)].astype(np.float64)

    return logits_LV


@functools.cache
def tiny_policy():
    made, params = policy.split_model(
        Transformer(Architecture(**SIZES, mlp_width=24, rope=Rope(theta=100.0)), nnx.Rngs(0))
    )
    return logits_of(made, rollout_cases.stir(params), LENGTH)


def logits_LV(tokens):
    """What the tiny policy computes from a whole sequence."""
    return tiny_policy()(tokens)


def sample(
    context, *, seed, max_tokens, temperature, top_k, top_p, stop_token_ids, logits=logits_LV
):
    """Tokens, the end token included, and log-probabilities of what they were drawn from."""
    assert top_p == 1.0
    rng, tokens, logp = np.random.default_rng(seed), [], []
    while len(tokens) < max_tokens and not set(tokens) & set(stop_token_ids):
        logits_V = logits([*context, *tokens])[-1] / temperature
        if top_k != -1:
            logits_V[np.argsort(-logits_V)[top_k:]] = -np.inf
        logp_V = logits_V - np.logaddexp.reduce(logits_V)
        tokens.append(int(rng.choice(len(logp_V), p=np.exp(logp_V))))
        logp.append(float(logp_V[tokens[-1]]))
    return tokens, logp


def take(body, **wanted):
    """Takes settings out of a request's body that must be these."""
    for key, value in wanted.items():
        assert body.pop(key) == value, key


def completions(body, ids_field=True, logits=logits_LV):
    """vLLM's `/v1/completions`."""
    body, seed = dict(body), body.get("seed")
    body.pop("seed", None)
    take(body, model=MODEL, logprobs=0, **NEUTRAL)
    take(body, return_token_ids=True, return_tokens_as_token_ids=True)
    stops = body["stop_token_ids"]
    tokens, logp = sample(body.pop("prompt"), seed=seed, logits=logits, **body)
    ended = tokens[-1] in stops
    choice = {
        "index": 0,
        "text": "",
        "logprobs": {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": logp},
        "finish_reason": "stop" if ended else "length",
        "stop_reason": tokens[-1] if ended else None,
    }
    return {"choices": [choice | ({"token_ids": tokens} if ids_field else {})]}


def generate(body, logits=logits_LV):
    """sglang's `/generate`."""
    body = dict(body)
    take(body, return_logprob=True, return_text_in_logprobs=False)
    params, context = dict(body.pop("sampling_params")), body.pop("input_ids")
    assert not body
    take(params, **NEUTRAL)
    stops, seed = params["stop_token_ids"], params.pop("sampling_seed", None)
    most = params.pop("max_new_tokens")
    tokens, logp = sample(context, seed=seed, max_tokens=most, logits=logits, **params)
    finish = {"type": "length", "length": len(tokens)}
    if tokens[-1] in stops:
        finish = {"type": "stop", "matched": tokens[-1]}
    sampled = [[value, token, None] for value, token in zip(logp, tokens, strict=True)]
    return {"text": "", "meta_info": {"finish_reason": finish, "output_token_logprobs": sampled}}


ROUTES = {"/v1/completions": completions, "/generate": generate}


def status(code, message):
    """An answer with an error in it."""
    return lambda reply: (code, json.dumps({"error": {"message": message}}).encode())


def changed(change):
    """An answer that is what `change` makes of the right one."""
    return lambda reply: (200, json.dumps(change(reply)).encode())


def raw(text):
    return lambda reply: (200, text.encode())


def right(reply):
    return 200, json.dumps(reply).encode()


class PolicyServer(ThreadingHTTPServer):
    """Answers on a loopback port until closed.

    logits: of the policy that it holds. key: without which it answers nothing, if it has one.
    card: what it says of its model. others: names of models that it lists besides. script: answers
    to give to the next requests for actions, then `usual`. asked: (path, headers, body) of the
    requests for actions so far.
    """

    # Joined by server_close: one that is still ending when Python does, aborts it (jax is in it).
    daemon_threads = False

    def __init__(self, *, logits=logits_LV, key=None, others=(), **card):
        super().__init__(("127.0.0.1", 0), _Handler)
        card = {"id": MODEL, "owned_by": "vllm", "max_model_len": LENGTH} | card
        self.key, self.connections = key, []
        self.script, self.usual, self.asked = collections.deque(), right, []
        self.cards = [card, *({"id": name} for name in others)]
        self.routes = {path: functools.partial(ask, logits=logits) for path, ask in ROUTES.items()}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def __exit__(self, *_):
        self.shutdown()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request, client_address):
        """Nothing: a client that gave up waiting is one of the cases."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        wanted = self.path == "/v1/models"
        cards = {"object": "list", "data": self.server.cards}
        self._answer(*(right(cards) if wanted else status(404, "no such path")(None)))

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, dict(self.headers), body))
        answer = server.script.popleft() if server.script else server.usual
        self._answer(*answer(server.routes[self.path](body)))

    def _answer(self, code, body):
        key = self.server.key
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            code, body = status(401, "no such key")(None)
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing on the terminal."""
