"""Training runs as their users start them: in processes of their own, alone or several together."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import nnx
from loaded_python import LoadedPython
from metric_names import checked
from places import TINY
from process_cases import environment, free_port

from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer

# A network of one layer with random weights, and rewards that depend on every word it says. What is
# chosen leaves few programs, since every process traces its own.
CHOICES = (
    "--config.warm_start.stages=()",
    "--config.env.name=run_environment:Echo",
    "--config.model.remat=none",
    "--config.batching.buckets=(128,)",
    "--config.rollout.group_size=2",
    "--config.rollout.max_action_tokens=8",
    "--config.rollout.prefill_tokens=32",  # two programs, one for each length of its rows
    "--config.evaluation.tasks=6",
)


def save_policy(folder: Path, padding: int = 0, **choices: Any) -> Path:
    """Writes the policy that `CHOICES` are for, of these fields of its architecture.

    padding: so many ids of its vocabulary have no token.
    """
    _, tokenizer = from_pretrained("package:order_desk")
    arch = Architecture(
        vocab_size=tokenizer.vocab_size + padding,
        width=32,
        layers=1,
        heads=2,
        kv_heads=2,
        head_dim=16,
        mlp_width=64,
        **choices,
    )
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder, tokenizer)
    return folder


def command(model: Path, workdir: Path, *overrides: str, module: str = "train") -> list[str]:
    called = [sys.executable, "-m", f"seeupo_jax.{module}", f"--config={TINY}"]
    return [*called, f"--workdir={workdir}", f"--config.model.path={model}", *CHOICES, *overrides]


def start(
    model: Path,
    workdir: Path,
    *overrides: str,
    processes: int = 1,
    devices: int = 1,
    module: str = "train",
) -> list[subprocess.Popen[str]]:
    """The processes of a run, with so many devices each."""
    port = free_port()
    each = []
    for number in range(processes):
        place = [
            f"--coordinator=localhost:{port}",
            f"--process_id={number}",
            f"--num_processes={processes}",
        ]
        each.append(
            LoadedPython(
                command(
                    model, workdir, *overrides, *(place if processes > 1 else []), module=module
                ),
                env=environment(devices),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return each


def finish(each: Sequence[subprocess.Popen[str]], code: int = 0) -> list[str]:
    """Waits for the processes, which all end with this code; what each printed."""
    printed = [process.communicate(timeout=300) for process in each]
    for process, (_, errors) in zip(each, printed, strict=True):
        assert process.returncode == code, errors[-3000:]
    return [out for out, _ in printed]


def killed_after(checkpoint: int, workdir: Path, called: Sequence[str]) -> None:
    """A run that is killed as soon as it has left a checkpoint."""
    process = LoadedPython(called, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (workdir / "checkpoints" / str(checkpoint) / "manifest.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def iterations(workdir: Path) -> list[dict]:
    return [line for line in checked(read_metrics(workdir)) if "rollout/success_rate" in line]


def checksums(workdir: Path) -> list[tuple[int, str]]:
    return [(line["iteration"], line["state/checksum"]) for line in iterations(workdir)]
