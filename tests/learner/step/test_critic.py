"""The value function: what it says, what trains it, where it lies, and what it leaves alone."""

import dataclasses
import json
from unittest import mock

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import numpy_credit
import numpy_model
import numpy_twin as twin
import pytest
from stored_fields import with_fields

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.optimizer_schema import ParameterGroup
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner import sweep as sweep_module
from seeupo_jax.learner.batching import SegmentBatch, Shapes, all_actions, lay_out, turn_batch
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import apply_update, make_optimizer
from seeupo_jax.learner.program_warming import compile_programs
from seeupo_jax.learner.state_layout import HOST, abstract_state, make_state, state_layout
from seeupo_jax.learner.step.critic import critic_optimizer, fresh_head, make_critic
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.planning import flops
from seeupo_jax.planning.program_flops import count
from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.lora import TARGETS, attach_adapters
from seeupo_jax.policy.network import split_model, split_trainable
from seeupo_jax.types import CriticState

SHAPES = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)
KINDS = ["head", "model"]
# One step on every turn, each an action with a ratio of its own, averaged by actions.
BY_ACTION = {"order": "parallel", "turns_per_update": 1, "loss_aggregation": "action"}
TURN_BY_TURN = {"turns_per_update": 1, "order": "reverse"}
DENOMINATOR, COEF, CLIP = np.float32(7), 0.5, 0.2
TRAJECTORIES = cases.ragged()
ROWS = SegmentBatch.of(TRAJECTORIES)
NETWORK, PARAMS = cases.policy()
REFERENCE = cases.jittered(PARAMS, 0.02)


def learner(kind, **choices):
    """A learner of PPO, whose optimizer steps the critic too; equal programs are shared."""
    algorithm = schema.Algorithm(**RECIPES["ppo"] | {"critic": {"kind": kind}} | choices)
    made = Learner(NETWORK, cases.recording(), algorithm, SHAPES, temperature=1.0, seed=5)
    return cases.sharing(made)


def without_critic(**choices):
    """The same without a value function."""
    return learner("none", advantage="returns", **{"estimator": {}} | choices)


def state_of(made, params=PARAMS):
    """A state whose values are of the rewards' size, and whose critic is not the policy."""
    state = cases.new_state(made.optimizer, params)
    if made.critic is None:
        return state
    own = cases.jittered(made.critic.init(state.params).params, 0.1)
    own["head"] = cases.jittered(own["head"], 0.4)
    own = jax.tree.map(jnp.array, own)
    return state._replace(critic=CriticState(own, made.critic.optimizer.init(own)))


def valued(weights, own):
    """The twin's weights of a value function: its output table is the head, of one row."""
    kernel = np.asarray(own["head"]["kernel"], np.float64)
    return weights | {"lm_head.weight": kernel[None, :]}


def weights_of(state, kind):
    """Weights of the transformer that a critic reads, with its head."""
    trunk = state.critic.params["trunk"] if kind == "model" else {}
    return valued(cases.weights_of(state.params | trunk), state.critic.params)


def twin_value(weights, bias, tokens_L):
    """V before each token [L], of the first 0, and the function that adds up gradients."""
    logits_L1, logits_back = numpy_model.forward(weights, tokens_L, cases.NUMPY_ARCH)
    value_L = np.append(0.0, logits_L1[:-1, 0] + bias)

    def backward(dvalue_L, grads):
        logits_back(np.append(dvalue_L[1:], 0.0)[:, None], grads)

    return value_L, backward


def twin_loss(weights, bias, per_token, spans):
    """The value function's loss, not divided by anything, and its gradients.

    Of each span, too, its tokens' errors and whether the clipped one counts.

    Args:
      per_token: value and returns, an array a segment. spans: (segment, positions, share) each.
    """
    total, grads, dbias, parts = 0.0, {}, 0.0, []
    for segment, position_A, share in spans:
        value_L, backward = twin_value(weights, bias, ROWS.tokens[segment])
        dvalue_L, part = np.zeros(len(value_L)), []
        for j in position_A:
            old, wanted = per_token["value"][segment][j], per_token["returns"][segment][j]
            error = value_L[j] - wanted
            near = min(max(value_L[j], old - CLIP), old + CLIP) - wanted
            clipped = abs(near) > abs(error)
            part.append((0.5 * max(error**2, near**2), float(clipped)))
            total += share / len(position_A) * part[-1][0]
            dvalue_L[j] = share / len(position_A) * (0.0 if clipped else error)
        parts.append(part)
        backward(dvalue_L, grads)
        dbias += dvalue_L.sum()
    return total, grads, dbias, parts


