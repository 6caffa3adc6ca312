"""Policies that play roles without being trained: from folders, with the policy's tokenizer."""

import dataclasses

import jax
import numpy as np
import pytest
import run_cases
from flax import nnx

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.evaluation.frozen_roles import check_frozen_roles, role_config, with_frozen_roles
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.abstract_run import CACHE, ROLES, abstract_run
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.tokenizer import train_tokenizer
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.rollout.engine.role_engine import RoleEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_cases.save_policy(tmp_path_factory.mktemp("policy"))


def configured(folder, **role):
    rollout = {"tasks": 4, "group_size": 4, "max_context": 64, "max_action_tokens": 8}
    roles = [{"name": "a"}, {"name": "b", **role}]
    return from_dict({"model": {"path": str(folder)}, "roles": roles, "rollout": rollout})


def test_a_folder_is_played_by_an_engine_of_its_own(folder):
    config = configured(folder, path=str(folder))
    check_frozen_roles(config)
    made, _ = build.load_policy(config, str(folder))
    engine = build_engine(config, made)
    assert with_frozen_roles(configured(folder), engine, made.tokenizer) is engine
    assert isinstance(with_frozen_roles(config, engine, made.tokenizer), RoleEngine)


def test_nothing_of_its_policy_trains(folder):
    config = configured(folder, path=str(folder))
    groups = [{"pattern": "*embed*", "frozen": True}]
    config = dataclasses.replace(
        config, optimizer=from_dict({"optimizer": {"groups": groups}}).optimizer
    )
    own = role_config(config, config.roles[1])
    assert (own.optimizer.groups, own.lora.rank, own.model.path) == ((), 0, str(folder))


def test_its_memory_is_planned(folder):
    mesh = make_mesh(configured(folder).mesh, jax.devices()[:1])
    without, both = (
        abstract_run(configured(folder, **role), mesh).parts for role in ({}, {"path": str(folder)})
    )
    assert ROLES not in without
    # The policy plays both roles, or one: it has a conversation of each in the cache.
    assert without[CACHE] == 2 * both[CACHE]
    _, params = build.abstract_policy(configured(folder), mesh)
    weights = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert both[ROLES] >= weights


def test_another_tokenizer_is_refused(folder, tmp_path):
    tokenizer = train_tokenizer(["bet or pass"], ("bet", "pass"), 268, configured(folder).chat)
    arch = Architecture(
        vocab_size=tokenizer.vocab_size,
        width=16,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=8,
        mlp_width=16,
    )
    save_pretrained(Transformer(arch, nnx.Rngs(0)), tmp_path, tokenizer)
    said = r"config.roles: b: got the tokenizer of .*; allowed: one with the tokens of the policy's"
    with pytest.raises(ValueError, match=said):
        check_frozen_roles(configured(folder, path=str(tmp_path)))


def test_a_grammar_is_refused_with_a_server(folder):
    config = configured(folder, server="http://localhost:1")
    rollout = dataclasses.replace(config.rollout, grammar="tool_calls")
    with pytest.raises(ValueError, match=r"grammar: got 'tool_calls' with config.roles\[1\]"):
        check_frozen_roles(dataclasses.replace(config, rollout=rollout))
