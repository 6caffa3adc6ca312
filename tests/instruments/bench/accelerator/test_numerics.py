"""What sweeps are compared by: distances, and PyTorch in the arithmetic of ours."""

import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.benchmarks.comparison import SweepOutcome
from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.benchmarks.workloads import prepared
from seeupo_jax.instruments.bench.accelerator import numerics

NAN = float("nan")


def outcome(kl=1.0, weights=(1.0, NAN), tensor=0.0):
    steps = [{"loss": 2.0, "kl": 0.0, "weights": [1.0, 1.0]}]
    steps += [{"loss": -2.0, "kl": kl, "weights": list(weights)}]
    return SweepOutcome(steps, {"a": np.full((2, 2), tensor), "b": np.zeros(3)})


def test_distances_are_of_the_euclidean_norm_over_all_steps_and_tensors():
    off = numerics._distances(outcome(kl=4.0, weights=(1.5, NAN), tensor=2.0), outcome())
    assert off == {"loss": 0.0, "kl": 3.0, "weights": 0.5, "parameters": 4.0}


@pytest.mark.parametrize("change", [{"kl": NAN}, {"weights": (1.0, 1.0)}, {"tensor": NAN}])
def test_no_number_is_infinitely_far_from_one(change):
    assert np.inf in numerics._distances(outcome(**change), outcome()).values()
    assert np.inf in numerics._distances(outcome(), outcome(**change)).values()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pytorchs_residual_stream_is_of_the_activations_type(dtype):
    torch = pytest.importorskip("torch")
    settings = BenchSettings("long", "nano", 0.05, groups=1, group_size=2, turns=2)
    seen = set()
    with prepared(settings, dtype) as inputs:
        sweeps = numerics._eager_sweeps(inputs)
        for model in (sweeps.model, sweeps._sweep.reference):
            model.model.norm.register_forward_pre_hook(lambda _, x: seen.add(x[0].dtype))
        sweeps.run()
    assert seen == {getattr(torch, jnp.dtype(dtype).name)}
