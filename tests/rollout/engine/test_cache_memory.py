"""The memory plan: what it counts, what it says, what it refuses."""

import dataclasses

import pytest
from published_cases import DEEPSEEK_V3

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.model_config import read_architecture
from seeupo_jax.rollout.engine.cache_memory import Reshard, plan_cache
from seeupo_jax.rollout.engine.read_plan import KVReadPlan

ARCH = Architecture(
    vocab_size=32, width=64, layers=4, heads=8, kv_heads=4, head_dim=16, mlp_width=128
)
ROLLOUT = schema.Rollout(tasks=4, group_size=4, max_context=100, page_size=16)
COPY = Reshard("data 4 x tensor 2", 3 * GIB, 2 * GIB, 16 * GIB)


def test_the_cache_is_every_conversation_at_full_length():
    plan = plan_cache(ARCH, ROLLOUT, shards=4, tensor=2)
    assert (plan.slots, plan.concurrency, plan.pages) == (4, 4, 4 * 7)
    # Layers x (key, value) x 2 of 4 heads x 16 numbers of 4 bytes.
    assert plan.token_bytes == 4 * 2 * 2 * 16 * 4
    assert plan.bytes == 28 * 16 * plan.token_bytes
    # With more devices than key-value heads each holds one; all, where they cannot share them.
    of_one = plan.token_bytes // 2
    assert plan_cache(ARCH, ROLLOUT, tensor=4).token_bytes == of_one
    assert plan_cache(ARCH, ROLLOUT, tensor=8).token_bytes == of_one
    assert plan_cache(ARCH, ROLLOUT, tensor=3).token_bytes == 4 * of_one


def test_the_cache_has_room_for_every_conversation_of_an_episode():
    one, two = (plan_cache(ARCH, ROLLOUT, conversations=count) for count in (1, 2))
    assert (two.slots, two.concurrency, two.pages) == (16, 16, 2 * one.pages)
    assert "16 slots for 16 episodes of 2 conversations" in str(two)
    with pytest.raises(ValueError, match="for 32 conversations of 100 tokens; allowed: less than"):
        plan_cache(ARCH, ROLLOUT, conversations=2, free_bytes=two.bytes - 1)


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_token_of_latents_takes_70_kilobytes_in_deepseek_v3(tensor):
    """70.272 KB, as its authors count (arXiv:2505.09343, table 1); keys and values 5 million."""
    arch = read_architecture(DEEPSEEK_V3, "config.json", dtype="bfloat16")
    plan = plan_cache(arch, ROLLOUT, tensor=tensor)
    assert plan.token_bytes == 70_272  # of all heads, so on every device that has some
    assert 2 * 61 * 128 * (192 + 128) == pytest.approx(71 * plan.token_bytes, rel=0.01)


def test_the_plan_tells_of_the_samplers_copy_of_the_policy():
    logged = str(plan_cache(ARCH, ROLLOUT, shards=4, tensor=2, reshard=COPY))
    assert logged.endswith(
        "4 of them fit at once); sampler's layout: data 4 x tensor 2; 3 GiB per device for its copy"
        " of the policy, 2 GiB of it from other devices before each rollout"
    )
    same = Reshard("one device", 0, 0, 0)
    logged = str(plan_cache(ARCH, ROLLOUT, reshard=same))
    assert logged.endswith("sampler's layout: one device; it reads the trainer's parameters")


def test_a_copy_that_does_not_fit_beside_the_cache_is_refused():
    own = schema.Mesh(data=4, tensor=2)
    rollout = schema.Rollout(tasks=4, group_size=4, max_context=100, mesh=own)
    cache = plan_cache(ARCH, rollout).bytes
    plan_cache(ARCH, rollout, reshard=COPY, free_bytes=cache + 3 * GIB)
    with pytest.raises(ValueError, match=r"with 3 GiB of the .* \(config.rollout.mesh\) together"):
        plan_cache(ARCH, rollout, reshard=COPY, free_bytes=cache + 3 * GIB - 1)
    with pytest.raises(ValueError, match=r"allowed: less than the .* that are free"):
        plan_cache(ARCH, rollout, free_bytes=cache - 1)