def random_known(seed, names):
    """Random numbers for every token; values and returns of the values' size."""
    rng = np.random.default_rng(seed)
    sizes = {"old_logp": -3.0, "ref_logp": -3.0}
    return {
        name: [
            (sizes[name] * rng.random(len(t)) if name in sizes else rng.normal(size=len(t))).astype(
                np.float32
            )
            for t in ROWS.tokens
        ]
        for name in names
    }


def batch_of(made, per_token):
    per_token = {name: per_token[name] for name in made.per_token if name != "action"}
    if "action" in made.per_token:
        per_token["action"] = [3 - turn_L for turn_L in ROWS.turn]
    layout = lay_out(ROWS, all_actions(ROWS), SHAPES, (32,))
    return turn_batch(ROWS, layout, SHAPES, per_token, action=SHAPES.action)


def step(made, batch, state=None):
    """A turn step's state and metrics, on the host."""
    state = state_of(made) if state is None else state
    state, _, _, metrics, _ = made.turn_step(state, batch, None, jnp.ones(8), DENOMINATOR)
    return cases.host((state, metrics))


CASES = {
    "head, a token": ("head", {}),
    "model, a token": ("model", {}),
    "head, by action": ("head", BY_ACTION),
}


@pytest.fixture(scope="module", params=CASES, ids=CASES)
def stepped(request):
    """A step with the value function, the same without it, and what the twin says of the value."""
    kind, choices = CASES[request.param]
    made, plain = learner(kind, **choices), without_critic(**choices)
    before = cases.host(state_of(made))
    per_token = random_known(3, made.per_token)
    state, metrics = step(made, batch_of(made, per_token))
    other, without = step(plain, batch_of(plain, per_token))
    turns = [[turn] for turn in range(4)] if choices else [range(4)]
    spans = []
    for segment, turn_L in enumerate(ROWS.turn):
        actions = (np.flatnonzero(np.isin(turn_L, action)) for action in turns)
        sizes = [(a, 1 if choices else a.size) for a in actions if a.size]
        spans += [(segment, position_A, share) for position_A, share in sizes]
    bias = float(before.critic.params["head"]["bias"][0])
    *wanted, parts = twin_loss(weights_of(before, kind), bias, per_token, spans)
    # A turn lies in one segment; all turns of a trajectory are one action in however many.
    actions = {}
    for number, ((segment, *_), part) in enumerate(zip(spans, parts, strict=True)):
        owner = number if choices else int(ROWS.trajectory_S[segment])
        actions.setdefault(owner, []).extend(part)
    return kind, (state, metrics), (other, without), wanted, list(actions.values())


def assert_gradients(got, wanted):
    scale = np.sqrt(sum((g**2).sum() for g in wanted.values()))
    assert got.keys() == wanted.keys() and scale > 0.05
    for name, gradient in wanted.items():
        np.testing.assert_allclose(
            got[name], gradient, rtol=1e-5, atol=1e-5 * max(1, scale), err_msg=name
        )


def test_the_loss_gains_the_coefficient_times_the_twins_error(stepped):
    _, (_, metrics), (_, without), (loss, *_), actions = stepped
    gained = (metrics["loss"] - without["loss"]) * DENOMINATOR
    np.testing.assert_allclose(gained, COEF * loss, rtol=1e-4)
    np.testing.assert_allclose(metrics["actions"], len(actions), rtol=1e-6)


def test_errors_and_who_is_clipped_are_counted_by_action_as_the_twins(stepped):
    _, (_, metrics), _, _, actions = stepped
    errors, clipped = np.sum([np.mean(action, axis=0) for action in actions], axis=0)
    np.testing.assert_allclose(metrics["value_loss"], errors, rtol=1e-4)
    np.testing.assert_allclose(metrics["value_clipped"], clipped, rtol=1e-5)
    assert 0 < clipped < len(actions)


