"""Tinker's API over HTTP: addresses, keys and the forms of answers."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import logging
import secrets
import shutil
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.agents.endpoint_http import discard_rest, read_body
from seeupo_jax.train_service.futures import Failed
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.saved_weights import KINDS, Saved
from seeupo_jax.train_service.service import TrainService

_LOGGER = logging.getLogger(__name__)
PREFIX = "/api/v1"
PROTOBUF = "application/x-protobuf"
BODY_BYTES, BODY_S = 64 * 2**20, 60.0
OWNER = "seeupo_jax"
# Of the SDK: data in chunks that come in any order, no protocol but HTTP/1.1, no compression.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "use_pyqwest_transport": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_enable_stuck_detection": False,
}


class TrainApi:
    """The addresses of a service; `app` is what a server of HTTP runs.

    Args:
      key: that every request has as `X-API-Key`, or as a bearer token.
    """

    def __init__(self, service: TrainService, key: str):
        self._service, self._key = service, key
        posts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "client/config": lambda _: CLIENT_CONFIG,
            "client/dynamic_config": lambda _: {},
            "telemetry": lambda _: {"status": "accepted"},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": lambda body: service.info(str(body.get("model_id"))),
            "optim_step": self._promise(service.optim_step),
            "save_weights": self._promise(service.save_weights),
            "load_weights": self._promise(service.load_weights),
            "save_weights_for_sampler": self._promise(service.save_weights_for_sampler),
            "save_weights_external": self._promise(service.save_weights_external),
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "weights_info": self._weights_info,
        }
        gets: dict[str, Callable[[Request], Any]] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{name}": lambda request: service.sampler(request.path_params["name"]),
            "training_runs": self._list_runs,
            "training_runs/{run}": self._show_run,
            "training_runs/{run}/checkpoints": self._list_of_run,
            "checkpoints": self._list_all,
        }
        answer = [
            *((path, "POST", functools.partial(self._post, work)) for path, work in posts.items()),
            *((path, "GET", functools.partial(self._get, work)) for path, work in gets.items()),
            ("forward_backward", "POST", self._forward_backward),
            ("retrieve_future", "POST", self._retrieve),
            ("sessions/{name}/finish", "POST", self._finish),
            ("training_runs/{run}/checkpoints/{kind}/{name}", "DELETE", self._remove),
        ]
        self.app = Starlette(
            routes=[
                Route(f"{PREFIX}/healthz", _answer_health, methods=["GET"]),
                *(
                    Route(f"{PREFIX}/{path}", functools.partial(self._answer, work), methods=[way])
                    for path, way, work in answer
                ),
            ],
            exception_handlers={HTTPException: _answer_unknown},
        )

    async def _answer(self, work: Any, request: Request) -> Response:
        """What `work` answers to a request with the key; refusals as `{"detail": SENTENCE}`."""
        try:
            self._check_key(request)
            return await work(request)
        except RequestRefused as refusal:
            return JSONResponse({"detail": str(refusal)}, refusal.status)
        except CallRefused as refusal:  # of its key, or of a body that is too large
            await discard_rest(request)
            return JSONResponse({"detail": str(refusal)}, refusal.status)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            _LOGGER.error("a request failed", exc_info=error)
            sentence = "the request failed inside the server; its log says why."
            return JSONResponse({"detail": sentence}, 500)

    def _check_key(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        if not any(secrets.compare_digest(key.encode(), self._key.encode()) for key in given):
            raise CallRefused(
                "the key: got no known key; allowed: the one that the server printed or read from"
                " SEEUPO_API_KEY, as TINKER_API_KEY of the client.",
                status=401,
            )

    async def _post(self, work: Callable[[dict[str, Any]], Any], request: Request) -> Response:
        body = await read_body(request, most=BODY_BYTES, body_s=BODY_S)
        return JSONResponse(await asyncio.to_thread(work, _read_json(body)))

    async def _get(self, work: Callable[[Request], Any], request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(work, request))

    async def _forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-type") != PROTOBUF or "content-encoding" in request.headers:
            raise RequestRefused(
                f"the body: got another form; allowed: {PROTOBUF}, not compressed, as the package"
                " tinker sends it from 0.38 on."
            )
        body = await read_body(request, most=BODY_BYTES, body_s=BODY_S)
        return JSONResponse({"request_id": self._service.forward_backward(body)})

    async def _retrieve(self, request: Request) -> Response:
        body = _read_json(await read_body(request, most=BODY_BYTES, body_s=BODY_S))
        name = str(body.get("request_id"))
        result = await self._service.futures.result(name)
        if result is None:
            waits = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(waits, 408)
        if isinstance(result, Failed):
            return JSONResponse({"error": result.sentence, "category": result.category})
        if isinstance(result, bytes):
            return Response(result, media_type=PROTOBUF)
        return JSONResponse(result)

    def _promise(
        self, begin: Callable[[dict[str, Any]], str]
    ) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda body: {"request_id": begin(body)}

    def _create_session(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"type": "create_session", "session_id": self._service.create_session()}

    def _heartbeat(self, body: dict[str, Any]) -> dict[str, Any]:
        self._service.heartbeat(str(body.get("session_id")))
        return {"type": "session_heartbeat"}

    def _create_model(self, body: dict[str, Any]) -> dict[str, Any]:
        model_id, request_id = self._service.create_model(body)
        return {"request_id": request_id, "model_id": model_id}

    def _create_sampling_session(self, body: dict[str, Any]) -> dict[str, Any]:
        name = self._service.create_sampling_session(body)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        request_id, count = self._service.sample(body)
        names = [f"{request_id}-{index}" for index in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": names}

    def _capabilities(self, _: Request) -> dict[str, Any]:
        model = {
            "model_name": self._service.model_name,
            "max_context_length": self._service.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def _weights_info(self, body: dict[str, Any]) -> dict[str, Any]:
        about = self._service.saved.find(str(body.get("tinker_path"))).about
        names = ("base_model", "lora_rank", "train_unembed", "train_mlp", "train_attn")
        return {"is_lora": True, **{name: about[name] for name in names}}

    def _list_runs(self, request: Request) -> dict[str, Any]:
        runs = self._service.describe_runs()
        first, most = (
            _query(request, name, default) for name, default in (("offset", 0), ("limit", 20))
        )
        named = sorted(runs.items(), key=lambda each: -each[1]["last_request"])
        shown = [self._training_run(name, about) for name, about in named[first : first + most]]
        cursor = {"offset": first, "limit": most, "total_count": len(runs)}
        return {"training_runs": shown, "cursor": cursor}

    def _show_run(self, request: Request) -> dict[str, Any]:
        name, runs = request.path_params["run"], self._service.describe_runs()
        if name not in runs:
            raise RequestRefused(f"training_run_id: got {name!r:.120}, which is not known.", 404)
        return self._training_run(name, runs[name])

    def _training_run(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        last: dict[str, Any] = {"training": None, "sampler": None}
        for each in self._service.saved.list(name):
            last[KINDS[each.kind]] = _checkpoint(each)
        return {
            "training_run_id": name,
            "base_model": about["base_model"],
            "model_owner": OWNER,
            "is_lora": True,
            "lora_rank": about["lora_rank"],
            "last_request_time": _time(about["last_request"]),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": about.get("user_metadata"),
        }

    def _list_of_run(self, request: Request) -> dict[str, Any]:
        saved = self._service.saved.list(request.path_params["run"])
        return {"checkpoints": [_checkpoint(each) for each in saved]}

    def _list_all(self, request: Request) -> dict[str, Any]:
        saved = self._service.saved.list()
        first, most = (
            _query(request, name, default) for name, default in (("offset", 0), ("limit", 100))
        )
        cursor = {"offset": first, "limit": most, "total_count": len(saved)}
        shown = [_checkpoint(each) for each in saved[first : first + most]]
        return {"checkpoints": shown, "cursor": cursor}

    async def _finish(self, request: Request) -> Response:
        self._service.finish_session(request.path_params["name"])
        return Response(status_code=204)

    async def _remove(self, request: Request) -> Response:
        named = request.path_params
        saved = self._service.saved.find(f"tinker://{named['run']}/{named['kind']}/{named['name']}")
        await asyncio.to_thread(shutil.rmtree, saved.folder)
        return Response(status_code=204)


def _checkpoint(saved: Saved) -> dict[str, Any]:
    kind, name = saved.path.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": _time(saved.about["time"]),
        "tinker_path": saved.path,
        "size_bytes": sum(file.stat().st_size for file in saved.folder.iterdir()),
        "public": False,
        "user_metadata": saved.about.get("checkpoint_metadata"),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _query(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, str(default))
    if not value.isdecimal():
        raise RequestRefused(f"{name}: got {value!r:.40}; allowed: a whole number.")
    return int(value)


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise RequestRefused("the body: got no JSON object; allowed: one.")
    return tree


async def _answer_health(_: Request) -> Response:
    """Needs no key."""
    return JSONResponse({"status": "ok"})


async def _answer_unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    got = f"{request.method[:20]} {request.url.path[:80]}"
    sentence = f"the address: got {got}, which this server does not have."
    return JSONResponse({"detail": sentence}, error.status_code)
