"""Fused kernels equal plain attention, lower for their platforms, and are selected by shape."""

import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, sharding
from seeupo_jax.policy.kernels import attention as attention_lib
from seeupo_jax.policy.kernels import fused
from seeupo_jax.policy.kernels.attention import KeyValues, attend
from seeupo_jax.policy.kernels.fused import (
    check_kernel,
    kernel_for,
    preferred_kernel,
    select_kernel,
)

SHAPE = {"length": 256, "head_dim": 64, "kv_heads": 2, "heads": 4, "dtype": "bfloat16"}
LENGTH = 256


def random_pass(seed, N, H, kv_heads, d, L=LENGTH, dtype=np.float32):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(N, L, heads, d)) for heads in (H, kv_heads))
    v = rng.uniform(-1, 1, size=k.shape)  # outputs stay below 1: absolute errors are relative ones
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def packed_rows(N, L=LENGTH):
    """Three sequences a row, of lengths that no block divides and that differ between the rows."""
    segment_NL = np.stack(
        [np.searchsorted([37 + n, 170 + n], np.arange(L), "right") for n in range(N)]
    )
    starts = np.stack([np.asarray([0, 37 + n, 170 + n])[segment_NL[n]] for n in range(N)])
    return jnp.asarray(segment_NL, jnp.int32), jnp.asarray(np.arange(L) - starts, jnp.int32)


def attention(q, k, v, *, packed, window, kernel):
    N, L = q.shape[:2]
    segment_NL, position_NL = (
        packed_rows(N, L) if packed else (None, jnp.broadcast_to(jnp.arange(L), (N, L)))
    )
    return attend(
        q,
        KeyValues(k, v),
        position_NL,
        position_NL,
        window=window,
        segment_NL=segment_NL,
        key_segment_NC=segment_NL,
        kernel=kernel,
    )


def with_gradients(f, qkv, seed=9):
    """Output and gradients of a random projection of it."""
    out_of = jax.eval_shape(f, *qkv)
    weight = jnp.asarray(np.random.default_rng(seed).normal(size=out_of.shape), jnp.float32)

    def loss(*qkv):
        return (lambda out: (jnp.sum(out * weight), out))(f(*qkv))

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    return out, gradients


def assert_equal_pass(got, wanted):
    np.testing.assert_allclose(got[0], wanted[0], atol=2e-6)
    for name, x, y in zip("qkv", got[1], wanted[1], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), err_msg=name)


def through(kernel, **case):
    """`attention` by a kernel; cuDNN's wrapper runs its XLA twin, for want of a GPU."""
    return functools.partial(attention, kernel=kernel, **case)


@functools.cache
def one_pass(kernel, H, kv_heads, d, packed, window):
    """Output and gradients of one kernel, compiled once for all that are compared with it."""
    f = through(kernel, packed=packed, window=window)
    return jax.device_get(with_gradients(f, random_pass(0, 2, H, kv_heads, d)))


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    f = functools.partial(fused.cudnn, _implementation="xla")
    monkeypatch.setitem(attention_lib._FUSED, "cudnn", f)


@pytest.mark.parametrize(
    "H, kv_heads, d, packed, window",
    [
        (7, 1, 128, False, None),
        (4, 2, 64, True, None),
        (2, 1, 128, False, 50),
        (4, 2, 40, True, 50),
    ],
)
@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_a_fused_kernel_equals_plain_attention(
    cudnn_by_xla, kernel, H, kv_heads, d, packed, window
):
    got, wanted = (one_pass(name, H, kv_heads, d, packed, window) for name in (kernel, "xla"))
    assert_equal_pass(got, wanted)


@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_devices_with_their_own_rows_and_heads_give_what_one_device_gives(cudnn_by_xla, kernel):
    qkv = random_pass(1, 4, 4, 2, 64, L=128)
    f = through(kernel, packed=True, window=50)
    alone = with_gradients(f, qkv)
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        sharded = with_gradients(f, qkv)
        assert_equal_pass(sharded, alone)
        by_device = sharding(mesh, ("rows", "length", "heads", "head_dim"))
    assert sharded[0].sharding.is_equivalent_to(by_device, 4)


def test_splash_in_bfloat16_is_as_near_to_the_exact_result_as_plain_attention():
    qkv = random_pass(2, 1, 2, 1, 128, L=128, dtype=jnp.bfloat16)

    def run(kernel, qkv):
        return jax.jit(through(kernel, packed=False, window=None))(*qkv)

    exact = run("xla", [x.astype(jnp.float32) for x in qkv])
    splash, plain = run("splash", qkv), run("xla", qkv)
    assert splash.dtype == jnp.bfloat16
    assert np.abs(splash - exact).max() <= 1.5 * np.abs(plain - exact).max()


@pytest.mark.parametrize("H, kv_heads, d, window", [(7, 1, 128, None), (4, 2, 64, 50)])
def test_splash_lowers_for_tpu_from_a_machine_without_one(H, kv_heads, d, window):
    qkv = random_pass(3, 2, H, kv_heads, d, dtype=jnp.bfloat16)
    f = through("splash", packed=True, window=window)

    def loss(*qkv):
        return f(*qkv).astype(jnp.float32).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1, 2))), platforms=["tpu"])(*qkv)
    # Forward, queries' gradient, keys' gradient, and no interpreter beside them.
    assert exported.mlir_module().count("@tpu_custom_call(") == 3