def test_gradients_of_the_value_function_are_the_twins(stepped):
    kind, (state, metrics), (other, _), (_, grads, dbias), _ = stepped
    wanted = {name: COEF / DENOMINATOR * g for name, g in grads.items()}
    kernel = wanted.pop("lm_head.weight")[0]
    own = state.critic.opt_state[0]
    np.testing.assert_allclose(own["head"]["kernel"], kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own["head"]["bias"], [COEF / DENOMINATOR * dbias], rtol=1e-4)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(own)))
    np.testing.assert_allclose(metrics["critic_grad_norm"], norm, rtol=1e-5)
    if kind == "model":
        assert "head" not in own["trunk"]
        of_trunk = cases.weights_of(own["trunk"] | {"head": state.params["head"]})
        assert_gradients({name: of_trunk[name] for name in wanted}, wanted)
        # Nothing of it reaches the policy.
        cases.assert_trees_equal(state.opt_state, other.opt_state)
        cases.assert_trees_equal(state.params, other.params)
    else:
        assert not own["trunk"]
        gained = jax.tree.map(np.subtract, state.opt_state[0], other.opt_state[0])
        gained = cases.weights_of(gained)
        assert not gained.pop("lm_head.weight").any()
        assert_gradients(gained, wanted)


def test_what_padding_holds_reaches_nothing():
    made = learner("head")
    batch = batch_of(made, random_known(3, made.per_token))
    rng, mask = np.random.default_rng(0), batch.mask_PA > 0
    alone = batch.end_MRL == np.arange(1, 33)[None, None, :]
    beyond = alone & (batch.depth_MRL == 0)
    spoilt = {
        name: np.where(mask, getattr(batch, name), np.nan)
        for name in ("value_PA", "returns_PA", "old_logp_PA", "advantage_PA")
    }
    other = rng.integers(0, 20, batch.tokens_MRL.shape).astype(np.int32)
    tokens = np.where(beyond, other, batch.tokens_MRL)
    changed = step(made, batch._replace(tokens_MRL=tokens, **spoilt))
    for got, wanted in zip(changed, step(made, batch), strict=True):
        cases.assert_trees_close(got, wanted, 1e-6)


@pytest.mark.parametrize("name", ["old_logp", "returns"])
def test_neither_is_stepped_where_a_gradient_is_not_finite(name):
    """What spoils the policy's gradient leaves that of a critic of its own alone, and back."""
    made = learner("model")
    per_token = random_known(3, made.per_token)
    per_token[name][0][ROWS.turn[0] >= 0] = np.nan
    before = cases.host(state_of(made))
    state, metrics = step(made, batch_of(made, per_token))
    finite = {key for key in ("grad_norm", "critic_grad_norm") if np.isfinite(metrics[key])}
    assert finite == {{"old_logp": "critic_grad_norm", "returns": "grad_norm"}[name]}
    assert metrics["update_skipped"] == 1
    cases.assert_trees_equal(state, before._replace(skipped=np.int32(1)))


def test_each_gradient_is_clipped_by_its_own_norm():
    fields = schema.Optimizer(name="sgd", learning_rate=0.5, max_grad_norm=2.0)
    optimizer = make_optimizer(fields, total_steps=9)
    params, own = {"policy": jnp.zeros(2)}, {"critic": jnp.zeros(2)}
    state = cases.new_state(optimizer, params)
    state = state._replace(critic=CriticState(own, optimizer.init(own)))
    grads = {"policy": jnp.array([3.0, 4.0])}, {"critic": jnp.array([0.0, 1.0])}
    state, metrics = apply_update(optimizer, grads[0], state, optimizer, grads[1])
    assert (metrics["grad_norm"], metrics["critic_grad_norm"]) == (5, 1)
    np.testing.assert_allclose(state.params["policy"], [-0.6, -0.8], rtol=1e-6)
    np.testing.assert_allclose(state.critic.params["critic"], [0, -0.5])


