"""An exact fingerprint of arrays, for comparing the state of two runs."""

from __future__ import annotations

import hashlib
from typing import Any

import jax

from seeupo_jax.parallel.distributed import to_host


def checksum(tree: Any) -> str:
    """The SHA-256 of a pytree's leaves: where each stands, its dtype, shape and bytes.

    One differing bit changes it; which devices hold the arrays, and how they are sharded, does not.
    Leaves are brought to the host one at a time. Where other processes hold parts of an array this
    gathers it, so every process must call it.

    Args:
      tree: a pytree of arrays, scalars and typed random keys.

    Returns:
      64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind = str(leaf.dtype) if _is_key(leaf) else ""
        array = to_host(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        name = jax.tree_util.keystr(path)
        # repr delimits the parts, so that no two trees give the same stream of bytes.
        digest.update(repr((name, kind, str(array.dtype), array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
