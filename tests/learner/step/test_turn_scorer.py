"""The model that scores turns: what it is trained on, what it leaves alone, and where it lies."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import numpy_model
import numpy_twin as twin
import pytest
from numpy_credit import token_advantages

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import SegmentBatch, Shapes, all_actions, lay_out, turn_batch
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.credit.credit_arrays import CreditArrays
from seeupo_jax.learner.credit.turn_scores import score_turns, scorer_loss
from seeupo_jax.learner.program_warming import compile_programs
from seeupo_jax.learner.state_layout import HOST, abstract_state, make_state, state_layout
from seeupo_jax.learner.step.turn_scorer import make_scorer, scorer_optimizer
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_control import SweepStopped, stopped_arrays
from seeupo_jax.learner.sweep_start import begin_sweep
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding
from seeupo_jax.types import CriticState

SHAPES = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)
NETWORK, PARAMS = cases.policy()
TRAJECTORIES = cases.ragged()
ROWS = SegmentBatch.of(TRAJECTORIES)
RATE = 0.12
REVERSE = [(3,), (2,), (1,), (0,)]
# So much that a step of the scorer shows, and that a turn's credit is not the episode's.
LOUD = {"implicit_coef": 2.0, "success_above": 0.2}
ORDERS = {"istar": [(0, 1, 2, 3)], "seeupo": REVERSE}


def istar(name, choices, **options):
    """A recipe's algorithm with iStar's credit."""
    own = RECIPES[name]["estimator"] | options
    return schema.Algorithm(**RECIPES[name] | {"advantage": "istar", "estimator": own} | choices)


def learner(name, choices=None, **options):
    """A learner that credits by a scorer, with these options; equal programs are shared."""
    algorithm = istar(name, {"kl_coef": 0.1} | (choices or {}), **LOUD | options)
    made = Learner(NETWORK, cases.recording(rate=RATE), algorithm, SHAPES, temperature=1.0, seed=5)
    return cases.sharing(made)


def state_of(made):
    """A state whose scorer is not the policy."""
    state = cases.new_state(made.optimizer)
    trunk = jax.tree.map(jnp.array, cases.jittered(PARAMS, 0.1))
    params = {"head": {}, "trunk": trunk}
    return state._replace(scorer=CriticState(params, made.scorer.optimizer.init(params)))


def wanted_step(made, before):
    """The twin's step of the scorer."""
    fields = {field.name for field in dataclasses.fields(twin.Options)} - {"order"}
    given = dataclasses.asdict(made.algorithm)
    choices = {name: x for name, x in given.items() if name in fields}
    options = twin.Options([], learning_rate=RATE, **choices)
    policy, scorer = cases.weights_of(PARAMS), cases.weights_of(before.scorer.params["trunk"])
    return twin.scorer_step(policy, scorer, TRAJECTORIES, options, cases.NUMPY_ARCH)


@pytest.mark.parametrize("name, score", [("istar", "mean"), ("seeupo", "sum")])
def test_a_sweep_and_its_scorers_step_are_the_twins(name, score):
    """Of failed, one-turn and rewritten trajectories; credited by the scorer before its step."""
    made = learner(name, pair_score=score)
    before = cases.host(state_of(made))
    observed, wanted = cases.assert_equal_to_the_twin(
        made, TRAJECTORIES, ORDERS[name], state=state_of(made), learning_rate=RATE
    )
    per_turn = wanted.credit[0][0][TRAJECTORIES[0].segments[0].turn_L >= 0]
    assert len({*per_turn}) == 4
    step, metrics = wanted_step(made, before), observed.metrics
    assert metrics["sweep/pairs"] == step.pairs == 4
    assert metrics["sweep/scorer_skipped"] == 0
    np.testing.assert_allclose(metrics["sweep/pair_loss"], step.loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["sweep/pair_accuracy"], step.accuracy, rtol=1e-6)
    norm = np.sqrt(sum((g**2).sum() for g in step.gradients.values()))
    np.testing.assert_allclose(metrics["sweep/scorer_grad_norm"], norm, rtol=1e-4)
    after = cases.weights_of(observed.state.scorer.params["trunk"])
    start = cases.weights_of(before.scorer.params["trunk"])
    for weight, value in step.weights.items():
        np.testing.assert_allclose(after[weight], value, rtol=1e-5, atol=1e-5, err_msg=weight)
    assert max(np.abs(after[weight] - start[weight]).max() for weight in start) > 1e-3


