"""What an endpoint answers to HTTP itself: addresses, headers, web pages, questions for tokens."""

import socket
import time
from urllib.parse import urlsplit

import anthropic
import httpx
import pytest
from agent_cases import TOOL, make_endpoint, opened

ASKED = {"model": "ours", "messages": [{"role": "user", "content": "good"}]}
PAGE = "http://localhost:3000"
HEAD_S = 1.5  # long enough for a request on a machine that is busy


@pytest.fixture(scope="module")
def endpoint():
    endpoint = make_endpoint(origins=(PAGE,), head_s=HEAD_S)
    yield endpoint
    endpoint.close()


@pytest.fixture
def http(endpoint):
    with opened(endpoint) as (_, access):
        header = {"authorization": f"Bearer {access.api_key}"}
        address = access.base_url.removesuffix("/v1")
        with httpx.Client(base_url=address, headers=header, timeout=20) as client:
            yield client


def connect(endpoint):
    address = urlsplit(endpoint.base_url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def everything(connection):
    """All that arrives until the other side closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_request_that_names_the_whole_address_is_answered(endpoint, http):
    body = httpx.Request("POST", "http://h", json=ASKED).content
    head = (
        f"POST {endpoint.base_url}/chat/completions HTTP/1.1\r\nhost: other\r\n"
        f"authorization: {http.headers['authorization']}\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with connect(endpoint) as connection:
        connection.sendall(head.encode() + body)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"content":"good"' in answer


@pytest.mark.parametrize("sent", [b"POST /v1/messages HTTP/1.1\r\nx-api-key: ", b"P"])
def test_headers_that_are_never_complete_are_timed_out(endpoint, sent):
    with connect(endpoint) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and HEAD_S / 2 < time.monotonic() - began < 20


def test_headers_that_drip_are_timed_out_after_an_answer_too(endpoint):
    with connect(endpoint) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        time.sleep(HEAD_S + 0.3)  # a connection may rest between two requests
        began = time.monotonic()
        with pytest.raises(OSError):  # it is closed while more arrives
            for _ in range(300):
                connection.sendall(b"G")
                time.sleep(0.1)
    assert HEAD_S / 2 < time.monotonic() - began < 20


def test_a_connection_on_which_nothing_arrives_is_closed(endpoint):
    with connect(endpoint) as connection:
        assert everything(connection) == b""


def test_a_body_may_take_longer_than_headers(endpoint, http):
    def slow():
        yield b'{"model": "ours", '
        time.sleep(HEAD_S + 0.3)
        yield b'"messages": [{"role": "user", "content": "good"}]}'

    assert http.post("/v1/chat/completions", content=slow()).status_code == 200


def test_options_lists_the_methods(http):
    answer = http.options("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST")
    assert http.options("/v1/nothing").status_code == 404


def test_a_page_of_an_allowed_origin_may_call(http):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    first = http.options("/v1/messages", headers={"origin": PAGE, **asks})
    assert first.status_code == 200
    assert first.headers["access-control-allow-origin"] == PAGE
    assert "x-api-key" in first.headers["access-control-allow-headers"]
    own = {"origin": PAGE}
    for asked in (ASKED, ASKED | {"stream": True}, ASKED | {"messages": []}):
        answer = http.post("/v1/chat/completions", json=asked, headers=own)
        assert answer.headers["access-control-allow-origin"] == PAGE


def test_other_pages_and_other_endpoints_allow_none(http):
    other = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    assert http.options("/v1/messages", headers=other).status_code == 400
    endpoint = make_endpoint()
    try:
        answer = httpx.options(f"{endpoint.base_url}/messages", headers=other)
        assert not any(name.startswith("access-control") for name in answer.headers)
    finally:
        endpoint.close()


def test_health_needs_no_key(endpoint):
    answer = httpx.get(endpoint.base_url.replace("/v1", "/health"))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_an_endpoint_of_a_run_has_no_figures_of_its_own(http):
    assert http.get("/metrics").status_code == 404


def test_anthropics_client_counts_tokens(endpoint):
    with opened(endpoint) as (session, access):
        address = access.base_url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=address, api_key=access.api_key) as client:
            tool = {"name": "find", "input_schema": TOOL["parameters"]}
            counted = client.messages.count_tokens(
                model="ours", system="abc", messages=ASKED["messages"], tools=[tool]
            )
    assert counted.input_tokens == len("abc" + "good") + 1
    assert session.calls == []  # no turn was used


def test_messages_are_tokenized_as_a_call_would_read_them(http):
    tools = [{"type": "function", "function": TOOL}]
    asked = ASKED | {"tools": tools, "add_generation_prompt": True}
    answer = http.post("/tokenize", json=asked).json()
    assert answer == {"count": 5, "max_model_len": 4096, "tokens": [*map(ord, "good"), 0]}


@pytest.mark.parametrize(
    "path, changes, param",
    [
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "good"}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse"}]}, None),
        ("/v1/messages/count_tokens", {"messages": [{"role": "tool", "content": ""}]}, None),
    ],
)
def test_a_question_is_refused_as_the_call_would_be(http, path, changes, param):
    answer = http.post(path, json=ASKED | changes)
    error = answer.json()["error"]
    assert answer.status_code == 400 and (param is None or error["param"] == param)
    assert http.post(path, json=ASKED, headers={"authorization": "Bearer x"}).status_code == 401


def test_an_episode_has_no_plain_prompts(http):
    answer = http.post("/v1/completions", json={"model": "ours", "prompt": "x"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "prompt"
    asked = {"prompt": "x"}
    assert http.post("/tokenize", json=asked).json()["error"]["param"] == "prompt"
