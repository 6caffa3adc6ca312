"""An engine whose turns have their own sampling and constraints: each row as it would be alone."""

import functools

import jax
import numpy as np
import openai_cases
import pytest
from flax import nnx
from rollout_cases import stir

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Constraint, Turn, TurnSampling
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

V, ACTION, CONTEXT, DEFAULT = 30, 6, 64, 0.6
ARCH = Architecture(**openai_cases.SIZES | {"vocab_size": V}, mlp_width=24, rope=Rope(theta=100.0))
ROLLOUT = schema.Rollout(
    tasks=1, group_size=4, max_action_tokens=ACTION, max_context=CONTEXT, page_size=8
)
PROMPT = [4, 9, 1, 17, 8, 8, 25, 9, 12]
EVENS = Constraint(calls="must", field="tool_choice")


class Evens:
    """Constraints of even tokens."""

    def begin(self, constraint, tools):
        if tools:
            raise ValueError("no such tools")
        return self

    def allowed(self, words_W):
        words_W[:] = sum(1 << token for token in range(0, V, 2))

    def accept(self, token):
        assert token % 2 == 0


@functools.cache
def made():
    network, params = policy.split_model(Transformer(ARCH, nnx.Rngs(0)))
    params = stir(params)
    return network, params, openai_cases.logits_of(network, params, CONTEXT)


@functools.cache
def engine(per_turn=True, tensor=0, end_ids=()):
    mesh, shards = None, 1
    if tensor:
        mesh = make_mesh(schema.Mesh(data=2, fsdp=1, tensor=tensor), jax.devices()[: 2 * tensor])
        shards = row_shards(mesh)
    sampling = Sampling(DEFAULT, None, None, ACTION, end_ids)
    plan = plan_cache(ARCH, ROLLOUT, shards=shards)
    options = {"few": True, "steps": 4, "per_turn": per_turn, "constraints": Evens()}
    return SlotEngine(made()[0], sampling, plan, mesh=mesh, **options), mesh


def sample(turns, *, seed=3, **which):
    """The actions of turns that are submitted together, by key."""
    sampler, mesh = engine(**which)
    params = made()[1]
    if mesh is not None:
        axes = made()[0].logical_axes()
        params = jax.device_put(params, param_shardings(mesh, axes, params))
    sampler.begin(params, seed=seed)
    for turn in turns:
        sampler.submit(turn)
    actions = {}
    while (finished := sampler.step(sampler.busy)) is not None:
        actions |= {action.key: action for action in finished}
    return actions


def turn(key, sampling=None, *, context=PROMPT, **fields):
    return Turn(key, context, key, 7 + key, 0, 1, sampling=sampling, **fields)


MIXTURE = [
    turn(0),
    turn(1, TurnSampling(temperature=0.0)),
    turn(2, TurnSampling(temperature=2.0, top_k=5, top_logprobs=4)),
    turn(3, TurnSampling(temperature=0.0, repetition=3.0, presence=2.0), context=PROMPT[:4]),
    turn(4, TurnSampling(temperature=0.0, frequency=2.0, presence=-0.5)),
    turn(5, TurnSampling(top_p=0.7), constraint=EVENS),
    turn(6, TurnSampling(temperature=3.0, min_p=0.1, bias=((3, 5.0),))),
    turn(7, constraint=EVENS, context=PROMPT[2:]),
]


@functools.cache
def alone():
    """The mixture's actions, each sampled with nothing beside it."""
    return {each.key: sample([each])[each.key] for each in MIXTURE}


def assert_same(got):
    for key, wanted in alone().items():
        assert got[key].tokens == wanted.tokens, key
        np.testing.assert_allclose(got[key].logp, wanted.logp, atol=1e-5)


