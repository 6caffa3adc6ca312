"""Who may ask an AppWorld server, and when it ends for a new one; without AppWorld itself."""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "third_party" / "appworld" / "server.py"


@pytest.fixture
def guard(tmp_path, monkeypatch):
    """A guard before an application whose `/evaluate` fails; `ended` lists its exits."""
    spec = importlib.util.spec_from_file_location("appworld_server", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    async def app(scope, receive, send):
        if scope["path"] == "/evaluate":
            raise TypeError
        await send({"type": "http.response.start", "status": 200})

    guard = module.Guard(app, "token", str(tmp_path), module.Limits(60, 10**6, idle_s=60))
    guard.ended = []
    guard._exit = guard.ended.append
    return guard


def ask(guard, path, client):
    headers = {b"authorization": b"Bearer token", b"x-client": client}
    scope = {"type": "http", "path": path, "headers": headers.items()}
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope, None, send))
    return sent[0]["status"]


def test_only_a_client_that_opened_a_world_here_may_use_it(guard):
    assert ask(guard, "/health", b"a") == 200
    assert ask(guard, "/execute", b"a") == 410  # of the process that was here before
    assert ask(guard, "/initialize", b"a") == ask(guard, "/execute", b"a") == 200
    assert ask(guard, "/execute", b"b") == ask(guard, "/initialize", b"b") == 409
    assert ask(guard, "/release", b"b") == ask(guard, "/end", b"b") == 409
    assert ask(guard, "/release", b"a") == 200 and ask(guard, "/execute", b"a") == 410
    assert ask(guard, "/initialize", b"b") == 200 and not guard.ended


def test_a_server_ends_for_a_client_where_code_ran_and_else_is_released(guard):
    assert ask(guard, "/initialize", b"a") == ask(guard, "/end", b"a") == 200
    assert not guard.ended
    assert ask(guard, "/initialize", b"b") == ask(guard, "/execute", b"b") == 200
    assert ask(guard, "/end", b"b") == 200 and guard.ended == [1]


def test_a_server_ends_when_a_request_fails_after_code_ran(guard):
    assert ask(guard, "/initialize", b"a") == 200
    with pytest.raises(TypeError):
        ask(guard, "/evaluate", b"a")
    assert not guard.ended and ask(guard, "/execute", b"a") == 200
    with pytest.raises(TypeError):
        ask(guard, "/evaluate", b"a")
    assert guard.ended == [1]
