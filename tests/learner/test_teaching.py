"""A teacher's term in advantages is the twins', in every recipe and with several teachers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import learner_cases as cases
import numpy as np
import pytest
import torch
from numpy_model import token_divergences, token_logps

from seeupo_jax.algorithms.distillation import reverse_kl_advantage
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.layers import layered
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.configuration.teacher_schema import Teacher
from seeupo_jax.learner.batching import Shapes
from seeupo_jax.learner.program_warming import compile_programs
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.teacher import TeacherModel, taught_by
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, sharding

SHAPES = Shapes((32,), action=16, rows=4, trajectories=12, turns=4)
REVERSE, ALL = [(3,), (2,), (1,), (0,)], [(0, 1, 2, 3)]


@functools.cache
def teacher_params(size=0.1):
    """Parameters of a teacher that is not the policy."""
    return cases.jittered(cases.policy()[1], size)


def learner(recipe, teachers=None, *, shapes=SHAPES, teaching=None, **choices):
    made = cases.learner(shapes=shapes, **layered(RECIPES[recipe], choices))
    if teachers is None:
        teachers = [TeacherModel(None, cases.policy()[0], jax.device_put(teacher_params()))]
    given = Teacher(path="models/teacher", **({} if teaching is None else teaching))
    return cases.sharing(cases.unshared(made, teachers=teachers, teaching=given))


def assert_taught(made, order, weights, **rest):
    trajectories = cases.ragged()
    teachers = [weights] * len(trajectories) if isinstance(weights, dict) else weights
    rest |= {f"teacher_{name}": vars(made.teaching)[name] for name in ("coef", "discount", "top_k")}
    return cases.assert_equal_to_the_twin(made, trajectories, order, teachers=teachers, **rest)


def test_the_advantage_is_thinking_machines():
    """As `incorporate_kl_penalty` of tinker-cookbook computes it, with `discounted_future_sum`."""
    rng = np.random.default_rng(0)
    logp, teacher = (-rng.exponential(2.0, (5, 9)).astype(np.float32) for _ in range(2))
    mask = rng.random((5, 9)) < 0.7
    for coef, discount in ((1.0, 0.0), (0.3, 0.0), (2.0, 0.9)):
        wanted = np.zeros(mask.shape)
        for row in range(5):
            sampled, taught, own = (
                torch.tensor(x[row][mask[row]].astype(np.float64)) for x in (logp, teacher, logp)
            )
            reverse_kl = sampled - taught
            advantages = -coef * reverse_kl
            for t in range(len(own)):
                powers = discount ** torch.arange(len(own) - t)
                wanted[row, np.flatnonzero(mask[row])[t]] = (powers * advantages[t:]).sum()
        hidden = np.where(mask, teacher, np.nan)
        got = reverse_kl_advantage(logp, hidden, mask, coef=coef, discount=discount)
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)


def test_a_token_of_the_teachers_choice_is_worth_what_the_teacher_adds():
    logp, teacher = np.log([[0.5, 0.25, 0.1]]), np.log([[0.25, 0.5, 0.1]])
    got = reverse_kl_advantage(logp, teacher, np.ones((1, 3)))
    np.testing.assert_allclose(got, [[-np.log(2), np.log(2), 0.0]], atol=1e-6)


@pytest.mark.parametrize("discount", [0.0, 0.8])
def test_the_recipe_is_the_twins(discount):
    made = learner("opd", teaching={"discount": discount})
    observed, wanted = assert_taught(made, ALL, cases.weights_of(teacher_params()))
    assert observed.metrics["sweep/clip_fraction"] == 0 and len(wanted.steps) == 1


def test_the_term_is_added_to_the_advantages_of_rewards():
    for recipe, order in (("grpo", ALL), ("seeupo", REVERSE)):
        made = learner(recipe, teaching={"coef": 0.4})
        observed, _ = assert_taught(made, order, cases.weights_of(teacher_params()))
        assert observed.metrics["sweep/weight_max"] > 0.4


def test_the_metric_is_the_mean_gap_of_sampled_tokens_whatever_the_coefficient():
    for coef in (0.0, 1.0):
        observed = cases.observe(learner("opd", teaching={"coef": coef}), cases.ragged())
        temperature, gaps = learner("opd").temperature, []
        weights = [cases.weights_of(each) for each in (cases.policy()[1], teacher_params())]
        for segment in (part for t in cases.ragged() if not t.failed for part in t.segments):
            own_L, teacher_L = (
                token_logps(each, segment.tokens_L, cases.NUMPY_ARCH, temperature)[0]
                for each in weights
            )
            gaps += [*(own_L - teacher_L)[segment.turn_L >= 0]]
        np.testing.assert_allclose(observed.metrics["sweep/teacher_kl"], np.mean(gaps), rtol=1e-5)
        assert (observed.metrics["sweep/weight_max"] == 0) == (coef == 0)


def test_tasks_have_the_teachers_of_their_labels_and_others_none():
    network, params = cases.policy()
    second = cases.jittered(params, 0.15)
    teachers = [
        TeacherModel("kind=a", network, jax.device_put(teacher_params())),
        TeacherModel("kind=b", network, jax.device_put(second)),
    ]
    kinds = ["a", "b", "c"]
    labels = [{"level": "1", "kind": kinds[i % 3]} for i in range(len(cases.ragged()))]
    weights = {"a": cases.weights_of(teacher_params()), "b": cases.weights_of(second), "c": None}
    made = learner("opd", teachers)
    observed, wanted = assert_taught(
        made, ALL, [weights[own["kind"]] for own in labels], labels=labels
    )
    untaught = [credit for i, credit in enumerate(wanted.credit) if i % 3 == 2]
    assert not any(np.any(credit_L) for own in untaught for credit_L in own)
    assert made.plan(4, 1).count("teacher") == 2
    assert np.isfinite(observed.metrics["sweep/teacher_kl"])


def test_the_first_matching_label_selects_and_none_is_for_all_others():
    teachers = [TeacherModel("kind=a"), TeacherModel(None), TeacherModel("level=2")]
    labels = [{"kind": "a", "level": "2"}, {"kind": "b"}, {}, {"level": "2"}]
    assert taught_by(teachers, labels, 4) == [0, 1, 1, 2]
    assert taught_by(teachers, None, 2) == [1, 1] and taught_by([], labels, 4) == [None] * 4


def test_a_teacher_that_is_asked_is_given_whole_contexts_up_to_the_last_action():
    weights, asked = cases.weights_of(teacher_params()), []

    def ask(sequences):
        asked.extend(sequences)
        temperature = learner("opd").temperature
        return [token_logps(weights, s, cases.NUMPY_ARCH, temperature)[0][1:] for s in sequences]

    made = learner("opd", [TeacherModel(None, ask=ask)])
    assert_taught(made, ALL, weights)
    assert made.teacher_programs == (None,)
    segments = [part for t in cases.ragged() if not t.failed for part in t.segments]
    ends = [1 + np.flatnonzero(s.turn_L >= 0)[-1] for s in segments if (s.turn_L >= 0).any()]
    assert [len(tokens) for tokens in asked] == ends


def test_a_hint_stands_before_the_teachers_contexts_alone():
    """The policy itself, with tokens that it does not see; segments begin with token 3 or not."""
    policy, hint = cases.weights_of(cases.policy()[1]), (7, 1, 12)
    made = learner("opd", [TeacherModel(None, moves=True, hint=hint, start=(3,))])
    trajectories = [begun(each, 3) if i % 2 else each for i, each in enumerate(cases.ragged())]
    kept = [t for t in trajectories if not t.failed]
    observed = cases.observe(made, trajectories)
    wanted = []
    for segment in (part for t in kept for part in t.segments):
        tokens = segment.tokens_L.tolist()
        own_L = token_logps(policy, tokens, cases.NUMPY_ARCH, made.temperature)[0]
        first = 1 if tokens[0] == 3 else 0
        longer = [*tokens[:first], *hint, *tokens[first:]]
        hinted_L = token_logps(policy, longer, cases.NUMPY_ARCH, made.temperature)[0]
        wanted.append(np.delete(hinted_L, slice(first, first + len(hint))) - own_L)
    for got_L, wanted_L, segment in zip(
        observed.advantage, wanted, (part for t in kept for part in t.segments), strict=True
    ):
        acted_L = segment.turn_L >= 0
        np.testing.assert_allclose(got_L[acted_L], wanted_L[acted_L], rtol=1e-5, atol=1e-5)
    assert np.abs(np.concatenate(wanted)).max() > 0.01


def begun(trajectory, token):
    """The trajectory with another first token, of its context, in each segment."""
    segments = []
    for segment in trajectory.segments:
        tokens_L = segment.tokens_L.copy()
        tokens_L[0] = token
        segments.append(dataclasses.replace(segment, tokens_L=tokens_L))
    return dataclasses.replace(trajectory, segments=tuple(segments))


def test_the_reference_policy_teaches_as_it_moves():
    made = learner("opd", [TeacherModel(None)], reference={"every": 2})
    own = cases.jittered(cases.policy()[1], 0.1)
    state = cases.new_state(made.optimizer)._replace(reference=jax.tree.map(jnp.array, own))
    assert_taught(made, ALL, cases.weights_of(own), state=state)
    moved, metrics, *_ = sweep(
        made,
        cases.new_state(made.optimizer)._replace(reference=jax.tree.map(jnp.array, own)),
        {},
        cases.ragged(),
        iteration=2,
    )
    cases.assert_trees_equal(cases.host(moved.reference), cases.host(moved.params))
    assert metrics["sweep/teacher_kl"] > 0


TOP = {"top_k": 3, "coef": 0.7}


@pytest.mark.parametrize(
    "recipe, order, choices",
    [
        ("opd", ALL, {}),
        ("opd", ALL, {"inner_epochs": 3, "entropy_coef": 0.1}),
        ("grpo", ALL, {}),
        ("seeupo", REVERSE, {}),
    ],
    ids=["opd", "opd, three epochs with an entropy bonus", "grpo", "seeupo"],
)
def test_the_loss_of_the_likeliest_tokens_is_the_twins(recipe, order, choices):
    made = learner(recipe, teaching=TOP, **choices)
    observed, wanted = assert_taught(made, order, cases.weights_of(teacher_params()), **choices)
    assert observed.metrics["sweep/teacher_forward_kl"] > 0.01
    if recipe == "opd":
        assert not any(np.any(credit_L) for own in wanted.credit for credit_L in own)


def test_the_divergence_is_logged_whatever_the_coefficient_and_without_one_is_not_learned_from():
    """Its mean over the sampled tokens, by the NumPy twin; the reverse KL keeps its meaning."""
    made = learner("opd", teaching={"top_k": 3, "coef": 0.0})
    observed = cases.observe(made, cases.ragged())
    own, teacher = (cases.weights_of(each) for each in (cases.policy()[1], teacher_params()))
    segments = [part for t in cases.ragged() if not t.failed for part in t.segments]
    divergences = [
        token_divergences(own, teacher, s.tokens_L, cases.NUMPY_ARCH, made.temperature, 3)[0][
            s.turn_L >= 0
        ]
        for s in segments
    ]
    wanted = np.concatenate(divergences).mean()
    np.testing.assert_allclose(observed.metrics["sweep/teacher_forward_kl"], wanted, rtol=1e-5)
    alone = cases.observe(learner("opd"), cases.ragged())
    assert observed.metrics["sweep/teacher_kl"] == alone.metrics["sweep/teacher_kl"]
    assert observed.metrics["sweep/grad_norm"] == 0
    assert "sweep/teacher_forward_kl" not in alone.metrics


def test_a_teacher_that_is_the_policy_has_no_divergence():
    made = learner("opd", [TeacherModel(None, moves=True)], teaching=TOP)
    metrics = cases.observe(made, cases.ragged()).metrics
    assert abs(metrics["sweep/teacher_forward_kl"]) < 1e-6 and metrics["sweep/grad_norm"] < 1e-5


def test_tokens_without_a_teacher_have_no_divergence():
    network, weights = cases.policy()[0], cases.weights_of(teacher_params())
    labels = [{"kind": "ab"[i % 2]} for i in range(len(cases.ragged()))]
    teachers = [TeacherModel("kind=a", network, jax.device_put(teacher_params()))]
    made = learner("opd", teachers, teaching=TOP)
    of_trajectory = [weights if own["kind"] == "a" else None for own in labels]
    observed, wanted = assert_taught(made, ALL, of_trajectory, labels=labels)
    taught, every = (
        sum(
            int((part.turn_L >= 0).sum())
            for t, own in zip(cases.ragged(), labels, strict=True)
            for part in t.segments
            if not t.failed and own["kind"] in kinds
        )
        for kinds in ("a", "ab")
    )
    logged = observed.metrics["sweep/teacher_forward_kl"] * taught / every
    np.testing.assert_allclose(0.7 * logged, wanted.steps[0].loss, rtol=1e-5)
    assert 0 < taught < every


def test_a_hinted_teacher_names_the_likeliest_tokens_of_its_own_contexts():
    made = learner("opd", [TeacherModel(None, moves=True, hint=(7, 1, 12))], teaching=TOP)
    plain = learner("opd", [TeacherModel(None, moves=True)], teaching=TOP)
    kl, none = (
        cases.observe(each, cases.ragged()).metrics["sweep/teacher_forward_kl"]
        for each in (made, plain)
    )
    assert kl > 1e-3 > abs(none)


@pytest.mark.parametrize("fields", [{"share": False}, {"rows": 1}, {"lengths": (24, 32)}])
def test_neither_sharing_nor_packing_changes_the_divergence(fields):
    trajectories = cases.branching()
    results = [
        cases.observe(learner("opd", teaching=TOP, shapes=shapes), trajectories)
        for shapes in (SHAPES, dataclasses.replace(SHAPES, **fields))
    ]
    wanted, got = results
    for name in ("sweep/teacher_forward_kl", "sweep/teacher_kl", "sweep/loss", "sweep/grad_norm"):
        np.testing.assert_allclose(got.metrics[name], wanted.metrics[name], rtol=2e-5)
    cases.assert_trees_close(got.state.params, wanted.state.params, 1e-5)


def test_a_taught_sweep_on_a_mesh_that_cuts_the_vocabulary_is_the_sweep_on_one_device():
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    network, params = cases.policy()
    placed = param_shardings(mesh, network.logical_axes(), params)
    alone = learner("opd", teaching=TOP)
    wanted = cases.observe(alone, cases.ragged())
    with jax.set_mesh(mesh):
        teachers = [TeacherModel(None, network, jax.device_put(teacher_params(), placed))]
        state = cases.new_state(alone.optimizer, jax.device_put(params, placed))
        layout = jax.tree.map(lambda x: x.sharding, state)
        options = {"state_shardings": layout, "replicated": sharding(mesh, ())}
        made = cases.unshared(alone, teachers=teachers, **options)
        trajectories = cases.ragged()
        state = compile_programs(made, state, {}, len(trajectories))
        compilations = Compilations()
        state, metrics, *_ = sweep(made, state, {}, trajectories, iteration=3)
        compilations.close()
        assert compilations.programs == 0
    cases.assert_trees_close(cases.host(state.params), wanted.state.params, 1e-5)
    for name in ("sweep/teacher_forward_kl", "sweep/teacher_kl", "sweep/loss"):
        np.testing.assert_allclose(metrics[name], wanted.metrics[name], rtol=1e-5)