def observed_pass(made, trajectories, **rest):
    """A sweep's state, metrics, and what it knew of every token when it began."""
    per_token, real = {}, sweep_module.update_turn

    def update_turn(learner, current, *others, **named):
        per_token.update(current.per_token)
        return real(learner, current, *others, **named)

    with mock.patch.object(sweep_module, "update_turn", update_turn):
        state, metrics, *_ = sweep(
            made, state_of(made), REFERENCE, trajectories, iteration=3, **rest
        )
    return cases.host(state), metrics, per_token


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_begins_with_the_twins_values_and_returns(kind):
    """Of several segments, null turns and failed trajectories, with the penalty in the rewards."""
    penalty = {"kl_in": "reward", "kl_coef": 0.1, "estimator": {"lam": 0.9, "discount": 0.95}}
    made = learner(kind, **penalty, inner_epochs=2, minibatches_per_turn=2)
    before = cases.host(state_of(made))
    state, metrics, per_token = observed_pass(made, TRAJECTORIES)
    weights, bias = weights_of(before, kind), float(before.critic.params["head"]["bias"][0])
    values = [[twin_value(weights, bias, s.tokens_L)[0] for s in t.segments] for t in TRAJECTORIES]
    spans = twin.step_pieces(TRAJECTORIES, range(9))
    options = twin.Options(
        [],
        advantage="gae",
        scale="none",
        advantage_clip=None,
        **penalty | {"estimator": dataclasses.asdict(made.algorithm.estimator)},
    )
    old, ref = (
        twin.piece_logps(cases.weights_of(params), spans, cases.NUMPY_ARCH, options)
        for params in (before.params, REFERENCE)
    )
    less = [0.1 * (old_A - ref_A) for old_A, ref_A in zip(old, ref, strict=True)]
    credit = numpy_credit.token_advantages(TRAJECTORIES, spans, less, options, values)
    flat = {"value": [], "returns": []}
    for segment, span in enumerate(spans):
        place = span.trajectory, span.place
        at = span.position_A
        value_A = values[place[0]][place[1]][at]
        returns_A = value_A + credit[place[0]][place[1]][at]
        for name, wanted_A in (("value", value_A), ("returns", returns_A)):
            np.testing.assert_allclose(per_token[name][segment][at], wanted_A, rtol=1e-4, atol=2e-5)
            flat[name].append(wanted_A)
    value, returns = (np.concatenate(flat[name]) for name in ("value", "returns"))
    explained = 1 - np.var(returns - value) / np.var(returns)
    np.testing.assert_allclose(metrics["sweep/explained_variance"], explained, rtol=1e-4)
    assert abs(explained) > 1e-2
    # Four steps, each of which moved both, the later ones far enough to be clipped.
    assert metrics["sweep/steps"] == state.step == 4 and not state.skipped
    assert metrics["sweep/value_clip_fraction"] > 0 < metrics["sweep/critic_grad_norm"]
    moved = jax.tree.map(
        lambda a, b: bool((a != b).any()), state.critic.params, before.critic.params
    )
    assert all(jax.tree.leaves(moved))


def test_equal_returns_have_no_variance_to_explain():
    made = learner("head")
    state = state_of(made)
    own = jax.tree.map(jnp.zeros_like, state.critic.params)
    state = state._replace(critic=state.critic._replace(params=own))
    alike = [with_fields(t, reward=0.0) for t in TRAJECTORIES]
    _, metrics, *_ = sweep(made, state, PARAMS, alike, iteration=1)
    assert np.isnan(metrics["sweep/explained_variance"])
    assert metrics["sweep/value_loss"] == metrics["sweep/critic_grad_norm"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_that_is_trained_on_the_same_returns_explains_more_of_them(kind):
    made = learner(kind, estimator={"lam": 1.0}, inner_epochs=8)
    state = cases.new_state(made.optimizer, PARAMS)
    state, explained = state._replace(critic=made.critic.init(state.params)), []
    for iteration in range(1, 9):
        state, metrics, *_ = sweep(made, state, PARAMS, TRAJECTORIES, iteration=iteration)
        explained.append(metrics["sweep/explained_variance"])
    assert explained[0] == 0  # every value is 0 at first
    assert explained[-1] > 0.2


@pytest.mark.parametrize("turns", [0, 2])
def test_a_stopped_sweep_goes_on_from_files_to_the_same_bits(tmp_path, turns):
    made = learner("model", **TURN_BY_TURN)
    wanted, metrics, _ = observed_pass(made, TRAJECTORIES)
    asked = iter([False] * turns)
    with pytest.raises(SweepStopped) as stopped:
        observed_pass(made, TRAJECTORIES, stop=lambda: next(asked, True))
    files = Checkpoints(tmp_path, 1)
    files.save(3, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    _, arrays, notes = files.restore(stopped_arrays(made, state_of(made), TRAJECTORIES))
    files.close()
    arrays = cases.reread(arrays)
    state, again, *_ = sweep(
        made, arrays["state"], REFERENCE, TRAJECTORIES, iteration=3, resume=(arrays, notes)
    )
    cases.assert_trees_equal(cases.host(state), wanted)
    assert again == metrics


def test_a_checkpoint_gives_the_critic_back_and_refuses_another_kind(tmp_path):
    states = {kind: state_of(learner(kind)) for kind in KINDS}
    states["none"] = state_of(without_critic())
    for saved, state in states.items():
        files = Checkpoints(tmp_path / saved, 1)
        files.save(1, state, {})
        _, restored, _ = files.restore(state)
        cases.assert_trees_equal(restored, state)
        for other in states.keys() - {saved}:
            with pytest.raises(ValueError, match="another model or optimizer: critic/.*workdir"):
                files.restore(states[other])
        files.close()


def test_without_a_critic_a_state_has_no_leaf_more():
    assert make_critic(schema.Algorithm(), 16, cases.recording()) is None
    state = state_of(without_critic())
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(tuple(state)[:4]))
    assert not {"value", "returns"} & set(without_critic().per_token)
    mesh = make_mesh(schema.Mesh(data=1), jax.devices()[:1])
    struct = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding(mesh, ("embed",)))
    layout = state_layout(mesh, cases.recording(), {"scale": struct}, schema.Offload())
    made = abstract_state(cases.recording(), {"scale": struct}, layout)
    assert made.critic is None and layout.critic is None


