"""The settings of a benchmark: the flags that all of them share, and each one's own."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.configuration.flags import Flags
from seeupo_jax.configuration.flags import path as file_path

# Ways to run the PyTorch baseline. The recipe is the reference implementation's: a turn's batch is
# padded with trajectories that do not have the turn.
RECIPE = "recipe"
CONTENDERS = ("eager", "compile", RECIPE)
GENERATE = ("resent", "kept", "static")  # ways to sample by `generate`


@dataclass(frozen=True)
class Settings:
    """Of one run; None is what the workload says, or has.

    scale: of a workload's lengths. groups: prompts. group_size: conversations that begin with each.
    turns, prompt: cut or stretch the conversations to so many turns, the prompts to so many tokens.
    repeats: timed runs of each contender. seed: of weights, tokens and rewards.
    torch: how the baseline runs; empty: it does not. torch_tokens: of its microbatches,
      at most; None: what suits the device.
    without: techniques of `bench/runners/ablations.py`, each left out by a contender of its own.
    generate: how `generate` samples; empty: it does not.
    slots: conversations that decode together; None: all. decode_steps: tokens of a dispatch.
    """

    workload: str = "bfcl"
    model: str = "tiny"
    scale: float | None = None
    groups: int = 2
    group_size: int = 8
    turns: int | None = None
    prompt: int | None = None
    repeats: int = 3
    seed: int = 0
    torch: tuple[str, ...] = CONTENDERS
    torch_tokens: int | None = None
    without: tuple[str, ...] = ()
    generate: tuple[str, ...] = ("resent", "kept")
    slots: int | None = None
    decode_steps: int = 16

    def __post_init__(self) -> None:
        least = {"group_size": 2, "seed": 0} | dict.fromkeys(
            ("groups", "turns", "prompt", "repeats", "torch_tokens", "slots", "decode_steps"), 1
        )
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"--{name}: got {value}; allowed: a whole number >= {low}.")
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise ValueError(f"--scale: got {self.scale}; allowed: a number > 0.")
        for flag, allowed in (("torch", CONTENDERS), ("generate", GENERATE)):
            wrong = [name for name in getattr(self, flag) if name not in allowed]
            if wrong:
                raise ValueError(
                    f"--{flag}: got {wrong[0]!r}; allowed: none, or some of {', '.join(allowed)}."
                )

    def flags(self) -> list[str]:
        """Those that differ from what is chosen without any, as a command line has them."""
        found = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                found.append(f"--{field.name}")
            elif isinstance(value, tuple):
                found.append(f"--{field.name}={','.join(value) if value else 'none'}")
            else:
                found.append(f"--{field.name}={value}")
        return found


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(text.split(","))


_SHARED: dict[str, tuple[Callable[[str], Any], str]] = {
    "workload": (str, "of bench/workloads.py: bfcl, order_desk, appworld, long"),
    "model": (str, "random weights of a size: nano, tiny, 135m, 0.5b, 1.5b"),
    "scale": (float, "of the workload's lengths; 1 is real"),
    "groups": (int, "prompts"),
    "group_size": (int, "conversations that begin with each"),
    "turns": (int, "cut or stretch the conversations to so many"),
    "prompt": (int, "tokens of the prompts, instead of the workload's own"),
    "repeats": (int, "timed runs of each contender"),
    "seed": (int, "of weights, tokens and rewards"),
}
_SWEEP: dict[str, tuple[Callable[[str], Any], str]] = {
    "torch": (_names, "of eager,compile,recipe: how the baseline runs; none: it does not"),
    "torch_tokens": (int, "of a microbatch of the baseline, at most; default: by the device"),
}
OWN: dict[str, dict[str, tuple[Callable[[str], Any], str]]] = {
    "update": _SWEEP | {"without": (_names, "techniques to leave out, one at a time; or all")},
    "rollout": {
        "generate": (_names, "of resent,kept,static: how generate samples; none: it does not"),
        "slots": (int, "conversations that decode together; default: all"),
        "decode_steps": (int, "tokens that a dispatch decodes at most"),
    },
    "iteration": _SWEEP
    | {
        "slots": (int, "conversations that decode together; default: all"),
        "decode_steps": (int, "tokens that a dispatch decodes at most"),
    },
}


def add_flags(parser: Flags, benchmark: str) -> None:
    """The flags of a benchmark, and where its figures go."""
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, (kind, words) in (_SHARED | OWN[benchmark]).items():
        parser.flag(name, words, kind, default=defaults[name])
    parser.flag("json", "also write the figures to this file", file_path)


def read(given: argparse.Namespace) -> Settings:
    """The settings among what a parser has read.

    Raises:
      ValueError: a number that is too small.
    """
    names = {field.name for field in dataclasses.fields(Settings)}
    return Settings(**{name: value for name, value in vars(given).items() if name in names})


def command(benchmark: str, settings: Settings) -> str:
    """The command line of a run."""
    return " ".join(["python -m seeupo_jax.bench", benchmark, *settings.flags()])


def check_json(path: Path | None) -> None:
    """Raises ValueError where the figures could not be written in the end."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--json: got {path}; allowed: a file in a folder that can be written.")


def split(argv: Sequence[str], commands: Sequence[str]) -> str:
    """The command among the arguments.

    Raises:
      ValueError: none, or an unknown one.
    """
    if len(argv) < 2 or argv[1] not in (*commands, "-h", "--help"):
        got = argv[1] if len(argv) > 1 else ""
        raise ValueError(f"bench: got {got!r}; allowed: one of {', '.join(commands)}.")
    return argv[1]
