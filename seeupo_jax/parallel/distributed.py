"""Communication of several processes: rows of global arrays, agreements, and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from seeupo_jax.parallel import codec
from seeupo_jax.parallel.mesh import row_shards, sharding
from seeupo_jax.parallel.side_channel import the_channel

_MAX, _GATHER, _BROADCAST = range(3)  # kinds of exchanges


def row_shard_owners(mesh: jax.sharding.Mesh) -> list[int]:
    """The process on whose devices each of the parts lies that rows are cut into.

    Raises:
      ValueError: a part lies on devices of several processes.
    """
    shards = row_shards(mesh)
    placed = sharding(mesh, ("rows",)).devices_indices_map((shards,))
    owners: dict[int, set[int]] = {}
    for device, (part,) in placed.items():
        owners.setdefault(part.start or 0, set()).add(device.process_index)
    split = [shard for shard, processes in owners.items() if len(processes) > 1]
    if split:
        raise ValueError(
            f"config.mesh.tensor (of config.rollout.mesh, where it is given): got"
            f" {mesh.shape['tensor']}, which spreads the devices of a row over several processes;"
            f" allowed: a size within the {jax.local_device_count()} devices of one."
        )
    return [owner for _, (owner,) in sorted(owners.items())]


def to_global(tree: Any, where: NamedSharding | None) -> Any:
    """Global arrays out of each process's own parts; None: this process's only device."""
    if where is None or jax.process_count() == 1:
        return jax.device_put(tree, where)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(where, x), tree)


def place(x: Any, where: NamedSharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all of them."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, where, lambda index: host[index])


def local_rows(x: jax.Array) -> np.ndarray:
    """This process's part of an array whose first axis is cut over processes."""
    if jax.process_count() == 1:
        return np.asarray(x)
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def max_over_processes(wants: Sequence[int]) -> list[int]:
    """The largest that any process wants, number by number."""
    if jax.process_count() == 1:
        return list(wants)
    every = the_channel().all_gather(np.array(wants, np.int64).tobytes(), _MAX)
    return np.max([np.frombuffer(each, np.int64) for each in every], axis=0).tolist()


def gather(x: Any, *types: type) -> list[Any]:
    """Every process's value, in the order of the processes, to all of them.

    Args:
      x: plain values and arrays, and dataclasses of `types`; see `codec.encode`.
    """
    if jax.process_count() == 1:
        return [x]
    every = the_channel().all_gather(codec.encode(x, types), _GATHER)
    return [codec.decode(each, types) for each in every]


def broadcast_from_primary(x: Any, *types: type) -> Any:
    """Process 0's value, as in `gather`, to all of them; what the others give is not looked at."""
    if jax.process_count() == 1:
        return x
    first = jax.process_index() == 0
    data = codec.encode(x, types) if first else b""
    return codec.decode(the_channel().all_gather(data, _BROADCAST)[0], types)


def to_host(x: Any) -> np.ndarray:
    """An array whole on the host; where processes hold parts of it, all of them must call."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)
