"""A tiny policy, ragged trajectories and observed sweeps that the tests of the learner share.

They share the compiled programs too: one network, one optimizer and one set of shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model as model
import numpy_twin as twin
import optax
from flax import nnx
from stored_fields import with_fields
from twin_policy import tensors_of

from seeupo_jax.configuration import schema
from seeupo_jax.learner import sweep as sweep_module
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.trajectories.forks import turn_nodes
from seeupo_jax.types import CONTEXT, Segment, TrainState, Trajectory, learnable

VOCAB = 20
RATE = 0.02  # steps so large that ratios leave the clip range
# Untied: an embedding that is not a number then reaches only the rows that hold its token.
ARCH = Architecture(
    vocab_size=VOCAB,
    width=16,
    layers=1,
    heads=2,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    tied=False,
)
NUMPY_ARCH = model.Architecture(ARCH.head_dim, ARCH.rope.theta, ARCH.norm_eps)
# Every step has a span longer than 8, so one program serves them all; a few refreshes are longer.
SHAPES = Shapes((8, 24), action=8, rows=3, trajectories=9)


@functools.cache
def policy() -> tuple[Any, Any]:
    """The network, and parameters on the host in which every part matters."""
    network, params = split_model(Transformer(ARCH, nnx.Rngs(0)))
    return network, jittered(params, 0.2)


def jittered(params: Any, size: float) -> Any:
    """Parameters with noise on them, on the host."""
    rng = np.random.default_rng(2)

    def noisy(x):
        return (np.asarray(x) + size * rng.normal(size=x.shape)).astype(np.float32)

    return jax.tree.map(noisy, params)


@functools.cache
def recording(name: str = "sgd", rate: float = RATE, max_grad_norm: float | None = None) -> Any:
    """An optimizer whose state begins with the last gradients; one object, so compiled once."""
    settings = schema.Optimizer(name=name, learning_rate=rate, max_grad_norm=max_grad_norm)
    return optax.chain(_kept_gradients(), make_optimizer(settings, total_steps=100))


def _kept_gradients() -> optax.GradientTransformation:
    """Changes nothing; its state is the gradients of the last step."""

    def zeros(params):
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(zeros, lambda grads, *_: (grads, grads))


def learner(
    *,
    shapes: Shapes = SHAPES,
    optimizer: Any = None,
    temperature: float = 1.0,
    reward_weights: Mapping[str, float] | None = None,
    **choices: Any,
) -> Learner:
    """A learner with these choices of the algorithm; those with equal programs share them."""
    settings = recording() if optimizer is None else optimizer
    algorithm = schema.Algorithm(**choices)
    weights = {} if reward_weights is None else reward_weights
    made = Learner(
        policy()[0], settings, algorithm, shapes, temperature, seed=5, reward_weights=weights
    )
    return sharing(made)


def sharing(made: Learner) -> Learner:
    """The learner on one device, with programs of those before: more than `Learner` itself keeps.

    What has no numbers of its own is what programs are compiled for.
    """
    config, _ = made.loss_config.split()
    keys: dict[str, tuple[Any, ...]] = {
        "turn_step": (config, made.critic, made.optimizer),
        "refresh": (config,),
    }
    if made.critic is not None or made.scorer is not None:
        keys["value"] = (made.critic, made.scorer)
    if made.scorer is not None:
        keys["scorer_step"] = (made.scorer,)
    own = {name: getattr(made, name) for name in keys}
    shared = {
        name: _PROGRAMS.setdefault((name, made.network, *key), own[name].func)
        for name, key in keys.items()
    }
    programs = {name: functools.partial(shared[name], *own[name].args) for name in keys}
    return with_programs(made, **programs)


def unshared(made: Learner, **fields: Any) -> Learner:
    """The learner with other fields, and with programs of its own."""
    return dataclasses.replace(made, wrap_program=lambda name, own: own, **fields)


def with_programs(made: Learner, **programs: Any) -> Learner:
    """The same learner, which calls these instead of its own of these names."""
    return dataclasses.replace(made, wrap_program=lambda name, own: programs.get(name, own))


_PROGRAMS: dict[Any, Any] = {}


def new_state(optimizer: Any, params: Any = None) -> TrainState:
    """A fresh state on the device, free to be donated."""
    # Copied: an array that shares memory with the host's must not be overwritten.
    params = jax.tree.map(jnp.array, policy()[1] if params is None else params)
    return TrainState(params, optimizer.init(params), jnp.int32(0), jnp.int32(0))


def host(tree: Any) -> Any:
    """A copy on the host, which outlives donation."""
    return jax.tree.map(lambda x: np.array(x), tree)


def reread(tree: Any) -> Any:
    """Arrays of a checkpoint, bound to no device: what a sweep of new ones has compiled fits."""
    return jax.tree.map(lambda x: jnp.array(np.array(x)), tree)


def weights_of(params: Any) -> model.Weights:
    """Parameters, or gradients in their shape, under the twin's names."""
    arch = dataclasses.replace(ARCH, layers=len(params["layers"]))
    return {k: v.astype(np.float64) for k, v in tensors_of(params, arch).items()}


