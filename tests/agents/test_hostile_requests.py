"""A thousand hostile requests: each is refused or answered, and nobody else notices."""

import copy
import dataclasses
import itertools
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from agent_cases import PARAMETERS, RULES, make_endpoint, opened

from seeupo_jax.agents.calls import Access

PATHS = ("/chat/completions", "/responses", "/messages")
REQUEST_BYTES = 100_000
MANY = 40  # requests of each raw kind
SECONDS = 5  # within which a client that vanished is noticed
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"name": "x"}'}}
PART = {"type": "text", "text": "x"}
SCHEMA = {"name": "find", "description": "Finds.", "strict": True}
BODIES = {
    "/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [PART]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "7", "name": "find"},
            {"role": "user", "content": "good"},
        ],
        "tools": [{"type": "function", "function": SCHEMA | {"parameters": PARAMETERS}}],
        "tool_choice": "auto",
        "max_tokens": 9,
        "stop": ["#"],
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "temperature": 0.8,
        "n": 1,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "user": "me",
    },
    "/responses": {
        "model": "m",
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
            {"role": "user", "content": "good"},
        ],
        "tools": [{"type": "function", **SCHEMA, "parameters": PARAMETERS}],
        "max_output_tokens": 9,
        "text": {"format": {"type": "text"}},
        "reasoning": {"summary": "auto"},
        "previous_response_id": None,
        "include": ["message.output_text.logprobs"],
        "store": True,
    },
    "/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [PART],
        "messages": [
            {"role": "user", "content": [PART]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "find", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [PART]}],
            },
            {"role": "user", "content": "good"},
        ],
        "tools": [{"name": "find", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["#"],
        "thinking": {"type": "disabled"},
        "temperature": 0.8,
    },
}
DEEP = json.loads("[" * 150 + "]" * 150)
VALUES = [
    *(None, True, False, 0, -1, 1, 10**400, -0.5, 1e300, "", "x", "\ud800", "é" * 9000, "wait?"),
    *([], {}, [None], [[]], {"": None}, {"type": "text"}, {"type": "image_url"}, [1] * 3000, DEEP),
    *({"\udfff": 1}, {"role": "user", "content": "x"}, "NaN", "Infinity", "1e999"),
]
LITERALS = ("NaN", "Infinity", "1e999")


@pytest.fixture(scope="module")
def endpoint():
    endpoint = make_endpoint(request_bytes=REQUEST_BYTES, body_s=1)
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=20) as http:
        yield http


@pytest.fixture(autouse=True)
def nothing_is_logged_and_the_next_good_request_is_answered(endpoint, http, caplog):
    yield
    assert caplog.get_records("call") == []
    with opened(endpoint, "fine:") as (_, access):
        for path in PATHS:
            reply = http.post(access.base_url + path, json=BODIES[path], headers=bearer(access))
            assert (reply.status_code, said(reply.json())) == (200, "fine:good")


def bearer(access):
    return {"authorization": f"Bearer {access.api_key}"}


def said(reply):
    """The text of a reply of any API."""
    if "choices" in reply:
        return reply["choices"][0]["message"]["content"]
    blocks = reply["output"][0]["content"] if "output" in reply else reply["content"]
    return blocks[0]["text"]


def check_error(reply, *allowed):
    """It says in the API's form what was wrong."""
    assert reply.status_code in allowed, reply.text
    error = reply.json()["error"]
    assert error["message"].endswith(".") and len(error["message"]) < 1000
    assert "Traceback" not in reply.text


