"""A decoder-only transformer in Flax NNX: RMSNorm, RoPE, grouped-query attention, gated MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from seeupo_jax.parallel.mesh import constrain, head_axes, repeat_kv_heads
from seeupo_jax.policy import zigzag
from seeupo_jax.policy.architecture import Architecture, LoraAdapters
from seeupo_jax.policy.delta_net import DeltaStates, GatedDeltaNet
from seeupo_jax.policy.embedding import embed, new_table
from seeupo_jax.policy.kernels import attention, paged
from seeupo_jax.policy.kernels.attention import KeyValues, Past, Tree
from seeupo_jax.policy.kernels.derivatives import FUSED
from seeupo_jax.policy.kernels.fused import kernel_for
from seeupo_jax.policy.kernels.paged import Pages, PageTable
from seeupo_jax.policy.latent_attention import LatentProjections
from seeupo_jax.policy.moe import Experts, RouterOutput, split_by_layer
from seeupo_jax.policy.norm import Norm
from seeupo_jax.policy.projection import Projection
from seeupo_jax.policy.rope import BY_LENGTH, grow_queries, rotate

_ATTENTION = jax.checkpoint_policies.save_only_these_names(FUSED)
_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, _ATTENTION
)
REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda f: f,
    "dots": functools.partial(jax.checkpoint, policy=_PRODUCTS),
    "attention": functools.partial(jax.checkpoint, policy=_ATTENTION),
    "full": jax.checkpoint,
}


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


class Mlp(nnx.Module):
    """A gated feed-forward: down(act(gate(x)) · up(x)), SwiGLU with act = silu."""

    def __init__(self, arch: Architecture, index: int, rngs: nnx.Rngs, *, gain: float):
        D, F, lora = arch.width, arch.mlp_width, adapters(arch, index)
        options = {"bias": arch.mlp_bias, "int8": arch.int8}
        self.activation = arch.activation
        self.gate = Projection((D, F), ("embed", "mlp"), rngs, lora=lora("gate_proj"), **options)
        self.up = Projection((D, F), ("embed", "mlp"), rngs, lora=lora("up_proj"), **options)
        self.down = Projection(
            (F, D), ("mlp", "embed"), rngs, gain=gain, lora=lora("down_proj"), **options
        )

    def __call__(self, x: jax.Array, adapter_NL: jax.Array | None = None) -> jax.Array:
        gate = ACTIVATIONS[self.activation](self.gate(x, adapter_NL))
        return self.down(gate * self.up(x, adapter_NL), adapter_NL)


def adapters(arch: Architecture, index: int) -> Callable[[str], LoraAdapters | None]:
    """Which of a layer's projections, by Hugging Face's names, have an adapter."""
    lora = arch.layer_adapters(index)
    return lambda name: lora if lora is not None and name in lora.targets else None


# Attention of one pass: of a layer's queries, this pass's keys and values, and how the layer scores
# them (`Layer.scoring`). Returns its output, and the keys and values for later passes.
Attend = Callable[[jax.Array, KeyValues, dict[str, Any]], tuple[jax.Array, Any]]
# The same of a layer with a state: of its module and of what it reads. Returns what it writes, and
# the states for later passes.
Recur = Callable[[GatedDeltaNet, jax.Array], tuple[jax.Array, Any]]


class Layer(nnx.Module):
    """Attention and feed-forward, each normalised and added to the residual stream.

    In a recurrent layer gated DeltaNet stands in place of attention.
    """

    def __init__(self, arch: Architecture, index: int, rngs: nnx.Rngs):
        self.arch, self.window, self.rope = arch, arch.window(index), arch.layer_rope(index)
        residual = (2 * arch.layers) ** -0.5  # keeps the residual stream's scale
        norm = functools.partial(Norm, arch, arch.width, "embed")
        self.attention_norm = norm() if arch.input_norms else None
        recurrent = arch.is_recurrent(index)
        self.delta = GatedDeltaNet(arch, rngs, gain=residual) if recurrent else None
        if not recurrent:
            self._init_attention(index, rngs, residual)
        self.attention_output_norm = norm() if arch.output_norms else None
        self.mlp_norm = norm() if arch.input_norms else None
        self.mlp_output_norm = norm() if arch.output_norms else None
        self.mlp: Mlp | Experts
        if arch.is_sparse(index):
            shared = replace(arch, mlp_width=arch.moe.shared_width)
            self.mlp = Experts(
                arch.width,
                arch.moe,
                rngs,
                gain=residual,
                activation=ACTIVATIONS[arch.activation],
                lora=arch.expert_adapters,
                shared=Mlp(shared, index, rngs, gain=residual) if shared.mlp_width else None,
            )
        else:
            self.mlp = Mlp(arch, index, rngs, gain=residual)

    def _init_attention(self, index: int, rngs: nnx.Rngs, gain: float) -> None:
        arch, lora = self.arch, adapters(self.arch, index)
        q, value_dim = arch.heads * arch.head_dim, arch.head_dim
        project = functools.partial(Projection, rngs=rngs, int8=arch.int8)
        latents = LatentProjections(arch, self.rope, rngs, lora) if arch.latent else None
        self.latent = latents
        if arch.latent is None:
            D, kv = arch.width, arch.kv_heads * arch.head_dim
            bias, q_and_gate = arch.qkv_bias, 2 * q if arch.attention_gate else q
            self.q = project((D, q_and_gate), ("embed", "heads"), bias=bias, lora=lora("q_proj"))
            self.k = project((D, kv), ("embed", "kv_heads"), bias=bias, lora=lora("k_proj"))
            self.v = project((D, kv), ("embed", "kv_heads"), bias=bias, lora=lora("v_proj"))
            self._init_qk_norms(q, kv)
        else:
            value_dim = arch.latent.value_dim
        self.out = project(
            (arch.heads * value_dim, arch.width),
            ("heads", "embed"),
            bias=arch.out_bias,
            gain=gain,
            lora=lora("o_proj"),
        )
        self.sinks = nnx.Param(jnp.zeros(arch.heads), logical=("heads",)) if arch.sinks else None

    def _init_qk_norms(self, q: int, kv: int) -> None:
        arch = self.arch
        norms = {"q": (q, "heads"), "k": (kv, "kv_heads")}
        if not arch.joint_qk_norm:
            norms = dict.fromkeys(norms, (arch.head_dim, "head_dim"))
        self.q_norm = Norm(arch, *norms["q"]) if arch.qk_norm else None
        self.k_norm = Norm(arch, *norms["k"]) if arch.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        position_NL: jax.Array,
        attend: Attend,
        recur: Recur | None,
        given_NLP: jax.Array | None = None,
        adapter_NL: jax.Array | None = None,
        *,
        absorbed: bool = False,
    ) -> tuple[jax.Array, Any, RouterOutput | None]:
        """Returns the residual stream, the keys and values for later passes, and a router's output.

        Args:
          recur: None: the layer has no state.
          given_NLP: as of `Experts`.
          adapter_NL: of each token, where adapters are per turn.
          absorbed: the form of latent attention (`policy/latent_attention.py`).
        """
        y = _normed(self.attention_norm, x)
        if self.delta is None:
            y, keys = self._attend(y, position_NL, attend, adapter_NL, absorbed)
        else:
            y, keys = recur(self.delta, y)
        x = self._add(x, y, self.attention_output_norm)
        y, routed = _normed(self.mlp_norm, x), None
        if isinstance(self.mlp, Experts):
            y, routed = self.mlp(y, given_NLP, adapter_NL)
        else:
            y = self.mlp(y, adapter_NL)
        x = self._add(x, y, self.mlp_output_norm)
        return constrain(x, "rows", "length", "embed"), keys, routed

    def scoring(self) -> dict[str, Any]:
        """How attention scores this layer's keys: arguments of the functions in `kernels/`."""
        sink_H = None if self.sinks is None else self.sinks[...]
        return {"window": self.window, "cap": self.arch.attention_cap, "sink_H": sink_H}

    def _add(self, x: jax.Array, y: jax.Array, norm: Norm | None) -> jax.Array:
        y, scale = _normed(norm, y), self.arch.residual_scale
        return x + (y if scale == 1 else y * jnp.asarray(scale, y.dtype))

    def _attend(
        self,
        x: jax.Array,
        position_NL: jax.Array,
        attend: Attend,
        adapter_NL: jax.Array | None,
        absorbed: bool,
    ) -> tuple[jax.Array, Any]:
        if self.latent is not None:
            project = self.latent.absorb if absorbed else self.latent.expand
            y, keys = attend(*project(x, position_NL, adapter_NL), self.scoring())
            y = self.latent.read(y, absorbed, adapter_NL)
            return self.out(y.reshape(*y.shape[:2], -1), adapter_NL), keys
        q, new, gate = self._project(x, position_NL, adapter_NL)
        y, keys = attend(q, new, self.scoring())
        if gate is not None:
            y = y * jax.nn.sigmoid(gate)
        return self.out(y.reshape(*y.shape[:2], -1), adapter_NL), keys

    def _project(
        self, x: jax.Array, position_NL: jax.Array, adapter_NL: jax.Array | None
    ) -> tuple[jax.Array, KeyValues, jax.Array | None]:
        """Queries, keys and values, and the gate of attention's output where it has one."""
        arch, gate = self.arch, None

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], -1, arch.head_dim)

        q, k = self.q(x, adapter_NL), self.k(x, adapter_NL)
        v = heads(self.v(x, adapter_NL))
        if arch.attention_gate:  # a head's query and its gate lie beside each other
            q, gate = jnp.split(q.reshape(*q.shape[:2], arch.heads, -1), 2, axis=-1)
            q = q.reshape(*q.shape[:2], -1)
        if arch.joint_qk_norm:
            q, k = heads(_normed(self.q_norm, q)), heads(_normed(self.k_norm, k))
        else:
            q, k = _normed(self.q_norm, heads(q)), _normed(self.k_norm, heads(k))
        k, v = (repeat_kv_heads(y, arch.heads) for y in (k, v))
        if self.rope is not None:
            q, k = (rotate(y, position_NL, self.rope) for y in (q, k))
            q = grow_queries(q, position_NL, self.rope)
        if arch.query_scale is not None:  # attention itself divides by the root of head_dim
            q = q * jnp.asarray(arch.query_scale * arch.head_dim**0.5, q.dtype)
        return q, KeyValues(k, v), gate


