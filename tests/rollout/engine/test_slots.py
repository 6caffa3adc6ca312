"""The engine: the same actions however it is run, log-probabilities of the network, no waste."""

import dataclasses
import functools
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollout_cases import converse, stir

from seeupo_jax.configuration import schema
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards, sampler_mesh
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, DeltaNet, LatentAttention
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.read_plan import KVReadPlan
from seeupo_jax.rollout.engine.row_sizes import cover, decoded_rows, prefilled_rows, row_sizes
from seeupo_jax.rollout.engine.sampling import Sampling, relative_entropy
from seeupo_jax.rollout.engine.slots import SlotEngine

ARCH = Architecture(
    vocab_size=30,
    width=16,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    rope=Rope(theta=100.0),
)
# Recurrent layers around one with attention, whose output has a gate.
HYBRID = {"layers": 3, "attention_gate": True, "delta": DeltaNet((0, 2), 2, 4, 6, 5, 4)}
LATENTS = {
    "layers": 2,
    "kv_heads": 4,
    "qk_norm": False,
    "latent": LatentAttention(q_rank=None, kv_rank=12, nope_dim=4, rope_dim=4, value_dim=6),
}
END_IDS = (2, 3, 7, 11, 14, 19, 23, 26)
TEMPERATURE, LONGEST, CONTEXT = 0.6, 6, 320
FIRST = 3  # tokens whose entropy is computed
SAMPLING = Sampling(TEMPERATURE, None, None, LONGEST, END_IDS, FIRST)
ROLLOUT = schema.Rollout(
    tasks=3, group_size=4, max_action_tokens=LONGEST, max_context=CONTEXT, page_size=8
)


@functools.cache
def make(arch=ARCH):
    """A network and parameters that make its distributions far from uniform."""
    network, params = policy.split_model(Transformer(arch, nnx.Rngs(0)))
    return network, stir(params)


def make_engine(*, arch=ARCH, sampling=SAMPLING, mesh=None, options=None, **changes):
    rollout = dataclasses.replace(ROLLOUT, **changes)
    shards = 1 if mesh is None else row_shards(mesh)
    plan = plan_cache(arch, rollout, shards=shards)
    # Few numbers of rows, for few programs, where a test does not ask for more.
    fields = {"group_size": 4, "steps": 3, "prefill_tokens": 256, "few": True} | (options or {})
    return SlotEngine(make(arch)[0], sampling, plan, mesh=mesh, **fields)


def tokens_of(length, *seed):
    return np.random.default_rng(seed).integers(0, ARCH.vocab_size, length).tolist()


def observation(key, turn):
    return tokens_of(1 + (5 * key + 7 * turn) % 23, key, turn)