def on_mesh(made, offload, **sizes):
    """The learner and its fresh state on eight devices."""
    mesh = make_mesh(schema.Mesh(**sizes))
    where = param_shardings(mesh, NETWORK.logical_axes(), PARAMS)
    params = jax.device_put(PARAMS, where)
    layout = state_layout(mesh, made.optimizer, params, offload, made.critic)
    state = make_state(made.optimizer, params, layout, made.critic)
    said = abstract_state(made.optimizer, params, layout, made.critic)
    assert jax.tree.map(lambda x: x.sharding, said) == jax.tree.map(lambda x: x.sharding, state)
    replicated = sharding(mesh, ())
    return mesh, cases.unshared(made, state_shardings=layout, replicated=replicated), state


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind, second", [("head", "data"), ("model", "context")])
def test_a_sweep_on_a_mesh_is_the_sweep_on_one_device(kind, second):
    offload = schema.Offload(optimizer=kind == "model")
    plain = learner(kind, inner_epochs=2, kl_coef=0.0)
    sizes = {"data": 1, "fsdp": 2, "tensor": 2, second: 2}
    mesh, made, state = on_mesh(plain, offload, **sizes)
    own = jax.device_put(
        cases.host(state_of(plain).critic.params), made.state_shardings.critic.params
    )
    with jax.set_mesh(mesh):
        state = state._replace(critic=state.critic._replace(params=own))
        state, metrics, *_ = sweep(made, state, state.params, TRAJECTORIES, iteration=3)
    wanted, alone, _ = observed_pass(plain, TRAJECTORIES)
    assert jax.tree.map(lambda x: x.sharding, state) == made.state_shardings
    cases.assert_trees_close(cases.host(state), wanted, 1e-5)
    np.testing.assert_allclose(metrics["sweep/value_loss"], alone["sweep/value_loss"], rtol=1e-5)
    critic = state.critic
    share = {"data": 8, "context": 4}[second]  # of the width, cut over fsdp and context
    assert critic.params["head"]["kernel"].sharding.shard_shape((16,)) == (share,)
    for leaf, kept in zip(
        jax.tree.leaves(critic.params), jax.tree.leaves(critic.opt_state[0]), strict=True
    ):
        assert kept.sharding.spec == leaf.sharding.spec
        assert (kept.sharding.memory_kind == HOST) == offload.optimizer
    if kind == "model":
        trunk = {name: node for name, node in state.params.items() if name != "head"}

        def where(tree):
            return jax.tree.map(lambda x: x.sharding, tree)

        assert where(critic.params["trunk"]) == where(trunk)


def adapted(kind):
    """A learner of a model with adapters, and its fresh state."""
    lora = LoraAdapters(rank=4, alpha=6.0, targets=TARGETS)
    model = attach_adapters(NETWORK.bind(jax.device_put(PARAMS)), lora, seed=7)
    network, params = split_model(model)
    params, frozen = split_trainable(network, params)
    made = cases.unshared(learner(kind), network=network, frozen=frozen)
    return made, state_of(made, cases.jittered(params, 0.1))


