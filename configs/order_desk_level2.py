"""SeeUPO on level 2 of the order desk, where turns depend on each other, from its bundled policy.

    python -m seeupo_jax.train --config=configs/order_desk_level2.py --workdir=runs/level2

A customer has two or three requests that share parcels and changes; 10 to 15 turns of 16 solve
them. Most first attempts fail: cost of an iteration and first success are in docs/order_desk.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 30
    config.env = {"name": "order_desk", "options": {"level": 2}}
    config.model = {"path": "package:order_desk_level2"}
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 16,
        "max_action_tokens": 16,
        "max_context": 384,
        "temperature": 1.0,
        "deterministic": True,  # its environments answer at once
    }
    config.batching = {"microbatch_tokens": 1024}
    config.optimizer = {"name": "adam", "learning_rate": 2e-4}
    config.evaluation = {"every": 10, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 10}
    return config
