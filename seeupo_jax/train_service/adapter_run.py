"""One training run of the service: adapters of its own over a base policy that runs share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.configuration.model_schema import PROJECTIONS
from seeupo_jax.learner.optimization.optimizer import step_if_finite
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import FEED_FORWARD, Architecture, LoraAdapters
from seeupo_jax.policy.lora import attach_adapters
from seeupo_jax.policy.network import Network, join_params, split_model, split_trainable
from seeupo_jax.policy_io.build import Policy
from seeupo_jax.train_service.adam import Adam, make_optimizer, new_moments
from seeupo_jax.train_service.losses import LOSSES
from seeupo_jax.train_service.refusals import RequestRefused
from seeupo_jax.train_service.tinker_messages import Datum, ForwardBackward, PassResult
from seeupo_jax.types import NO_TARGET, CriticState

ALPHA = 32.0  # of every adapter: https://thinkingmachines.ai/blog/lora
TARGET = "target_tokens"


@dataclass(frozen=True)
class BasePolicy:
    """The policy that all runs start from, and the shapes of their passes.

    params: all of them; none trains. longest: tokens of a sequence, at most. lengths: of rows,
      rising; the last is not shorter. tokens: of a pass over the devices, at most. rows: of a
      pass, a multiple of it.
    """

    policy: Policy
    params: Any
    longest: int
    lengths: Sequence[int]
    tokens: int
    rows: int

    @property
    def network(self) -> Network:
        return self.policy.network


class _Batch(NamedTuple):
    """Rows of a pass: one sequence each, padded. inputs: by name, float32 [R, L]."""

    token_RL: Any  # of NumPy, and traced in a pass
    target_RL: Any
    inputs: Any


def adapters_for(
    arch: Architecture, rank: int, *, attention: bool, feed_forward: bool
) -> LoraAdapters:
    """The adapters of a rank in a model's attention, its feed-forwards, or both.

    Raises:
      RequestRefused: in neither of them.
    """
    named = {
        *(arch.attention_projections if attention else ()),
        *(FEED_FORWARD if feed_forward else ()),
    }
    targets = tuple(name for name in PROJECTIONS if name in named)  # as a saved folder has them
    if not targets:
        raise RequestRefused(
            "lora_config: got neither train_attn nor train_mlp; allowed: one of them or both, since"
            " the unembedding has no adapters here."
        )
    return LoraAdapters(rank, ALPHA, targets)


class AdapterRun:
    """Adapters, their gradient since the last step, and their optimizer.

    Arrays that a step replaces stay valid: what was handed out to a sampler never changes.
    gradient: a tree as that of the adapters; None: there was no pass since the last step.

    Args:
      adapters: their tree; None: new ones of the seed, which have no effect yet.
    """

    def __init__(
        self, base: BasePolicy, lora: LoraAdapters, *, seed: int = 0, adapters: Any = None
    ):
        self._base, self.lora = base, lora
        model = attach_adapters(
            base.network.bind(base.params), lora, seed=seed, mesh=base.policy.mesh
        )
        self.network, params = split_model(model)
        new, self._frozen = split_trainable(self.network, params)
        adapters = new if adapters is None else adapters
        self.state = CriticState(adapters, new_moments(adapters))
        self.gradient: Any = None

    @property
    def policy(self) -> Policy:
        """The policy with the run's adapters, as `build.load_policy` gives one."""
        base = self._base.policy
        return Policy(self.network, base.tokenizer, base.mesh, self._frozen, base.source)

    def load(self, adapters: Any, moments: Any = None) -> None:
        """Takes saved adapters; the gradient begins anew, and moments that are missing."""
        if moments is None:
            moments = new_moments(adapters)
        self.state, self.gradient = CriticState(adapters, moments), None

    def forward_backward(self, asked: ForwardBackward) -> PassResult:
        """Log-probabilities and the loss of data; adds its gradient to that of the next step.

        Returns: `logprobs` and `elementwise_loss` of every datum, in its order, and `loss:sum`.

        Raises:
          RequestRefused: a loss or data that it cannot compute.
        """
        options = _check(asked, self.network.arch.vocab_size, self._base.longest)
        gradient = self.gradient
        if not asked.forward_only:
            self.gradient = None  # the pass takes it: one that fails leaves none
            if gradient is None:
                gradient = jax.tree.map(jnp.zeros_like, self.state.params)
        count = len(asked.data)
        logp: list[np.ndarray] = [np.zeros(0)] * count
        losses: list[np.ndarray] = [np.zeros(0)] * count
        for length, indices in self._batches(asked.data):
            data = [asked.data[index] for index in indices]
            rows = _rows(len(data), self._base.rows)
            batch = _pad(data, asked.loss, rows, length)
            what = self.network, asked.loss, self.state.params, self._frozen
            if asked.forward_only:
                found = _losses(*what, batch, options)
            else:
                found, gradient = _accumulate(*what, gradient, batch, options)
            for index, datum, *arrays in zip(indices, data, *jax.device_get(found), strict=False):
                logp[index], losses[index] = (array[: len(datum.tokens)] for array in arrays)
        self.gradient = gradient
        total = float(sum(np.sum(each, dtype=np.float64) for each in losses))
        return PassResult({"logprobs": logp, "elementwise_loss": losses}, {"loss:sum": total})

    def step(self, adam: Adam) -> dict[str, float]:
        """One step of AdamW by the gradient so far, which then begins anew.

        A gradient that is not finite leaves everything as it is.

        Raises:
          RequestRefused: there is no gradient.
        """
        if self.gradient is None:
            raise RequestRefused(
                "optim_step: got no gradient; allowed: after forward_backward since the last step."
            )
        self.state, norm, skipped = _step(self.state, self.gradient, adam)
        self.gradient = None
        return {"grad_norm": float(norm), "update_skipped": float(skipped)}

    def _batches(self, data: Sequence[Datum]) -> list[tuple[int, list[int]]]:
        """Rows' lengths, and indices of the data in them."""
        lengths, batches = self._base.lengths, []
        fits = [next(x for x in lengths if x >= len(datum.tokens)) for datum in data]
        for length in lengths:
            indices = [index for index, own in enumerate(fits) if own == length]
            most = max(1, self._base.tokens // (length * self._base.rows)) * self._base.rows
            batches += [(length, indices[i : i + most]) for i in range(0, len(indices), most)]
        return batches


def _rows(count: int, multiple: int) -> int:
    """A power of two of rows, times the number that rows are a multiple of."""
    rows = multiple
    while rows < count:
        rows *= 2
    return rows


def _check(asked: ForwardBackward, vocabulary: int, longest: int) -> dict[str, float]:
    """The options of a loss, once its data are found to be as it needs them."""
    loss = LOSSES.get(asked.loss)
    if loss is None:
        raise RequestRefused(f"loss_fn: got {asked.loss!r}; allowed: {', '.join(LOSSES)}.")
    if unknown := [name for name in asked.options if name not in loss.options]:
        allowed = ", ".join(loss.options) or "none"
        raise RequestRefused(
            f"loss_fn_config: got {unknown[0]!r}; allowed for {asked.loss}: {allowed}."
        )
    if wrong := [name for name, value in asked.options.items() if not math.isfinite(value)]:
        raise RequestRefused(
            f"loss_fn_config.{wrong[0]}: got {asked.options[wrong[0]]}; allowed: a finite number."
        )
    if not asked.data:
        raise RequestRefused("data: got none; allowed: one datum or more.")
    for index, datum in enumerate(asked.data):
        _check_datum(datum, f"data[{index}]", asked.loss, vocabulary, longest)
    return {**loss.options, **asked.options}


def _check_datum(datum: Datum, name: str, loss: str, vocabulary: int, longest: int) -> None:
    needs, optional = LOSSES[loss].inputs, LOSSES[loss].optional
    length, named = len(datum.tokens), {TARGET, *needs}
    if not 1 <= length <= longest:
        raise RequestRefused(f"{name}: got {length} tokens; allowed: 1 to {longest}.")
    given = datum.inputs.keys()
    if wrong := sorted((named - given - optional.keys()) | (given - named)):
        how = "none" if wrong[0] in named else "some"
        raise RequestRefused(
            f"{name}.{wrong[0]}: got {how}; allowed for {loss}: {', '.join((TARGET, *needs))}."
        )
    for key, array in datum.inputs.items():
        if len(array) != length:
            raise RequestRefused(
                f"{name}.{key}: got {len(array)} numbers; allowed: {length}, one a token."
            )
        if key != TARGET and not np.isfinite(array).all():
            raise RequestRefused(
                f"{name}.{key}: got a number that is not finite; allowed: finite ones."
            )
    for key, tokens in (("model_input", datum.tokens), (TARGET, datum.inputs[TARGET])):
        if tokens.dtype.kind != "i":
            raise RequestRefused(f"{name}.{key}: got {tokens.dtype}; allowed: int64.")
        if (wrong := tokens[(tokens < 0) | (tokens >= vocabulary)]).size:
            raise RequestRefused(
                f"{name}.{key}: got the token {wrong[0]}; allowed: 0 to {vocabulary - 1}."
            )


def _pad(data: Sequence[Datum], loss: str, rows: int, length: int) -> _Batch:
    def padded(arrays: Sequence[np.ndarray], value: float, dtype: type) -> np.ndarray:
        out_RL = np.full((rows, length), value, dtype)
        for row, array in enumerate(arrays):
            out_RL[row, : len(array)] = array
        return out_RL

    inputs = {}
    for name in LOSSES[loss].inputs:
        default = LOSSES[loss].optional.get(name, 0.0)
        arrays = [x.inputs.get(name, np.full(len(x.tokens), default)) for x in data]
        inputs[name] = padded(arrays, 0.0, np.float32)
    targets = [x.inputs[TARGET] for x in data]
    return _Batch(
        padded([x.tokens for x in data], 0, np.int32), padded(targets, NO_TARGET, np.int32), inputs
    )


def _loss(
    adapters: Any,
    network: Network,
    loss: str,
    frozen: Any,
    batch: _Batch,
    options: Mapping[str, jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The sum of a loss; log-probabilities and losses, float32 [R, L], 0 without a target."""
    params = join_params(adapters, frozen)
    hidden_RLD, _ = policy.hidden(network, params, batch.token_RL)
    target_RL = batch.target_RL
    logp_RL = policy.token_logp(network, params, hidden_RLD, target_RL, temperature=1.0)
    logp_RL = jnp.where(target_RL == NO_TARGET, 0.0, logp_RL)
    loss_RL = LOSSES[loss].of_token(logp_RL, batch.inputs, options)
    loss_RL = jnp.where(target_RL == NO_TARGET, 0.0, loss_RL)
    return loss_RL.sum(), (logp_RL, loss_RL)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _losses(
    network: Network, loss: str, adapters: Any, frozen: Any, batch: _Batch, options: Any
) -> tuple[jax.Array, jax.Array]:
    return _loss(adapters, network, loss, frozen, batch, options)[1]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def _accumulate(
    network: Network,
    loss: str,
    adapters: Any,
    frozen: Any,
    gradient: Any,
    batch: _Batch,
    options: Any,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    differentiate = jax.grad(_loss, has_aux=True)
    new, found = differentiate(adapters, network, loss, frozen, batch, options)
    return found, jax.tree.map(jnp.add, gradient, new)


@jax.jit
def _step(state: CriticState, gradient: Any, adam: Adam) -> tuple[CriticState, Any, Any]:
    return step_if_finite(make_optimizer(adam), gradient, state, streamed=False)
