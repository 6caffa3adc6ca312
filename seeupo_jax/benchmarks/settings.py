"""The settings of a benchmark, each with its default and its flag; the models that they name."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flax import nnx

from seeupo_jax.configuration.flags import (
    Flags,
    Wrong,
    integer,
    names,
    one_of,
    output_file,
    positive,
)
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.tokenizer import Tokenizer
from seeupo_jax.policy.transformer import Transformer

# Ways to run the PyTorch baseline. The recipe is the reference implementation's: a turn's batch is
# padded with trajectories that do not have the turn. Packed is eager, on rows of a group each: what
# its conversations begin with is computed once.
RECIPE, PACKED = "recipe", "packed"
CONTENDERS = ("eager", "compile", RECIPE, PACKED)
GENERATE = ("resent", "kept", "static")  # ways to sample by `generate`
WORKLOADS = ("bfcl", "order_desk", "appworld", "long")  # lengths; see `workloads.py`
PADDED = "padded"  # as `PACKED`, a way to batch conversations for `transformers`
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


def _some(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between them, or `none`; any names where `allowed` is empty."""

    def read(value: str) -> tuple[str, ...]:
        given = () if value == "none" else tuple(names(value))
        for name in given:
            if allowed and name not in allowed:
                raise Wrong(name, f"none, or some of {', '.join(allowed)}")
        return given

    return read


def _flag(default: Any, kind: Callable[[str], Any], words: str, of: str = "") -> Any:
    """A field whose flag the benchmarks named in `of` have; by default all."""
    benchmarks = of.split() or ("update", "rollout", "iteration", "gain", "sft")
    return dataclasses.field(
        default=default, metadata={"kind": kind, "words": words, "of": benchmarks}
    )


@dataclass(frozen=True)
class BenchSettings:
    """Settings of one run. None: the workload's or the device's own value."""

    workload: str = _flag("bfcl", one_of(*WORKLOADS), f"lengths of: {', '.join(WORKLOADS)}")
    model: str = _flag("tiny", one_of(*MODELS), f"random weights of a size: {', '.join(MODELS)}")
    scale: float | None = _flag(None, positive, "of the workload's lengths; 1 is real")
    groups: int = _flag(2, integer(1), "prompts")
    group_size: int = _flag(8, integer(2), "conversations that begin with each prompt")
    turns: int | None = _flag(None, integer(1), "cut or stretch the conversations to so many")
    prompt: int | None = _flag(
        None, integer(1), "tokens of the prompts; default: the workload's own"
    )
    repeats: int = _flag(3, integer(1), "timed runs of each contender")
    seed: int = _flag(0, integer(0), "of weights, tokens and rewards")
    torch: tuple[str, ...] = _flag(
        CONTENDERS,
        _some(*CONTENDERS),
        "of eager,compile,recipe,packed: how the baseline runs; none: it does not",
        "update iteration",
    )
    torch_tokens: int | None = _flag(
        None,
        integer(1),
        "of a microbatch of the baseline, at most; default: by the device",
        "update iteration sft",
    )
    without: tuple[str, ...] = _flag(
        (), _some(), "techniques to leave out, one at a time; or all", "update"
    )
    generate: tuple[str, ...] = _flag(
        ("resent", "kept"),
        _some(*GENERATE),
        "of resent,kept,static: how generate samples; none: it does not",
        "rollout",
    )
    batches: tuple[str, ...] = _flag(
        (PADDED, PACKED),
        _some(PADDED, PACKED),
        "of padded,packed: how the baseline batches conversations; none: it does not run",
        "sft",
    )
    slots: int | None = _flag(
        None, integer(1), "conversations that decode together; default: all", "rollout iteration"
    )
    decode_steps: int = _flag(
        16, integer(1), "tokens that a dispatch decodes at most", "rollout iteration"
    )

    def command(self, benchmark: str) -> str:
        """The command line of a run: the flags that differ from their defaults."""
        line = ["python -m seeupo_jax.bench", benchmark]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                value = ",".join(value) or "none" if isinstance(value, tuple) else value
                line.append(f"--{field.name}={value}")
        return " ".join(line)


def add_flags(parser: Flags, benchmark: str) -> None:
    """The flags of a benchmark, and where its figures go."""
    for field in dataclasses.fields(BenchSettings):
        if benchmark in field.metadata["of"]:
            kind, words = field.metadata["kind"], field.metadata["words"]
            parser.flag(field.name, words, kind, default=field.default)
    parser.flag("json", "also write the figures to this file", output_file)


def read(given: argparse.Namespace) -> BenchSettings:
    """The settings among a parser's values."""
    fields = {field.name for field in dataclasses.fields(BenchSettings)}
    return BenchSettings(**{name: value for name, value in vars(given).items() if name in fields})


def architecture(name: str, dtype: str) -> Architecture:
    """The architecture of one of `MODELS`, with activations of type `dtype`."""
    return Architecture(**MODELS[name], dtype=dtype)


def write_model(
    arch: Architecture,
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    seed: int,
    dtype: str = "float32",
) -> None:
    """A folder with random weights of type `dtype`, which both sides load."""
    save_pretrained(Transformer(arch, nnx.Rngs(seed)), folder, tokenizer, dtype=dtype)
