"""The policy in a configuration: its network, its layout on devices, its conversations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seeupo_jax.configuration.agent_schema import TOOL_FORMATS
from seeupo_jax.configuration.fields import mapping_field, path_field
from seeupo_jax.options import above, at_least, checked, choice, within

# Upper bounds, several times those of the largest published models (Llama 3.1 405B: 126 layers of
# width 16,384; Gemma 3: 262,144 tokens): more is a mistake or a damaged file.
MODEL_SIZES = {
    "vocab_size": 2**24,
    "width": 2**18,
    "layers": 2**10,
    "heads": 2**12,
    "head_dim": 2**12,
    "mlp_width": 2**21,
    "max_positions": 2**31 - 1,  # positions are int32
}

SENT_ROLES = ("system", "user", "tool")  # of messages that the policy does not write


@dataclass(frozen=True)
class Model:
    """The policy network: loaded from `path`, or randomly initialised in the sizes below."""

    path: str | None = path_field()
    """A Hugging Face folder, a .gguf file, package:NAME, or the hub's OWNER/NAME[@REVISION]; it
    sets the sizes; none: random."""
    vocab_size: int = within(1, MODEL_SIZES["vocab_size"], 512)
    """Tokens of the vocabulary."""
    width: int = within(1, MODEL_SIZES["width"], 128)
    """Width of the residual stream."""
    layers: int = within(1, MODEL_SIZES["layers"], 4)
    """Transformer blocks."""
    heads: int = within(1, MODEL_SIZES["heads"], 4)
    """Attention heads."""
    kv_heads: int = within(1, MODEL_SIZES["heads"], 4)
    """Heads of keys and values; a divisor of `heads`."""
    head_dim: int = checked(
        32,
        f"an even number from 2 to {MODEL_SIZES['head_dim']}",
        lambda v: 2 <= v <= MODEL_SIZES["head_dim"] and v % 2 == 0,
    )
    """Width of a head."""
    mlp_width: int = within(1, MODEL_SIZES["mlp_width"], 384)
    """Width of the feed-forward layer."""
    rope_theta: float = above(0, 10_000.0)
    """Base of the rotary position embedding."""
    max_positions: int = within(2, MODEL_SIZES["max_positions"], 32_768)
    """Tokens that the model can attend over."""
    qk_norm: bool = True
    """Whether queries and keys are normalised (RMSNorm)."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    tied: bool = True
    """Whether the output projection is the embedding."""
    dtype: str = choice("float32", "bfloat16")
    """Type of activations."""
    param_dtype: str = choice("float32", "bfloat16")
    """Type of frozen parameters, with lora.rank > 0; parameters that train are float32."""
    scan_layers: bool = False
    """Whether one layer is compiled and looped over; all are compiled as one program otherwise."""
    remat: str = choice("auto", "none", "dots", "attention", "full")
    """Rematerialisation in the backward pass; auto: as little as memory allows."""
    attention: str = choice("auto", "xla", "all_pairs", "splash", "cudnn")
    """Kernel of whole-row passes; all_pairs: of token trees too, for comparison."""


# Projections that adapters may have, by Hugging Face's names, and where they are in a layer: of
# most models, and of latent attention.
_USUAL = {
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
_OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
PROJECTIONS = _USUAL | {name: f"self_attn.{name}" for name in _OF_LATENTS}


def is_pattern(target: str) -> bool:
    """Whether a target of adapters is a regular expression of modules' full names, not a name."""
    try:
        re.compile(target)
    except (re.error, RecursionError, OverflowError):
        return False
    return not re.fullmatch(r"\w*", target)


def _are_targets(targets: tuple[str, ...]) -> bool:
    if len(targets) == 1 and is_pattern(targets[0]):
        return True
    return bool(targets) and len({*targets} & {*PROJECTIONS}) == len(targets)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, trained while the model is frozen."""

    rank: int = at_least(0, 0)
    """Rank of the adapters; 0: no adapters, every parameter trains."""
    alpha: float = above(0, 32.0)
    """Adapters are scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA)."""
    targets: tuple[str, ...] = checked(
        tuple(_USUAL),
        "projections by Hugging Face's names, or a regular expression of modules' full names",
        _are_targets,
    )
    """Projections that have adapters; a regular expression can select layers."""
    path: str | None = path_field()
    """Start from these adapters, in PEFT's format; it sets all above; none: new ones."""
    per_turn: int = within(0, 64, 0)
    """Adapters of turns: action t (from 0) is sampled and trained, with all of its context, under
    adapter min(t, per_turn - 1); an update moves those of its turns alone; 0 and 1: one for all."""
    merge: bool = False
    """Export the merged model instead of the adapters."""

    @property
    def turn_adapters(self) -> int:
        """K, adapters of turns, at least 2; 0: all turns have the same."""
        return self.per_turn if self.per_turn > 1 else 0


@dataclass(frozen=True)
class Chat:
    """How conversations become tokens; with these defaults a model folder's chat.json decides."""

    system: bool = True
    """Keep the environment's system message."""
    tools: str = choice("auto", "none", "signatures", "json", *TOOL_FORMATS)
    """auto: as the chat template lists them; the others: in a system message, as a tool format asks
    for calls."""
    template: str | None = path_field()
    """A Jinja file, the name of one of the model's templates, or keep_thoughts; none: its own."""
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    roles: Mapping[str, Any] = mapping_field(
        f"a dict from and to {', '.join(SENT_ROLES)}",
        lambda v: {*v, *map(str, v.values())} <= {*SENT_ROLES},
    )
    """Roles sent as others where the template lacks them, such as {'tool': 'user'}."""


def _axis(default: int) -> Any:
    """A field of a mesh axis's size."""
    return checked(default, "-1 or a number >= 1", lambda v: v == -1 or v >= 1)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes; -1: the remaining devices."""

    data: int = _axis(-1)
    """Copies of the model, each with its part of the batch."""
    fsdp: int = _axis(1)
    """Devices that share parameters and optimizer state, each with its part of the batch."""
    expert: int = _axis(1)
    """Devices that share the experts of a mixture-of-experts model."""
    context: int = _axis(1)
    """Devices that share the tokens of a row."""
    tensor: int = _axis(1)
    """Devices that share heads and feed-forward widths; above the key-value heads a multiple."""


@dataclass(frozen=True)
class Offload:
    """Arrays that are moved to the host's memory while the devices do not need them."""

    optimizer: bool = False
    """The optimizer's state, between steps."""
    reference: bool = False
    """The reference policy of the KL penalty, between sweeps."""
    teacher: bool = False
    """Teachers, between sweeps."""
