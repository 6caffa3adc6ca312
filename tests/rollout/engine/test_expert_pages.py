"""Actions come with the experts of all tokens that they were sampled behind."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from rollout_cases import converse, stir

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture, Moe, Routing
from seeupo_jax.policy.kernels.attention import NOWHERE
from seeupo_jax.policy.kernels.paged import PageTable
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.expert_pages import ExpertPages
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine

LONGEST, CONTEXT, VOCAB = 5, 64, 30
ARCH = Architecture(
    vocab_size=VOCAB,
    width=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=24,
    moe=Moe(4, 2, mlp_width=8, normalize=True, dense_layers=(1,)),
)
ROLLOUT = schema.Rollout(
    tasks=2, group_size=4, max_action_tokens=LONGEST, max_context=CONTEXT, page_size=8
)
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 21).tolist()
PROMPTS = {key: (key // 4, PROMPT[: 21 - 9 * (key // 4)]) for key in range(8)}


@functools.cache
def make():
    network, params = policy.split_model(Transformer(ARCH, nnx.Rngs(0)))
    return network, stir(params)


def record(params, mesh=None, **changes):
    """Each action of some conversations, and the tokens before it."""
    shards = 1 if mesh is None else row_shards(mesh)
    plan = plan_cache(ARCH, dataclasses.replace(ROLLOUT, **changes), shards=shards)
    sampling = Sampling(1.0, None, None, LONGEST, (3, 7, 11))
    how = {"group_size": 4, "steps": 3, "prefill_tokens": 32, "few": True, "records": True}
    engine = SlotEngine(make()[0], sampling, plan, mesh=mesh, **how)
    found, step = {}, engine.step

    def watched(unfinished):
        actions = step(unfinished)
        for action in actions or []:
            found.setdefault(action.key, []).append(action.experts)
        return actions

    engine.step = watched

    def said(key, turn):
        return [key, turn, *PROMPT[:turn]]

    played = converse(engine, params, PROMPTS, turns=2, answer=said, shuffle=1, delay=1)
    rows = [
        (turn[0] + turn[1], experts)
        for key, turns in played.items()
        for turn, experts in zip(turns, found[key], strict=True)
    ]
    return rows, engine.usage()


@functools.cache
def chosen_of(tokens):
    """The experts of one sequence, by the network itself."""
    row = np.zeros((1, CONTEXT), np.int32)
    row[0, : len(tokens)] = tokens
    compute = jax.jit(policy.compute, static_argnums=0)
    return np.asarray(compute(*make(), row).routed_NLG[0, : len(tokens)])


def assert_recorded(rows):
    assert len(rows) == 16
    for tokens, experts in rows:
        assert experts.dtype == np.uint8
        np.testing.assert_array_equal(experts, chosen_of(tuple(tokens))[:-1])


def test_experts_are_recorded_of_prompts_and_of_what_was_sampled():
    rows, usage = record(make()[1])
    assert_recorded(rows)
    assert usage["cached_tokens"] > 100  # others computed the prompt


@pytest.mark.exhaustive
def test_evicted_and_copied_pages_leave_no_record_behind():
    page_gib = 8 * 3 * 2 * 2 * 8 * 4 / 2**30
    rows, usage = record(make()[1], cache_gib=8.5 * page_gib)
    assert_recorded(rows)
    assert usage["evicted_pages"] > 10


@pytest.mark.exhaustive
def test_eight_devices_record_what_one_records():
    mesh = make_mesh(schema.Mesh(data=2, expert=2, tensor=2))
    network, params = make()
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        assert_recorded(record(placed, mesh)[0])


@pytest.fixture
def pages():
    held = ExpertPages(Routing(1, 2, 300), pages=4, page_size=3)
    held.write([2, 0], 1, np.arange(8, dtype=np.uint16).reshape(4, 2))
    return held


def test_positions_lie_in_pages_in_the_order_of_the_lease(pages):
    assert pages.read([2, 0], 5)[1:].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pages.read([0], 2).tolist() == [[4, 5], [6, 7]]


def test_pages_are_copied_before_any_is_written(pages):
    pages.copy([(0, 2), (2, 0)])
    assert pages.read([0, 2], 5)[1:].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_padding_of_tiles_is_written_nowhere(pages):
    position_RL = np.array([[1, 2, NOWHERE], [NOWHERE] * 3])
    table = PageTable(np.array([[3, 1], [2, 2]]), np.zeros(2, int))
    before = pages.read([2], 3)
    pages.write_tiles(position_RL, table, np.full((2, 3, 2), 299, np.uint16))
    assert pages.read([3], 3)[1:].tolist() == [[299, 299]] * 2
    assert pages.read([2], 3).tolist() == before.tolist()
