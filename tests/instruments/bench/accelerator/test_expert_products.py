"""The comparison of experts' products passes a right one, and finds a wrong one."""

import pytest

from seeupo_jax.instruments.bench.accelerator import expert_products
from seeupo_jax.policy.kernels.grouped import grouped_product


def wrong(x_SD, w_EDF, size_E):
    """The last row of the first group goes to the second one."""
    return grouped_product(x_SD, w_EDF, size_E.at[0].add(-1).at[1].add(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_within_rounding_passes_and_a_row_in_another_group_does_not(dtype, monkeypatch):
    def passed():
        differences, _ = expert_products.SMALLEST[0].compare(dtype, timed=False)
        return {name: got <= bound for name, (got, bound) in differences.items()}

    assert passed() == {"out": True, "d_x": True, "d_w": True}
    monkeypatch.setattr(expert_products, "grouped_product", wrong)
    assert passed() == {"out": False, "d_x": False, "d_w": False}
