"""Makes a policy that hands over half of the order desk's cases, and solves few of the others.

    python -m seeupo_jax.train --config=configs/order_desk_referral_warm_start.py \\
        --workdir=runs/order_desk_referral_warm_start

The bundled policy of level 1 learns from a demonstrator who refers half of the cases in the first
turn and slips in most of the others. The result lies in WORKDIR/warm_start.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 0
    config.env = {"name": "order_desk", "options": {"refer_reward": 0.5}}
    config.model = {"path": "package:order_desk"}
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
                "steps": 200,
                "learning_rate": 1e-3,
                "demonstrations": {"skill": 0.4, "episodes": 6_400, "referrals": 0.5},
            },
        ],
    }
    config.batching = {"microbatch_tokens": 512}
    config.evaluation = {"split": "test", "tasks": 128, "k": 4}
    return config
