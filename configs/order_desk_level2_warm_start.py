"""Makes the policy for level 2 of the order desk, seeupo_jax/assets/order_desk_level2.

    python -m seeupo_jax.train --config=configs/order_desk_level2_warm_start.py \\
        --workdir=runs/level2_warm_start

The bundled policy of level 1, whose tokenizer it keeps, is trained on level 2's demonstrations:
first on those of the oracle, then on a few of a demonstrator who slips in many cases. The result
lies in WORKDIR/warm_start; time and checksum of the shipped one: docs/order_desk.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 0
    config.env = {"name": "order_desk", "options": {"level": 2}}
    config.model = {"path": "package:order_desk"}
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 16,
        "max_action_tokens": 16,
        "max_context": 320,
        "deterministic": True,
    }
    config.warm_start = {
        "batch_size": 16,
        "stages": [
            {
                "steps": 2000,
                "learning_rate": 3e-3,
                "demonstrations": {"skill": 1.0, "episodes": 32_000},
            },
            {
                "steps": 200,
                "learning_rate": 1e-3,
                "demonstrations": {"skill": 0.6, "episodes": 6_400},
            },
        ],
    }
    config.batching = {"microbatch_tokens": 1024}
    config.evaluation = {"split": "test", "tasks": 128, "k": 4}
    return config