def test_what_a_gpu_gathers_to_decode_is_planned_beside_the_cache():
    arch = dataclasses.replace(ARCH, layers=36, kv_heads=8, head_dim=128, dtype="bfloat16")
    rollout = schema.Rollout(
        tasks=16, group_size=8, max_context=8192, page_size=16, cache_gib=2.25, slots=64
    )
    # A token has 2 x 8 x 128 numbers of 2 bytes in a layer, 4 KiB, and 8192 of them 32 MiB: those
    # of 64 rows, and of the 8 prefixes of groups of 8 among them.
    gathered = (64 + 8) * 32 * 2**20
    given = {"read_plan": KVReadPlan("xla", None)}
    # The cache: two conversations, of 36 layers.
    cache = 2 * 36 * 32 * 2**20
    plan = plan_cache(arch, rollout, free_bytes=cache + gathered, **given)
    assert plan.gathered_bytes == gathered and plan.bytes == cache
    assert "; 2.25 GiB beside it, gathered to decode" in str(plan)
    short = (
        r"allowed: with 2.25 GiB that decoding gathers \(config.rollout.slots, 64\) together less"
    )
    with pytest.raises(ValueError, match=short):
        plan_cache(arch, rollout, free_bytes=cache + gathered - 1, **given)
    alone = dataclasses.replace(rollout, tasks=64, group_size=1, slots=None)
    assert plan_cache(arch, alone, **given).gathered_bytes == 64 * 32 * 2**20
    assert plan_cache(arch, rollout, shards=4, tensor=2, **given).gathered_bytes == (
        (16 + 2) * 16 * 2**20  # half of the heads
    )
    assert plan_cache(arch, rollout).gathered_bytes == 0  # in blocks, as on a CPU and a TPU


def test_token_counts_of_answers_with_their_own_sampling_are_planned_beside_the_cache():
    arch = dataclasses.replace(ARCH, vocab_size=151_936)
    cache, counts = plan_cache(arch, ROLLOUT).bytes, 16 * 151_936 * 4
    plan = plan_cache(arch, ROLLOUT, per_turn=True, free_bytes=cache + 2 * counts)
    assert plan.history_bytes == 2 * counts and plan_cache(arch, ROLLOUT).history_bytes == 0
    assert "; 18.55 MiB of token counts for penalties" in str(plan)
    with pytest.raises(ValueError, match=r"allowed: with 18.55 MiB of token counts .*slots, 16\)"):
        plan_cache(arch, ROLLOUT, per_turn=True, free_bytes=cache + 2 * counts - 1)
    cut = plan_cache(arch, ROLLOUT, per_turn=True, shards=4, tensor=2)
    assert cut.history_bytes == 2 * counts // 8


@pytest.mark.parametrize(
    "mesh, field", [(None, "config.mesh"), (schema.Mesh(data=3), "config.rollout.mesh")]
)
def test_rows_that_the_samplers_devices_do_not_divide_are_told_with_the_mesh(mesh, field):
    rollout = schema.Rollout(tasks=4, group_size=4, max_context=100, mesh=mesh)
    with pytest.raises(ValueError, match=rf"concurrency: got 16; .* the 3 devices .*\({field}\)"):
        plan_cache(ARCH, rollout, shards=3)


def test_more_keys_than_int32_counts_are_refused():
    rollout = schema.Rollout(tasks=2**13, group_size=2**9, max_context=112, page_size=16)
    pages = rollout.tasks * rollout.group_size * 7
    assert pages * 16 * 4 < 2**31
    plan_cache(ARCH, rollout)
    longer = dataclasses.replace(rollout, max_context=128)  # 8 pages: 2**22 x 8 x 16 x 4 = 2**31
    with pytest.raises(ValueError, match=r"33554432 pages of 16 .* 4 heads .* fewer than 2\*\*31"):
        plan_cache(ARCH, longer)