def test_cudnn_lowers_for_cuda_with_its_window_and_without_a_needless_mask(monkeypatch):
    # Without a GPU only the version of cuDNN is missing.
    library = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91000)
    qkv = random_pass(4, 2, 7, 1, 128, dtype=jnp.bfloat16)

    def lowered(**case):
        def loss(*qkv):
            return through("cudnn", **case)(*qkv).astype(jnp.float32).sum()

        calls = ("Softmax", "SoftmaxBackward", "ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward")
        unchecked = [jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmha{c}") for c in calls]
        grad = jax.jit(jax.grad(loss, (0, 1, 2)))
        export = jax.export.export(grad, platforms=["cuda"], disabled_checks=unchecked)
        text = export(*qkv).mlir_module()
        return [c for c in calls if f"@__cudnn$fmha{c}(" in text], text

    calls, text = lowered(packed=False, window=50)
    assert calls == ["Softmax", "SoftmaxBackward"]
    assert re.search(r"sliding_window_length[^,]*: 50,", text) and re.search(
        r"mask_type[^,]*CAUSAL", text
    )
    assert lowered(packed=True, window=None)[0] == ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]


@pytest.mark.parametrize(
    "length, size", [(128, 128), (384, 384), (640, 128), (768, 384), (1024, 512), (4096, 512)]
)
def test_splash_blocks_divide_the_length_and_stay_below_512(length, size):
    blocks = fused._blocks(length)
    names = [field.name for field in dataclasses.fields(blocks) if field.name.startswith("block_")]
    assert {name: operator.attrgetter(name)(blocks) for name in names} == dict.fromkeys(names, size)


@pytest.mark.parametrize(
    "wanted, change, reason",
    [
        ("splash", {"length": 96}, "splash needs a length divisible by 128: got 96"),
        ("splash", {"head_dim": 68}, "splash needs a head_dim divisible by 8: got 68"),
        ("cudnn", {"dtype": "float32"}, "cudnn needs bfloat16 or float16: got float32"),
        ("cudnn", {"head_dim": 256}, "cudnn needs a head_dim up to 128, divisible by 8: got 256"),
        ("cudnn", {"head_dim": 68}, "cudnn needs a head_dim up to 128, divisible by 8: got 68"),
        ("cudnn", {"length": 255}, "cudnn needs an even length: got 255"),
        ("cudnn", {"cap": True}, "cudnn does not bound attention scores"),
        ("splash", {"sinks": True}, "splash has no attention sinks"),
    ],
)
def test_a_shape_that_a_kernel_cannot_take_falls_back_with_the_reason(wanted, change, reason):
    assert select_kernel(wanted, **SHAPE) == (wanted, "as wanted")
    assert select_kernel(wanted, **SHAPE | change) == ("xla", reason)
    assert select_kernel("xla", **SHAPE | change) == ("xla", "as wanted")


@pytest.mark.parametrize("wanted", ["splash", "cudnn"])
def test_a_mesh_that_splits_a_head_falls_back_with_the_reason(wanted):
    shape = SHAPE | {"heads": 12, "kv_heads": 6}
    with jax.set_mesh(make_mesh(schema.Mesh(data=4, tensor=2))):
        assert select_kernel(wanted, **shape)[0] == wanted
    with jax.set_mesh(make_mesh(schema.Mesh(data=2, tensor=4))):
        reason = f"{wanted} needs kv_heads divisible by mesh axis tensor=4: got 6"
        assert select_kernel(wanted, **shape) == ("xla", reason)
        # Of two key-value heads each is copied, for six query heads each.
        assert select_kernel(wanted, **shape | {"kv_heads": 2}) == (wanted, "as wanted")


def test_a_fallback_is_logged_once_for_each_shape(caplog):
    fused._log_fallback.cache_clear()
    for length in (96, 256, 96, 200):
        kernel_for("splash", **SHAPE | {"length": length})
    assert [record.getMessage() for record in caplog.records] == [
        "Attention by xla instead of splash: splash needs a length divisible by 128: got 96.",
        "Attention by xla instead of splash: splash needs a length divisible by 128: got 200.",
    ]


def test_each_platform_prefers_its_own_kernel():
    wanted = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn", "cpu": "xla", "rocm": "xla"}
    assert {platform: preferred_kernel(platform) for platform in wanted} == wanted
    for platform in wanted:
        check_kernel(preferred_kernel(platform), platform)


def test_a_kernel_that_cannot_run_on_a_platform_is_refused():
    check_kernel("splash", "cpu")
    check_kernel("xla", "gpu")
    with pytest.raises(ValueError, match="'cudnn' on cpu; allowed: 'xla' here, or 'cudnn' on gpu"):
        check_kernel("cudnn", "cpu")
    with pytest.raises(ValueError, match="'splash' on gpu; allowed: 'cudnn' here, or 'splash' on"):
        check_kernel("splash", "gpu")


@pytest.mark.parametrize(
    "f", [lambda name: select_kernel(name, **SHAPE), lambda name: check_kernel(name, "tpu")]
)
def test_an_unknown_kernel_lists_those_that_are_known(f):
    with pytest.raises(ValueError, match="got 'flash'; allowed: xla, all_pairs, splash, cudnn"):
        f("flash")