def test_a_new_scorer_is_the_policy_and_credits_turns_with_their_episode():
    made = learner("istar")
    observed = cases.observe(made, TRAJECTORIES)
    assert observed.metrics["sweep/pair_accuracy"] == 0.5
    np.testing.assert_allclose(observed.metrics["sweep/pair_loss"], np.log(2), rtol=1e-6)
    reward = np.array([TRAJECTORIES[i].reward for i in (3, 5)])  # of group 1; the fifth failed
    wanted = reward - reward[::-1]  # less the mean of the others
    for segment, value in ((4, wanted[0]), (5, wanted[1])):
        acted_L = ROWS.turn[segment] >= 0
        np.testing.assert_allclose(observed.advantage[segment][acted_L], value, rtol=1e-5)


def test_an_overlong_success_is_a_success_to_the_scorer():
    penalty = {"overlong": {"length": 1, "penalty": 5.0}}
    plain, shaped = (
        cases.observe(made, TRAJECTORIES, state=state_of(made))
        for made in (learner("istar"), learner("istar", penalty))
    )
    assert shaped.metrics["sweep/overlong_penalty"] == -5 and plain.metrics["sweep/pairs"] == 4
    cases.assert_trees_equal(shaped.state.scorer, plain.state.scorer)


def test_a_reward_that_is_just_success_above_is_a_failure():
    # 0.6 and -0.7 are no pair; 1 with 0 and 0.5, and 0.9 with 0 are.
    algorithm = istar("istar", {}, success_above=0.6)
    nothing = [np.zeros(len(tokens), np.float32) for tokens in ROWS.tokens]
    said = {"scorer_logp": nothing, "old_logp": nothing}
    arrays = CreditArrays(algorithm, SHAPES, ROWS, TRAJECTORIES, said)
    assert scorer_loss(algorithm, arrays, ROWS, TRAJECTORIES).metrics["sweep/pairs"] == 3


def test_without_a_pair_the_scorer_takes_no_step():
    made = learner("istar", success_above=100.0)
    before = cases.host(state_of(made).scorer)
    observed = cases.observe(made, TRAJECTORIES, state=state_of(made))
    cases.assert_trees_equal(observed.state.scorer, before)
    assert observed.metrics["sweep/pairs"] == 0
    assert not {"sweep/pair_loss", "sweep/scorer_grad_norm"} & set(observed.metrics)


def batch_of(made, value):
    """Every action token, each with this slope, which is infinite for some tests."""
    spans = all_actions(ROWS)
    layout = lay_out(ROWS, spans, made.shapes, made.shapes.long)
    slope = [np.full(len(turn_L), value, np.float32) for turn_L in ROWS.turn]
    return turn_batch(ROWS, layout, made.shapes, {"score_grad": slope}, action=made.shapes.longest)


def test_a_gradient_that_is_not_finite_leaves_the_scorer_as_it_was():
    made = learner("istar")
    before = cases.host(state_of(made))
    state, reported = made.scorer_step(state_of(made), batch_of(made, np.inf))
    assert reported["scorer_skipped"] == 1 and not np.isfinite(reported["scorer_grad_norm"])
    cases.assert_trees_equal(cases.host(state), before)


@pytest.mark.parametrize("turns", [0, 2])
def test_a_stopped_sweep_goes_on_from_files_to_the_same_bits(tmp_path, turns):
    made = learner("seeupo", pair_score="sum")

    def swept(state, **rest):
        return sweep(made, state, PARAMS, TRAJECTORIES, iteration=3, **rest)

    wanted, metrics, *_ = swept(state_of(made))
    wanted, asked = cases.host(wanted), iter([False] * turns)
    with pytest.raises(SweepStopped) as stopped:
        swept(state_of(made), stop=lambda: next(asked, True))
    files = Checkpoints(tmp_path, 1)
    files.save(3, stopped.value.arrays, json.loads(json.dumps(stopped.value.notes)))
    _, arrays, notes = files.restore(stopped_arrays(made, state_of(made), TRAJECTORIES))
    files.close()
    arrays = cases.reread(arrays)
    state, again, *_ = swept(arrays["state"], resume=(arrays, notes))
    cases.assert_trees_equal(cases.host(state), wanted)
    assert again == metrics


