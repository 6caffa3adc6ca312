import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.rope import Rope
from seeupo_jax.rollout.engine.read_plan import KVReadPlan, choose_read_plan


@pytest.mark.parametrize(
    "platform, max_context, wanted",
    [
        ("cpu", 256, KVReadPlan("xla", 256)),
        ("cpu", 272, KVReadPlan("xla", 64)),
        ("gpu", 272, KVReadPlan("xla", None)),
        ("tpu", 272, KVReadPlan("paged", 256)),
    ],
)
def test_a_platform_has_its_way_of_reading_the_cache(platform, max_context, wanted):
    arch = Architecture(
        vocab_size=30,
        width=16,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=128,
        mlp_width=16,
        rope=Rope(theta=100.0),
        dtype="bfloat16",
    )
    rollout = schema.Rollout(max_context=max_context)
    assert choose_read_plan(arch, rollout, platform) == wanted