# Three groups of four: prompts of 210 and 130 tokens that begin alike, and a short one.
SYSTEM = tokens_of(100, 0)
STARTS = [SYSTEM + tokens_of(110, 1), SYSTEM + tokens_of(30, 2), tokens_of(5, 3)]
PROMPTS = {key: (key // 4, STARTS[key // 4]) for key in range(12)}
play = functools.partial(converse, prompts=PROMPTS, answer=observation)


@functools.cache
def plain():
    """The conversations, one at a time, each token's keys and values computed by itself."""
    engine = make_engine(concurrency=1, options={"group_size": 1, "steps": 1})
    return play(engine, make()[1])


def assert_same(got, wanted=None, atol=1e-5):
    """The same actions; a token may differ only where two candidates are within rounding."""
    wanted = plain() if wanted is None else wanted
    assert got.keys() == wanted.keys()
    for key in wanted:
        for (context, action, logp), (known, same, known_logp) in zip(
            got[key], wanted[key], strict=True
        ):
            assert context == known
            assert action == same, f"conversation {key}: {margin(context, action, same)}"
            np.testing.assert_allclose(logp, known_logp, atol=atol)


def margin(context, action, other):
    """How far apart in log-probability the first tokens are that differ."""
    where = next(i for i, (a, b) in enumerate(zip(action, other, strict=False)) if a != b)
    logp_V = logp_of(make()[1], [*context, *action[:where]])[-1]
    return float(logp_V[action[where]] - logp_V[other[where]])


@functools.cache
def model(arch):
    """The network as one program, for rows as long as a conversation may become."""
    network, _ = make(arch)
    return jax.jit(lambda params, tokens_1L: network.bind(params)(tokens_1L)[0])


def logits_of(params, tokens, arch=ARCH):
    """The network's logits [L, V] after each of these tokens."""
    tokens_1L = np.zeros((1, CONTEXT), np.int32)
    tokens_1L[0, : len(tokens)] = tokens
    return np.asarray(model(arch)(params, tokens_1L), np.float64)[: len(tokens)]


def logp_of(params, tokens, arch=ARCH, temperature=TEMPERATURE):
    logits_LV = logits_of(params, tokens, arch) / temperature
    return logits_LV - np.logaddexp.reduce(logits_LV, axis=-1, keepdims=True)


def assert_logp_of_network(played, params, arch=ARCH, atol=1e-5, temperature=TEMPERATURE):
    for turns in played.values():
        context, action, _ = turns[-1]
        logp_LV = logp_of(params, context + action, arch, temperature)
        for context, action, logp in turns:
            where = np.arange(len(context), len(context) + len(action))
            np.testing.assert_allclose(logp, logp_LV[where - 1, action], atol=atol)


def test_the_recorded_logp_is_the_networks_at_the_temperature():
    assert_logp_of_network(plain(), make()[1])


def test_the_entropy_of_an_actions_first_tokens_is_the_networks():
    engine, found = make_engine(concurrency=1, options={"group_size": 1, "steps": 1}), []
    engine.begin(make()[1], seed=1)
    for number in range(4):
        engine.submit(Turn(number, STARTS[2], 0, 100, number, 0))
        while engine.busy:
            found += engine.step(True)
        engine.release(number)
    assert engine.step(False) is None
    assert any(len(action.tokens) > FIRST for action in found)
    for action in found:
        logp_LV = logp_of(make()[1], STARTS[2] + action.tokens)[len(STARTS[2]) - 1 : -1]
        entropy_L = -(np.exp(logp_LV) * logp_LV).sum(axis=1) / np.log(ARCH.vocab_size)
        np.testing.assert_allclose(action.entropy, entropy_L[:FIRST].sum(), atol=1e-5)


PADDED = dataclasses.replace(ARCH, tied=False, unassigned=(4, 6, 13, 14, 27, 30))
UNASSIGNED = [4, 5, 13, 27, 28, 29]


def padded():
    """Parameters whose likeliest tokens by far would be ids that no token has."""
    params = make(PADDED)[1]
    loud_V1 = np.isin(np.arange(PADDED.vocab_size), UNASSIGNED)[:, None]
    return params | {"head": jnp.where(loud_V1, 4.0, 1.0) * params["head"]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "limits, served",
    [
        ({}, False),
        ({"top_k": 1}, False),
        ({"top_k": 25}, False),
        ({"top_p": 0.95}, False),
        ({"top_k": 1}, True),
    ],
    ids=["softmax", "greedy", "top-k beyond the tokens", "top-p", "served greedily"],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_ids_that_no_token_has_are_never_sampled(limits, served, tensor):
    """And log-probabilities are of softmaxes over the others, by NumPy."""
    params, mesh = padded(), None
    if tensor > 1:
        mesh = make_mesh(schema.Mesh(data=1, fsdp=1, tensor=tensor), jax.devices()[:tensor])
        axes = make(PADDED)[0].logical_axes()
        params = jax.device_put(params, param_shardings(mesh, axes, params))
    sampling = SAMPLING._replace(**limits)
    options = {"per_turn": served}
    played = play(make_engine(arch=PADDED, sampling=sampling, mesh=mesh, options=options), params)
    actions = [turn for turns in played.values() for turn in turns]
    sampled = np.concatenate([action for _, action, _ in actions])
    assert len(sampled) > 50 and not np.isin(sampled, UNASSIGNED).any()
    likeliest = 0
    for context, action, logp in actions:
        logits_LV = logits_of(padded(), context + action, PADDED)[len(context) - 1 : -1]
        likeliest += np.isin(logits_LV.argmax(axis=1), UNASSIGNED).sum()
        logits_LV[:, UNASSIGNED] = -np.inf
        if "top_k" not in limits and "top_p" not in limits:
            logits_LV /= TEMPERATURE
        elif not served:
            continue  # of a smaller set of tokens
        logp_LV = logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)
        np.testing.assert_allclose(logp, logp_LV[np.arange(len(action)), action], atol=2e-5)
        assert limits.get("top_k") != 1 or list(logits_LV.argmax(axis=1)) == list(action)
    assert likeliest > len(sampled) / 2


def test_of_ids_that_have_a_token_the_entropy_is_at_most_1():
    logits_NV = jnp.where(jnp.asarray(PADDED.unassigned_V()), -jnp.inf, jnp.zeros((1, 30)))
    assert float(relative_entropy(logits_NV, SAMPLING, PADDED.tokens)[0]) == pytest.approx(1)
    assert PADDED.tokens == 24


FEW_SLOTS = {"slots": 5, "concurrency": 9, "page_size": 64}
FEW_AT_ONCE = {"group_size": 2, "steps": 6, "prefill_tokens": 16}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {"few": False}),
        (FEW_SLOTS, FEW_AT_ONCE),
        (
            {"slots": 1, "concurrency": 3, "page_size": 1},
            {"group_size": 1, "read_plan": KVReadPlan(block=16)},
        ),
        ({}, {"steps": 1, "read_plan": KVReadPlan(block=None)}),
    ],
    ids=["groups", "few slots", "one slot", "unblocked"],
)
def test_actions_do_not_depend_on_how_the_engine_runs(changes, options):
    assert_same(play(make_engine(**changes, options=options), make()[1]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", range(3))
def test_actions_do_not_depend_on_the_order_of_arrival(order):
    engine = make_engine(**FEW_SLOTS, options=FEW_AT_ONCE)
    assert_same(play(engine, make()[1], shuffle=order, delay=4))


def test_actions_do_not_depend_on_the_memory_and_all_of_it_comes_back():
    # Room for one whole conversation and a little more: pages are evicted all the time.
    page_gib = 8 * 2 * ARCH.layers * 2 * 8 * 4 / 2**30
    engine = make_engine(cache_gib=47.5 * page_gib)
    assert engine.plan.pages == 47
    assert_same(play(engine, make()[1], shuffle=1, delay=2))
    assert engine.usage()["evicted_pages"] > 100 and engine.usage()["memory_waits"] > 0
    assert_same(play(engine, make()[1]))


def test_a_groups_prompt_is_computed_once_and_so_is_what_groups_share():
    engine = make_engine()
    played = play(engine, make()[1])
    usage = engine.usage()
    read = {start for _, start in ((0, tuple(s)) for s in STARTS)}
    prompts = sum(map(len, read)) - 100 // 8 * 8  # the second group finds the system prompt's pages
    later = sum(
        len(turns[-1][0]) + len(turns[-1][1]) - len(PROMPTS[key][1])
        for key, turns in played.items()
    )
    # Of every turn the last context token and the sampled ones but the last pass through decoding.
    assert usage["decoded_tokens"] == sum(len(a) for turns in played.values() for _, a, _ in turns)
    assert usage["prefilled_tokens"] + usage["decoded_tokens"] <= prompts + later
    assert usage["prefilled_tokens"] + usage["decoded_tokens"] >= prompts + later - 60


def test_pages_that_rows_share_are_read_as_a_prefix():
    engine, shared = make_engine(), []
    shard = engine._shards[0]
    take = shard.take_rows

    def spy(*args, **options):
        rows = take(*args, **options)
        shared.append(rows[1].prefixes.length_Q.max())
        return rows

    shard.take_rows = spy
    play(engine, make()[1], turns=2)
    assert max(shared) == 208  # 209 tokens of the prompt are whole pages of 8 but for the last


def test_a_collection_begins_with_an_empty_cache():
    engine = make_engine()
    first, second = make()[1], stir(make()[1], seed=1)
    cold = play(engine, first)
    spent = engine.usage()
    other = play(engine, second, iteration=5)
    assert_logp_of_network(other, second)
    again = play(engine, first)
    assert engine.usage() == spent
    for key, turns in again.items():
        for (_, action, logp), (_, same, same_logp) in zip(turns, cold[key], strict=True):
            assert (action, logp) == (same, same_logp)  # to the last bit


def test_a_rewritten_context_goes_on_from_what_it_shares():
    engine = make_engine(concurrency=2)
    params = make()[1]
    (turns,) = converse(engine, params, {0: (0, STARTS[0])}, turns=1).values()
    context, action, _ = turns[0]
    for rewritten in (
        context + action,  # nothing is rewritten
        context[:150] + [5, 6] + context[150:],
        context[:-1],
        context[:3],
        action + context,
    ):
        got = converse(engine, params, {1: (0, rewritten)}, turns=1)
        wanted = converse(make_engine(concurrency=2), params, {1: (0, rewritten)}, turns=1)
        assert_same(got, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        {"windows": (9, None), "layers": 2},
        {"scan_layers": True, "layers": 2},
        {"kv_heads": 1, "qk_norm": False, "tied": False},
        {"dtype": "bfloat16"},
        {"layers": 2, "attention_gate": True, "delta": DeltaNet((0,), 2, 4, 6, 5, 4)},
        LATENTS,
    ],
    ids=str,
)
def test_other_networks_are_sampled_alike(how):
    arch = dataclasses.replace(ARCH, **how)
    params = make(arch)[1]
    played = play(make_engine(arch=arch), params)
    # bfloat16 has 8 bits; the mean gap is a tenth of this.
    assert_logp_of_network(played, params, arch, atol=0.2 if "dtype" in how else 2e-5)


def test_conversations_share_latents_as_they_do_keys():
    arch = dataclasses.replace(ARCH, **LATENTS)
    engine, params = make_engine(arch=arch), make(arch)[1]
    played = play(engine, params, shuffle=1, delay=2)
    assert_logp_of_network(played, params, arch, atol=2e-5)
    usage = engine.usage()
    assert usage["cached_tokens"] > 4 * usage["prefilled_tokens"]


RECURRENT = dataclasses.replace(ARCH, **HYBRID)


@functools.cache
def plain_recurrent():
    """As `plain`: one state that is kept nowhere, each context in whole."""
    engine = make_engine(arch=RECURRENT, concurrency=1, cached_states=0, options={"steps": 1})
    played = play(engine, make(RECURRENT)[1])
    assert engine.usage()["cached_tokens"] == 0
    return played


def test_a_recurrent_network_prefills_a_prompt_once_and_then_only_what_is_new():
    engine, params = make_engine(arch=RECURRENT), make(RECURRENT)[1]
    played = play(engine, params)
    # The norm behind the gated delta rule scales outputs near 0, and their rounding with them.
    assert_logp_of_network(played, params, RECURRENT, atol=1e-4)
    usage = engine.usage()
    # Of every context the last token, and of every action but its last one, are decoding's. What a
    # later turn prefills is an action's last token and its answer without the answer's last.
    answers = sum(len(observation(key, turn)) for key in PROMPTS for turn in range(2))
    assert usage["prefilled_tokens"] == 209 + 129 + 4 + answers
    contexts = [len(context) for turns in played.values() for context, _, _ in turns]
    assert usage["cached_tokens"] == sum(contexts) - len(contexts) - usage["prefilled_tokens"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("states", [0, 5, 30])
def test_actions_of_a_recurrent_network_do_not_depend_on_how_many_states_are_kept(states):
    engine, params = few_states(states), make(RECURRENT)[1]
    played = play(engine, params, shuffle=states, delay=3)
    assert_same(played, plain_recurrent(), atol=1e-4)
    assert_logp_of_network(played, params, RECURRENT, atol=1e-4)
    engine.begin(params, seed=1)
    assert engine.plan.states == 5 + states == engine._pages[0].state_SHkv.shape[0]
    assert engine.step(False) is None


def few_states(states):
    return make_engine(arch=RECURRENT, **FEW_SLOTS, cached_states=states, options=FEW_AT_ONCE)


def drawn_contexts(rng, done):
    """Contexts that continue, repeat, rewrite or leave earlier turns, or begin anew."""
    for _ in range(rng.integers(1, 7)):
        turn, action = done[rng.integers(len(done))] if done else (None, None)
        kind = rng.choice(["continue"] * 4 + ["fork", "rewrite", "begin"]) if done else "begin"
        new = tokens_of(rng.integers(1, 30), int(rng.integers(2**30)))
        if kind == "begin":
            yield STARTS[rng.integers(3)][: rng.integers(1, 250)] + new
        elif kind == "continue":
            yield [*turn.context, *action.tokens, *new]
        elif kind == "fork":
            yield turn.context
        else:
            cut = rng.integers(len(turn.context))
            yield turn.context[:cut] + new + turn.context[cut + 3 :]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_random_turns_of_a_recurrent_network_are_sampled_as_with_nothing_kept(seed):
    rng, params = np.random.default_rng(seed), make(RECURRENT)[1]
    engine, plain_engine = (
        few_states(5),
        make_engine(arch=RECURRENT, concurrency=1, cached_states=0, options={"steps": 1}),
    )
    for each in (engine, plain_engine):
        each.begin(params, seed=1)
    done, key = [], 0
    for _ in range(12):
        turns = {}
        for context in drawn_contexts(rng, done):
            if engine.fits(context):
                turns[key] = Turn(key, context, int(rng.integers(3)), 100, key, 0)
                engine.submit(turns[key])
                key += 1
        got = []
        while engine.busy:
            got += engine.step(True)
        done += [(turns[action.key], action) for action in got]
        for action in got[::2]:
            engine.release(action.key)
    assert engine.usage()["cached_tokens"] > 1000 and engine.usage()["evicted_states"] > 10
    gaps = []
    for turn, action in done:
        plain_engine.submit(turn)
        wanted = []
        while plain_engine.busy:
            wanted += plain_engine.step(True)
        assert action.tokens == wanted[0].tokens
        gaps += np.abs(np.subtract(action.logp, wanted[0].logp)).tolist()
    # Both are up to 1.2e-4 from the network's, where a norm scales an output near 0.
    assert np.mean(gaps) < 1e-5 and np.max(gaps) < 1e-3
    assert plain_engine.usage()["cached_tokens"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [HYBRID, LATENTS], ids=["recurrent", "latents"])
def test_eight_devices_sample_another_network_as_it_is(how):
    arch, mesh = (
        dataclasses.replace(ARCH, **how),
        make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2)),
    )
    network, params = make(arch)
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        engine = make_engine(arch=arch, mesh=mesh)
        played = play(engine, placed, turns=2)
    assert_logp_of_network(played, params, arch, atol=1e-4)
    assert engine.usage()["cached_tokens"] > 6 * 200  # of the prompts alone


