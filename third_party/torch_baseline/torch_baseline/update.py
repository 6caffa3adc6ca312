"""One sweep on stored trajectories, from a model folder to a model folder.

python -m torch_baseline.update --config=FILE.py --model=FOLDER --trajectories=FILE.jsonl
  --output=FOLDER [--json=OUT] [--config.field=value ...]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from torch_baseline.options import read_options
from torch_baseline.sweep import Result, Sweep
from torch_baseline.trajectories import Trajectory, read

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json", "config.json")


def main(argv: Sequence[str]) -> None:
    """Runs the command; a wrong input ends it with one sentence and exit status 2."""
    try:
        _run(_arguments(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def load(folder: str | Path, device: str = "cpu") -> Any:
    """A model folder as a float32 model, by `transformers`.

    Raises:
      ValueError: no such folder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"--model: got {str(folder)!r}; allowed: a folder with a config.json.")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.to(device)


def save(model: Any, source: str | Path, output: str | Path) -> None:
    """Writes a model, and beside it what else lay in the folder that it came from."""
    shutil.copytree(source, output, ignore=shutil.ignore_patterns(*_WEIGHTS), dirs_exist_ok=True)
    model.save_pretrained(output)


def check_tokens(trajectories: Sequence[Trajectory], vocab_size: int) -> None:
    """Raises ValueError where a token is outside the vocabulary."""
    for number, trajectory in enumerate(trajectories, 1):
        highest = max(int(segment.tokens.max(initial=0)) for segment in trajectory.segments)
        if highest >= vocab_size:
            raise ValueError(
                f"--trajectories: trajectory {number} has token {highest}; allowed: below the"
                f" model's {vocab_size}."
            )


def as_json(result: Result) -> dict[str, Any]:
    """A result as plain values; null for what is not a number."""
    steps = [
        {
            "turns": [step.turn],
            "loss": _number(step.loss),
            "kl": _number(step.kl),
            "grad_norm": _number(step.grad_norm),
            "clip_fraction": _number(step.clip_fraction),
            "weights": [_number(weight) for weight in step.weights],
        }
        for step in result.steps
    ]
    return {
        "steps": steps,
        "advantages": [_number(advantage) for advantage in result.advantages],
        "metrics": _metrics(result),
    }


def _metrics(result: Result) -> dict[str, float | None]:
    tokens, positions = sum(result.tokens.values()), sum(result.positions.values())
    metrics = {
        "sweep/turns": len({step.turn for step in result.steps}),
        "sweep/steps": len(result.steps) - result.skipped,
        "sweep/updates_skipped": result.skipped,
        "sweep/tokens": tokens,
        "sweep/padding_fraction": 1 - tokens / positions if positions else 0.0,
        "time/sweep_s": sum(result.seconds.values()),
        **{f"time/{phase}_s": seconds for phase, seconds in result.seconds.items()},
        **{f"tokens/{phase}": count for phase, count in result.tokens.items()},
    }
    if result.steps:
        for name in ("loss", "grad_norm"):
            values = [vars(step)[name] for step in result.steps]
            metrics[f"sweep/{name}"] = _number(np.mean(values))
    return metrics


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torch_baseline.update", description=__doc__, allow_abbrev=False
    )
    for name in ("config", "model", "trajectories", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--json")
    parser.add_argument("--override", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iteration", type=int, default=1)
    parser.add_argument("--microbatch_tokens", type=int, default=8192)
    for name in ("null_turns", "share_prefixes", "compile", "checkpointing"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args([re.sub(r"^--config\.", "--override=", text) for text in argv])


def _run(given: argparse.Namespace) -> None:
    names = ("null_turns", "share_prefixes", "microbatch_tokens", "compile", "checkpointing")
    options = read_options(
        given.config, given.override, **{name: getattr(given, name) for name in names}
    )
    trajectories = read(given.trajectories)
    model = load(given.model, given.device)
    check_tokens(trajectories, model.config.vocab_size)
    Path(given.output).mkdir(parents=True, exist_ok=True)
    result = Sweep(model, options).run(trajectories, iteration=given.iteration)
    save(model, given.model, given.output)
    if given.json is not None:
        Path(given.json).write_text(json.dumps(as_json(result), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
