"""Sums such as 47 + 8, which a function generates, and a tiny policy: docs/prompts.md.

    python -m seeupo_jax.train --config=configs/arithmetic.py --workdir=runs/arithmetic

A transformer of 0.46 million parameters first imitates right answers, and is stopped before it
can add; SeeUPO then trains it on whether its own answers are right. Test sums are not trained on.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 120
    config.env = {
        "name": "prompts",
        "options": {
            "file": "seeupo_jax.tasks.arithmetic:additions",
            "file_options": {
                "tasks": 820,
                "validation_tasks": 60,
                "test_tasks": 120,
                "digits": [2, 1],
            },
            "prompt": "question",
            "answer": "answer",
        },
    }
    config.model = {
        "vocab_size": 276,
        "width": 128,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 32,
        "mlp_width": 384,
    }
    config.warm_start = {
        "batch_size": 64,
        "stages": [{"steps": 180, "learning_rate": 3e-3}],
    }
    config.rollout = {
        "tasks": 64,
        "group_size": 8,
        "max_turns": 1,
        "max_action_tokens": 5,
        "max_context": 32,
        "temperature": 1.0,
        "deterministic": True,
    }
    config.optimizer = {"name": "adam", "learning_rate": 3e-4}
    config.algorithm = {"minibatches_per_turn": 4}
    config.evaluation = {"every": 10, "split": "test", "tasks": 120, "k": 4}
    config.checkpoint = {"every": 20}
    return config
