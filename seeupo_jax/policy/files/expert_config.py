"""The settings of experts in a config.json, by the families' ways to state them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.policy.architecture import Moe


class ExpertSettings(NamedTuple):
    """A way to state experts in a config.json.

    read: of a config with its family's defaults, and the config's name for errors. write: the
    inverse.
    """

    read: Callable[[Mapping[str, Any], str], Moe]
    write: Callable[[Moe], dict[str, Any]]


def _experts_per_token(values: Mapping[str, Any], experts: int, source: str) -> int:
    each = values["num_experts_per_tok"]
    if each is None or not 0 < each <= experts:
        raise ValueError(
            f"{source}: num_experts_per_tok is {each}; allowed: from 1 to the {experts} experts."
        )
    return each


def _read_qwen_experts(values: Mapping[str, Any], source: str) -> Moe:
    experts = values.get("num_local_experts", values.get("num_experts"))
    layers, step = range(values["num_hidden_layers"]), values["decoder_sparse_step"]
    return Moe(
        experts,
        _experts_per_token(values, experts, source),
        values["moe_intermediate_size"],
        values["norm_topk_prob"],
        tuple(i for i in layers if i in values["mlp_only_layers"] or (i + 1) % step),
    )


def _qwen_experts_json(moe: Moe) -> dict[str, Any]:
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.mlp_width,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }


def _read_qwen2_experts(values: Mapping[str, Any], source: str) -> Moe:
    width = values["shared_expert_intermediate_size"]
    return replace(_read_qwen_experts(values, source), shared_width=width, shared_gate=True)


def _qwen2_experts_json(moe: Moe) -> dict[str, Any]:
    return _qwen_experts_json(moe) | {"shared_expert_intermediate_size": moe.shared_width}


def _read_qwen3_5_experts(values: Mapping[str, Any], source: str) -> Moe:
    return Moe(
        values["num_experts"],
        _experts_per_token(values, values["num_experts"], source),
        values["moe_intermediate_size"],
        normalize=True,
        shared_width=values["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def _qwen3_5_experts_json(moe: Moe) -> dict[str, Any]:
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.mlp_width,
        "shared_expert_intermediate_size": moe.shared_width,
    }


def _read_olmoe_experts(values: Mapping[str, Any], source: str) -> Moe:
    experts = values["num_experts"]
    each = _experts_per_token(values, experts, source)
    return Moe(experts, each, values["intermediate_size"], values["norm_topk_prob"])


def _olmoe_experts_json(moe: Moe) -> dict[str, Any]:
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
        "intermediate_size": moe.mlp_width,
        "norm_topk_prob": moe.normalize,
    }


def _read_mixtral_experts(values: Mapping[str, Any], source: str) -> Moe:
    experts = values["num_local_experts"]
    each = _experts_per_token(values, experts, source)
    return Moe(experts, each, values["intermediate_size"], normalize=True, names="mixtral")


def _mixtral_experts_json(moe: Moe) -> dict[str, Any]:
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.per_token,
        "intermediate_size": moe.mlp_width,
    }


_DEEPSEEK_KEYS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("norm_topk_prob", "first_k_dense_replace"),
)


def _read_deepseek_experts(values: Mapping[str, Any], source: str) -> Moe:
    missing = [key for key in _DEEPSEEK_KEYS if values.get(key) is None]
    if missing:
        raise ValueError(f"{source}: {', '.join(missing)} missing; a model of experts has them.")
    _check_scores(values, ("sigmoid", "noaux_tc"), source)  # the second as dots.llm1 says it
    dense = values["first_k_dense_replace"]
    if not 0 <= dense < values["num_hidden_layers"]:
        raise ValueError(
            f"{source}: first_k_dense_replace is {dense}; allowed: 0 to fewer than all layers."
        )
    experts, groups, some = (values[k] for k in ("n_routed_experts", "n_group", "topk_group"))
    if experts % groups or some > groups or experts < 2 * groups:
        raise ValueError(
            f"{source}: n_group is {groups} and topk_group {some} for {experts} experts; allowed:"
            " groups of equal size with two experts at least, and at most all of them."
        )
    each = _experts_per_token(values, experts // groups * some, source)
    return Moe(
        experts,
        each,
        values["moe_intermediate_size"],
        values["norm_topk_prob"],
        tuple(range(dense)),
        scores="sigmoid",
        scale=values["routed_scaling_factor"],
        selection_bias=True,
        groups=groups,
        groups_per_token=some,
        shared_width=values["n_shared_experts"] * values["moe_intermediate_size"],
        names="deepseek",
    )


def _check_scores(values: Mapping[str, Any], allowed: tuple[str, ...], source: str) -> None:
    stated = values.get("scoring_func")
    if stated is not None and stated not in allowed:
        raise ValueError(f"{source}: scoring_func is {shown(stated)}; allowed: {allowed[0]}.")


def _read_deepseek2_experts(values: Mapping[str, Any], source: str) -> Moe:
    method, one_group = values["topk_method"], {"n_group": 1, "topk_group": 1}
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"{source}: topk_method is {shown(method)}; allowed: greedy, group_limited_greedy."
        )
    if values["norm_topk_prob"]:
        raise ValueError(f"{source}: norm_topk_prob is true; allowed for deepseek_v2: false.")
    _check_scores(values, ("softmax",), source)
    groups = one_group if method == "greedy" else {}
    moe = _read_deepseek_experts({**values, **groups, "scoring_func": None}, source)
    return replace(moe, scores="softmax", selection_bias=False, group_best=1)


def _deepseek2_experts_json(moe: Moe) -> dict[str, Any]:
    method = "greedy" if moe.groups == 1 else "group_limited_greedy"
    return _deepseek_experts_json(moe) | {"topk_method": method}


def _deepseek_experts_json(moe: Moe) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_width // moe.mlp_width,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.mlp_width,
        "norm_topk_prob": moe.normalize,
        "first_k_dense_replace": len(moe.dense_layers),
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.groups_per_token,
    }


def _read_gpt_oss_experts(values: Mapping[str, Any], source: str) -> Moe:
    experts = values["num_local_experts"]
    return Moe(
        experts,
        _experts_per_token(values, experts, source),
        values["intermediate_size"],
        normalize=True,  # its softmax over a token's experts alone is the same
        biases=True,
        swiglu_limit=values["swiglu_limit"],
        swiglu_alpha=values["swiglu_alpha"],
        names="gpt_oss",
    )


def _gpt_oss_experts_json(moe: Moe) -> dict[str, Any]:
    limits = {"swiglu_limit": moe.swiglu_limit, "swiglu_alpha": moe.swiglu_alpha}
    return _mixtral_experts_json(moe) | limits


# By `Family.experts`.
EXPERT_SETTINGS = {
    "qwen3": ExpertSettings(_read_qwen_experts, _qwen_experts_json),
    "qwen2": ExpertSettings(_read_qwen2_experts, _qwen2_experts_json),
    "qwen3_5": ExpertSettings(_read_qwen3_5_experts, _qwen3_5_experts_json),
    "olmoe": ExpertSettings(_read_olmoe_experts, _olmoe_experts_json),
    "mixtral": ExpertSettings(_read_mixtral_experts, _mixtral_experts_json),
    "gpt_oss": ExpertSettings(_read_gpt_oss_experts, _gpt_oss_experts_json),
    "deepseek_v2": ExpertSettings(_read_deepseek2_experts, _deepseek2_experts_json),
    "deepseek": ExpertSettings(_read_deepseek_experts, _deepseek_experts_json),
}
