"""SeeUPO on the order desk, from the policy that ships with the package.

    python -m seeupo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The policy starts out mediocre: it looks things up, but in most cases it guesses, obeys
a request that the desk's rules forbid, takes the wrong order or tells the customer the wrong thing.
Measured on 64 held-out tasks, four episodes each (avg@4), three seeds: README.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 30
    config.env = {"name": "order_desk"}
    config.model = {"path": "package:order_desk"}
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 16,
        "max_context": 128,
        "temperature": 1.0,
        "deterministic": True,  # its environments answer at once
    }
    config.batching = {"microbatch_tokens": 512}
    config.optimizer = {"name": "adam", "learning_rate": 2e-4}
    config.evaluation = {"every": 5, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 10}
    return config
