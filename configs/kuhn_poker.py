"""Self-play in Kuhn poker: one small policy, made here, learns both roles.

    python -m seeupo_jax.train --config=configs/kuhn_poker.py --workdir=runs/kuhn_poker

A warm start on weak moves teaches the words and to read the card; then the policy plays both seats.
What it reaches: docs/roles.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 60
    config.env = {"name": "kuhn_poker"}
    config.roles = [{"name": "player_1"}, {"name": "player_2"}]
    config.chat = {"system": False, "tools": "none"}
    config.model = {
        "vocab_size": 320,
        "width": 64,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 32,
        "mlp_width": 128,
    }
    config.warm_start = {
        "batch_size": 32,
        "stages": [{"steps": 400, "learning_rate": 3e-3, "demonstrations": {"episodes": 8000}}],
    }
    # The penalty is to the policy of some iterations ago, which keeps the two roles from chasing
    # each other around the equilibrium.
    reference = {"every": 15}
    config.algorithm = {"advantage": "rae", "scale": "none", "kl_coef": 0.1, "reference": reference}
    config.rollout = {
        "tasks": 6,  # the deals
        "group_size": 32,
        "max_turns": 3,
        "max_action_tokens": 4,
        "max_context": 64,
        "deterministic": True,
    }
    config.batching = {"microbatch_tokens": 512}
    config.optimizer = {"name": "adam", "learning_rate": 5e-4}
    config.evaluation = {"every": 20, "split": "test", "tasks": 12, "k": 16}
    config.checkpoint = {"every": 20}
    return config
