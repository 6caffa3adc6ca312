"""An HTTP endpoint for sessions: a key belongs to one session, a request is one of its calls.

A session is an episode of a run's collection, or a server for other programs (`seeupo-serve`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from seeupo_jax.agents.answer_form import PLAIN_TEXT, AnswerForm, AnswerSplitter, Shown
from seeupo_jax.agents.calls import (
    Access,
    CallRefused,
    Completion,
    HistoryMessage,
    Session,
    is_header_value,
)
from seeupo_jax.agents.control import Control

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from seeupo_jax.agents.dialects import (
        anthropic_messages,
        chat_completions,
        completions,
        generate,
        responses,
    )
    from seeupo_jax.agents.dialects.exchange import Caller, Dialect, Event, Exchange
    from seeupo_jax.agents.dialects.request_body import leave_out_media, parse_json
    from seeupo_jax.agents.dialects.sampling_rules import SamplingRules
    from seeupo_jax.agents.dialects.token_counts import COUNT_TOKENS, TOKENIZE, TokenQuestion
    from seeupo_jax.agents.endpoint_http import (
        ClientGone,
        EventStream,
        OriginForm,
        discard_rest,
        read_body,
        task_of,
        until_disconnect,
    )
    from seeupo_jax.agents.listening import Listener
except ModuleNotFoundError as error:
    if error.name not in ("uvicorn", "starlette", "pydantic"):
        raise
    raise ValueError(
        f"agents need the {error.name} package: pip install 'seeupo_jax[agents]'."
    ) from None

_log = logging.getLogger(__name__)

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_completions.DIALECT,
    "/v1/completions": completions.DIALECT,
    "/generate": generate.DIALECT,
    "/v1/responses": responses.DIALECT,
    "/v1/messages": anthropic_messages.DIALECT,
}
QUESTIONS: dict[str, TokenQuestion] = {
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/tokenize": TOKENIZE,
}
IN_PROCESS = "http://in-process"  # the address of an endpoint without a port
LARGE = 65_536  # bytes of a body from which on it is parsed outside the event loop

Read = TypeVar("Read")


@dataclass(frozen=True)
class Limits:
    """Limits of a request's cost.

    request_bytes: of its body. head_s, body_s: seconds until its headers and its body have arrived.
    """

    request_bytes: int = 8 * 2**20
    head_s: float = 60.0
    body_s: float = 60.0


@dataclass
class _Client:
    """The holder of a key. ids: prefix of the ids of its tool calls. requests: number sent."""

    session: Session
    rules: SamplingRules
    ids: str
    requests: int = 0
    responses: dict[str, tuple[HistoryMessage, ...]] = field(default_factory=dict)


class Endpoint:
    """Serves sessions to clients of OpenAI's and Anthropic's APIs.

    Sessions are awaited in the event loop that serves the request: the loop of `start`'s thread, or
    the loop of a client that calls `app` in its own process (`httpx.ASGITransport`).

    Args:
      sampling: the rules of all keys without their own.
      model: the served name; requests may give any name.
      form: the form of the policy's answers.
      roles: names that requests give as their model to play a role of their episode.
      origins: of web pages that may call (CORS): `*`, or addresses such as http://localhost:3000.
      metrics: figures in Prometheus' form, for /metrics; None: there are none.
      controls: of what is served.
    """

    def __init__(
        self,
        *,
        sampling: SamplingRules,
        model: str,
        form: AnswerForm,
        roles: Sequence[str] = (),
        limits: Limits = Limits(),
        origins: Sequence[str] = (),
        metrics: Callable[[], bytes] | None = None,
        controls: Sequence[Control] = (),
    ):
        self._sampling, self._model, self._limits = sampling, model, limits
        self._roles = tuple(roles)
        self._form, self._metrics = form, metrics
        self._clients: dict[str, _Client] = {}
        self._calls: set[asyncio.Task[Completion]] = set()
        self.base_url = f"{IN_PROCESS}/v1"
        self.app = Starlette(
            routes=[
                *(Route(path, self._answer_call, methods=["POST"]) for path in DIALECTS),
                *(Route(path, self._answer_question, methods=["POST"]) for path in QUESTIONS),
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._show_model, methods=["GET"]),
                Route("/health", _answer_health, methods=["GET"]),
                *([] if metrics is None else [Route("/metrics", self._show_metrics)]),
                *(Route(c.path, self._control(c), methods=[c.method]) for c in controls),
            ],
            middleware=[Middleware(OriginForm), *_cross_origin(origins)],
            exception_handlers={
                CallRefused: _answer_error,
                HTTPException: _answer_http_error,
            },
        )
        self.app.router.redirect_slashes = False
        self._listener = Listener(self.app, head_s=limits.head_s)

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts to listen, in a separate thread with its own event loop.

        Args:
          port: 0: a free port.

        Raises:
          ValueError: the address is not available.
        """
        self.base_url = f"{self._listener.start(host, port)}/v1"

    def open_key(
        self,
        session: Session,
        *,
        sampling: SamplingRules | None = None,
        key: str | None = None,
        unique_ids: bool = False,
    ) -> Access:
        """Makes a key (or uses the given one) for a session; any thread may call it.

        Args:
          unique_ids: ids of tool calls start with random digits, for histories that may continue
            at another endpoint. Otherwise ids are reproducible.

        Raises:
          ValueError: the given key cannot be sent.
        """
        key = secrets.token_urlsafe(32) if key is None else key
        if not is_header_value(key):
            raise ValueError("the key: got one that is empty or not visible ASCII.")
        ids = f"call_{secrets.token_hex(4)}" if unique_ids else "call"
        rules = self._sampling if sampling is None else sampling
        self._clients[key] = _Client(session, rules, ids)
        return Access(self.base_url, key)

    def close_key(self, key: str) -> None:
        """Removes a key; the session has to end its running calls."""
        del self._clients[key]

    def close(self, *, cancel: bool = True) -> None:
        """Ends the thread and all calls.

        Args:
          cancel: end calls immediately; otherwise their sessions have the seconds of
            `Listener.close` for it.
        """
        self._clients.clear()
        for task in self._calls.copy() if cancel else ():
            task.get_loop().call_soon_threadsafe(task.cancel)
        self._listener.close()

    def _client(self, request: Request) -> _Client:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        keys = [token.strip()] if scheme.lower() == "bearer" else []
        for key in (*keys, request.headers.get("x-api-key", "")):
            client = self._clients.get(key)
            if client is not None:
                return client
        raise CallRefused(
            "the key: got no known key; allowed: the key of an open episode, or the key that"
            " `serve` printed or read from SEEUPO_API_KEY, as `Authorization: Bearer KEY` or"
            " `x-api-key: KEY`.",
            status=401,
            code="invalid_api_key",
        )

    async def _answer_call(self, request: Request) -> Response:
        try:
            client, body = await self._receive(request)
            client.requests += 1
            exchange = await self._read(DIALECTS[request.url.path].read, client, body)
            del body  # it may have megabytes, and the call may wait long
            if exchange.stream:
                return await self._answer_stream(request, client.session, exchange)
            calls = self._complete_all(client.session, exchange)
            done = await until_disconnect(request.receive, calls)
            return JSONResponse(exchange.reply(*done))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # the client has disconnected
        except Exception as error:
            return await _answer_error(request, error)

    async def _answer_question(self, request: Request) -> Response:
        """Answers with the tokens of a call's context."""
        try:
            client, body = await self._receive(request)
            question = QUESTIONS[request.url.path]
            call = await self._read(question.read, client, body)
            tokens = await until_disconnect(request.receive, client.session.context(call))
            return JSONResponse(question.reply(tokens, client.session.max_context))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            return await _answer_error(request, error)

    def _control(self, control: Control) -> Callable[[Request], Awaitable[Response]]:
        """What answers a request about what is served."""

        async def answer(request: Request) -> Response:
            try:
                _, body = await self._receive(request)
                query, fields = dict(request.query_params), _read_object(body)
                answered = control.answer(query, fields)
                status, reply = await until_disconnect(request.receive, answered)
                return JSONResponse(reply, status)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=499)
            except Exception as error:
                return await _answer_error(request, error)

        return answer

    async def _receive(self, request: Request) -> tuple[_Client, bytes]:
        """Returns the client of a request, and the body."""
        most, body_s = self._limits.request_bytes, self._limits.body_s
        try:
            return self._client(request), await read_body(request, most=most, body_s=body_s)
        except CallRefused as refusal:
            if refusal.status != 408:
                await discard_rest(request)
            raise

    async def _read(
        self, read_tree: Callable[[Any, Caller], Read], client: _Client, body: bytes
    ) -> Read:
        responses = client.responses
        last = next(reversed(responses.values()), ())
        caller = Caller(self._model, client.requests, client.rules, responses, last, client.ids)

        def read() -> Read:
            try:
                tree = parse_json(body)
            except ValueError as error:
                raise CallRefused(f"the body: {error}.", code="invalid_json") from None
            if client.rules.without_media:
                caller.ignored += leave_out_media(tree)
            if isinstance(tree, dict) and tree.get("model") in self._roles:
                caller.model = caller.role = tree["model"]
            return read_tree(tree, caller)

        result = await asyncio.to_thread(read) if len(body) > LARGE else read()
        for param in caller.ignored:
            client.session.ignored(param)
        return result

    async def _complete(
        self, session: Session, exchange: Exchange, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        async with task_of(session.complete(exchange.call, on_text)) as task:
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            await asyncio.wait({task})
            if task.cancelled():
                raise CallRefused("the endpoint is closed.", status=503, code="closed")
            return task.result()

    async def _complete_all(
        self,
        session: Session,
        exchange: Exchange,
        on_text: Callable[[int, str], None] | None = None,
    ) -> Sequence[Completion]:
        """All answers to a request; if one fails the others are cancelled.

        Args:
          on_text: receives the number of an answer and a piece of its text.
        """
        branches = exchange.branches
        tasks: list[asyncio.Task[Completion]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, branch in enumerate(branches):
                    listen = None if on_text is None else functools.partial(on_text, index)
                    tasks.append(group.create_task(self._complete(session, branch, listen)))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer_stream(
        self, request: Request, session: Session, exchange: Exchange
    ) -> Response:
        events = self._events(session, exchange)
        # A refusal before the first event is sent with its own status.
        first = await until_disconnect(request.receive, anext(events))

        return EventStream(first, events, lambda error: exchange.fail(_as_refusal(error)))

    async def _events(self, session: Session, exchange: Exchange) -> AsyncGenerator[Event, None]:
        pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        form = PLAIN_TEXT
        if exchange.call.prompt is None:
            form = self._form.with_tools(exchange.call.tools)
        branches = exchange.branches
        splitters = [AnswerSplitter(form) for _ in branches]
        started = False
        calls = self._complete_all(session, exchange, lambda *piece: pieces.put_nowait(piece))
        async with task_of(calls) as task:
            task.add_done_callback(lambda _: pieces.put_nowait(None))
            while (piece := await pieces.get()) is not None:
                for event in () if started else exchange.begin():
                    yield event
                started = True
                index, text = piece
                shown = splitters[index].feed(text)
                for event in _write_parts(branches[index], shown):
                    yield event
            done = await task
        for event in () if started else exchange.begin():
            yield event
        for branch, splitter, completion in zip(branches, splitters, done, strict=True):
            rest = splitter.rest(Shown(completion.thoughts, completion.content))
            for event in branch.think(rest.thoughts) if rest.thoughts else ():
                yield event
            for event in branch.end(completion, rest.content):
                yield event
        for event in exchange.close(*done):
            yield event

    async def _show_metrics(self, request: Request) -> Response:
        self._client(request)
        assert self._metrics is not None
        return Response(self._metrics(), media_type="text/plain; version=0.0.4")

    async def _list_models(self, request: Request) -> Response:
        self._client(request)
        return JSONResponse(
            {
                "object": "list",
                "data": [_describe_model(name) for name in self._names],
                "has_more": False,
                "first_id": self._names[0],
                "last_id": self._names[-1],
            }
        )

    async def _show_model(self, request: Request) -> Response:
        self._client(request)
        name = request.path_params["name"]
        if name not in self._names:
            raise CallRefused(
                f"model: got {name[:80]!r}; allowed: {', '.join(map(repr, self._names))}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return JSONResponse(_describe_model(name))

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the policy and of the roles."""
        return (self._model, *self._roles)


def _describe_model(name: str) -> dict[str, Any]:
    """A model in OpenAI's and Anthropic's form together; their fields do not collide."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "seeupo_jax",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def _answer_health(request: Request) -> Response:
    """Needs no key: for what restarts a server that does not answer."""
    return JSONResponse({"status": "ok"})


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """What lets web pages of these origins call."""
    if not origins:
        return []
    every = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    return [Middleware(CORSMiddleware, allow_origins=origins, **every)]


def _read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; an empty one has none of the fields."""
    try:
        tree = parse_json(body) if body.strip() else {}
    except ValueError as error:
        raise CallRefused(f"the body: {error}.", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise CallRefused("the body: got no JSON object; allowed: one.", code="invalid_json")
    return tree


def _write_parts(exchange: Exchange, shown: Shown) -> Iterator[Event]:
    """The events of further thoughts and content."""
    if shown.thoughts:
        yield from exchange.think(shown.thoughts)
    if shown.content:
        yield from exchange.text(shown.content)


def _as_refusal(error: Exception) -> CallRefused:
    """Converts an error to a refusal; an error that is not the client's is logged in full."""
    if isinstance(error, CallRefused):
        return error
    _log.error("a call failed", exc_info=error)
    return CallRefused(
        "the call failed inside the server; its log says why.", status=500, code="server_error"
    )


def _error_form(request: Request) -> Callable[[CallRefused], dict[str, Any]]:
    path = request.url.path
    if path in DIALECTS:
        return DIALECTS[path].error
    if path in QUESTIONS:
        return QUESTIONS[path].error
    of_anthropic = path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return DIALECTS["/v1/messages" if of_anthropic else "/v1/responses"].error


async def _answer_error(request: Request, error: Exception) -> Response:
    refusal = _as_refusal(error)
    return JSONResponse(_error_form(request)(refusal), refusal.status)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=error.headers)  # of which `allow` answers it
    got = f"{request.method[:20]} {request.url.path[:80]}"
    refusal = CallRefused(
        f"the address: got {got}; allowed: POST {', POST '.join([*DIALECTS, *QUESTIONS])}, GET"
        " /v1/models, GET /health, and of a server GET /metrics; with --weight_updates of serve"
        " also updates of its weights.",
        status=error.status_code,
        code="unknown_url",
    )
    return JSONResponse(_error_form(request)(refusal), refusal.status, error.headers)
