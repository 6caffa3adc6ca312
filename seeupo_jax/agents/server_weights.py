"""How a server is given the weights of a folder, for each kind of server (vLLM, sglang)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from seeupo_jax.agents.server_client import Refused, ServerClient, TryAgain


class WeightUpdate(NamedTuple):
    """How a kind of server is updated.

    push: of its client, the folder as it sees it, the version, and whether requests are under way;
      raises TryAgain or Refused.
    give_up: after a failed push: requests that are under way end, sooner or later.
    """

    push: Callable[[ServerClient, str, str, bool], None]
    give_up: Callable[[ServerClient], None]


def _push_vllm(client: ServerClient, folder: str, version: str, under_way: bool) -> None:
    """Pauses, reloads, names the version, and resumes; after a failure it is still paused."""
    client.ask("POST", f"/pause?mode={'keep' if under_way else 'wait'}", None, _any)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    client.ask("POST", "/collective_rpc", reload, _any)
    client.ask("POST", "/reset_prefix_cache", None, _any)
    try:
        client.ask("POST", "/update_weight_version", {"new_version": version}, _any)
    except Refused as refusal:  # of older servers, which have no names for versions
        if refusal.status != 404:
            raise
    client.ask("POST", "/resume", None, _any)


def _give_up_vllm(client: ServerClient) -> None:
    """Ends requests under way, and resumes: a server that is paused already may ignore the first.

    What a failed reload leaves may be weights of both versions: nothing that is sampled from now on
    may be used.
    """
    with contextlib.suppress(TryAgain, Refused):
        client.ask("POST", "/pause?mode=abort", None, _any)
        client.ask("POST", "/resume", None, _any)


def _push_sglang(client: ServerClient, folder: str, version: str, under_way: bool) -> None:
    """Updates once no request is under way, or while they stand still; then requests go on."""
    body = {"model_path": folder, "weight_version": version, "flush_cache": not under_way}
    with contextlib.ExitStack() as stack:
        if under_way:
            client.ask("POST", "/pause_generation", {"mode": "in_place"}, _any)
            stack.callback(client.ask, "POST", "/continue_generation", {}, _any)
        client.ask("POST", "/update_weights_from_disk", body, _succeeded)


def _any(reply: Any) -> Any:
    return reply


def _succeeded(reply: Any) -> None:
    if reply["success"] is not True:
        raise TryAgain(str(reply["message"]))


WEIGHT_UPDATES: dict[str, WeightUpdate] = {
    "vllm": WeightUpdate(_push_vllm, _give_up_vllm),
    "sglang": WeightUpdate(_push_sglang, lambda client: None),  # it has continued
}
