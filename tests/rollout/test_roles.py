"""Episodes of several roles: a conversation each, by one policy or by one that is frozen."""

import functools

import jax
import numpy as np
import pytest
import rollout_cases
from flax import nnx
from role_cases import ROLES, Duel
from rollout_cases import NumberTokenizer, make_worker

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.role_schema import Role
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.policy import network as policy
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.rollout.engine.role_engine import FrozenPolicy, RoleEngine
from seeupo_jax.rollout.engine.sampling import Sampling
from seeupo_jax.rollout.engine.slots import SlotEngine
from seeupo_jax.rollout.episode_metrics import rewritten_episodes, rollout_metrics
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.trajectories.roles import rewards_by_role, turn_roles
from seeupo_jax.types import CONTEXT

ROLLOUT = schema.Rollout(concurrency=4, page_size=8, max_action_tokens=4, max_context=60)
TRAINED = tuple(map(Role, ROLES))
FROZEN = (Role("a"), Role("b", path="elsewhere"))


@functools.cache
def model(seed):
    sizes = {"vocab_size": 29, "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8}
    network, params = policy.split_model(
        Transformer(Architecture(**sizes, mlp_width=24), nnx.Rngs(0))
    )
    return network, rollout_cases.stir(params, seed)


def engine():
    network, _ = model(0)
    sampling = Sampling(1.0, None, None, ROLLOUT.max_action_tokens, NumberTokenizer.end_ids)
    plan = plan_cache(network.arch, ROLLOUT)
    return SlotEngine(network, sampling, plan, group_size=2, steps=3, prefill_tokens=64)


@functools.cache
def played(roles=TRAINED, players="a:b", turns=4, max_turns=4):
    """Of a group of two: the collection. A frozen `b` has other parameters."""
    pool, own = EnvPool(Duel, 4, workers=2, timeout_s=20, retries=0, retry_wait_s=0.01), engine()
    if roles is FROZEN:
        own = RoleEngine(own, {"b": FrozenPolicy(engine(), model(1)[1])})
    worker = make_worker(own, pool, max_turns=max_turns, deterministic=True, roles=roles)
    requests = group_requests([f"{players}:{turns}"], 2, 1)
    try:
        return collect(worker, model(0)[1], requests, CollectionOptions(5))
    finally:
        pool.close()


def logp_of(tokens_L, seed):
    network, params = model(seed)
    logp_LV = jax.nn.log_softmax(network.bind(params)(tokens_L[None])[0], axis=-1)
    return np.asarray(logp_LV)[np.arange(len(tokens_L) - 1), tokens_L[1:]]


def test_each_role_has_a_conversation_of_its_own():
    tokenizer = NumberTokenizer()
    for trajectory in played().trajectories:
        assert [segment.role for segment in trajectory.segments] == ["a", "b"]
        assert turn_roles(trajectory) == ["a", "b", "a", "b"]
        for segment, first in zip(trajectory.segments, ("12", "14"), strict=True):
            own = [m for m in trajectory.messages if m["name"] == segment.role]
            assert [m["role"] for m in own] == ["user", "assistant"] * 2
            assert own[0]["content"].startswith(first)
            said = tokenizer.begin(own[:1], ()).tokens
            assert segment.tokens_L[: len(said)].tolist() == said
            np.testing.assert_array_equal(segment.turn_L[: len(said)], CONTEXT)


def test_a_roles_actions_are_sampled_from_what_it_has_read():
    for trajectory in played().trajectories:
        for segment in trajectory.segments:
            acted = segment.turn_L[1:] != CONTEXT
            np.testing.assert_allclose(
                segment.logp_L[1:][acted], logp_of(segment.tokens_L, 0)[acted], atol=2e-5
            )


def test_roles_share_the_episodes_reward_and_have_their_own():
    collected = played()
    for trajectory in collected.trajectories:
        assert trajectory.reward == 1.0 and trajectory.turn_rewards == (0.25,) * 4
        assert rewards_by_role(trajectory) == {"a": 2.0, "b": 0.0}
    metrics = rollout_metrics(collected)
    wanted = {"role_reward/a": 2.0, "role_reward/b": 0.0, "role_turns/a": 4, "role_turns/b": 4}
    assert {n: metrics[f"rollout/{n}"] for n in wanted} == wanted
    assert rewritten_episodes(collected).rewritten == 0


def test_a_frozen_roles_tokens_are_context_and_are_counted():
    collected = played(FROZEN)
    for trajectory in collected.trajectories:
        own, frozen = trajectory.segments
        assert trajectory.turns == 2 and turn_roles(trajectory) == ["a", "a"]
        assert set(frozen.turn_L) == {CONTEXT} and not frozen.logp_L.any()
        assert trajectory.turn_rewards == (0.5, 0.5)  # each with that of the turn that answers it
        assert trajectory.info["states"] == ["0", "2"]
        said = [m for m in trajectory.messages if m["role"] == "assistant"]
        assert ["history" in message for message in said] == [False, True] * 2
        acted = own.turn_L[1:] != CONTEXT
        np.testing.assert_allclose(
            own.logp_L[1:][acted], logp_of(own.tokens_L, 0)[acted], atol=2e-5
        )
    assert collected.usage["frozen_turns"] == 4
    of_trained = sum((s.turn_L >= 0).sum() for t in collected.trajectories for s in t.segments)
    assert collected.sampled_tokens == of_trained
    assert collected.usage["frozen_tokens"] >= 4


def test_a_frozen_role_is_played_by_its_own_parameters():
    """Its answers are another policy's: those of the trained one differ for the same seeds."""
    said = []
    for roles in (TRAINED, FROZEN):
        answers = [
            [m["content"] for m in t.messages if m["name"] == "b" and m["role"] == "assistant"]
            for t in played(roles).trajectories
        ]
        said.append(answers)
    assert said[0] != said[1]


@pytest.mark.parametrize("roles, players", [((), "a:b"), (TRAINED, "a:c")])
def test_a_role_that_is_not_listed_is_the_environments_error(roles, players):
    for trajectory in played(roles, players).trajectories:
        assert trajectory.stop == "env_error"
        assert "role: got" in trajectory.info["failure"]
        assert "config.roles" in trajectory.info["failure"]


def test_turns_of_all_roles_count_to_the_limit():
    for trajectory in played(max_turns=3).trajectories:
        assert trajectory.stop == "max_turns" and turn_roles(trajectory) == ["a", "b", "a"]
