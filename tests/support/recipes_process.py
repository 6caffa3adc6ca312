"""Trains `order_desk` by several recipes, one after the other: FOLDER RECIPE ...

Their policy, tokenizer and compiled programs are shared. Each leaves its run in FOLDER/RECIPE.
"""

import sys
from pathlib import Path

from places import TINY

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.train import train

CONFIG = TINY
CHOICES = (
    "model.path=package:order_desk",  # whose policy is rewarded now and then
    "model.scan_layers=True",  # each recipe's step is compiled, of one layer instead of three
    "warm_start.stages=()",
    "iterations=2",
    "seed=5",  # after which every recipe's policy has moved
    "rollout.tasks=2",
    "batching.buckets=(128,)",
    "evaluation.every=0",
    "evaluation.tasks=4",
    "checkpoint.every=0",
    "checkpoint.keep_best=0",  # else the validation split would be played too
)

TEACHER = {"opd": ["teacher.path=package:order_desk_level2"]}  # which has the same tokens


def main(folder: str, *names: str) -> None:
    for name in names:
        print(f"recipe {name}", file=sys.stderr, flush=True)
        options = [*CHOICES, f"recipe={name}", *TEACHER.get(name, ())]
        train(load_config(CONFIG, options), Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
