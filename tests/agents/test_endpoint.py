"""An endpoint begins, hands out keys, and ends with all that waits for it."""

import asyncio
import socket
import sys
import threading
import weakref

import httpx
import openai
import pytest
from agent_cases import FORMAT, RULES, ToldSession, make_endpoint, opened
from places import ROOT

from seeupo_jax.agents import endpoint as endpoint_module
from seeupo_jax.agents.answer_form import AnswerForm
from seeupo_jax.agents.dialects import (
    anthropic_messages,
    chat_completions,
    responses,
    token_counts,
)
from seeupo_jax.agents.endpoint import Endpoint
from seeupo_jax.agents.endpoint_http import task_of
from seeupo_jax.envs.tool_formats.formats import choose_format


def ask(access, text, **options):
    with openai.OpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=20
    ) as client:
        messages = [{"role": "user", "content": text}]
        reply = client.chat.completions.create(model="m", messages=messages, **options)
        return list(reply) if options.get("stream") else reply


def wait_in_thread(access, errors, **options):
    def wait():
        try:
            ask(access, "wait", **options)
        except openai.APIError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_closed_endpoint_has_told_all_that_waited_and_left_its_address():
    endpoint, errors = make_endpoint(), []
    session = ToldSession()
    access = endpoint.open_key(session)
    threads = [wait_in_thread(access, errors, stream=stream) for stream in (False, True)]
    for _ in threads:
        assert session.waiting.acquire(timeout=5)
    assert "endpoint" in {thread.name for thread in threading.enumerate()}
    endpoint.close()
    for thread in threads:
        thread.join(timeout=5)
    assert len(errors) == 2
    assert all("the endpoint is closed" in error.message for error in errors)
    assert "endpoint" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(httpx.ConnectError):
        httpx.get(access.base_url)
    endpoint.close()  # again, which changes nothing


def test_an_endpoint_that_never_listened_serves_its_own_process_and_closes():
    endpoint = Endpoint(sampling=RULES, model="ours", form=AnswerForm(FORMAT))
    access = endpoint.open_key(ToldSession(), key="mine")
    assert access.base_url.startswith("http://") and access.api_key == "mine"

    async def talk():
        transport = httpx.ASGITransport(endpoint.app)
        async with httpx.AsyncClient(transport=transport, base_url=access.base_url) as http:
            return await http.get("models", headers={"x-api-key": "mine"})

    assert asyncio.run(talk()).json()["data"][0]["id"] == "ours"
    endpoint.close()


class Body(bytes):
    """A body with a part, which can be referred to weakly: bytes cannot."""


class Part:
    """Held by what holds the body."""


def test_a_call_that_waits_does_not_hold_its_body(monkeypatch):
    read_body, session, parts = endpoint_module.read_body, ToldSession(), weakref.WeakSet()

    async def read(request, **limits):
        body = Body(await read_body(request, **limits))
        body.part = Part()
        parts.add(body.part)
        return body

    monkeypatch.setattr(endpoint_module, "read_body", read)
    endpoint = Endpoint(sampling=RULES, model="ours", form=AnswerForm(FORMAT))
    access = endpoint.open_key(session, key="mine")

    async def talk():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(endpoint.app))
        async with openai.AsyncOpenAI(
            base_url=access.base_url, api_key="mine", http_client=http
        ) as client:
            messages = [{"role": "user", "content": "wait"}]
            create = client.chat.completions.create(model="m", messages=messages)
            async with asyncio.timeout(20), task_of(create):
                while not session.waiting.acquire(blocking=False):
                    await asyncio.sleep(0.01)
                return len(parts)

    assert asyncio.run(talk()) == 0


@pytest.mark.parametrize(("name", "text"), [("llama", '{"n": 1}'), ("hermes", "<tool_call>")])
def test_without_tools_all_text_streams_at_once(name, text):
    endpoint = Endpoint(sampling=RULES, model="ours", form=AnswerForm(choose_format(name)))
    access = endpoint.open_key(ToldSession(), key="mine")

    async def talk():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(endpoint.app))
        async with openai.AsyncOpenAI(
            base_url=access.base_url, api_key="mine", http_client=http
        ) as client:
            messages = [{"role": "user", "content": text}]
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    pieces = [piece for piece in asyncio.run(talk()) if piece]
    assert pieces == [text[i : i + 3] for i in range(0, len(text), 3)]  # as they are sampled


def test_an_address_that_cannot_be_had_is_refused():
    endpoint = Endpoint(sampling=RULES, model="ours", form=AnswerForm(FORMAT))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be listened on: .*in use"):
            endpoint.start(port=port)
    with pytest.raises(ValueError, match="192.0.2.1:0 cannot be listened on"):
        endpoint.start("192.0.2.1")  # of documentation, nobody's
    with pytest.raises(ValueError, match="the port: got 70000; allowed: 0 to 65535"):
        endpoint.start(port=70_000)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "é"])
def test_a_key_that_cannot_be_sent_is_refused(key):
    endpoint = Endpoint(sampling=RULES, model="ours", form=AnswerForm(FORMAT))
    with pytest.raises(ValueError, match="the key: got one that"):
        endpoint.open_key(ToldSession(), key=key)


def test_what_a_session_samples_is_that_of_its_own_rules():
    endpoint = make_endpoint()
    greedy = type(RULES)(temperature=0.0, top_k=5)
    likeliest = opened(endpoint, sampling=type(RULES)(temperature=0.0))
    with likeliest as (_, access):
        for top_k in (1, -1, 0, 50):
            assert ask(access, "x", temperature=0, top_p=0.9, extra_body={"top_k": top_k})
        with pytest.raises(openai.BadRequestError, match="top_k: got -2; allowed: -1 or 0 or 1"):
            ask(access, "x", extra_body={"top_k": -2})
    with opened(endpoint) as (_, sampled), opened(endpoint, sampling=greedy) as (_, other):
        assert ask(other, "x", temperature=0, top_p=1, extra_body={"top_k": 5})
        for access, options, more in (
            (sampled, {"temperature": 0}, "; --temperature of serve sets it"),
            (other, {"seed": 1}, ""),
        ):
            advice = rf"\(agent.*, or --ignore_sampling of serve, ignores the field{more}\)"
            with pytest.raises(openai.BadRequestError, match=advice):
                ask(access, "x", **options)
    endpoint.close()


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    for name in ("endpoint", "listening"):
        monkeypatch.delitem(sys.modules, f"seeupo_jax.agents.{name}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ValueError, match=r"need the uvicorn package: .*seeupo_jax\[agents\]"):
        import seeupo_jax.agents.endpoint  # noqa: F401


@pytest.mark.parametrize(
    "request_kind",
    [
        chat_completions.ChatRequest,
        responses.ResponsesRequest,
        anthropic_messages.MessagesRequest,
        token_counts.TokenizeRequest,
    ],
)
def test_the_page_names_every_field(request_kind):
    page = (ROOT / "docs" / "endpoint.md").read_text()
    missing = [
        n for n in request_kind.model_fields if f"`{n}`" not in page and f"`{n}." not in page
    ]
    assert missing == []
