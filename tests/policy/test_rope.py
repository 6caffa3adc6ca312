"""Rotation on hand-worked values, and frequencies against those of transformers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from numpy_model import Architecture, _rope
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from seeupo_jax.policy.rope import Rope, frequencies, rotate

LLAMA = Rope(500_000.0, "llama3", factor=32.0, original_positions=8192)
YARN = Rope(1_000_000.0, "yarn", factor=4.0, original_positions=32_768)
# The one field that has another name there; the others are theirs.
NAMES = {
    "theta": "rope_theta",
    "scaling": "rope_type",
    "original_positions": "original_max_position_embeddings",
}
READ = {  # what a config.json may say for each scaling
    "none": ("theta", "scaling"),
    "linear": ("theta", "scaling", "factor"),
    "dynamic": ("theta", "scaling", "factor"),
    "llama3": (
        *("theta", "scaling", "factor", "original_positions"),
        *("low_freq_factor", "high_freq_factor"),
    ),
    "yarn": (
        *("theta", "scaling", "factor", "original_positions", "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def of_transformers(rope, head_dim):
    fields = {name: value for name, value in vars(rope).items() if name in READ[rope.scaling]}
    said = {NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    if rope.scaling == "none":
        said["rope_type"] = "default"
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=said
    )
    compute = ROPE_INIT_FUNCTIONS.get(
        said["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    frequency, scale = compute(config)
    return frequency.numpy(), scale


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        Rope(),
        Rope(1_000_000.0),
        Rope(10_000.0, "linear", factor=2.5),
        Rope(10_000.0, "dynamic", factor=4.0),  # within the model's own context
        LLAMA,
        dataclasses.replace(LLAMA, factor=8.0, low_freq_factor=2.0, high_freq_factor=5.0),
        YARN,
        dataclasses.replace(YARN, attention_factor=0.75),
        dataclasses.replace(YARN, mscale=0.707, mscale_all_dim=1.3),
        dataclasses.replace(YARN, mscale=0.707),
        dataclasses.replace(YARN, mscale=0.0, mscale_all_dim=1.3),
        dataclasses.replace(YARN, truncate=False),
        dataclasses.replace(YARN, beta_fast=48.0, beta_slow=2.5, factor=40.0),
        # Ramps that begin before the first pair, end after the last, or have no width.
        dataclasses.replace(YARN, original_positions=64),
        dataclasses.replace(YARN, theta=100.0),
        dataclasses.replace(YARN, theta=20.0, original_positions=2**31),
        dataclasses.replace(YARN, beta_fast=4.0, beta_slow=4.0, truncate=False),
        dataclasses.replace(YARN, factor=1.0),
        dataclasses.replace(YARN, factor=0.5),
    ],
)
def test_frequencies_and_scale_are_those_of_transformers(rope, head_dim):
    frequency, scale = frequencies(rope, head_dim)
    wanted, wanted_scale = of_transformers(rope, head_dim)
    assert frequency.dtype == np.float32
    # Two units in the last place, of a power and of a division.
    np.testing.assert_allclose(frequency, wanted, rtol=2.4e-7)
    assert scale == pytest.approx(wanted_scale, rel=1e-12)


def test_an_unknown_scaling_lists_those_that_are_known():
    with pytest.raises(ValueError, match="got 'ntk'; allowed: none, linear, llama3, yarn, "):
        frequencies(Rope(scaling="ntk"), 8)


def test_linear_scaling_is_a_position_divided_by_the_factor():
    x = np.random.default_rng(2).normal(size=(1, 5, 2, 8)).astype(np.float32)
    position_NL = jnp.arange(5)[None]
    stretched = rotate(x, 4 * position_NL, Rope(50.0, "linear", factor=4.0))
    np.testing.assert_allclose(stretched, rotate(x, position_NL, Rope(50.0)), atol=1e-6)


def test_the_attention_scale_multiplies_what_is_rotated():
    x = np.random.default_rng(3).normal(size=(1, 5, 2, 8)).astype(np.float32)
    position_NL = jnp.arange(5)[None]
    plain, doubled = (
        rotate(x, position_NL, dataclasses.replace(YARN, attention_factor=factor))
        for factor in (1.0, 2.0)
    )
    np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-6)


def test_angles_are_float32_whatever_the_dtype_of_what_is_rotated():
    # bfloat16 cannot tell position 1001 from 1000.
    x = jnp.ones((1, 2, 1, 2), jnp.bfloat16)
    got = rotate(x, jnp.asarray([[1000, 1001]]), Rope())
    assert got.dtype == jnp.bfloat16
    angle = np.asarray([1000.0, 1001.0])
    wanted = np.stack([np.cos(angle) - np.sin(angle), np.cos(angle) + np.sin(angle)], axis=-1)
    np.testing.assert_allclose(got[0, :, 0].astype(np.float32), wanted, atol=0.01)


def test_rotation_equals_the_twin_at_any_position():
    x = np.random.default_rng(0).normal(size=(9, 2, 6)).astype(np.float32)
    wanted, _ = _rope(x, Architecture(head_dim=6, rope_theta=50.0))
    got = rotate(jnp.asarray(x[None]), jnp.arange(9)[None], Rope(50.0))
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)
    late = rotate(jnp.asarray(x[None, :1]), jnp.asarray([[4]]), Rope(50.0))
    alone, _ = _rope(np.repeat(x[:1], 5, axis=0), Architecture(head_dim=6, rope_theta=50.0))
    np.testing.assert_allclose(late[0, 0], alone[4], atol=1e-5)


@pytest.mark.parametrize("rope", [Rope(10.0), dataclasses.replace(LLAMA, theta=10.0)])
def test_only_the_distance_of_two_positions_matters_to_their_score(rope):
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def at(x, position):
        return rotate(x, jnp.asarray([[position]]), rope)

    scores = [float(jnp.sum(at(q, p + 3) * at(k, p))) for p in (0, 4, 11)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)