def test_eight_devices_give_the_actions_of_one():
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    network, params = make()
    alone = plain()  # before the mesh is set, which it would have too
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        engine = make_engine(mesh=mesh)
        assert_same(play(engine, placed), alone)
        assert_same(play(engine, placed, shuffle=3, delay=3), alone)


# Two groups of eight, whose prompts begin alike.
SPLIT = {key: (key // 8, STARTS[key // 8]) for key in range(16)}
TWO_GROUPS = {"tasks": 2, "group_size": 8}


def test_eight_shards_split_two_groups_and_give_the_actions_of_one_device():
    mesh = make_mesh(schema.Mesh(data=8))
    network, params = make()
    options = {"prompts": SPLIT, "answer": observation}
    alone = converse(make_engine(**TWO_GROUPS), params, **options)
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        engine = make_engine(mesh=mesh, **TWO_GROUPS)
        assert_same(converse(engine, placed, **options, shuffle=1, delay=2), alone)
        assert min(shard.usage()["decoded_tokens"] for shard in engine._shards.values()) > 0
        converse(engine, placed, SPLIT, turns=1)
    # Each prompt but its last token, which is decoding's, once on each of four shards.
    assert engine.usage()["prefilled_tokens"] == 4 * (209 + 129)


@pytest.mark.parametrize("shards", [1, 8])
def test_collections_of_one_policy_are_prepared_once(shards):
    """And are those of a cold engine, to the last bit."""
    network, params = make()
    trainers = make_mesh(schema.Mesh(data=4, fsdp=2)) if shards > 1 else None
    mesh = None if trainers is None else sampler_mesh(trainers, schema.Mesh(data=-1))
    if trainers is not None:
        axes = network.logical_axes()
        params = jax.device_put(params, param_shardings(trainers, axes, params))
    engine = make_engine(mesh=mesh, **TWO_GROUPS)
    options = {"prompts": SPLIT, "answer": observation, "turns": 2}
    cold = [converse(engine, params, **options, iteration=number) for number in (2, 3)]
    moved = engine.usage()["reshard_bytes"]
    assert engine.prepared == 2 and (moved > 0) == (shards > 1)
    compilations = Compilations()
    with engine.one_policy():
        for number in (0, 1, 0):
            assert converse(engine, params, **options, iteration=2 + number) == cold[number]
            assert (engine.prepared, engine.usage()["reshard_bytes"]) == (3, moved)
            moved = 0
        pages = weakref.ref(engine._pages[0].k)
        other = jax.tree.map(jnp.copy, params)
        assert converse(engine, other, **options) == cold[0] and engine.prepared == 4
        assert pages() is None and engine._pages is not None
    compilations.close()
    assert engine._params is engine._pages is engine._slots is None
    assert converse(engine, other, **options) == cold[0] and engine.prepared == 5
    # `jnp.copy` is a program for each kind of array; the engine's are there already.
    assert compilations.programs <= len({x.shape for x in jax.tree.leaves(params)})


@pytest.mark.parametrize("tensor, heads", [(4, 4), (8, 8)])
def test_devices_that_share_a_key_value_head_sample_alike(tensor, heads):
    """Each has a copy of one of two, and so a cache of one head."""
    arch = dataclasses.replace(ARCH, vocab_size=32, heads=heads)
    mesh = make_mesh(schema.Mesh(data=8 // tensor, tensor=tensor))
    network, params = make(arch)
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        engine = make_engine(arch=arch, mesh=mesh)
        played = play(engine, placed)
        (copy,) = (each for each in engine.programs(placed) if each.name == "rollout/copy")
    assert_logp_of_network(played, params, arch)
    keys = copy.arguments[0][0].k
    of_device = (1, engine.plan.pages, ROLLOUT.page_size, ARCH.head_dim)
    assert keys.sharding.shard_shape(keys.shape) == of_device


def test_every_program_is_compiled_ahead():
    engine = make_engine(options={"steps": 4, "few": False})
    engine.compile(make()[1])
    compilations = Compilations()
    play(engine, make()[1], shuffle=2, delay=3)
    compilations.close()
    assert compilations.programs == 0


def test_between_collections_no_copy_of_the_policy_is_held():
    arch = dataclasses.replace(
        ARCH, scan_layers=True, layers=2
    )  # whose layers are copied out of their stack
    engine, params = make_engine(arch=arch), make(arch)[1]
    engine.begin(params, seed=1)
    leaf = weakref.ref(jax.tree.leaves(engine._params["layers"])[0])
    assert all(leaf() is not own for own in jax.tree.leaves(params))
    assert engine.step(False) is None
    assert leaf() is None


def test_every_count_is_told_also_where_there_was_nothing():
    engine = make_engine()
    engine.begin(make()[1], seed=1)
    usage = engine.usage()
    assert set(usage) >= {"prefilled_tokens", "decoded_tokens", "evicted_pages", "memory_waits"}
    assert not any(usage.values())


def test_another_temperature_is_of_one_collection_only():
    engine, params = make_engine(), make()[1]
    engine.begin(params, seed=1, temperature=2.0)
    begin = engine.begin
    engine.begin = lambda *args, **numbers: begin(*args, **numbers, temperature=2.0)
    hot = play(engine, params)
    assert_logp_of_network(hot, params, temperature=2.0)
    engine.begin = begin
    assert_same(play(engine, params))


def test_an_action_ends_with_its_first_end_token_or_at_the_limit():
    ended = cut = 0
    for turns in plain().values():
        for _, action, logp in turns:
            assert not np.isin(action[:-1], END_IDS).any()
            ends = action[-1] in END_IDS
            assert ends or len(action) == LONGEST
            assert max(logp) < 0 and len(logp) == len(action)
            ended, cut = ended + ends, cut + (not ends)
    assert ended > 5 and cut > 5


def test_a_conversation_may_fill_max_context_to_its_last_token():
    engine = make_engine(sampling=SAMPLING._replace(end_ids=(99,)))
    context = tokens_of(CONTEXT - LONGEST, 8)
    assert engine.fits(context) and not engine.fits([*context, 1])
    played = converse(engine, make()[1], {0: (0, context)})
    assert [len(action) for _, action, _ in played[0]] == [LONGEST]
    assert_logp_of_network(played, make()[1])


def test_top_k_of_one_is_greedy_and_certain():
    engine = make_engine(sampling=SAMPLING._replace(top_k=1))
    params = make()[1]
    for turns in converse(engine, params, {0: (0, STARTS[2]), 1: (1, STARTS[1])}).values():
        context, action, _ = turns[-1]
        best_L = logits_of(params, context + action).argmax(-1)
        for context, action, logp in turns:
            assert best_L[len(context) - 1 :][: len(action)].tolist() == action
            np.testing.assert_array_equal(logp, 0.0)


def test_every_token_has_random_numbers_of_its_own():
    zero = jax.tree.map(jnp.zeros_like, make()[1])  # every token is equally likely
    played = play(make_engine(sampling=SAMPLING._replace(end_ids=(99,))), zero)
    actions = [tuple(action) for turns in played.values() for _, action, _ in turns]
    assert len(set(actions)) == len(actions)
    assert min(len(set(action)) for action in actions) >= 2
    np.testing.assert_allclose(played[0][0][2], -np.log(30), rtol=1e-6)


def test_a_collection_that_was_broken_off_leaves_nothing_behind():
    engine, params = make_engine(), make()[1]
    engine.begin(params, seed=9)
    for key in range(12):
        engine.submit(Turn(key, STARTS[key // 4], key // 4, 1, key, 0))
    for _ in range(2):
        engine.step(True)
    assert engine.busy
    assert_same(play(engine, params))


def test_an_action_may_have_a_limit_of_its_own():
    engine = make_engine(sampling=SAMPLING._replace(end_ids=(99,)))
    engine.begin(make()[1], seed=1)
    for key, limit in enumerate((1, 4, None, 50)):
        engine.submit(Turn(key, STARTS[0], 0, 1, key, 0, limit=limit))
    actions = {}
    while (finished := engine.step(engine.busy)) is not None:
        actions |= {action.key: len(action.tokens) for action in finished}
    assert actions == {0: 1, 1: 4, 2: LONGEST, 3: LONGEST}


class Evens:
    """A grammar of even tokens; tools say where it is stuck or has but one first token."""

    words = 1

    class Matcher:
        def __init__(self, tools):
            self.accepted, self.tools = [], tools

        def allowed(self, words_W):
            if self.tools == "stick" and len(self.accepted) == 2:
                raise RuntimeError("stuck after two")
            if self.tools == "block":
                raise RuntimeError("stuck at once")
            only = self.tools == "force" and not self.accepted
            words_W[:] = sum(1 << token for token in ([4] if only else range(0, 30, 2)))

        def accept(self, token):
            assert token % 2 == 0
            self.accepted.append(token)

    def begin(self, tools):
        if tools == "refuse":
            raise ValueError("no such tools")
        return self.Matcher(tools)


def test_a_grammars_mask_is_in_the_distribution_and_its_failure_is_the_actions():
    engine = make_engine(sampling=SAMPLING._replace(end_ids=(6,)), options={"grammars": Evens()})
    params = make()[1]
    engine.begin(params, seed=1)
    tools = {0: (), 1: "refuse", 2: "stick", 3: "force", 4: "block"}
    for key in tools:
        engine.submit(Turn(key, STARTS[0], 0, 1, key, 0, tools=tools[key]))
    actions = {}
    while (finished := engine.step(engine.busy)) is not None:
        actions |= {action.key: action for action in finished}
    assert {key: action.failure for key, action in actions.items()} == {
        0: "",
        1: "no such tools",
        2: "stuck after two",
        3: "",
        4: "stuck at once",
    }
    assert [key for key in tools if actions[key].refuses_tools] == [1]
    for key in (0, 3):
        tokens, logp = actions[key].tokens, actions[key].logp
        assert len(tokens) == LONGEST or tokens[-1] == 6
        logits_LV = logits_of(params, STARTS[0] + tokens)[len(STARTS[0]) - 1 : -1]
        even_LV = np.where(np.arange(30)[None, :] % 2 == 0, logits_LV / TEMPERATURE, -np.inf)
        wanted_LV = even_LV - np.logaddexp.reduce(even_LV, axis=-1, keepdims=True)
        if key == 3:
            assert (tokens[0], logp[0]) == (4, 0.0) and 0 not in logp[1:]
            wanted_LV[0, 4] = 0.0
        np.testing.assert_allclose(logp, wanted_LV[np.arange(len(tokens)), tokens], atol=1e-5)


@pytest.mark.parametrize(
    "count, wanted",
    [(0, []), (1, [4]), (3, [4]), (4, [4]), (7, [4, 4]), (12, [16]), (11, [4, 4, 4]), (99, [64])],
)
def test_rows_are_covered_by_dispatches_that_are_mostly_full(count, wanted):
    assert cover(count, [4, 16, 64]) == wanted


def test_programs_have_few_numbers_of_rows():
    assert row_sizes(128, halvings=3, least=8) == [16, 32, 64, 128]
    assert row_sizes(20, halvings=3, least=8) == [8, 10, 20]
    assert decoded_rows(32, halvings=3, few=True) == [32]
    assert decoded_rows(128, halvings=3, few=True) == [16, 128]
    assert [prefilled_rows(1024, length, few=True) for length in (128, 16)] == [[2], [16]]
    assert prefilled_rows(1024, 16, few=False) == [4, 16, 64]
    assert row_sizes(3, halvings=3, least=8) == [3]


def test_the_devices_time_is_told_by_what_they_did():
    engine, params = make_engine(), make()[1]
    began = time.monotonic()
    play(engine, params)
    taken, seconds = time.monotonic() - began, engine.seconds()
    assert min(seconds.values()) > 0 and sum(seconds.values()) <= taken
    engine.begin(params, seed=1)
    assert not any(engine.seconds().values())
