"""A process of a run whose callback stops it, or raises: RANK COUNT PORT OUT MODEL WORKDIR HOW.

OUT: JSON of the iterations that ended, and why the run stopped; or of the error.
"""

import json
import sys
from pathlib import Path

from places import TINY
from run_cases import CHOICES

from seeupo_jax import Callback, load_config, train
from seeupo_jax.cli.command_line import join_cluster


class Stopper(Callback):
    def __init__(self, raises: bool):
        self.iterations, self._raises = [], raises

    def on_iteration(self, run, iteration, metrics):
        self.iterations.append(iteration)
        if self._raises:
            raise LookupError("enough")
        run.stop("enough")


def main(rank: str, count: str, port: str, out: str, model: str, workdir: str, how: str) -> None:
    own = [f"model.path={model}", "iterations=3", "evaluation.every=0", "rollout.tasks=2"]
    overrides = [text.removeprefix("--config.") for text in CHOICES]
    config = load_config(TINY, [*overrides, *own, "evaluation.tasks=1", "evaluation.k=1"])
    join_cluster(
        config,
        coordinator=f"localhost:{port}",
        process_id=int(rank),
        num_processes=int(count),
    )
    stopper = Stopper(how == "raise")
    try:
        result = train(config, workdir, [stopper])
    except (LookupError, RuntimeError) as error:
        Path(out).write_text(json.dumps(repr(error)))
        return
    rows = result.metrics["iteration"]
    Path(out).write_text(json.dumps([stopper.iterations, result.stopped, rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
