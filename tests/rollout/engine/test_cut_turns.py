"""Turns that end early: cut by their listener, or taken back; no other action notices."""

import functools
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from rollout_cases import stir

from seeupo_jax.configuration import schema
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

ARCH = Architecture(
    vocab_size=30, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24
)
LONGEST, CONTEXT = 12, 320
END_IDS = (3,)
# Room for two conversations of the full length and not a page more.
ROLLOUT = schema.Rollout(
    slots=2, concurrency=2, max_action_tokens=LONGEST, max_context=CONTEXT, page_size=8
)
NEVER = 99


@functools.cache
def make():
    """A network, its parameters, and an engine of two slots that all tests share."""
    network, params = policy.split_model(Transformer(ARCH, nnx.Rngs(0)))
    plan = plan_cache(ARCH, ROLLOUT)
    sampling = Sampling(0.8, None, None, LONGEST, END_IDS)
    engine = SlotEngine(
        network, sampling, plan, group_size=2, steps=3, prefill_tokens=256, few=True
    )
    return network, stir(params), engine


def tokens_of(length, *seed):
    return np.random.default_rng(seed).integers(4, ARCH.vocab_size, length).tolist()


def turn_of(key, context, number=0, listen=None):
    return Turn(key, context, key // 2, 100 + key // 2, key, number, listen=listen)


def run(turns, *, cancel=lambda step: (), submit=lambda action: None):
    """Actions by key and turn, in one collection.

    Args:
      turns: to begin with. cancel: keys that are cancelled before a step. submit: gives the next
        turn of an action's conversation; None: it is over, and released.
    """
    _, params, engine = make()
    engine.begin(params, seed=1)
    for turn in turns:
        engine.submit(turn)
    actions, step, begun = {}, 0, Counter()
    while True:
        for key in cancel(step):
            engine.cancel(key)
            engine.release(key)
        found = engine.step(engine.busy)
        if found is None:
            return actions
        for action in found:
            actions[action.key, begun[action.key]] = action
            begun[action.key] += 1
            after = submit(action)
            if after is None:
                engine.release(action.key)
            else:
                engine.submit(after)
        step += 1


def alone(turn):
    """The action of a turn in a collection of its own: all of its context is prefilled afresh."""
    (action,) = run([turn]).values()
    return action


def assert_same(got, wanted):
    assert got.tokens == wanted.tokens
    np.testing.assert_allclose(got.logp, wanted.logp, atol=1e-5)


@functools.cache
def network_logp():
    network, params, _ = make()
    run = jax.jit(lambda tokens_1L: jax.nn.log_softmax(network.bind(params)(tokens_1L)[0] / 0.8))

    def logp_LV(tokens):
        padded_1L = np.zeros((1, CONTEXT), np.int32)
        padded_1L[0, : len(tokens)] = tokens
        return np.asarray(run(padded_1L))[: len(tokens)]

    return logp_LV


# Shorter than a page, up to its last token, over it, and long enough for two lengths of tiles.
STARTS = {0: tokens_of(5, 0), 1: tokens_of(9, 1), 2: tokens_of(30, 2), 3: tokens_of(150, 3)}
KEEP = [1, 2, 3, 4, 7, 8, 9, NEVER]


def test_an_action_that_is_cut_is_the_beginning_of_the_uncut_one_and_the_cache_stays_right():
    contexts, received = {}, {}

    def turn(key, number, context):
        contexts[key, number] = context
        keep = KEEP[(3 * key + number) % len(KEEP)]
        logged = received[key, number] = []

        def listen(tokens):
            assert tokens[: len(logged[-1]) if logged else 0] == (logged[-1] if logged else [])
            logged.append(list(tokens))
            return keep if len(tokens) >= keep else None

        return turn_of(key, context, number, listen)

    def submit(action):
        number = max(number for key, number in contexts if key == action.key)
        if number == 4:
            return None
        said = tokens_of(1 + (5 * action.key + number) % 7, action.key, number)
        context = [*contexts[action.key, number], *action.tokens, *said]
        return turn(action.key, number + 1, context)

    actions = run([turn(key, 0, context) for key, context in STARTS.items()], submit=submit)
    assert actions.keys() == contexts.keys() and len(actions) == 20
    cut = 0
    for (key, number), action in actions.items():
        whole = alone(turn_of(key, contexts[key, number], number))
        kept = min(KEEP[(3 * key + number) % len(KEEP)], len(whole.tokens))
        cut += kept < len(whole.tokens)
        assert action.tokens == whole.tokens[:kept]
        np.testing.assert_allclose(action.logp, whole.logp[:kept], atol=1e-5)
        assert received[key, number][-1][:kept] == action.tokens
        # Whatever a dispatch on its way wrote behind the cut is in no later turn's past.
        context = contexts[key, number]
        logp_LV = network_logp()([*context, *action.tokens])
        exact = logp_LV[len(context) - 1 : -1][np.arange(kept), action.tokens]
        np.testing.assert_allclose(action.logp, exact, atol=1e-5)
    assert cut >= 10


VICTIM = 0
# The steps before which a turn that comes first is taken back: while it waits, in the midst of its
# prefill (a long tile, then short ones), before its first tokens are fetched, among its tokens.
STAGES = {"waiting": 0, "prefilling": 1, "dispatched": 3, "decoding": 4}


@pytest.mark.parametrize("stage", STAGES)
def test_a_cancelled_turn_frees_its_slot_and_its_pages_and_disturbs_nobody(stage):
    _, params, engine = make()
    victim = turn_of(VICTIM, tokens_of(200, 7), listen=lambda tokens: seen.append(len(tokens)))
    seen: list[int] = []
    other = turn_of(1, tokens_of(40, 8))
    # Each fills all that a conversation may have: both at once need every page of the pool.
    full = [turn_of(key, tokens_of(CONTEXT - LONGEST, 9, key)) for key in (2, 3)]
    wanted = {turn.key: alone(turn) for turn in (other, *full)}

    engine.begin(params, seed=1)
    for turn in (victim, other):
        engine.submit(turn)
    actions, step = {}, 0
    while engine.busy or len(actions) < 3:
        if step == STAGES[stage]:
            engine.cancel(VICTIM)
            engine.release(VICTIM)
            assert (len(seen) > 0) == (stage == "decoding")
        for action in engine.step(True):
            actions[action.key] = action
            engine.release(action.key)
            if action.key == other.key:
                for turn in full:
                    engine.submit(turn)
        step += 1
    assert engine.step(False) is None
    assert actions.keys() == wanted.keys()
    for key, action in wanted.items():
        assert_same(actions[key], action)
    usage = engine.usage()
    assert usage["memory_waits"] == 0
    begun = usage["prefilled_tokens"] - sum(len(turn.context) - 1 for turn in (other, *full))
    whole = len(victim.context) - 1
    least, most = {"waiting": (0, 0), "prefilling": (128, whole - 1)}.get(stage, (whole, whole))
    assert least <= begun <= most


def test_a_cancelled_prefill_that_another_turn_waits_for_is_computed_by_that_one():
    prompt = tokens_of(200, 5)
    wanted = alone(turn_of(1, prompt))
    actions = run(
        [turn_of(0, prompt), turn_of(1, prompt)], cancel=lambda step: [0] if step == 1 else []
    )
    assert actions.keys() == {(1, 0)}
    assert_same(actions[1, 0], wanted)


def test_the_next_turn_after_a_cancelled_one_samples_as_if_prefilled_afresh():
    """A client that vanished and asks again: the same history, the next number."""
    prompt = tokens_of(21, 6)
    again = turn_of(0, prompt, 1)
    _, params, engine = make()
    engine.begin(params, seed=1)
    engine.submit(turn_of(0, prompt))
    for _ in range(4):
        engine.step(True)
    engine.cancel(0)
    assert not engine.busy
    engine.submit(again)
    while engine.busy:
        found = engine.step(True)
    assert engine.usage()["cached_tokens"] == len(prompt) - 1
    assert_same(found[0], alone(again))


def test_nothing_is_cancelled_where_nothing_is_open():
    turn = turn_of(0, tokens_of(9, 4))
    wanted = alone(turn)
    assert_same(run([turn], cancel=lambda step: [7])[0, 0], wanted)
