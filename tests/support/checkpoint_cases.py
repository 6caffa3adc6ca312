"""A state spread over a mesh, whose every number says where it stands."""

import jax
import jax.numpy as jnp
import numpy as np


def mesh(fsdp, tensor):
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.devices()[: fsdp * tensor]
    return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=axis_types, devices=devices)


def state(where, fill):
    """Arrays cut along both axes, along one, and whole everywhere; a key; on a mesh or nowhere."""
    values = {
        "params": {
            "w": ("fsdp", "tensor"),
            "b": ("tensor",),
            "scale": (),
        },
        "count": (),
    }
    shapes = {"w": (512, 64), "b": (64,), "scale": (64,)}
    rng = np.random.default_rng(fill)

    def put(value, spec):
        if where is None:
            return jnp.asarray(value)
        sharding = jax.NamedSharding(where, jax.P(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    params = {
        name: put(rng.normal(size=shapes[name]).astype(np.float32), spec)
        for name, spec in values["params"].items()
    }
    return {"params": params, "count": put(np.array(fill, np.int32), values["count"])}