def _normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Computed(NamedTuple):
    """The outputs of a pass over tokens.

    hidden_NLD: final hidden states. keys: its keys and values, or its cache, per layer.
    routed_NLG: what the routers chose, as `Architecture.routing` says; None without experts.
    router_NLYE: float32, the routers' logits, of each layer that has experts; None without any.
    """

    hidden_NLD: jax.Array
    keys: Sequence[Any]
    routed_NLG: jax.Array | None
    router_NLYE: jax.Array | None


class Transformer(nnx.Module):
    """The policy network. Parameters are float32 and name their logical axes."""

    def __init__(self, arch: Architecture, rngs: nnx.Rngs):
        self.arch = arch
        self.embedding = new_table(arch, rngs)
        layers = [Layer(arch, index, rngs) for index in range(arch.layers)]
        self.layers = _stack(layers) if arch.scan_layers else nnx.List(layers)
        self.norm = Norm(arch, arch.width, "embed")
        self.head = None if arch.tied else new_table(arch, rngs)

    def __call__(self, tokens_NL: jax.Array, *, turn: int | None = None) -> jax.Array:
        """Float32 logits [N, L, V] of every next token, for rows without left padding.

        Args:
          turn: of a model with adapters per turn, the action (0, 1, ...) of the conversation whose
            adapter computes all tokens; None for any other model.

        Raises:
          ValueError: rows that the model's rope scaling would rotate by their length; a turn for a
            model without adapters per turn, or none for one with them.
        """
        most, scaling = self.arch.max_positions, self.arch.rope.scaling
        if scaling in BY_LENGTH and tokens_NL.shape[1] > most:
            raise ValueError(
                f"tokens: got rows of {tokens_NL.shape[1]} for a model with {scaling} rope scaling;"
                f" allowed: at most its own context of {most} tokens."
            )
        adapter_NL = None if turn is None else jnp.full(tokens_NL.shape, self._adapter(turn))
        return _logits(*nnx.split(self), tokens_NL, adapter_NL)

    def _adapter(self, turn: int) -> int:
        adapters = self.arch.turn_adapters
        if not adapters or turn < 0:
            allowed = "a number >= 0" if adapters else "None, for a model without adapters per turn"
            raise ValueError(f"turn: got {turn}; allowed: {allowed}.")
        return min(turn, adapters - 1)

    def head_VD(self, dtype: Any) -> jax.Array:
        """The output projection: the head, or the embedding where both are one."""
        head = self.embedding if self.head is None else self.head
        return head[...].astype(dtype)

    def hidden(self, tokens_NL: jax.Array, **rows: Any) -> tuple[jax.Array, Sequence[KeyValues]]:
        """The final hidden states [N, L, D] of `compute`, and its keys and values per layer."""
        return self.compute(tokens_NL, **rows)[:2]

    def compute(
        self,
        tokens_NL: jax.Array,
        *,
        tree: Tree | None = None,
        past: Past | None = None,
        segment_NL: jax.Array | None = None,
        given_NLG: jax.Array | None = None,
        adapter_NL: jax.Array | None = None,
    ) -> Computed:
        """A pass over whole sequences, or over token trees.

        Args:
          tree: for rows of token trees; a token is computed as if the path from its root were alone
            in a row.
          past: an earlier pass over trees, which these continue.
          segment_NL: for rows that hold several sequences one after the other: int32, rising, a
            number a sequence. Each is computed as if it stood alone. Not together with `tree`.
          given_NLG: experts of the tokens, as `Architecture.routing` says, for routers that are not
            to choose; None: all choose.
          adapter_NL: int32, the adapter of each token, the same within a sequence or a tree, where
            adapters are per turn; any other number (padding): none. Ignored by a model without.

        Raises:
          ValueError: trees, for a model with recurrent layers; no adapters of the tokens, for one
            with adapters per turn.
        """
        N, L = tokens_NL.shape
        arch = self.arch
        kernel = kernel_for(
            arch.attention,
            length=L,
            head_dim=arch.head_dim,
            heads=arch.heads,
            kv_heads=arch.kv_heads,
            dtype=arch.dtype,
            trees=tree is not None,
            cap=arch.attention_cap is not None,
            sinks=arch.sinks,
        )
        if tree is not None:
            return self._compute_trees(tokens_NL, tree, past, kernel, given_NLG, adapter_NL)
        position_NL = jnp.broadcast_to(jnp.arange(L)[None, :], (N, L))
        if segment_NL is not None:
            segment_NL = constrain(segment_NL, "rows", None)
            position_NL = position_NL - _starts(segment_NL)

        def attend(_: None, q: jax.Array, new: KeyValues, scoring: dict[str, Any]) -> Any:
            new = _by_rows(new)
            y = attention.attend(
                q,
                new,
                position_NL,
                position_NL,
                **scoring,
                segment_NL=segment_NL,
                key_segment_NC=segment_NL,
                kernel=kernel,
            )
            return y, new

        def recur(_: None, delta: GatedDeltaNet, x: jax.Array) -> tuple[jax.Array, None]:
            return delta(x, segment_NL), None

        return self._run(tokens_NL, position_NL, (), attend, recur, given_NLG, adapter_NL)

    def _compute_trees(
        self,
        tokens_NL: jax.Array,
        tree: Tree,
        past: Past | None,
        kernel: str,
        given_NLG: jax.Array | None,
        adapter_NL: jax.Array | None,
    ) -> Computed:
        if self.arch.recurrent:
            raise ValueError("compute: got token trees; allowed with recurrent layers: whole rows.")
        tree = Tree(*(constrain(x, "rows", None) for x in tree))
        devices = zigzag.zigzag_devices(tokens_NL.shape[1]) if past is None else 1
        deal = functools.partial(zigzag.to_zigzag, devices=devices)
        tree_mask = attention.TreeMask(*map(deal, attention.tree_mask_of(tree, past)))

        def attend(
            old: KeyValues | None, q: jax.Array, new: KeyValues, scoring: dict[str, Any]
        ) -> Any:
            new = _by_rows(new)
            keys = new if old is None else attention.concatenate(old, new)
            of = {"kernel": kernel, "longest": self.arch.longest} | scoring
            return attention.attend_trees(q, keys, tree_mask, **of), new

        keys = () if past is None else past.keys
        of_tokens = [None if x is None else deal(x) for x in (given_NLG, adapter_NL)]
        computed = self._run(deal(tokens_NL), tree_mask.depth_NL, keys, attend, None, *of_tokens)
        if devices == 1:
            return computed
        hidden_NLD = zigzag.gather_in_order(computed.hidden_NLD, devices, "embed")
        axes = (head_axes(computed.keys[0].k.shape[2])[0], "head_dim")
        keys_values = [
            KeyValues(*(zigzag.gather_in_order(x, devices, *axes) for x in new))
            for new in computed.keys
        ]
        routed_NLG, router_NLYE = computed.routed_NLG, computed.router_NLYE
        if routed_NLG is not None and router_NLYE is not None:
            routed_NLG = zigzag.gather_in_order(routed_NLG, devices, None)
            router_NLYE = zigzag.gather_in_order(router_NLYE, devices, None, None)
        return Computed(hidden_NLD, keys_values, routed_NLG, router_NLYE)

    def extend(
        self,
        tokens_RL: jax.Array,
        position_RL: jax.Array,
        pages: Sequence[Pages | DeltaStates],
        page_table: PageTable,
        *,
        kernel: str = "xla",
        block: int | None = None,
    ) -> Computed:
        """A pass over tokens that continue a paged cache.

        Args:
          position_RL: of each token in its conversation; `NOWHERE` at padding, which is written
            nowhere.
          pages: the cache, a layer each; page_table: which of them each row reads and writes.
          kernel, block: how attention reads the pages; see `paged.attend`.

        Returns: for keys the cache with the tokens in it.
        """

        def attend(old: Pages, q: jax.Array, new: KeyValues, scoring: dict[str, Any]) -> Any:
            written = paged.write(old, new, position_RL, page_table)
            y = paged.attend(
                q, written, position_RL, page_table, kernel=kernel, block=block, **scoring
            )
            return y, written

        def recur(
            old: DeltaStates, delta: GatedDeltaNet, x: jax.Array
        ) -> tuple[jax.Array, DeltaStates]:
            return delta.extend(x, position_RL, old, page_table.states)

        adapter_RL = None
        if page_table.adapter_R is not None:
            adapter_RL = jnp.broadcast_to(page_table.adapter_R[:, None], tokens_RL.shape)
        of_tokens = {"adapter_NL": adapter_RL, "cached": True}
        return self._run(tokens_RL, position_RL, pages, attend, recur, **of_tokens)

    def _run(
        self,
        tokens_NL: jax.Array,
        position_NL: jax.Array,
        past: Sequence[Any],
        attend: Callable[[Any, jax.Array, KeyValues, dict[str, Any]], tuple[jax.Array, Any]],
        recur: Callable[[Any, GatedDeltaNet, jax.Array], tuple[jax.Array, Any]] | None,
        given_NLG: jax.Array | None = None,
        adapter_NL: jax.Array | None = None,
        *,
        cached: bool = False,
    ) -> Computed:
        """A pass through all layers, which attend to `past` and to their own keys.

        Args:
          cached: `past` is the sampler's cache. The layers are unrolled then, since a scan would
            copy it into its stack and out of it; and latents are not expanded.
        """
        if self.arch.turn_adapters and adapter_NL is None:
            raise ValueError(
                f"compute: got no adapters of the tokens for a model with {self.arch.turn_adapters}"
                " adapters per turn; allowed: the number of each token's, or a turn for all."
            )
        table_VD = self.embedding[...].astype(self.arch.dtype)
        x = embed(table_VD, tokens_NL, self.arch.embedding_scale)
        remat = REMAT[self.arch.remat]

        def run(layer: Layer, x: jax.Array, old: Any, given: Any) -> Any:
            of_old = functools.partial(attend, old), recur and functools.partial(recur, old)
            x, keys, routed = layer(x, position_NL, *of_old, given, adapter_NL, absorbed=cached)
            return x, (keys, routed)

        given = split_by_layer(self.arch, given_NLG)
        if self.arch.scan_layers and not cached:
            graph, stacked = nnx.split(self.layers)
            old = jax.tree.map(lambda *layers: jnp.stack(layers), *past) if past else None
            given = None if given_NLG is None else jnp.stack(given)
            body = remat(lambda x, layer: run(nnx.merge(graph, layer[0]), x, *layer[1:]))
            x, outputs = jax.lax.scan(body, x, (stacked, old, given))
            outputs = [jax.tree.map(lambda y, i=i: y[i], outputs) for i in range(self.arch.layers)]
        else:
            outputs = []

            def run_layer(
                graph: nnx.GraphDef, state: nnx.State, x: jax.Array, *layer_inputs: Any
            ) -> Any:
                return run(nnx.merge(graph, state), x, *layer_inputs)

            # A sampler has many programs: in each, layers of a kind are traced and lowered once.
            body = jax.jit(run_layer, static_argnums=0) if cached else run_layer
            for layer, *layer_inputs in zip(
                self.each_layer(), past or [None] * self.arch.layers, given, strict=True
            ):
                graph, state = nnx.split(layer)
                x, layer_output = remat(functools.partial(body, graph))(state, x, *layer_inputs)
                outputs.append(layer_output)
        routed = [each for _, each in outputs if each is not None]
        routed_NLG = router_NLYE = None
        if routed:
            routed_NLG = jnp.concatenate([each.expert_NLP for each in routed], axis=-1)
            router_NLYE = jnp.stack([each.logits_NLE for each in routed], axis=2)
        return Computed(self.norm(x), [keys for keys, _ in outputs], routed_NLG, router_NLYE)

    def each_layer(self) -> list[Layer]:
        """The layers one by one, also where they are stored stacked."""
        if not self.arch.scan_layers:
            return list(self.layers)
        graph, stacked = nnx.split(self.layers)
        slices = (jax.tree.map(lambda y, i=i: y[i], stacked) for i in range(self.arch.layers))
        return [nnx.merge(graph, state) for state in slices]


