"""The quickstart's training from its start to its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import seeupo_jax
from seeupo_jax.bench.accelerator.record import NotHere, Record
from seeupo_jax.bench.settings import Settings

CONFIG = Path(seeupo_jax.__path__[0]).parent / "configs" / "quickstart.py"
_SMALLEST = {  # of a rehearsal
    "iterations": 1,
    "rollout.tasks": 2,
    "rollout.group_size": 2,
    "rollout.max_turns": 2,
    "evaluation.tasks": 1,
    "evaluation.every": 0,
    "evaluation.k": 1,
    "checkpoint.every": 0,
    "batching.buckets": "(128,)",  # one shape, to be compiled once
    "batching.microbatch_tokens": 128,
}


def train(record: Record, _: Settings, rehearse: bool) -> None:
    """Trains by the command; the figures are the curve of avg@k, and the seconds.

    This process must not take the device: of a TPU there is one process.

    Raises:
      NotHere: no configuration file. RuntimeError: the training failed.
    """
    if not CONFIG.is_file():
        raise NotHere(f"no file {CONFIG}: the quickstart needs a checkout of the repository")
    chosen = {"telemetry.trackers": "[]", "telemetry.display": "plain"}
    chosen |= _SMALLEST if rehearse else {}
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "seeupo_jax.train", f"--config={CONFIG}"]
        line += [f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in chosen.items())]
        began = time.perf_counter()
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.perf_counter() - began
        print(done.stdout)
        if done.returncode:
            said = [text for text in done.stdout.splitlines() if text.strip()]
            raise RuntimeError(f"training ended with {done.returncode}: {''.join(said[-1:])}")
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    keys = {key for values in metrics for key in values}
    (name,) = (key for key in keys if re.fullmatch(r"eval/avg@\d+", key))
    record.put(
        figures={
            "metric": name,
            "curve": [[each["iteration"], each[name]] for each in metrics if name in each],
            "seconds": seconds,
            "iterations": max(each["iteration"] for each in metrics),
            "compile_s": sum(each.get("time/compile_s", 0.0) for each in metrics),
        }
    )