def segment(rng: np.random.Generator, *parts: tuple[int, int, int], after: int = 0) -> Segment:
    """Random tokens, never the last of the vocabulary.

    Args:
      parts: (turn, context tokens, action tokens), one after the other.
      after: context tokens at the end.
    """
    turns: list[int] = []
    for turn, context, action in parts:
        turns += [CONTEXT] * context + [turn] * action
    turn_L = np.array(turns + [CONTEXT] * after, np.int32)
    tokens_L = rng.integers(0, VOCAB - 1, turn_L.size).astype(np.int32)
    logp_L = np.where(turn_L >= 0, -rng.random(turn_L.size), 0).astype(np.float32)
    return Segment(tokens_L, turn_L, logp_L)


def ragged(seed: int = 8) -> list[Trajectory]:
    """Eight trajectories of one to four turns in three groups: one failed, two in two segments."""
    rng = np.random.default_rng(seed)
    part = functools.partial(segment, rng)
    return [
        Trajectory.of((part((0, 4, 3), (1, 2, 1), (2, 3, 4), (3, 1, 2)),), 1.0, 0),
        Trajectory.of((part((0, 5, 1), (1, 3, 2), after=4),), 0.0, 0),
        Trajectory.of((part((0, 4, 2), (1, 1, 4), after=2), part((2, 6, 2), (3, 2, 3))), 0.5, 0),
        Trajectory.of((part((0, 6, 4)),), -0.7, 1),
        Trajectory.of((part((0, 3, 2), (1, 2, 2), (2, 2, 2)),), 7.0, 1, stop="env_error"),
        Trajectory.of((part((0, 3, 2), (1, 4, 3), (2, 2, 1)),), 0.6, 1),
        Trajectory.of((part((0, 2, 3), (2, 3, 2)), part((1, 7, 2))), 0.9, 2),
        Trajectory.of((part((0, 2, 1), (1, 2, 3), (2, 5, 3), after=1),), 0.0, 2),
    ]


def trees(seed: int = 3) -> list[Trajectory]:
    """Two trees: a root that failed, one without a fork, branches of branches, a rewritten one."""
    rng = np.random.default_rng(seed)
    part = functools.partial(segment, rng)

    def branch(start: Trajectory, parent: int, fork: int, reward: float, *parts: Any) -> Trajectory:
        """Continues another one after `fork` of its turns."""
        kept = [s for s in start.segments if ((s.turn_L >= 0) & (s.turn_L < fork)).any()]
        stop = 1 + int(np.flatnonzero((kept[-1].turn_L >= 0) & (kept[-1].turn_L < fork))[-1])
        both = ((s.tokens_L, s.turn_L, s.logp_L) for s in (kept[-1], part(*parts)))
        last = zip(*both, strict=True)
        joined = Segment(*(np.concatenate([old_L[:stop], new_L]) for old_L, new_L in last))
        segments = (*kept[:-1], joined)
        return Trajectory.of(segments, reward, start.group, parent=parent, fork=fork)

    root = Trajectory.of((part((0, 4, 3), (1, 2, 2), (2, 3, 2)),), 1.0, 0)
    alone = Trajectory.of((part((0, 4, 2), (1, 3, 2)),), 0.2, 0)
    middle = branch(root, 0, 1, 0.4, (1, 2, 3), (2, 2, 2), (3, 2, 1))
    failed = Trajectory.of((part((0, 3, 2), (1, 2, 2)),), 9.0, 1, stop="env_error")
    rewritten = Trajectory.of((part((0, 2, 2)), part((1, 5, 2), (2, 1, 2))), 0.8, 1)
    return [
        root,
        alone,
        failed,
        middle,
        branch(middle, 2, 2, -0.5, (2, 1, 2)),
        branch(root, 0, 2, 0.9, (2, 4, 2)),
        rewritten,
        branch(failed, 0, 1, 0.1, (1, 2, 1)),
        branch(failed, 0, 1, 0.5, (1, 1, 2), (2, 2, 1)),
        branch(rewritten, 1, 2, 0.0, (2, 2, 3)),
    ]


