"""Folders whose weights a server takes: whole models, and adapters in PEFT's format."""

import dataclasses

import jax
import numpy as np
import pytest
import run_cases

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.policy_folder import write_policy
from seeupo_jax.policy_io.served_weights import load_weights


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return run_cases.save_policy(tmp_path_factory.mktemp("served_weights") / "base")


def config_of(base, **lora):
    return from_dict({"model": {"path": str(base), "dtype": "float32"}, "lora": lora})


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """A folder of adapters that change the model, and the model with them merged, in another."""
    folder = tmp_path_factory.mktemp("served_weights")
    config = config_of(base, rank=2, merge=False)
    made, params = build.load_policy(config, str(base))
    params = jax.tree.map(lambda x: x + 0.1, params)
    write_policy(config, made, params, folder / "adapters")
    merged = dataclasses.replace(config, lora=dataclasses.replace(config.lora, merge=True))
    write_policy(merged, made, params, folder / "merged")
    return folder, made.merged(params)


def params_of(folder):
    return split_model(from_pretrained(folder, dtype="float32")[0])[1]


def same(params, others):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params, others)


def test_a_model_takes_whole_models_and_adapters_that_are_merged(base, adapters):
    folder, _ = adapters
    config = config_of(base)
    served, first = build.load_policy(config, str(base))
    wanted = params_of(folder / "merged")
    with pytest.raises(AssertionError):
        same(first, wanted)
    same(load_weights(config, served, folder / "merged"), wanted)
    same(load_weights(config, served, folder / "adapters"), wanted)


def test_adapters_take_adapters_and_no_whole_model(base, adapters):
    folder, wanted = adapters
    config = config_of(base, rank=2)
    served, _ = build.load_policy(config, str(base))
    same(load_weights(config, served, folder / "adapters"), wanted)
    with pytest.raises(ValueError, match="got a whole model; allowed: a folder of adapters"):
        load_weights(config, served, folder / "merged")


def test_another_network_is_refused_by_what_differs(base, tmp_path):
    other = run_cases.save_policy(tmp_path / "other", norm_eps=1e-3)
    config = config_of(base)
    served, _ = build.load_policy(config, str(base))
    with pytest.raises(ValueError, match="got a model whose norm_eps differ"):
        load_weights(config, served, other)
    with pytest.raises(ValueError, match="got no folder"):
        load_weights(config, served, tmp_path / "missing")
