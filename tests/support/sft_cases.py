"""Small supervised runs: conversations of the order desk, and a policy of one layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from places import TINY

from seeupo_jax.envs.order_desk.demonstrator import demonstrate

# A network of one layer (`run_cases.save_policy`) on rows of one length: few programs.
CHOICES = (
    "warm_start.stages=()",
    "model.remat=none",
    "batching.buckets=(128,)",
    "optimizer.learning_rate=0.01",
    "telemetry.trackers=()",
    "sft.batch_size=4",
    "sft.held_out=0.2",
    "sft.eval_every=2",
    "checkpoint.every=2",
)


def write_desk(path: Path, count: int = 20, split: str = "train") -> Path:
    """A file of the order desk's demonstrations."""
    lines = []
    for index in range(count):
        shown, _ = demonstrate(f"{split}/{index}", skill=1.0)
        lines.append({"messages": list(shown.messages), "tools": list(shown.tools)})
    return write(path, lines)


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(model: Path, data: Path | str, workdir: Path, *choices: str) -> list[str]:
    overrides = [f"--config.{choice}" for choice in (f"model.path={model}", *CHOICES, *choices)]
    return [f"--config={TINY}", f"--data={data}", f"--workdir={workdir}", *overrides]
