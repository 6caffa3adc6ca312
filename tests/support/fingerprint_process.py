"""Prints the fingerprint of many leaves that all devices hold a part of."""

import jax.numpy as jnp

from seeupo_jax.configuration.schema import Mesh
from seeupo_jax.parallel import fingerprint
from seeupo_jax.parallel.mesh import make_mesh, sharding

fingerprint._FEW = 0  # by the devices, as for leaves of millions of elements
where = sharding(make_mesh(Mesh(data=2, fsdp=2, tensor=2)), ("rows", None))
print(fingerprint.fingerprint([jnp.ones((8, 16), device=where)] * 1000))