def test_with_adapters_a_critic_of_its_own_has_adapters_of_its_own():
    made, state = adapted("model")
    trunk = state.critic.params["trunk"]
    assert jax.tree.structure(trunk) == jax.tree.structure(state.params)
    batch = batch_of(made, random_known(3, made.per_token))
    as_policy = state.critic.params | {"trunk": state.params}
    value_PA = np.asarray(made.value(state.params, as_policy, batch))
    head, _ = adapted("head")
    of_head = np.asarray(head.value(state.params, state.critic.params, batch))
    np.testing.assert_allclose(value_PA, of_head, rtol=1e-5, atol=1e-6)
    own = np.asarray(made.value(state.params, state.critic.params, batch))
    assert np.abs(own - value_PA)[batch.mask_PA > 0].max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_with_values_of_0_and_a_model_begins_as_the_policy(kind):
    made = learner(kind)
    params = cases.new_state(made.optimizer, PARAMS).params
    own = made.critic.init(params).params
    batch = batch_of(made, random_known(3, made.per_token))
    assert not np.asarray(made.value(params, own, batch)).any()
    own["head"] = {"kernel": jnp.linspace(-1, 1, 16), "bias": jnp.ones(1)}
    wanted = learner("head").value(params, own | {"trunk": {}}, batch)
    got = np.asarray(made.value(params, own, batch))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert np.abs(got[batch.mask_PA > 0]).max() > 0.1


def test_programs_compiled_ahead_are_all_that_a_sweep_needs():
    # Trajectories of several segments, whose ratio is scored before the second step.
    choices = {"ratio": "geometric", "inner_epochs": 2}
    made = cases.unshared(learner("model", **choices))  # nothing compiled yet
    state = state_of(made)
    before = cases.host(state)
    state = compile_programs(made, state, PARAMS, trajectories=8)
    cases.assert_trees_equal(cases.host(state), before)
    compilations = Compilations()
    state, _, *_ = sweep(made, state, PARAMS, TRAJECTORIES, iteration=1)
    compilations.close()
    assert compilations.programs == 0 and state.step == 2


def test_a_step_with_a_model_multiplies_what_its_formula_says():
    def counted(made):
        batch = batch_of(made, random_known(3, made.per_token))
        given = (state_of(made), batch, None, jnp.ones(8), DENOMINATOR)
        return count(made.turn_step.func.trace(*made.turn_step.args, *given).jaxpr).total

    sizes = NETWORK.arch, SHAPES.rows, 32, SHAPES.action
    plain = flops.turn_step_flops(*sizes, computed=True)
    assert counted(without_critic()) == plain
    assert flops.turn_step_flops(*sizes, critic="head", computed=True) == plain
    head = 3 * 2 * SHAPES.rows * 32 * NETWORK.arch.width  # which the formula leaves out
    wanted = flops.turn_step_flops(*sizes, critic="model", computed=True)
    assert wanted <= counted(learner("model")) <= wanted + head < 1.01 * wanted


def head_critic(rate):
    return {"kind": "head", "learning_rate": rate}


def test_muons_rate_of_what_is_no_matrix_is_in_proportion_the_critics_too():
    fields = schema.Optimizer(
        name="contrib.muon",
        learning_rate=0.5,
        max_grad_norm=None,
        kwargs={"adam_learning_rate": 0.125},
    )
    moved = {}
    for rate in (None, 0.25):
        whole = schema.Config(
            optimizer=fields, algorithm=schema.Algorithm(critic=head_critic(rate))
        )
        optimizer = critic_optimizer(whole, total_steps=4)
        head = fresh_head(2)
        gradient = jax.tree.map(jnp.ones_like, head)
        moved[rate], _ = optimizer.update(gradient, optimizer.init(head), head)
    np.testing.assert_allclose(moved[0.25]["kernel"], 0.5 * moved[None]["kernel"], rtol=1e-6)


def test_the_critics_learning_rate_is_its_own_or_the_policys():
    fields = schema.Optimizer(name="sgd", learning_rate=0.5, max_grad_norm=None)
    for rate, wanted in ((None, 0.5), (0.25, 0.25)):
        algorithm = schema.Algorithm(critic=head_critic(rate))
        whole = schema.Config(optimizer=fields, algorithm=algorithm)
        optimizer = critic_optimizer(whole, total_steps=4)
        updates, _ = optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))
        np.testing.assert_allclose(updates, -wanted)


def test_groups_of_the_policys_parameters_are_not_the_critics():
    groups = (ParameterGroup("kernel", learning_rate=8.0), ParameterGroup("bias", frozen=True))
    fields = schema.Optimizer(name="sgd", learning_rate=0.5, max_grad_norm=None, groups=groups)
    optimizer = critic_optimizer(schema.Config(optimizer=fields), total_steps=4)
    head = fresh_head(2)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, head), optimizer.init(head))
    jax.tree.map(lambda x: np.testing.assert_allclose(x, -0.5), updates)