# Compiled: operation by operation, a first call would compile some fifty programs.
@functools.partial(jax.jit, static_argnums=0)
def _logits(
    graph: nnx.GraphDef, state: nnx.State, tokens_NL: jax.Array, adapter_NL: jax.Array | None
) -> jax.Array:
    model = nnx.merge(graph, state)
    hidden, _ = model.hidden(tokens_NL, adapter_NL=adapter_NL)
    product = jnp.einsum(
        "nld,vd->nlv", hidden, model.head_VD(hidden.dtype), preferred_element_type=jnp.float32
    )
    return model.arch.logits(product)


def _by_rows(keys: KeyValues) -> KeyValues:
    """Keys and values, sharded by rows, lengths and heads."""
    axes = ("rows", "length", head_axes(keys.k.shape[2])[0], "head_dim")
    return KeyValues(*(constrain(x, *axes) for x in keys))


def _starts(segment_NL: jax.Array) -> jax.Array:
    """The start of each token's segment in its row."""
    index_L = jnp.arange(segment_NL.shape[1])
    first_NL = jnp.diff(segment_NL, axis=1, prepend=segment_NL[:, :1]) != 0
    return jax.lax.cummax(jnp.where(first_NL, index_L[None, :], 0), axis=1)


def _stack(layers: Sequence[Layer]) -> Layer:
    """One layer whose parameters carry a leading axis `layers`."""
    graph, first = nnx.split(layers[0])
    states = [nnx.split(layer)[1] for layer in layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    logical = nnx.to_flat_state(first)
    for (_, stacked_param), (_, param) in zip(nnx.to_flat_state(stacked), logical, strict=True):
        stacked_param.set_metadata(logical=("layers", *param.get_metadata("logical")))
    return nnx.merge(graph, stacked)
