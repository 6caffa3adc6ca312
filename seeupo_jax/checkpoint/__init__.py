"""Checkpoints of a run, in a folder or a bucket."""

from seeupo_jax.checkpoint.checkpoints import Checkpoints, SaveError
from seeupo_jax.checkpoint.storage import (
    check_could_write,
    check_writable,
    find_directory,
    is_bucket,
    reason,
)
from seeupo_jax.checkpoint.together import check_shared, exclusive_output, exclusive_run

__all__ = [
    "Checkpoints",
    "SaveError",
    "check_could_write",
    "check_shared",
    "check_writable",
    "exclusive_output",
    "exclusive_run",
    "find_directory",
    "is_bucket",
    "reason",
]
