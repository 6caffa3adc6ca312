"""Communication that a formula expects of a program, against counts by hand."""

from types import SimpleNamespace

import jax
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.instruments.aot.expected_figures import _traffic
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy.architecture import Architecture

ARCH = Architecture(
    vocab_size=32, width=64, layers=3, heads=8, kv_heads=2, head_dim=16, mlp_width=64
)
TOKENS = 512


@pytest.mark.parametrize(
    "tensor, context, gathered, kv_heads",
    [(1, 2, 0, 2), (2, 2, 0, 1), (4, 2, 1 / 2, 1), (8, 1, 3 / 4, 1)],
)
def test_keys_are_gathered_by_the_devices_that_share_a_head_or_a_row(
    tensor, context, gathered, kv_heads
):
    """gathered: of a head, what a device has not computed itself."""
    devices = jax.devices()[: tensor * context]
    mesh = make_mesh(schema.Mesh(data=1, context=context, tensor=tensor), devices)
    work = SimpleNamespace(tokens=TOKENS)
    program = SimpleNamespace(kind="rollout/prefill", trips=1, mesh=mesh, work=work)
    found = {(x.kind, x.axes): x for x in _traffic(SimpleNamespace(arch=ARCH), program)}
    head = 3 * 2 * TOKENS / context * 16 * 4  # layers x (key, value) x tokens x numbers of 4 bytes
    over_tensor = found.get(("all-gather", ("tensor",)))
    assert (0 if over_tensor is None else over_tensor.total) == pytest.approx(gathered * head)
    over_context = found["all-gather", ("context",)]
    assert over_context.total == pytest.approx((context - 1) * kv_heads * head)
