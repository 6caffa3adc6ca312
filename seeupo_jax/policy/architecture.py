"""The architecture of a policy network: everything that its programs are compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from seeupo_jax.configuration.model_schema import PROJECTIONS, is_pattern
from seeupo_jax.policy.kernels.scores import bound
from seeupo_jax.policy.rope import Rope

DTYPES = ("float32", "bfloat16")
SCORES = ("softmax", "sigmoid")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")  # projections, by Hugging Face's names
# The name of the parameter that `Moe.selection_bias` adds: float32 everywhere, since it grows by
# small steps, and trained by no gradient.
SELECTION_BIAS = "selection_bias"
CHOICES = {
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    "remat": ("none", "dots", "attention", "full"),
    "attention": ("xla", "all_pairs", "splash", "cudnn"),
    "activation": ("silu", "gelu_tanh", "gelu"),
}


@dataclass(frozen=True)
class Moe:
    """A feed-forward of many experts, of which each token uses a few, and one that all may use.

    A token's experts are those of the highest scores; their outputs are added, times weights.

    mlp_width: of one expert.
    normalize: whether the weights, which are the scores, are divided by their sum.
    dense_layers: with a dense feed-forward instead.
    scores: a softmax over all experts, or a sigmoid of each one's logit, in float32.
    scale: factor of the weights.
    selection_bias: whether every expert has a number that is added to its score for the choice
      alone. Gradients do not train it; see `learner/step/expert_balance.py`.
    groups, groups_per_token: of experts, in order and of equal size. A token's experts lie in the
      groups whose highest scores, `group_best` of each, have the largest sums.
    shared_width: of the expert that all tokens use; 0: there is none.
    shared_gate: whether its output is multiplied by a sigmoid of its input's projection.
    biases: whether the router and the experts have biases.
    swiglu_limit, swiglu_alpha: experts compute (up + 1) · gate · sigmoid(alpha · gate) of a gate of
      at most the limit and an up within it (gpt-oss); None: act(gate) · up.
    names: whose names their parameters have in a model folder (`policy/files/parameter_names.py`).

    Raises:
      ValueError: a choice or a number that is none; one sentence.
    """

    experts: int
    per_token: int
    mlp_width: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()
    scores: str = "softmax"
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_best: int = 2
    shared_width: int = 0
    shared_gate: bool = False
    biases: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    names: str = "qwen"

    def __post_init__(self) -> None:
        if self.scores not in SCORES:
            raise ValueError(f"scores: got {self.scores!r}; allowed: {', '.join(SCORES)}.")
        if not 1 <= self.per_token <= self.experts:
            raise ValueError(
                f"experts per token: got {self.per_token}; allowed: 1 to {self.experts}, all the"
                " experts."
            )
        size, rest = divmod(self.experts, self.groups)
        if rest or not 1 <= self.groups_per_token <= self.groups:
            raise ValueError(
                f"groups of experts: got {self.groups_per_token} per token of {self.groups} for"
                f" {self.experts} experts; allowed: a divisor of the experts, of which a token has"
                " 1 to all."
            )
        if self.per_token > size * self.groups_per_token:
            raise ValueError(
                f"experts per token: got {self.per_token}; allowed: 1 to"
                f" {size * self.groups_per_token}, the experts of a token's groups."
            )


@dataclass(frozen=True)
class DeltaNet:
    """Layers of gated DeltaNet (`policy/delta_net.py`) in place of attention (Qwen3-Next).

    layers: their indices. key_heads: each serves as many of the value heads. key_dim, value_dim: of
      a head. conv: tokens that its convolution covers.
    grouped: whether its projections are two, whose outputs lie by key heads, instead of four.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    grouped: bool = False

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values, of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (`policy/latent_attention.py`), in all layers (DeepSeek).

    q_rank: of queries, which are a product of two matrices; None: of one. kv_rank: numbers of the
      latent from which a token's keys and values are made. nope_dim, rope_dim: of each head's query
      and key, without and with a rope; the key's second part is the same for all heads.
    value_dim: of each head's value, at most as wide as its key.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Numbers of a token in the sampler's cache: its latent, and the key with a rope."""
        return self.kv_rank + self.rope_dim

    @property
    def projections(self) -> tuple[str, ...]:
        """By Hugging Face's names."""
        queries = ("q_proj",) if self.q_rank is None else ("q_a_proj", "q_b_proj")
        return (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


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
    per_turn: K adapters, stacked on a leading axis: action t of a conversation (0, 1, ...) and all
      of its context are computed under adapter min(t, K - 1). 0: one, for all actions.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False
    layers: tuple[int, ...] | None = None
    per_turn: int = 0

    @property
    def scale(self) -> float:
        """The scale of the product of the two factors."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def total_rank(self) -> int:
        """The rank of all stacked adapters together, with which a pass computes them."""
        return self.rank * max(1, self.per_turn)

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

    norm_offset: added to the scales of all norms, whose parameters are then around 0.
    input_norms, output_norms: whether a layer normalises what attention and feed-forward read, and
      what they write into the residual stream.
    qk_norm: whether queries and keys are normalised: every head, or with `joint_qk_norm` all heads
      at once.
    query_scale: of the product of a query and a key; None: 1/sqrt(head_dim).
    attention_cap, logit_cap: bounds of attention scores and logits, x -> cap · tanh(x / cap).
    sinks: whether the softmax of attention has one more score a head, of a key without a value.
    attention_gate: whether attention's output is multiplied by a sigmoid, of an own projection.
    embedding_scale, residual_scale, logit_scale: factors of the embedding, of what attention and
      feed-forward write into the residual stream, and of logits.
    ropes: each layer's rope where layers differ; None: a layer without one. Empty: all have `rope`.
    windows: each layer's number of visible positions, the query's own included; None: all. Empty:
      no layer has a window.
    max_positions: the longest context of the model, as its rope stretches it.
    longest: tokens of the longest sequence in token trees; None: unknown.
    family: whose names a model folder has (`policy/families.py`); None: the first that fits.
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
    norm_offset: float = 0.0
    input_norms: bool = True
    output_norms: bool = False
    qk_norm: bool = True
    joint_qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    query_scale: float | None = None
    attention_cap: float | None = None
    sinks: bool = False
    attention_gate: bool = False
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tied: bool = True
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    moe: Moe | None = None
    delta: DeltaNet | None = None
    latent: LatentAttention | None = None
    max_positions: int = 32_768
    lora: LoraAdapters | None = None
    dtype: str = "float32"
    param_dtype: str = "float32"
    scan_layers: bool = False
    remat: str = "none"
    attention: str = "xla"
    family: str | None = None
    longest: int | None = None
    unassigned: tuple[int, ...] = ()
    int8: bool = False

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}; allowed: {', '.join(allowed)}."
                )
        kinds = {
            (self.window(i), self.layer_rope(i), self.is_sparse(i), self.is_recurrent(i))
            for i in range(self.layers)
        }
        if self.scan_layers and len(kinds) > 1:
            raise ValueError(
                "config.model.scan_layers: got True for a model whose layers differ in their"
                " sliding window, rope, experts or attention; allowed: False."
            )

    def logits(self, product: jax.Array) -> jax.Array:
        """The logits of final hidden states times the head, both float32."""
        return bound(
            product if self.logit_scale == 1 else product * self.logit_scale, self.logit_cap
        )

    @property
    def tokens(self) -> int:
        """How many ids a token has."""
        return self.vocab_size - sum(self.unassigned[1::2]) + sum(self.unassigned[::2])

    def unassigned_V(self) -> np.ndarray:
        """Of every id whether no token has it: bool [V]."""
        return np.searchsorted(self.unassigned, np.arange(self.vocab_size), side="right") % 2 == 1

    @property
    def turn_adapters(self) -> int:
        """K, adapters of turns, of which every token needs the number of its own; 0: none."""
        return 0 if self.lora is None else self.lora.per_turn

    @property
    def adapter_axis(self) -> int:
        """The axis of stacked adapters in their parameters: behind that of stacked layers."""
        return int(self.scan_layers)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer."""
        return self.ropes[layer] if self.ropes else self.rope

    def layer_adapters(self, layer: int) -> LoraAdapters | None:
        """The adapters of a layer's dense projections, by name: of a model of experts attention's.

        A recurrent layer's own projections have none, nor has a feed-forward beside experts, since
        PEFT's files take its names for experts.
        """
        if self.lora is None:
            return None
        lora = self.lora.of_layer(layer)
        has = (*self.attention_projections, *FEED_FORWARD)
        lora = replace(lora, targets=tuple(x for x in lora.targets if x in has))
        if self.is_recurrent(layer):
            lora = replace(lora, targets=tuple(x for x in lora.targets if x in FEED_FORWARD))
        if self.moe is None:
            return lora
        return replace(lora, targets=tuple(x for x in lora.targets if x not in FEED_FORWARD))

    @property
    def attention_projections(self) -> tuple[str, ...]:
        """Of a layer that has attention, by Hugging Face's names."""
        plain = ("q_proj", "k_proj", "v_proj", "o_proj")
        return plain if self.latent is None else self.latent.projections

    @property
    def cached_heads(self) -> int:
        """Key-value heads of the sampler's cache: of latents, which all heads share, one."""
        return self.kv_heads if self.latent is None else 1

    @property
    def cached_dim(self) -> int:
        """Width of a key in the sampler's cache."""
        return self.head_dim if self.latent is None else self.latent.cached_dim

    @property
    def cached_numbers(self) -> int:
        """Of a token's key and value in the cache, for each of its heads; a latent is both."""
        return 2 * self.head_dim if self.latent is None else self.latent.cached_dim

    @property
    def expert_adapters(self) -> LoraAdapters | None:
        """The adapters of the experts in all layers; None: they have none."""
        if self.moe is None or self.lora is None or not {*self.lora.targets} & {*FEED_FORWARD}:
            return None
        return self.lora

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward is one of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a state instead of attention."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a state: a token then depends on all before it in their order."""
        return any(map(self.is_recurrent, range(self.layers)))

    @property
    def routing(self) -> Routing | None:
        """The record of a token's experts; None: no layer has any."""
        layers = sum(self.is_sparse(layer) for layer in range(self.layers))
        if self.moe is None or not layers:
            return None
        return Routing(layers, self.moe.per_token, self.moe.experts)
