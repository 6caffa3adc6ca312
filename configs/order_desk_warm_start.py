"""Makes the policy that ships with the package, seeupo_jax/assets/order_desk.

    python -m seeupo_jax.train --config=configs/order_desk_warm_start.py --workdir=runs/warm_start

A tokenizer is trained on the demonstrations' text, then a transformer of 0.7 million parameters on
the demonstrations: first those of the oracle, until looking things up works, then a few of a
demonstrator who slips in most cases. The result lies in WORKDIR/warm_start; time and
checksum of the shipped one: docs/order_desk.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 0
    config.env = {"name": "order_desk"}
    config.chat = {"system": False, "tools": "none"}  # too small to read rules: it learns them
    config.model = {
        "vocab_size": 896,
        "width": 128,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "mlp_width": 384,
    }
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 16,
        "max_context": 128,
        "deterministic": True,
    }
    config.warm_start = {
        "batch_size": 32,
        "stages": [
            {
                "steps": 2000,
                "learning_rate": 3e-3,
                "demonstrations": {"skill": 1.0, "episodes": 40_000},
            },
            {
                "steps": 400,
                "learning_rate": 1e-3,
                "demonstrations": {"skill": 0.4, "episodes": 12_800},
            },
        ],
    }
    config.batching = {"microbatch_tokens": 512}
    config.evaluation = {"split": "test", "tasks": 128, "k": 4}
    return config