@pytest.mark.parametrize("order", [1, -1])
def test_a_row_does_not_depend_on_the_others(order):
    assert_same(sample(MIXTURE[::order]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_several_shards_and_a_divided_vocabulary_sample_alike(tensor):
    assert_same(sample(MIXTURE, tensor=tensor))


def test_greedy_rows_with_penalties_take_what_numpy_takes_from_the_networks_logits():
    for each in MIXTURE:
        wanted = each.sampling
        if wanted is None or wanted.temperature:
            continue
        sampled = []
        for _ in range(ACTION):
            logits_V = made()[2]([*each.context, *sampled])[-1].copy()
            for token in {*each.context, *sampled}:
                positive = logits_V[token] > 0
                logits_V[token] *= 1 / wanted.repetition if positive else wanted.repetition
            for token in set(sampled):
                logits_V[token] -= wanted.presence + wanted.frequency * sampled.count(token)
            sampled.append(int(logits_V.argmax()))
        assert alone()[each.key].tokens == sampled, each.key
    assert alone()[1].tokens != alone()[4].tokens


def test_log_probabilities_are_of_the_model_and_the_grammars_mask_and_so_are_the_likeliest():
    for each in MIXTURE:
        action = alone()[each.key]
        logits_LV = made()[2]([*each.context, *action.tokens])[len(each.context) - 1 : -1]
        if each.constraint is not None:
            assert not np.any(np.array(action.tokens) % 2)
            logits_LV[:, 1::2] = -np.inf
        logp_LV = logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)
        np.testing.assert_allclose(
            action.logp, logp_LV[np.arange(ACTION), action.tokens], atol=1e-5
        )
        if each.key != 2:
            assert action.top is None
            continue
        for logp_V, top in zip(logp_LV, action.top, strict=True):
            assert [token for token, _ in top] == np.argsort(-logp_V)[:4].tolist()
            np.testing.assert_allclose([p for _, p in top], np.sort(logp_V)[::-1][:4], atol=1e-5)


def test_a_slot_that_is_used_again_has_no_history_of_the_action_before():
    penalized = MIXTURE[3]
    before = [turn(10 + i, penalized.sampling, context=PROMPT[i:]) for i in range(6)]
    sampler, _ = engine()
    sampler.begin(made()[1], seed=3)
    for each in [*before, penalized]:
        sampler.submit(each)
        while sampler.busy:
            for action in sampler.step(True):
                if action.key == penalized.key:
                    assert action.tokens == alone()[penalized.key].tokens
    sampler.begin(made()[1], seed=3)


def test_in_training_a_constraint_is_in_the_distribution_and_other_turns_are_as_they_were():
    """Also where the engine decodes several tokens per dispatch otherwise."""
    turns = [turn(key, constraint=EVENS if key == 1 else None) for key in range(4)]
    plain = sample([turn(key) for key in range(4)], per_turn=False)
    mixed = sample(turns, per_turn=False)
    for key in (0, 2, 3):
        assert mixed[key].tokens == plain[key].tokens
        np.testing.assert_allclose(mixed[key].logp, plain[key].logp, atol=1e-5)
    tokens = mixed[1].tokens
    logits_LV = made()[2]([*PROMPT, *tokens])[len(PROMPT) - 1 : -1] / DEFAULT
    logits_LV[:, 1::2] = -np.inf
    logp_LV = logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)
    np.testing.assert_allclose(mixed[1].logp, logp_LV[np.arange(ACTION), tokens], atol=1e-5)
    assert plain[1].tokens != tokens


def test_a_constraint_that_has_no_grammar_refuses_its_turn_only():
    actions = sample([turn(0), turn(1, constraint=EVENS, tools=({"name": "x"},))])
    assert (actions[0].failure, len(actions[0].tokens)) == ("", ACTION)
    assert (actions[1].failure, actions[1].refuses_tools) == ("no such tools", True)


def test_at_most_one_call_is_asked_for_only_where_a_grammar_is():
    one = Constraint(calls="may", single=True)
    actions = sample([turn(0, constraint=one)])
    assert actions[0].tokens == alone()[0].tokens
