"""Equal parameters have equal fingerprints wherever they lie; one bit makes another."""

import sys

import jax
import jax.numpy as jnp
import loaded_python
import numpy as np
import pytest
from places import SUPPORT
from process_cases import environment

from seeupo_jax.configuration.schema import Mesh
from seeupo_jax.parallel.fingerprint import device_sums, fingerprint, host_sums, mix
from seeupo_jax.parallel.mesh import make_mesh, sharding


def numbers(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_the_mixing_is_murmur3s():
    # Of the reference implementation, MurmurHash3.cpp's fmix32.
    got = mix(jnp.array([0, 1, 0xDEADBEEF, 0xFFFFFFFF], jnp.uint32))
    assert [hex(x) for x in np.asarray(got)] == ["0x0", "0x514e28b7", "0xde5c6a9", "0x81f16f39"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_every_bit_of_every_element_counts(dtype):
    x = numbers((8, 16), dtype)
    width = x.dtype.itemsize * 8
    found = {fingerprint({"x": x})}
    bits = np.array(jax.lax.bitcast_convert_type(x, f"uint{width}"))
    for place, bit in [((0, 0), 0), ((7, 15), width - 1), ((3, 5), 1), ((5, 3), 1)]:
        changed = bits.copy()
        changed[place] ^= bits.dtype.type(1) << bits.dtype.type(bit)
        found.add(fingerprint({"x": jax.lax.bitcast_convert_type(changed, x.dtype)}))
    assert len(found) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "float64"])
@pytest.mark.parametrize("shape", [(), (7,), (8, 16), (3, 5, 2), (0, 4)])
def test_the_host_adds_up_what_devices_do(shape, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = numbers(shape, dtype)
        assert x.dtype == dtype
        wanted = [int(each) for each in device_sums(x)]
    assert [int(each) for each in host_sums(np.asarray(x))] == wanted


def test_order_shape_name_and_type_count():
    x = numbers((8, 16))
    others = [
        {"x": x},
        {"y": x},
        {"x": x[::-1]},
        {"x": x[:, ::-1]},
        {"x": x.reshape(16, 8)},
        {"x": x.at[0, 0].set(x[0, 1]).at[0, 1].set(x[0, 0])},
        {"x": x, "y": x[0]},
        {"x": x[0], "y": x},
        {"x": x.astype(jnp.bfloat16)},
        {"x": jnp.zeros((8, 16))},
        {"x": jnp.zeros((8, 16), jnp.int32)},
        {"x": -jnp.zeros((8, 16))},
    ]
    assert len({fingerprint(each) for each in others}) == len(others)


def test_how_an_array_is_cut_makes_no_difference():
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    x = {"x": numbers((8, 16)), "s": numbers(())}
    wanted = fingerprint(x)
    for axes in (("rows", None), (None, "rows"), ("rows",), ()):
        where = sharding(mesh, axes)
        assert fingerprint(x | {"x": jax.device_put(x["x"], where)}) == wanted
    with jax.set_mesh(mesh):
        assert fingerprint(x) == wanted


def test_small_steps_are_told_apart():
    x = numbers((64, 64))
    assert len({fingerprint([x * np.float32(1 + 2e-7 * i)]) for i in range(20)}) == 20


def test_however_many_leaves_devices_share_they_do_not_wait_for_each_other():
    command = [sys.executable, str(SUPPORT / "fingerprint_process.py")]
    done = loaded_python.run(command, env=environment(8), timeout=60)
    assert done.stdout.strip() == fingerprint([jnp.ones((8, 16))] * 1000), done.stderr
