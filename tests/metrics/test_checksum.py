"""The fingerprint of state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from seeupo_jax.metrics.checksum import checksum


def _tree():
    params = {"w": jnp.arange(16.0).reshape(8, 2), "b": jnp.ones(2, jnp.bfloat16)}
    return {"params": params, "opt": optax.adam(1e-3).init(params), "key": jax.random.key(3)}


def test_equal_trees_agree_and_the_fingerprint_is_a_sha256():
    assert checksum(_tree()) == checksum(_tree())
    assert len(bytes.fromhex(checksum(_tree()))) == 32


def test_one_bit_changes_it():
    tree = _tree()
    bits = np.asarray(tree["params"]["w"]).view(np.uint32).copy()
    bits[3, 1] ^= 1
    tree["params"]["w"] = jnp.asarray(bits.view(np.float32))
    assert checksum(tree) != checksum(_tree())


def test_a_zero_and_its_negative_differ():
    assert checksum(jnp.array([0.0])) != checksum(jnp.array([-0.0]))


def test_names_places_shapes_and_types_change_it():
    array = np.arange(4, dtype=np.int32)
    trees = [
        {"a": array},
        {"b": array},
        [array],
        {"a": {"a": array}},
        {"a": array.reshape(2, 2)},
        {"a": array.view(np.uint32)},
        {"a": array[:2], "b": array[2:]},
        {"a": array.view(np.float32)},
    ]
    assert len({checksum(tree) for tree in trees}) == len(trees)


def test_random_keys_count_with_their_kind():
    key = jax.random.key(3)
    assert checksum(key) == checksum(jax.random.key(3))
    assert checksum(key) != checksum(jax.random.key(4))
    assert checksum(key) != checksum(jax.random.key_data(key))


def test_where_arrays_live_changes_nothing():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    tree = _tree()
    plain = checksum(tree)
    for spec in (PartitionSpec("x", "y"), PartitionSpec(("x", "y")), PartitionSpec()):
        tree["params"]["w"] = jax.device_put(_tree()["params"]["w"], NamedSharding(mesh, spec))
        assert checksum(tree) == plain
    tree["params"]["w"] = np.asarray(tree["params"]["w"])
    assert checksum(tree) == plain


def test_host_memory_order_changes_nothing():
    array = np.arange(6.0).reshape(2, 3)
    assert checksum(np.asfortranarray(array)) == checksum(array)
