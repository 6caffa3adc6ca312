"""The policy is replaced between two dispatches: what goes on, with which policy, and what is freed."""

import dataclasses
import functools
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollout_cases import stir

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, DeltaNet, Moe
from seeupo_jax.policy.rope import Rope
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.dealing import deal
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.protocol import Turn, TurnSampling
from seeupo_jax.rollout.engine.sampling import Sampling, Streams, draw, stream_keys
from seeupo_jax.rollout.engine.slots import SlotEngine

V, LONGEST, CONTEXT, STEPS = 30, 11, 160, 3
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
    # Recurrent layers around one with attention.
    "recurrent": dataclasses.replace(
        ATTENTION, layers=3, attention_gate=True, delta=DeltaNet((0, 2), 2, 4, 6, 5, 4)
    ),
    # Layers that the sampler copies out of their stack.
    "stacked": dataclasses.replace(ATTENTION, scan_layers=True),
    "experts": dataclasses.replace(ATTENTION, moe=Moe(4, 2, mlp_width=8, normalize=True)),
}
MESHES = {
    "one device": None,
    "eight devices": schema.Mesh(data=2, fsdp=2, tensor=2),
    "eight row shards": schema.Mesh(data=8),
}
SAMPLING = Sampling(0.7, None, None, LONGEST, (2, 19), 4)
ROLLOUT = schema.Rollout(
    tasks=3, group_size=4, max_action_tokens=LONGEST, max_context=CONTEXT, page_size=8
)


def tokens_of(length, *seed):
    return np.random.default_rng(seed).integers(0, V, length).tolist()


# Groups of four, two of which begin with the same system prompt.
STARTS = [tokens_of(40, 0) + tokens_of(25, 1), tokens_of(40, 0) + tokens_of(9, 2), tokens_of(5, 3)]
PROMPTS = {key: (key // 4, STARTS[key // 4]) for key in range(12)}


@functools.cache
def make(name="attention", seed=0):
    """A network, and parameters that make its distributions far from uniform."""
    network, params = policy.split_model(Transformer(NETWORKS[name], nnx.Rngs(0)))
    return network, stir(params, seed)


def make_engine(name="attention", mesh=None, *, sampling=SAMPLING, options=None, **changes):
    rollout = dataclasses.replace(ROLLOUT, **changes)
    plan = plan_cache(NETWORKS[name], rollout, shards=1 if mesh is None else row_shards(mesh))
    # Few numbers of rows, for few programs.
    fields = {"group_size": 4, "steps": STEPS, "prefill_tokens": 256, "few": True} | (options or {})
    return SlotEngine(make(name)[0], sampling, plan, mesh=mesh, **fields)


def place(params, network, mesh):
    if mesh is None:
        return params
    return jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))


def copies(params):
    return jax.tree.map(jnp.copy, params)


def converse(engine, params, swaps=(), prompts=PROMPTS, turns=3, iteration=2, **fields):
    """Conversations, each a list of (turn, action).

    Args:
      swaps: the parameters that replace the policy, and their version, by the number of steps
        before; the first version is 0.
    """
    swaps = dict(swaps)
    shard_N = deal([group for group, _ in prompts.values()], engine.shard_owners)
    shards = dict(zip(prompts, shard_N, strict=True))
    engine.begin(params, seed=1, version=0)
    played = {key: [] for key in prompts}
    queued, live, asked = list(prompts), set(), {}

    def submit(key, context):
        group, turn = prompts[key][0], len(played[key])
        place = group, 100 + group, key, turn
        asked[key] = Turn(key, context, *place, shard=shards[key], iteration=iteration, **fields)
        engine.submit(asked[key])

    for step in itertools.count():
        if step in swaps:
            engine.swap(*swaps[step])
        while queued and len(live) < engine.concurrency:
            key = queued.pop(0)
            live.add(key)
            submit(key, list(prompts[key][1]))
        actions = engine.step(bool(live or queued))
        if actions is None:
            return played
        for action in actions:
            key, turn = action.key, asked[action.key]
            played[key].append((turn, action))
            answer = tokens_of(1 + (5 * key + 7 * turn.turn) % 13, key, turn.turn)
            context = [*turn.context, *action.tokens, *answer]
            if len(played[key]) == turns or not engine.fits(context):
                live.discard(key)
                engine.release(key)
            else:
                submit(key, context)
    raise AssertionError


def assert_same(got, wanted, atol):
    for key, turns in wanted.items():
        for (turn, action), (same_turn, same) in zip(got[key], turns, strict=True):
            assert (turn.context, action.tokens) == (same_turn.context, same.tokens)
            np.testing.assert_allclose(action.logp, same.logp, atol=atol, rtol=0)
            np.testing.assert_allclose(action.entropy, same.entropy, atol=10 * atol)


@pytest.mark.parametrize("on_swap", ["keep", "prefill"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["attention", "recurrent", "stacked"])
def test_a_swap_to_equal_parameters_changes_no_sample(name, mesh, on_swap):
    network, params = make(name)
    mesh = None if MESHES[mesh] is None else make_mesh(MESHES[mesh])
    placed = place(params, network, mesh)
    made = functools.partial(make_engine, name, mesh, concurrency=8)
    wanted = converse(made(), placed)
    engine = made(options={"on_swap": on_swap})
    got = converse(engine, placed, {3 * n: (copies(placed), n) for n in range(1, 9)})
    gaps = {
        key: max(
            np.abs(np.subtract(a.logp, b.logp)).max()
            for (_, a), (_, b) in zip(got[key], wanted[key], strict=True)
        )
        for key in wanted
    }
    print("GAP", name, on_swap, mesh and mesh.shape, gaps)
    assert_same(got, wanted, atol=1e-4)
    assert engine.usage()["swaps"] == 8 and engine.seconds()["swap_s"] > 0
