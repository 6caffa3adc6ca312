"""Runs of a policy with recurrent layers: what they do without, and where they say so."""

import dataclasses

import pytest
from flax import nnx
from places import TINY

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.expected_time import planned_sweep
from seeupo_jax.planning.explain.explain_parts import model_lines, plan_run
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import Architecture, DeltaNet
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy_io import build
from seeupo_jax.rollout.engine.cache_memory import plan_cache
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.training.checks import check_model

NOTICE = "recurrent layers: 1 of 2; training computes what sequences share for each of them"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a small Qwen3.5."""
    path, tokenizer = tmp_path_factory.mktemp("hybrid"), from_pretrained("package:order_desk")[1]
    arch = Architecture(
        vocab_size=tokenizer.vocab_size,
        width=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_width=24,
        norm_offset=1.0,
        attention_gate=True,
        delta=DeltaNet((0,), key_heads=2, value_heads=4, key_dim=8, value_dim=6, conv=4),
    )
    save_pretrained(Transformer(arch, nnx.Rngs(0)), path, tokenizer)
    return path


@pytest.fixture
def config(folder):
    return load_config(TINY, [f"model.path={folder}", "warm_start.stages=()"])


def test_its_sweeps_share_nothing_and_refresh_by_passes_of_their_own(config, caplog):
    policy, params = build.load_policy(config, config.model.path)
    learner = build_learner(config, policy, params).learner
    assert [NOTICE in line for line in caplog.messages].count(True) == 1
    assert config.batching.share_prefixes and not learner.shapes.share
    assert not learner.fused and "refresh" in learner.kinds
    assert planned_sweep(config).count("refresh") == 5  # after all of six turns but the last


def test_with_attention_alone_they_do(caplog):
    config = load_config(TINY, ["model.path=package:order_desk", "warm_start.stages=()"])
    policy, params = build.load_policy(config, config.model.path)
    learner = build_learner(config, policy, params).learner
    assert learner.shapes.share and learner.fused and "recurrent" not in caplog.text


def test_explain_says_so(config):
    lines = model_lines(plan_run(config, config.model.path)[0], config.model.path)
    assert sum(NOTICE in line for line in lines) == 1


def test_a_fused_refresh_is_refused_before_anything_is_compiled(config):
    algorithm = dataclasses.replace(config.algorithm, refresh="fused")
    with pytest.raises(ValueError, match=r"refresh: got 'fused' .* recurrent .*; allowed: auto or"):
        check_model(dataclasses.replace(config, algorithm=algorithm), make_mesh(config.mesh))


def test_the_cache_has_pages_of_attention_and_states_of_slots_and_of_later_turns(folder):
    arch = build.load_architecture(folder, dtype="bfloat16")
    rollout = schema.Rollout(max_context=64, tasks=2, group_size=4, slots=5)
    plan = plan_cache(arch, rollout)
    assert plan.token_bytes == 2 * 1 * 8 * 2  # keys and values of one layer's head, bfloat16
    # 3 inputs of 2 x 16 + 24 channels, bfloat16; a matrix of 8 x 6 float32 for each of 4 heads.
    state = 3 * 56 * 2 + 4 * 8 * 6 * 4
    # 5 of slots, which a dispatch has twice, and one for each of 8 open conversations.
    assert plan.states == 5 + 8 and plan.state_bytes == (5 + 8 + 5) * state
    assert plan.needed_bytes == plan.bytes + plan.state_bytes + plan.gathered_bytes
    assert "of recurrent states, 8 of them kept for later turns" in str(plan)
    fewer = plan_cache(arch, dataclasses.replace(rollout, cached_states=2))
    assert fewer.states == 5 + 2 and fewer.state_bytes == (5 + 2 + 5) * state


def test_kept_states_are_refused_where_they_do_not_divide_or_there_are_none(folder):
    arch = build.load_architecture(folder, dtype="bfloat16")
    rollout = schema.Rollout(max_context=64, tasks=2, group_size=4, slots=4, cached_states=3)
    with pytest.raises(ValueError, match="cached_states: got 3; allowed: a multiple of the 2"):
        plan_cache(arch, rollout, shards=2)
    with pytest.raises(ValueError, match="cached_states: got 3; allowed without recurrent layers"):
        plan_cache(dataclasses.replace(arch, delta=None), rollout)