def judged_trees(seed: int = 3) -> list[Trajectory]:
    """`trees` whose every turn has a reward of its own, the same wherever it is shared."""
    given = trees(seed)
    nodes, rng = turn_nodes(given), np.random.default_rng(seed)
    scores = rng.integers(0, 3, 1 + max(map(max, nodes))) / 2
    paid = [tuple(float(scores[node]) for node in own) for own in nodes]
    return [
        with_fields(one, turn_rewards=own, reward=sum(own), stop=stop)
        for one, own, stop in zip(
            given,
            paid,
            ["done", "done", "env_error", *["unchosen"] * (len(given) - 3)],
            strict=True,
        )
    ]


def branching(seed: int = 9) -> list[Trajectory]:
    """`ragged`, but the members of a group begin alike, some of them up to the second turn."""
    rng = np.random.default_rng(seed)
    made = ragged()
    prompt = rng.integers(0, VOCAB - 1, (3, 40)).astype(np.int32)
    alike = {0: 9, 1: 4, 2: 9, 3: 6, 4: 3, 5: 5, 6: 3, 7: 3}  # tokens of the first segment

    def begun(number: int, trajectory: Trajectory) -> Trajectory:
        first, *rest = trajectory.segments
        tokens_L = first.tokens_L.copy()
        size = min(alike[number], len(tokens_L))
        tokens_L[:size] = prompt[trajectory.group, :size]
        segments = (dataclasses.replace(first, tokens_L=tokens_L), *rest)
        return dataclasses.replace(trajectory, segments=segments)

    return [begun(number, trajectory) for number, trajectory in enumerate(made)]


def as_sampled(trajectories: Sequence[Trajectory], spread: float) -> list[Trajectory]:
    """The same with log-probabilities of a sampler that differs from `policy` by so many nats.

    Half of the spread moves whole segments, for means over tokens to differ too.
    """
    rng = np.random.default_rng(4)

    def recorded(segment: Segment) -> Segment:
        weights = weights_of(policy()[1])
        exact_L, _ = model.token_logps(weights, segment.tokens_L, NUMPY_ARCH, temperature=1.0)
        noise_L = spread * (rng.normal(size=exact_L.size) + rng.normal()) / 2
        logp_L = np.where(segment.turn_L >= 0, exact_L + noise_L, 0).astype(np.float32)
        return dataclasses.replace(segment, logp_L=logp_L)

    segments = [tuple(recorded(segment) for segment in t.segments) for t in trajectories]
    pairs = zip(trajectories, segments, strict=True)
    return [dataclasses.replace(t, segments=new) for t, new in pairs]


