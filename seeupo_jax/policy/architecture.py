"""The architecture of a policy network: everything that its programs are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from seeupo_jax.configuration.model_schema import PROJECTIONS, is_pattern
from seeupo_jax.policy.rope import Rope

DTYPES = ("float32", "bfloat16")
CHOICES = {
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    "remat": ("none", "dots", "attention", "full"),
    "attention": ("xla", "all_pairs", "splash", "cudnn"),
}


@dataclass(frozen=True)
class Moe:
    """A feed-forward of many experts, of which each token uses a few (Qwen3-MoE)."""

    experts: int
    per_token: int
    mlp_width: int  # of one expert
    normalize: bool  # scale a token's experts' probabilities to a sum of 1
    dense_layers: tuple[int, ...] = ()  # with a dense feed-forward instead


class Routing(NamedTuple):
    """The layout of a record of the experts that a token runs through: G indices, layer by layer.

    layers: that have experts. per_token: experts of a token in each. experts: to choose from.
    """

    layers: int
    per_token: int
    experts: int

    @property
    def size(self) -> int:
        """G, the indices of a token."""
        return self.layers * self.per_token

    @property
    def dtype(self) -> np.dtype:
        """The type of an expert's index, or of `unknown`."""
        return np.dtype(np.uint8 if self.experts < np.iinfo(np.uint8).max else np.uint16)

    @property
    def unknown(self) -> int:
        """Stands for an index that was not recorded: the router chooses."""
        return int(np.iinfo(self.dtype).max)


@dataclass(frozen=True)
class LoraAdapters:
    """Low-rank adapters (Hu et al., arXiv:2106.09685): W + scale · A B, only A and B train.

    targets: projections by Hugging Face's names; or one regular expression, which matches the full
      names of modules, such as model.layers.0.self_attn.q_proj.
    rslora: the scale is alpha / sqrt(rank) (arXiv:2312.03732) instead of alpha / rank.
    layers: those that have adapters; None: all.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def scale(self) -> float:
        """The scale of the product of the two factors."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def pattern(self) -> str | None:
        """The regular expression that selects modules; None: names do."""
        return self.targets[0] if self.targets and is_pattern(self.targets[0]) else None

    def of_layer(self, layer: int) -> LoraAdapters:
        """The same with the names of the projections that have adapters in this layer."""
        names = self.targets
        if self.layers is not None and layer not in self.layers:
            names = ()
        elif self.pattern is not None:
            modules = {name: f"model.layers.{layer}.{path}" for name, path in PROJECTIONS.items()}
            names = tuple(x for x in modules if re.fullmatch(self.pattern, modules[x]))
        return replace(self, targets=names, layers=None)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer, with a field for each difference between model families.

    windows: each layer's number of visible positions, the query's own included; None: all. Empty:
      no layer has a window.
    max_positions: the longest context of the model, as its rope stretches it.
    longest: tokens of the longest sequence in token trees; None: unknown.
    unassigned: bounds of the ids that no token has, since the vocabulary is padded or has holes:
      from the first to before the second, from the third to before the fourth, and so on. The
      policy's distributions are over the other ids; logits cover all.
    int8: whether the layers' matrices are int8, with a scale for each output: a sampler's copy.
    dtype: of activations; param_dtype: of the parameters that do not train where `lora` is set.
    attention: kernel of whole-row passes (`policy/kernels/fused.py`).

    Raises:
      ValueError: a value that is none of `CHOICES`; layers that differ in kind, with `scan_layers`.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope: Rope = field(default_factory=Rope)
    norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    windows: tuple[int | None, ...] = ()
    moe: Moe | None = None
    max_positions: int = 32_768
    lora: LoraAdapters | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    scan_layers: bool = False
    remat: str = "none"
    attention: str = "xla"
    longest: int | None = None
    unassigned: tuple[int, ...] = ()
    int8: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}; allowed: {', '.join(allowed)}."
                )
        kinds = {(self.window(i), self.is_sparse(i)) for i in range(self.layers)}
        if self.scan_layers and len(kinds) > 1:
            raise ValueError(
                "config.model.scan_layers: got True for a model whose layers differ in their"
                " sliding window or experts; allowed: False."
            )

    @property
    def tokens(self) -> int:
        """How many ids a token has."""
        return self.vocab_size - sum(self.unassigned[1::2]) + sum(self.unassigned[::2])

    def unassigned_V(self) -> np.ndarray:
        """Of every id whether no token has it: bool [V]."""
        return np.searchsorted(self.unassigned, np.arange(self.vocab_size), side="right") % 2 == 1

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer."""
        return self.windows[layer] if self.windows else None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward is one of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def routing(self) -> Routing | None:
        """The record of a token's experts; None: no layer has any."""
        layers = sum(self.is_sparse(layer) for layer in range(self.layers))
        if self.moe is None or not layers:
            return None
        return Routing(layers, self.moe.per_token, self.moe.experts)
