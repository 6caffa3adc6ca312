"""The sampler of a configuration: what memory holds, in which types."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from places import CONFIGS

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture, Moe
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy_io import build, build_sampler
from seeupo_jax.policy_io.build_sampler import build_engine
from seeupo_jax.training.checks import check_config

CONFIG = CONFIGS / "quickstart.py"


def test_a_cache_larger_than_what_memory_is_free_is_told_before_it_is_made(monkeypatch):
    config = load_config(CONFIG, ["mesh.data=8"])
    policy, _ = build.load_policy(config, "package:order_desk")
    needed = build_engine(config, policy).plan.bytes
    monkeypatch.setattr(build_sampler, "free_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match="rollout.cache_gib: got None, which means .*: less"):
        build_engine(config, policy)
    monkeypatch.setattr(build_sampler, "free_memory", lambda device: needed)
    assert build_engine(config, policy).plan.bytes == needed


def test_a_sampler_of_8_bits_is_made_and_its_copy_is_planned_with():
    policy, params = build.load_policy(load_config(CONFIG), "package:order_desk")
    engine = build_engine(load_config(CONFIG, ["rollout.quantize=int8"]), policy)
    engine.begin(policy.merged(params), seed=0)
    own = jax.tree.leaves_with_path(engine._params)
    made = [(path[-1].key, x) for path, x in own if x.dtype == jnp.int8 or "scale" in path[-1].key]
    assert [name for name, _ in made].count("kernel") == 3 * 7  # layers; q, k, v, out and the MLP's
    # Norms' scales stay where the trainer has them, as the embedding does.
    copied = sum(x.nbytes for name, x in made if name != "scale")
    assert engine.plan.policy_bytes == copied and engine.plan.reshard.int8
    assert not build_engine(load_config(CONFIG), policy).plan.policy_bytes


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A choice of a folder with a small mixture of experts."""
    folder = tmp_path_factory.mktemp("mixture")
    moe = Moe(experts=4, per_token=2, mlp_width=8, normalize=True)
    tokenizer = read_tokenizer("package:order_desk")
    sizes = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 8}
    arch = Architecture(vocab_size=tokenizer.vocab_size, moe=moe, **sizes)
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder, tokenizer)
    return f"model.path={folder}"


def test_experts_are_not_rounded(mixture):
    with pytest.raises(ValueError, match="rollout.quantize: got 'int8' for .*; allowed: none"):
        check_config(load_config(CONFIG, [mixture, "rollout.quantize=int8"]))


def test_experts_are_recorded_where_those_of_the_sampler_are_replayed(mixture):
    config = load_config(CONFIG, [mixture])
    policy, _ = build.load_policy(config, config.model.path)
    choices = [f"algorithm.router_replay={choice}" for choice in ("none", "old", "rollout")]
    made = [build_engine(load_config(CONFIG, [mixture, choice]), policy) for choice in choices]
    assert [engine._records for engine in made] == [False, False, True]
