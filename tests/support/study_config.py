"""A study of a minute: two recipes of a network of one layer, an iteration each."""

from pathlib import Path

from ml_collections import ConfigDict
from tiny_config import get_config as tiny_config


def get_config() -> ConfigDict:
    config = tiny_config()
    config.iterations = 1
    config.stop_after_idle = None
    config.log_checksum = False
    config.warm_start = {"stages": ()}
    config.env = {"name": "run_environment:Echo"}
    # Below the folder that the command is called in.
    config.model = {"path": str(Path("policy").absolute()), "remat": "none"}
    config.rollout.update(tasks=2, group_size=2, max_turns=4, max_action_tokens=8)
    config.batching = {"buckets": (128,)}
    config.evaluation = {"every": 0, "tasks": 2, "k": 2}
    config.checkpoint = {"every": 0, "export": False, "keep_best": 0}
    config.telemetry = {"display": "plain", "trackers": (), "trajectory_share": 0.0}
    return config


def get_study() -> dict:
    return {
        "recipes": {
            "seeupo": {"recipe": "seeupo"},
            "grpo": {"recipe": "grpo", "algorithm.minibatches_per_turn": 2},
        },
        "tuning": {"seeds": (100,), "grid": {"optimizer.learning_rate": (1e-3, 1e-2)}},
        "seeds": (0, 1),
        "ablations": {"not_clipped": {"of": "seeupo", "algorithm.weight_clip": None}},
        # Of the same runs as the tuning, which are not trained again.
        "stability": {
            "seeds": (100,),
            "grid": {"optimizer.learning_rate": (1e-3, 1e-2), "algorithm.inner_epochs": (1,)},
        },
    }