def test_on_a_mesh_it_lies_as_the_policy_and_its_moments_wait_on_the_host():
    made = learner("istar")
    mesh = make_mesh(schema.Mesh(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    params = jax.device_put(PARAMS, param_shardings(mesh, NETWORK.logical_axes(), PARAMS))
    offload = schema.Offload(optimizer=True)
    layout = state_layout(mesh, made.optimizer, params, offload, scorer=made.scorer)
    state = make_state(made.optimizer, params, layout, scorer=made.scorer)
    said = abstract_state(made.optimizer, params, layout, scorer=made.scorer)
    assert jax.tree.map(lambda x: x.sharding, said) == jax.tree.map(lambda x: x.sharding, state)
    cases.assert_trees_equal(cases.host(state.scorer.params["trunk"]), PARAMS)

    def where(tree):
        return jax.tree.map(lambda x: x.sharding, tree)

    assert where(state.scorer.params["trunk"]) == where(state.params)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.scorer.opt_state) if x.ndim}
    assert kinds == {HOST}

    alone = cases.new_state(made.optimizer)
    alone = alone._replace(scorer=made.scorer.init(alone.params))
    batch = batch_of(made, 0.01)
    wanted, reported = made.scorer_step(alone, batch)
    sharded = cases.unshared(made, state_shardings=layout, replicated=sharding(mesh, ()))
    with jax.set_mesh(mesh):
        state, again = sharded.scorer_step(state, batch)
    assert where(state) == layout
    cases.assert_trees_close(cases.host(state), cases.host(wanted), 1e-5)
    np.testing.assert_allclose(again["scorer_grad_norm"], reported["scorer_grad_norm"], rtol=1e-5)
    assert reported["scorer_grad_norm"] > 0


def test_programs_compiled_ahead_are_all_that_a_sweep_needs():
    made = cases.unshared(learner("istar"))  # nothing compiled yet
    before = cases.host(state_of(made))
    state = compile_programs(made, state_of(made), PARAMS, trajectories=8)
    cases.assert_trees_equal(cases.host(state), before)
    compilations = Compilations()
    state, *_ = sweep(made, state, PARAMS, TRAJECTORIES, iteration=1)
    compilations.close()
    assert compilations.programs == 0 and state.step == 1


def progress_learner(kind, rate=RATE, **choices):
    """A learner of SPA; equal programs are shared."""
    algorithm = schema.Algorithm(**RECIPES["spa"] | {"critic": {"kind": kind}} | choices)
    made = Learner(NETWORK, cases.recording(rate=rate), algorithm, SHAPES, temperature=1.0, seed=5)
    return cases.sharing(made)


def progress_state(made):
    """A state whose critic is new, and whose estimator says something."""
    state = cases.new_state(made.optimizer)
    own = cases.host(made.scorer.init(state.params).params)
    own = {name: cases.jittered(node, 0.3) for name, node in own.items()}
    own = jax.tree.map(jnp.array, own)
    scorer = CriticState(own, made.scorer.optimizer.init(own))
    return state._replace(critic=made.critic.init(state.params), scorer=scorer)


def twin_progress(own, kind):
    """Per segment what is said of the last token of each turn, and the loss with its gradients."""
    trunk = own["trunk"] if kind == "model" else {}
    weights = cases.weights_of(PARAMS | trunk)
    weights |= {"lm_head.weight": np.asarray(own["head"]["kernel"], np.float64)[None, :]}
    bias, said, backs, sums = float(own["head"]["bias"][0]), [], [], {}
    for segment, tokens_L in enumerate(ROWS.tokens):
        logits_L1, back = numpy_model.forward(weights, tokens_L, cases.NUMPY_ARCH)
        turn_L, owner = ROWS.turn[segment], int(ROWS.trajectory_S[segment])
        ends = [max(np.flatnonzero(turn_L == turn)) for turn in {*turn_L.tolist()} - {-1}]
        said.append(np.zeros(len(tokens_L)))
        said[-1][ends] = logits_L1[ends, 0] + bias
        backs.append((back, ends, owner))
        sums[owner] = sums.get(owner, 0.0) + said[-1].sum()
    error = {i: total - TRAJECTORIES[i].reward for i, total in sums.items()}
    grads, dbias = {}, 0.0
    for (back, ends, owner), said_L in zip(backs, said, strict=True):
        slope_L1 = np.zeros((len(said_L), 1))
        slope_L1[ends] = 2 * error[owner] / len(error)
        back(slope_L1, grads)
        dbias += slope_L1.sum()
    loss = np.mean([x**2 for x in error.values()])
    return said, (loss, np.mean([abs(x) for x in error.values()])), weights, grads, dbias


