"""Checkpoints of a run, in a folder or a bucket."""

from seeupo_jax.checkpoint.checkpoints import Checkpoints, SaveError
from seeupo_jax.checkpoint.process_sync import check_shared, exclusive_output, exclusive_run
from seeupo_jax.checkpoint.storage import (
    NotWritable,
    check_may_write,
    check_path,
    check_replaceable,
    check_writable,
    find_directory,
    is_bucket,
    keep_root_logger,
)

__all__ = [
    "Checkpoints",
    "SaveError",
    "NotWritable",
    "check_may_write",
    "check_path",
    "check_replaceable",
    "check_shared",
    "check_writable",
    "exclusive_output",
    "exclusive_run",
    "find_directory",
    "is_bucket",
    "keep_root_logger",
]
