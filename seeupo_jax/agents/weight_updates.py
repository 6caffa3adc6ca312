"""Updates of a server's weights, by the requests that SGLang and vLLM have for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.agents.control import Control
from seeupo_jax.agents.dialects.request_body import Fields, read_fields, refuse
from seeupo_jax.agents.serving import ServingSession

_LOGGER = logging.getLogger(__name__)
FLAG = "--weight_updates"
VLLM_MODES = ("abort", "wait", "keep")
# What SGLang does with the contexts of calls that stand still -> the engine's treatment of them.
SGLANG_KEPT = {"in_place": "keep", "retract": "prefill"}
_TRANSFERS = (
    *("/init_weight_transfer_engine", "/start_weight_update"),
    *("/update_weights", "/finish_weight_update"),
    *("/update_weights_from_tensor", "/update_weights_from_distributed"),
    *("/init_weights_update_group", "/update_weights_from_ipc"),
)


class _Update(Fields):
    """SGLang's update from a folder; what only concerns its memory has no effect."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    flush_cache: bool = True
    load_format: str | None = None
    is_async: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class _Adapter(Fields):
    """A folder of adapters. load_inplace, pinned: vLLM's and SGLang's own; without effect."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool = False


class _Pause(Fields):
    mode: str = "abort"


class _Continue(Fields):
    torch_empty_cache: bool = True


class _Name(Fields):
    new_version: str
    abort_all_requests: bool = False


class _Reload(Fields):
    weights_path: str | None = None
    is_checkpoint_format: bool = True


class _Call(Fields):
    method: str
    timeout: float | None = None
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class WeightUpdates:
    """Serves the weights of other folders, while calls are answered.

    A folder that cannot be read changes nothing: the weights before it are served on.

    Args:
      root: folders are below it.
      load: reads a folder's parameters, on the devices; raises ValueError or OSError.
      on_swap: what the engine does with calls that stand still: keep | prefill.
      model_path: of the weights that are served first.
    """

    def __init__(
        self,
        session: ServingSession,
        root: Path,
        load: Callable[[Path], Any],
        *,
        on_swap: str,
        model_path: str,
    ):
        self._session, self._root, self._load = session, Path(os.path.realpath(root)), load
        self._on_swap, self._model_path = on_swap, model_path
        self._one = asyncio.Lock()  # one update after another: each needs memory for its weights

    @property
    def controls(self) -> tuple[Control, ...]:
        """The requests of both kinds of servers."""
        return (
            Control("POST", "/update_weights_from_disk", self._update_from_disk),
            Control("POST", "/pause_generation", self._pause_generation),
            Control("POST", "/continue_generation", self._continue_generation),
            Control("GET", "/model_info", self._model_info),
            Control("GET", "/get_weight_version", self._weight_version),
            Control("GET", "/flush_cache", self._flush_cache),
            Control("POST", "/flush_cache", self._flush_cache),
            Control("POST", "/load_lora_adapter", self._load_lora_adapter),
            Control("POST", "/pause", self._pause),
            Control("POST", "/resume", self._resume),
            Control("GET", "/is_paused", self._is_paused),
            Control("POST", "/collective_rpc", self._collective_rpc),
            Control("POST", "/reset_prefix_cache", self._flush_cache),
            Control("POST", "/update_weight_version", self._update_weight_version),
            Control("GET", "/weight_info", self._weight_version),
            Control("POST", "/v1/load_lora_adapter", self._load_lora_adapter),
            *(Control("POST", path, _refuse_transfer) for path in _TRANSFERS),
        )

    async def _update_from_disk(
        self, _: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, Any]:
        request = _read(_Update, body)
        if request.load_format not in (None, "auto", "safetensors"):
            refuse(
                "load_format",
                f"load_format: got {request.load_format!r}; allowed: auto or safetensors.",
            )
        try:
            await self._update(
                request.model_path,
                "model_path",
                request.weight_version,
                abort=request.abort_all_requests,
                pause=request.keep_pause,
            )
        except CallRefused as refusal:
            if refusal.status != 400:
                raise
            return 400, {"success": False, "message": str(refusal), "num_paused_requests": 0}
        message = f"Serving {request.model_path} as version {self._session.version!r}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}

    async def _pause_generation(
        self, _: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, Any]:
        mode = _read(_Pause, body).mode
        if mode not in ("abort", *SGLANG_KEPT):
            refuse("mode", f"mode: got {mode!r}; allowed: abort, {', '.join(SGLANG_KEPT)}.")
        if mode != "abort" and SGLANG_KEPT[mode] != self._on_swap:
            refuse(
                "mode",
                f"mode: got {mode!r} with config.rollout.on_swap={self._on_swap}; allowed: abort,"
                f" or {SGLANG_KEPT[mode]} there.",
            )
        await self._session.pause("abort" if mode == "abort" else "keep")
        return 200, {"message": "Generation is paused.", "status": "ok"}

    async def _continue_generation(
        self, _: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, Any]:
        _read(_Continue, body)
        await self._session.resume()
        return 200, {"message": "Generation continues.", "status": "ok"}

    async def _model_info(self, *_: Mapping[str, Any]) -> tuple[int, Any]:
        version = self._session.version
        return 200, {
            "model_path": self._model_path,
            "is_generation": True,
            "weight_version": version,
        }

    async def _weight_version(self, *_: Mapping[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self._session.version}

    async def _flush_cache(self, *_: Mapping[str, Any]) -> tuple[int, Any]:
        message = "Keys and values that other weights have computed are not used anyway."
        return 200, {"success": True, "message": message}

    async def _load_lora_adapter(
        self, _: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, Any]:
        request = _read(_Adapter, body)
        await self._update(request.lora_path, "lora_path", None)
        return 200, {"success": True, "message": f"Serving the adapters {request.lora_name!r}."}

    async def _pause(self, query: Mapping[str, str], _: Mapping[str, Any]) -> tuple[int, Any]:
        mode = query.get("mode", "abort")
        if mode not in VLLM_MODES:
            refuse("mode", f"mode: got {mode[:40]!r}; allowed: {', '.join(VLLM_MODES)}.")
        await self._session.pause(mode)
        return 200, {"status": "paused"}

    async def _resume(self, *_: Mapping[str, Any]) -> tuple[int, Any]:
        await self._session.resume()
        return 200, {"status": "resumed"}

    async def _is_paused(self, *_: Mapping[str, Any]) -> tuple[int, Any]:
        return 200, {"is_paused": self._session.paused}

    async def _collective_rpc(
        self, _: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, Any]:
        call = _read(_Call, body)
        if call.method != "reload_weights" or call.args:
            got = f"{call.method[:40]!r} with args" if call.args else f"{call.method[:40]!r}"
            refuse("method", f"method: got {got}; allowed: reload_weights with kwargs.")
        folder = _read(_Reload, call.kwargs).weights_path
        await self._update(self._model_path if folder is None else folder, "weights_path", None)
        return 200, {"results": [None]}

    async def _update_weight_version(
        self, _: Mapping[str, str], body: Mapping[str, Any]
    ) -> tuple[int, Any]:
        request = _read(_Name, body)
        await self._session.rename(request.new_version)
        return 200, {
            "success": True,
            "message": f"The weights are version {request.new_version!r}.",
            "new_version": request.new_version,
        }

    async def _update(
        self,
        path: str,
        field: str,
        version: str | None,
        *,
        abort: bool = False,
        pause: bool = False,
    ) -> None:
        """Serves a folder's weights, by default under the folder's name.

        Raises:
          CallRefused: it is not below the root, or cannot be read; nothing has changed.
        """
        folder = self._inside(path, field)
        async with self._one:
            try:
                params = await asyncio.to_thread(self._load, folder)
            except (ValueError, OSError) as error:
                _LOGGER.warning(f"warning: weights were not updated: {error}")
                sentence = f"{field}: {error} Version {self._session.version!r} is served on."
                raise CallRefused(sentence, code="invalid_weights", param=field) from None
            name = folder.name if version is None else version
            await self._session.update(params, name, abort=abort, pause=pause)
        self._model_path = path
        _LOGGER.info(f"serving the weights of {folder}, version {name!r}")

    def _inside(self, path: str, field: str) -> Path:
        with contextlib.suppress(ValueError, OSError):  # a NUL, or a loop of links
            folder = Path(os.path.realpath(self._root / path))
            if folder != self._root and folder.is_relative_to(self._root):
                return folder
        raise CallRefused(
            f"{field}: got {path[:200]!r}; allowed: a folder below {self._root} ({FLAG}).",
            status=403,
            code="not_allowed",
            param=field,
        )


def _read(kind: Any, body: Mapping[str, Any]) -> Any:
    fields, _ = read_fields(kind, dict(body), ignore=False)
    return fields


async def _refuse_transfer(*_: Mapping[str, Any]) -> NoReturn:
    raise CallRefused(
        "updates of the weights: got tensors over a connection; allowed: a folder, by"
        " /update_weights_from_disk, or by /collective_rpc with reload_weights.",
        status=404,
        code="not_available",
    )