@dataclasses.dataclass(frozen=True)
class Update:
    """One `update_turn` of a sweep, on the host."""

    turns: tuple[int, ...]
    params: Any
    gradients: model.Weights  # of its last step, under the twin's names
    cumulative_ratio_N: np.ndarray
    metrics: list[dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Observed:
    """A sweep, and what each of its updates did.

    advantage: of every token of what is learned from, one array a segment; anything at context.
    """

    state: TrainState
    metrics: dict[str, float]
    updates: list[Update]
    advantage: list[np.ndarray]

    @property
    def losses(self) -> list[float]:
        return [float(step["loss"]) for update in self.updates for step in update.metrics]


def observe(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    *,
    state: TrainState | None = None,
    ref_params: Any = None,
    labels: Sequence[Mapping[str, str]] | None = None,
) -> Observed:
    """Runs a real sweep and copies what passes between its updates."""
    state = new_state(learner.optimizer) if state is None else state
    if learner.critic is not None and state.critic is None:
        state = state._replace(critic=learner.critic.init(state.params))
    if learner.scorer is not None and state.scorer is None:
        state = state._replace(scorer=learner.scorer.init(state.params))
    ref_params = jax.device_put(policy()[1]) if ref_params is None else ref_params
    updates, real, advantage = [], sweep_module.update_turn, []

    def update_turn(learner, current, planned, **rest):
        advantage[:] = current.per_token["advantage"]
        before = len(current.steps)
        current = real(learner, current, planned, **rest)
        gradients = weights_of(host(current.train.opt_state[0]))
        steps = [dict(step.metrics) for step in current.steps[before:]]
        copies = host((current.cumulative_ratio_N, steps))
        updates.append(Update(planned.turns, host(current.train.params), gradients, *copies))
        return current

    with mock.patch.object(sweep_module, "update_turn", update_turn):
        state, metrics, *_ = sweep_module.sweep(
            learner, state, ref_params, trajectories, iteration=3, labels=labels
        )
    return Observed(host(state), metrics, updates, advantage)


def twin_sweep(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    order: Sequence[Sequence[int]],
    *,
    ref_params: Any = None,
    scorer: model.Weights | None = None,
    teachers: Sequence[model.Weights | None] = (),
    **rest: Any,
) -> twin.Sweep:
    """The same sweep by the NumPy twin, with the learner's choices.

    Args:
      rest: further fields of the twin's options.
    """
    known = {field.name for field in dataclasses.fields(twin.Options)} - {"order"}
    given = dataclasses.asdict(learner.algorithm)  # sections as mappings
    choices = {name: value for name, value in given.items() if name in known}
    choices |= {"reward_weights": learner.reward_weights}
    choices |= {"learning_rate": RATE, "longest": learner.shapes.action} | rest
    options = twin.Options(order, temperature=learner.temperature, **choices)
    return twin.sweep(
        weights_of(policy()[1]),
        trajectories,
        options,
        NUMPY_ARCH,
        ref_weights=None if ref_params is None else weights_of(ref_params),
        scorer=scorer,
        teachers=teachers,
    )


def assert_equal_to_the_twin(
    learner: Learner,
    trajectories: Sequence[Trajectory],
    order: Sequence[Sequence[int]] | None,
    *,
    ref_params: Any = None,
    state: TrainState | None = None,
    labels: Sequence[Mapping[str, str]] | None = None,
    **rest: Any,
) -> tuple[Observed, twin.Sweep]:
    """Advantages, losses, gradients and factors of every step, final parameters: agree to 1e-5.

    Args:
      order: the turns of each step; None: whatever the sweep drew.
      state: to begin from, with the parameters of `policy`; None: a fresh one.
      rest: further fields of the twin's options.
    """
    if state is not None and state.scorer is not None:
        rest["scorer"] = weights_of(host(state.scorer.params["trunk"]))
    observed = observe(learner, trajectories, state=state, ref_params=ref_params, labels=labels)
    order = [update.turns for update in observed.updates] if order is None else order
    assert [update.turns for update in observed.updates] == order
    wanted = twin_sweep(learner, trajectories, order, ref_params=ref_params, **rest)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    kept = np.flatnonzero(learnable(trajectories, grouped=learner.algorithm.grouped))
    credit_S = [credit_L for i in kept for credit_L in wanted.credit[i]]
    segments = [segment for i in kept for segment in trajectories[i].segments]
    for advantage_L, credit_L, segment in zip(observed.advantage, credit_S, segments, strict=True):
        acted_L = segment.turn_L >= 0
        close(advantage_L[acted_L], credit_L[acted_L], atol=1e-5)
    close(observed.losses, [step.loss for step in wanted.steps], atol=1e-5)

    before_N = np.ones(len(trajectories))
    ends = np.cumsum([len(update.metrics) for update in observed.updates])
    for update, end in zip(observed.updates, ends, strict=True):
        step = wanted.steps[end - 1]
        norm = np.sqrt(sum((g**2).sum() for g in step.gradients.values()))
        # Sums over tokens and rows: their rounding goes with the whole gradient's size.
        atol = 1e-5 * max(1.0, norm)
        close(update.metrics[-1]["grad_norm"], norm, atol=atol)
        for name, gradient in step.gradients.items():
            close(update.gradients[name], gradient, atol=atol, err_msg=f"{step.turns} {name}")
        # A fused step holds the refresh of the step before; the last step's refresh is nobody's.
        last = update is observed.updates[-1]
        cumulative_ratio_N = before_N if learner.fused or last else step.cumulative_ratio_N
        close(update.cumulative_ratio_N, cumulative_ratio_N, atol=1e-5)
        before_N = step.cumulative_ratio_N

    params = weights_of(observed.state.params)
    assert params.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        close(params[name], weight, atol=1e-5, err_msg=name)
    assert observed.state.step == observed.metrics["sweep/steps"] == len(wanted.steps)
    assert observed.metrics["sweep/updates_skipped"] == observed.state.skipped == 0
    assert_weights_are_the_twins(learner, observed.metrics, wanted)
    return observed, wanted


def assert_weights_are_the_twins(
    learner: Learner, metrics: Mapping[str, float], wanted: twin.Sweep
) -> None:
    """The means and maxima of M that are logged are of what the twin's steps used."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    used = {key: weight_A for step in wanted.steps for key, weight_A in step.used.items()}
    largest = {key: np.abs(weight_A).max() for key, weight_A in used.items()}
    if learner.algorithm.covariance.kind != "clip":  # which takes the advantage from some tokens
        close(metrics["sweep/weight_max"], max(largest.values()))
    for turn in {turn for _, turn in used}:
        own = [key for key in used if key[1] == turn]
        mean = np.mean([used[key].mean() for key in own])
        close(metrics[f"sweep/weight_mean/turn={turn + 1}"], mean)
        close(metrics[f"sweep/weight_max/turn={turn + 1}"], max(largest[key] for key in own))


def assert_trees_equal(left: Any, right: Any) -> None:
    """Every leaf agrees bit for bit."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, x), y in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name


def assert_trees_close(left: Any, right: Any, tolerance: float) -> None:
    """Every leaf agrees to `tolerance`, absolute and relative."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, x), y in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)
