"""What both sides of a benchmark are given: a model, trajectories, and a configuration."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from seeupo_jax.bench import workloads
from seeupo_jax.bench.settings import Settings
from seeupo_jax.bench.workloads import Workload
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer

_QWEN = {"vocab_size": 151_936, "head_dim": 64, "kv_heads": 2, "qkv_bias": True, "qk_norm": False}
# For rehearsals, with the vocabulary of the order desk's tokenizer; Qwen3's layout; that of
# SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B.
MODELS: dict[str, dict[str, Any]] = {
    "nano": dict(vocab_size=896, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24),
    "tiny": dict(
        vocab_size=8192, width=256, layers=6, heads=4, kv_heads=2, head_dim=64, mlp_width=512
    ),
    "135m": dict(
        vocab_size=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_width=1536
    )
    | {"qk_norm": False},
    "0.5b": _QWEN | {"width": 896, "layers": 24, "heads": 14, "mlp_width": 4864},
    "1.5b": _QWEN | {"width": 1536, "layers": 28, "heads": 12, "mlp_width": 8960, "head_dim": 128},
}
# Large enough for the first sweep to change the weights M and the parameters, which are compared.
# With the usual eps Adam makes as much of a gradient that is nothing but rounding as of any other.
_LEARNING_RATE, _EPS = 1e-3, 1e-3


def architecture(name: str, dtype: str) -> Architecture:
    """Of one of `MODELS`.

    Args:
      dtype: of activations.

    Raises:
      ValueError: an unknown name.
    """
    if name not in MODELS:
        raise ValueError(f"--model: got {name!r}; allowed: {', '.join(MODELS)}.")
    return Architecture(**MODELS[name], dtype=dtype)


def write_model(arch: Architecture, folder: Path, *, seed: int, dtype: str = "float32") -> None:
    """A folder with random weights of type `dtype`, which both sides load."""
    save_pretrained(Transformer(arch, nnx.Rngs(seed)), folder, dtype=dtype)


@dataclass(frozen=True)
class Inputs:
    """Of one run.

    model: a folder. lines: a file of trajectories.
    fields: of the configuration by their full names; all others are as they are by default.
    """

    settings: Settings
    arch: Architecture
    work: Workload
    model: Path
    lines: Path
    fields: Mapping[str, Any]


@contextlib.contextmanager
def prepared(settings: Settings, dtype: str) -> Iterator[Inputs]:
    """Files of random weights, and of the workload's conversations with random actions.

    Args:
      dtype: of activations.

    Raises:
      ValueError: a wrong setting.
    """
    arch = architecture(settings.model, dtype)
    work = workloads.make(settings, arch.vocab_size)
    fields = {
        "seed": settings.seed,
        "model.dtype": dtype,
        "optimizer.name": "adam",
        "optimizer.learning_rate": _LEARNING_RATE,
        "optimizer.kwargs": {"eps": _EPS},
        "rollout.max_turns": work.turns,
        "rollout.temperature": 1.0,
    }
    with tempfile.TemporaryDirectory() as folder:
        model, lines = Path(folder, "model"), Path(folder, "trajectories.jsonl")
        write_model(arch, model, seed=settings.seed)
        actions = workloads.random_actions(work, settings.seed)
        made = workloads.trajectory_lines(work, actions, seed=settings.seed)
        lines.write_text("\n".join(made) + "\n")
        yield Inputs(settings, arch, work, model, lines, fields)
