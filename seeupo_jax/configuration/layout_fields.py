"""Fields that say where and how a run is computed: its numbers are the same up to rounding."""

from __future__ import annotations

# Of config.rollout.
ROLLOUT = tuple(
    "mesh concurrency slots cache_gib page_size decode_steps prefill_tokens deterministic"
    " reset_ahead_s".split()
)
# Of config.env: where and how environments are called.
PROCESSES = ("isolation", "memory_mib")
CALLS = ("workers", "timeout_s", "retries", "retry_wait_s")
# Of the configuration; a name stands for all fields below it.
LAYOUT = (
    *("log_checksum", "mesh", "batching", "offload", "model.remat", "model.attention"),
    *(f"rollout.{name}" for name in ROLLOUT),
    *(f"env.{name}" for name in (*PROCESSES, *CALLS)),
    *("judge.concurrency", "judge.timeout_s"),
)
