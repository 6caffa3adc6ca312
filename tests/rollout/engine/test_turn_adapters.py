"""Actions under adapters of their turns: what is sampled, what is shared and what that costs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from rollout_cases import stir

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards
from seeupo_jax.policy.architecture import Architecture, DeltaNet, LoraAdapters, Moe
from seeupo_jax.policy.lora import TARGETS, attach_adapters
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling, Streams, draw, stream_keys
from seeupo_jax.rollout.engine.slots import SlotEngine

V, LONGEST, CONTEXT, TURNS = 30, 7, 160, 4
ATTENTION = Architecture(
    vocab_size=V,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope=Rope(theta=100.0),
)
NETWORKS = {
    "attention": ATTENTION,
    "recurrent": dataclasses.replace(
        ATTENTION, layers=3, attention_gate=True, delta=DeltaNet((0, 2), 2, 4, 6, 5, 4)
    ),
    "stacked": dataclasses.replace(ATTENTION, scan_layers=True),
    "experts": dataclasses.replace(ATTENTION, moe=Moe(4, 2, mlp_width=8, normalize=True)),
}
ADAPTERS = 3
LORA = LoraAdapters(rank=3, alpha=1.5, targets=TARGETS, per_turn=ADAPTERS)
SAMPLING = Sampling(0.7, None, None, LONGEST, (2, 19))
ROLLOUT = schema.Rollout(
    tasks=2, group_size=4, max_action_tokens=LONGEST, max_context=CONTEXT, page_size=8
)


def tokens_of(length, *seed):
    return np.random.default_rng(seed).integers(3, V, length).tolist()


# Two groups of four, which begin with the same system prompt.
PROMPTS = {key: tokens_of(30, 0) + tokens_of(11 * (key // 4) + 3, 1, key // 4) for key in range(8)}


@functools.cache
def make(name="attention"):
    """A network and parameters with adapters that differ much."""
    model = attach_adapters(Transformer(NETWORKS[name], nnx.Rngs(0)), LORA)
    network, params = split_model(model)
    return network, stir(params)


def make_engine(name="attention", mesh=None, *, options=None, **changes):
    rollout = dataclasses.replace(ROLLOUT, **changes)
    network = make(name)[0]
    plan = plan_cache(network.arch, rollout, shards=1 if mesh is None else row_shards(mesh))
    fields = {"group_size": 4, "steps": 3, "prefill_tokens": 256, "few": True} | (options or {})
    return SlotEngine(network, SAMPLING, plan, mesh=mesh, **fields)


def converse(engine, params, swaps=()):
    """Conversations, each a list of (turn, action)."""
    swaps, shards = dict(swaps), len(engine.shard_owners)
    engine.begin(params, seed=1, version=0)
    played, asked, step = {key: [] for key in PROMPTS}, {}, 0
    waiting, live = list(PROMPTS), set()

    def submit(key, context):
        number = len(played[key])
        place = key // 4, 100 + key // 4, key, number
        turn = Turn(key, context, *place, shard=key % shards, iteration=2, action=number)
        asked[key] = turn
        engine.submit(turn)

    while waiting or live:
        if step in swaps:
            engine.swap(params, swaps[step])
        while waiting and len(live) < engine.concurrency:
            live.add(waiting[0])
            submit(waiting[0], PROMPTS[waiting.pop(0)])
        for action in engine.step(True):
            key, turn = action.key, asked[action.key]
            played[key].append((turn, action))
            if len(played[key]) == TURNS:
                live.discard(key)
                engine.release(key)
                continue
            answer = tokens_of(1 + (5 * key + 7 * turn.turn) % 13, key, turn.turn)
            submit(key, [*turn.context, *action.tokens, *answer])
        step += 1
    usage = engine.usage()
    assert engine.step(False) is None
    return played, usage


@functools.cache
def model(name, turn):
    """The network as one program under the adapter of a turn."""
    network, _ = make(name)
    return jax.jit(lambda params, tokens_1L: network.bind(params)(tokens_1L, turn=turn)[0])


def assert_sampled_by_the_turns_adapters(name, played, atol):
    """Tokens and log-probabilities are those of whole rows, as the trainer computes them."""
    _, params = make(name)
    for turns in played.values():
        for number, (turn, action) in enumerate(turns):
            tokens, first = [*turn.context, *action.tokens], len(turn.context)
            count = len(action.tokens)
            tokens_1L = np.zeros((1, CONTEXT), np.int32)
            tokens_1L[0, : len(tokens)] = tokens
            logits_KV = model(name, number)(params, tokens_1L)[first - 1 : first - 1 + count]
            numbers = turn.iteration, turn.task, turn.member, turn.turn
            numbers_K = (np.full(count, number, np.uint32) for number in numbers)
            keys_K = stream_keys(
                Streams(np.uint32(1), *numbers_K), np.arange(count, dtype=np.uint32)
            )
            drawn_K, _ = draw(logits_KV, keys_K, SAMPLING)
            logp_KV = jax.nn.log_softmax(logits_KV / SAMPLING.temperature)
            logp_K = np.asarray(logp_KV)[np.arange(count), action.tokens]
            assert np.asarray(drawn_K).tolist() == action.tokens
            np.testing.assert_allclose(action.logp, logp_K, atol=atol)


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("attention", None),
        ("stacked", None),
        ("experts", None),
        ("recurrent", None),
        ("attention", schema.Mesh(data=2, fsdp=2, tensor=2)),
    ],
    ids=str,
)
def test_each_action_is_sampled_under_its_turns_adapter(name, mesh):
    network, params = make(name)
    mesh = None if mesh is None else make_mesh(mesh)
    if mesh is not None:
        params = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    played, usage = converse(make_engine(name, mesh), params)
    assert_sampled_by_the_turns_adapters(name, played, 1e-4 if name == "recurrent" else 1e-5)
    assert usage["adapter_prefill_tokens"] > 0


def test_prefixes_are_shared_within_a_turn_and_the_rest_is_prefilled_again():
    played, usage = converse(make_engine(), make()[1])
    again = 0
    for turns in played.values():
        for before, (turn, action) in zip(turns, turns[1:], strict=False):
            computed = len(before[0].context) + len(before[1].tokens) - 1
            if turn.action < ADAPTERS:  # under an adapter that has computed none of its answers
                again += max(0, computed - action.cached)
            else:
                assert action.cached == computed
    assert usage["adapter_prefill_tokens"] == again
    # Members of a group find what the first of them has computed under the same adapter.
    cached = [[turns[number][1].cached for turns in played.values()] for number in range(TURNS)]
    for number in range(ADAPTERS):
        assert sum(count >= 24 for count in cached[number]) >= 6
    plain = dataclasses.replace(make()[0].arch, lora=None)
    assert "adapter_prefill_tokens" not in _usage_of(plain)


def _usage_of(arch):
    network, params = split_model(Transformer(arch, nnx.Rngs(0)))
    engine = SlotEngine(network, SAMPLING, plan_cache(arch, ROLLOUT), few=True)
    engine.begin(params, seed=1)
    return engine.usage()


@pytest.mark.parametrize("on_swap", ["keep", "prefill"])
@pytest.mark.parametrize("name", ["attention", "recurrent"])
def test_neither_evictions_nor_swaps_change_what_is_sampled(name, on_swap):
    """A pool without room for all: turns wait, and pages of left adapters go first."""
    params = make(name)[1]
    plan = plan_cache(make(name)[0].arch, ROLLOUT)
    gib = 44.5 * 8 * plan.token_bytes / 2**30
    tight = make_engine(name, slots=3, concurrency=5, cache_gib=gib, options={"on_swap": on_swap})
    played, usage = converse(tight, params, {3 * n: n for n in range(1, 12)})
    assert_sampled_by_the_turns_adapters(name, played, 1e-4 if name == "recurrent" else 1e-5)
    assert usage["evicted_pages"] > 5 and usage["swaps"] >= 8
    (shard,) = tight._shards.values()
    assert not (shard._policies or shard._leases or shard._computed or shard.jobs)
    shard.swap(prefill=False)
    assert sorted(shard._tree._free) == list(range(tight.plan.pages)) and not shard._tree._idle