def places(tree, path=()):
    """All places in a tree of JSON."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


def damaged(rng, path):
    """The body of a request with one to three values replaced, left out or added, as bytes."""
    body = {"body": copy.deepcopy(BODIES[path])}
    for _ in range(rng.choice((1, 1, 2, 3))):
        *outer, last = rng.choice([place for place in places(body) if place])
        node = body
        for part in outer:
            node = node[part]
        what, value = rng.randrange(6), copy.deepcopy(rng.choice(VALUES))
        if what == 0 and len(outer) > 0:
            del node[last]
        elif what == 1 and isinstance(node, dict):
            node[rng.choice(["mood", "seed", "\n", "type", "role", "stream"])] = value
        else:
            node[last] = value
    text = json.dumps(body.get("body", None))
    for literal in LITERALS:
        text = text.replace(f'"{literal}"', literal)
    return text.encode()


def test_damaged_fields_are_refused_or_harmless_and_every_answer_is_the_keys_own(endpoint, http):
    ignoring = dataclasses.replace(RULES, ignore=True)

    def attack(number):
        rng, codes, name = random.Random(number), [], f"{number}:"
        rules = ignoring if number % 2 else RULES
        with opened(endpoint, name, sampling=rules) as (_, access):
            for path in rng.choices(PATHS, k=120):
                content = damaged(rng, path)
                reply = http.post(access.base_url + path, content=content, headers=bearer(access))
                codes.append(reply.status_code)
                if reply.status_code != 200:
                    check_error(reply, 400, 413)
                elif reply.headers["content-type"] == "application/json":
                    assert said(reply.json()).startswith(name[: len(said(reply.json()))])
                else:
                    assert all(
                        f'"{other}:' not in reply.text for other in range(8) if other != number
                    )
        return codes

    with ThreadPoolExecutor(8) as threads:
        codes = list(itertools.chain(*threads.map(attack, range(8))))
    assert len(codes) == 960
    assert min(codes.count(200), codes.count(400)) > 100


BROKEN = [
    *(b"", b"{", b"}", b"null", b"[]", b"3", b'"x"', b'{"model": NaN}', b'{"model": "m",}'),
    *(b"\xff\xfe{}", b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b'{"model": "\xff"}', b"\0" * 99),
    *(
        b"[" * 50_000,
        b'{"a":' * 15_000,
        b"[" * 150 + b"]" * 150,
        b'{"model": ' + b"9" * 5000 + b"}",
    ),
    *(b'{"model": 1e999}', b'{"model": "\\ud800"}', b'{"model": "\\q"}', b'{"\\ud800": 1}'),
    *(b"x" * 90_000, b"[0" + b",0" * 49_000 + b"]", b"{" + b'"a":{},' * 9000 + b'"b":1}'),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_no_request_is_a_bad_request(endpoint, http, path):
    with opened(endpoint) as (session, access):
        for body in BROKEN:
            reply = http.post(access.base_url + path, content=body, headers=bearer(access))
            check_error(reply, 400)
        assert session.calls == []


def test_only_an_open_episodes_key_opens_and_only_its_own(endpoint, http):
    with opened(endpoint, "a:") as (first, mine), opened(endpoint, "b:") as (second, other):
        with opened(endpoint, "gone:") as (third, closed):
            pass
        keys = [closed.api_key, ".", "null", mine.api_key[:-1], mine.api_key + "x", "k" * 30_000]
        headers = [{"authorization": f"Bearer {key}"} for key in keys]
        headers += [{"x-api-key": key} for key in keys]
        headers += [{}, {"authorization": mine.api_key}]
        headers += [{"authorization": f"Basic {mine.api_key}"}, {"cookie": mine.api_key}]
        for header, path in itertools.product(headers, PATHS):
            reply = http.post(mine.base_url + path, json=BODIES[path], headers=header)
            check_error(reply, 401)
        for path in ("/models", "/models/ours"):
            check_error(http.get(mine.base_url + path, headers=headers[0]), 401)
        assert first.calls == second.calls == third.calls == []
        for access, name in ((mine, "a:"), (other, "b:")):
            for header in (bearer(access), {"x-api-key": access.api_key}):
                reply = http.post(access.base_url + PATHS[0], json=BODIES[PATHS[0]], headers=header)
                assert said(reply.json()) == f"{name}good"


def test_other_addresses_and_methods_are_not_found(endpoint, http):
    rng = random.Random(0)
    pieces = [
        "v1",
        "chat",
        "completions",
        "..",
        "%2e%2e",
        "",
        "%00",
        "é",
        "models",
        "%ff",
        "a" * 999,
    ]
    with opened(endpoint) as (session, access):
        root = access.base_url.removesuffix("/v1")
        for _ in range(MANY):
            path = "/".join(rng.choices(pieces, k=rng.randrange(5)))
            reply = http.request(
                rng.choice(["GET", "POST"]), f"{root}/x/{path}", headers=bearer(access)
            )
            check_error(reply, 404)
        for method, path in itertools.product(("GET", "PUT", "DELETE", "PATCH", "XYZ"), PATHS):
            reply = http.request(method, access.base_url + path, headers=bearer(access))
            check_error(reply, 405)
            assert reply.headers["allow"] == "POST"
        check_error(http.post(f"{access.base_url}{PATHS[0]}/", headers=bearer(access)), 404)
        check_error(http.get(f"{access.base_url}/models/a/b", headers=bearer(access)), 404)
        assert session.calls == []


class Wire:
    """A connection on which anything may be said."""

    def __init__(self, endpoint):
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def head(self, access, path=PATHS[0], **headers):
        lines = [f"POST /v1{path} HTTP/1.1", "Host: x", f"x-api-key: {access.api_key}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    def ask(self, access, path=PATHS[0], **fields):
        body = json.dumps(BODIES[path] | fields).encode()
        self.head(access, path, content_length=len(body))
        self.send(body)

    def status(self):
        line = b""
        while not line.endswith(b"\r\n"):
            data = self.socket.recv(1)
            if not data:
                break
            line += data
        return int(line.split()[1]) if line else None

    def until_closed(self):
        data = b""
        try:
            while more := self.socket.recv(65_536):
                data += more
        except ConnectionResetError:
            pass
        return data


def test_a_body_that_is_too_large_is_refused_however_it_is_announced(endpoint, http):
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    with opened(endpoint) as (session, access):
        for length in (REQUEST_BYTES + 1, 10**12, 10**19):
            with Wire(endpoint) as wire:
                wire.head(access, content_length=length)
                assert wire.status() == 413
        for end in (b"0\r\n\r\n", b"zz\r\n", b""):
            with Wire(endpoint) as wire:
                wire.head(access, transfer_encoding="chunked")
                wire.send(chunk * 8)
                assert wire.status() == 413
                wire.send(end)
                if end.startswith(b"zz"):
                    assert wire.until_closed()
        check_error(
            http.post(access.base_url + PATHS[0], content=b"x" * 9_000_000, headers=bearer(access)),
            413,
        )
        assert session.calls == []


def test_a_client_that_sends_all_before_it_reads_is_told_why_it_is_refused(endpoint):
    with opened(endpoint) as (session, access):
        for who, status in ((access, 413), (Access(access.base_url, "wrong"), 401)):
            with Wire(endpoint) as wire:
                wire.head(who, content_length=2**24, connection="close")
                wire.send(bytes(2**24))  # more than a connection buffers
                assert wire.status() == status
            with Wire(endpoint) as wire:
                wire.head(who, content_length=2**24, expect="100-continue")
                assert wire.status() == status  # and no 100, after which the body would come
        assert session.calls == []


def test_a_body_that_does_not_arrive_is_not_waited_for(endpoint):
    with opened(endpoint) as (session, access):
        wires = [Wire(endpoint) for _ in range(MANY)]
        for wire, path in zip(wires, itertools.cycle(PATHS), strict=False):
            wire.head(access, path, content_length=99)
            wire.send(b"{")
        assert {wire.status() for wire in wires} == {408}
        for wire in wires:
            wire.socket.close()
        assert session.calls == []


def test_what_is_no_http_is_answered_or_cut_off(endpoint):
    rng = random.Random(1)
    with opened(endpoint) as (session, access):
        key = access.api_key.encode()
        ask = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nx-api-key: " + key + b"\r\n"
        pieces = [
            *(ask, b"\r\n", b"GET / HTTP/1.1\r\n", b"Host: x\r\n", b"\0", b"\xff" * 20, b"zz\r\n"),
            *(b"Content-Length: 2\r\n\r\n{}", b"Content-Length: -1\r\n", b"Content-Length: 9\r\n"),
            *(b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\n{}\r\n", b"0\r\n\r\n", b"x" * 3000),
            *(b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
            *(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01\x02\x00",
                b"Connection: close\r\n",
            ),
        ]
        for _ in range(3 * MANY):
            with Wire(endpoint) as wire:
                wire.send(b"".join(rng.choices(pieces, k=rng.randint(1, 8))))
                wire.socket.shutdown(socket.SHUT_WR)
                assert b" 500 " not in wire.until_closed()
        assert session.calls == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pipelined", [b"", b"GET / HTTP/1.1\r\n\r\nHost: x\r\n" + b"x" * 99_000])
def test_a_client_that_vanishes_frees_what_it_waited_for(endpoint, stream, pipelined):
    wait = {"messages": [{"role": "user", "content": "wait"}], "input": "wait"}
    with opened(endpoint) as (session, access):
        wires = [Wire(endpoint) for _ in PATHS]
        for wire, path in zip(wires, PATHS, strict=True):
            fields = {name: value for name, value in wait.items() if name in BODIES[path]}
            wire.ask(access, path, **fields, stream=stream)
            assert session.waiting.acquire(timeout=SECONDS)
            if stream:
                assert wire.status() == 200
            wire.send(pipelined)
        begin = time.monotonic()
        for wire in wires:
            wire.socket.close()
        for _ in wires:
            assert session.cancelled.acquire(timeout=SECONDS)
        assert time.monotonic() - begin < SECONDS


def test_clients_that_vanish_before_their_request_is_whole_are_forgotten(endpoint):
    with opened(endpoint) as (session, access):
        for size in range(MANY):
            with Wire(endpoint) as wire:
                wire.head(access, PATHS[size % 3], content_length=99)
                wire.send(b"{" * size)
        assert session.calls == []