@pytest.mark.parametrize("kind", ["head", "model"])
def test_progress_and_its_step_are_the_twins(kind):
    """At the last token of turns, of several segments; the step leaves a head's policy alone."""
    given = {"progress_coef": 0.7}
    made = progress_learner(kind, scale="none", advantage_clip=None, estimator=given)
    own = cases.host(progress_state(made).scorer.params)
    said, (loss, error), weights, grads, dbias = twin_progress(own, kind)
    plan = made.plan(ROWS.updated_turns, iteration=1)
    begun = begin_sweep(
        made,
        progress_state(made),
        PARAMS,
        ROWS,
        TRAJECTORIES,
        plan,
        shaped=TRAJECTORIES,
        version=0,
    )
    metrics = begun.data.initial_metrics
    np.testing.assert_allclose(metrics["sweep/progress_loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["sweep/progress_error"], error, rtol=1e-5)
    pieces = twin.step_pieces(TRAJECTORIES, range(9), grouped=False)
    at = [said_L[piece.position_A] for piece, said_L in zip(pieces, said, strict=True)]
    estimator = dataclasses.asdict(made.algorithm.estimator)
    choices = {"scale": "none", "advantage_clip": None, "estimator": estimator}
    options = twin.Options([], advantage="spa", **choices)
    nothing = [np.zeros(len(piece.position_A)) for piece in pieces]
    credit = token_advantages(TRAJECTORIES, pieces, nothing, options, progress=at)
    for segment, piece in enumerate(pieces):
        wanted_A = credit[piece.trajectory][piece.place][piece.position_A]
        got_A = begun.per_token["advantage"][segment][piece.position_A]
        np.testing.assert_allclose(got_A, wanted_A, rtol=1e-4, atol=1e-5)

    after = cases.host(begun.train.scorer.params)
    kernel = own["head"]["kernel"] - RATE * grads["lm_head.weight"][0]
    np.testing.assert_allclose(after["head"]["kernel"], kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after["head"]["bias"], own["head"]["bias"] - RATE * dbias, atol=1e-5)
    cases.assert_trees_equal(cases.host(begun.train.params), PARAMS)
    if kind == "model":
        moved = cases.weights_of(PARAMS | after["trunk"])
        for name in weights.keys() - {"lm_head.weight"}:
            wanted = weights[name] - RATE * grads[name]
            np.testing.assert_allclose(moved[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def test_several_steps_are_as_many_passes_and_the_first_ones_scores_count():
    made, given = progress_learner("head", 1e-3), (ROWS, TRAJECTORIES, {})
    first = score_turns(made, progress_state(made), *given, epochs=1)
    second = score_turns(made, first.train, *given, epochs=1)
    got = score_turns(made, progress_state(made), *given, epochs=2)
    cases.assert_trees_equal(cases.host(got.train.scorer), cases.host(second.train.scorer))
    for name, wanted in first.per_token.items():
        cases.assert_trees_equal(list(got.per_token[name]), list(wanted))
    assert second.metrics["sweep/progress_loss"] < got.metrics["sweep/progress_loss"]
    norms = [done.metrics["sweep/scorer_grad_norm"] for done in (got, second)]
    assert norms[0] > norms[1] > 0


def test_without_a_scorer_a_state_has_no_leaf_more():
    assert make_scorer(schema.Algorithm(), 16, cases.recording(), 1.0) is None
    assert scorer_optimizer(schema.Config(), total_steps=4) is None
    state = cases.new_state(cases.recording())
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(tuple(state)[:4]))


def test_the_scorers_learning_rate_is_a_multiple_of_the_policys():
    fields = schema.Optimizer(name="sgd", learning_rate=5e-7, max_grad_norm=None)
    whole = schema.Config(optimizer=fields, recipe="istar")
    optimizer = scorer_optimizer(whole, total_steps=4)
    updates, _ = optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))
    np.testing.assert_allclose(updates, -1e-6)  # the authors' two
