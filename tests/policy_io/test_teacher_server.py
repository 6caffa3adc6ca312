"""A teacher behind a real seeupo-serve is the teacher in its folder; servers that are none are
refused in a sentence."""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax
import numpy as np
import pytest
from loaded_python import LoadedPython
from places import CONFIGS
from process_cases import environment
from serving import running

from seeupo_jax.agents.served_address import KEY_VARIABLE as SERVED_KEY
from seeupo_jax.errors import NotLearning
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy_io import teacher_server
from seeupo_jax.policy_io.teacher_server import KEY_VARIABLE, TeacherServer
from seeupo_jax.policy_io.teachers import check_tokens

KEY, BASE, FIELD = "the-teachers.key", "package:order_desk", "config.teacher.server"


@pytest.fixture(scope="module")
def local():
    return from_pretrained(BASE, dtype="float32")


@pytest.fixture(scope="module")
def served():
    """The address of a server in a process of its own."""
    small = ("--config.rollout.tasks=1", "--config.rollout.group_size=2")
    line = [f"--config={CONFIGS / 'quickstart.py'}", f"--model={BASE}", "--port=0", *small]
    command = [sys.executable, "-m", "seeupo_jax.serve", *line]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = LoadedPython(command, env=environment() | {SERVED_KEY: KEY}, **streams)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        address = next(word for line in lines for word in line.split() if word.startswith("http"))
        yield address.rstrip("/.,").removesuffix("/v1") + "/v1"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def keyed(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(teacher_server, "_WAITS_S", ())


def contents(tokenizer):
    pieces = tokenizer.token_bytes()
    return {token: pieces[token] for token in tokenizer.ids}


def test_a_served_teacher_scores_as_the_one_in_its_folder(served, local):
    model, tokenizer = local
    rng = np.random.default_rng(0)
    ids = np.array(sorted(tokenizer.ids), np.int32)
    sequences = [rng.choice(ids, size) for size in (2, 5, 90)]
    server = TeacherServer(served, FIELD)
    server.check(contents(tokenizer))
    for tokens, got in zip(sequences, server.score(sequences), strict=True):
        logp_LV = jax.nn.log_softmax(model(tokens[None])[0])
        wanted = np.take_along_axis(np.asarray(logp_LV)[:-1], tokens[1:, None], axis=1)[:, 0]
        np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_longer_context_than_the_server_has_is_refused_in_a_sentence(served):
    with pytest.raises(NotLearning, match=r"config.teacher.server: .* of a prompt of 4000 token"):
        TeacherServer(served, FIELD).score([np.zeros(4000, np.int32)])


def test_another_tokenizer_is_found_by_what_its_tokens_are(served, local, monkeypatch):
    given = contents(local[1])
    words = [token for token, content in given.items() if content.strip().isalnum()]
    swapped = given | {words[0]: given[words[1]], words[1]: given[words[0]]}
    with pytest.raises(ValueError, match=r"whose token \d+ is '.*' instead of .*; allowed: a mod"):
        TeacherServer(served, FIELD).check({token: swapped[token] for token in words[:2]})
    monkeypatch.setenv(KEY_VARIABLE, "another.key")
    with pytest.raises(ValueError, match="does not answer: .*; allowed: a server that runs, whose"):
        TeacherServer(served, FIELD).check(given)


def test_a_server_that_is_not_there_is_a_sentence():
    server = TeacherServer("http://127.0.0.1:9/v1", FIELD)
    with pytest.raises(
        NotLearning, match=r"config.teacher.server: http://127.0.0.1:9/v1/models do"
    ):
        server.score([np.zeros(3, np.int32)])


def answering(answer):
    """A server of /models, and of /completions by a function of the request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, {"data": [{"id": "m"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(*answer(body))

        def reply(self, code, values):
            text = json.dumps(values).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    return HTTPServer(("127.0.0.1", 0), Handler)


def address(server):
    return f"http://127.0.0.1:{server.server_port}/v1"


def test_prompt_logprobs_in_vllms_form_are_read_where_prompts_are_not_echoed():
    def answer(body):
        if body.get("echo"):
            return 400, {"error": {"message": "echo is not supported"}}
        assert body["prompt_logprobs"] == 0 and body["prompt"] == [7, 8, 9]
        entries = [
            {str(token): {"logprob": -float(token), "rank": 1, "decoded_token": f"t{token}"}}
            for token in body["prompt"][1:]
        ]
        return 200, {"choices": [{"text": "x", "prompt_logprobs": [None, *entries]}]}

    with running(answering(answer)) as server:
        (got,) = TeacherServer(address(server), FIELD).score([np.array([7, 8, 9], np.int32)])
        server.server_close()
    np.testing.assert_array_equal(got, [-8, -9])


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: (200, {"choices": [{"text": "x", "logprobs": None}]}),
        lambda body: (400, {"error": {"message": "no scores here"}}),
        lambda body: (
            200,
            {"choices": [{"logprobs": {"token_logprobs": [None, -1.0], "tokens": ["a", "b"]}}]},
        ),
    ],
    ids=["none", "refused", "too few"],
)
def test_a_server_without_log_probabilities_of_prompts_is_refused(answer):
    with running(answering(answer)) as server:
        with pytest.raises(NotLearning, match="gave no log-probabilities of a prompt of 3 token"):
            TeacherServer(address(server), FIELD).score([np.array([7, 8, 9], np.int32)])
        server.server_close()


def test_a_folder_with_another_tokenizer_is_refused_and_one_with_more_tokens_is_not(local):
    tokenizer = local[1]
    check_tokens("config.teacher.path", BASE, tokenizer)

    class Fewer:
        """The policy's side: a part of its tokens, and one of another content."""

        def __init__(self, changed):
            self.pieces = list(tokenizer.token_bytes())
            self.ids = sorted(tokenizer.ids)[:-5]
            if changed:
                self.pieces[self.ids[9]] = b"other"

        def token_bytes(self):
            return self.pieces

    check_tokens("config.teacher.path", BASE, Fewer(False))
    with pytest.raises(ValueError, match=r"config.teacher.path: got package:order_desk, whose tok"):
        check_tokens("config.teacher.path", BASE, Fewer(True))
