"""Makes the policy that plays the laboratory's problems in text, seeupo_jax/assets/lab_problem.

    python -m seeupo_jax.train --config=configs/lab_problem_warm_start.py \\
        --workdir=runs/lab_problem_warm_start

A tokenizer and a transformer of 30,000 parameters learn from conversations of random actions. First
each action repeats the one before it, so that the network can tell actions apart by large logits,
which adapters alone could not make. Then all are uniformly random: in every context of every
problem each action is about equally likely. The result lies in WORKDIR/warm_start.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 0
    config.env = {"name": "lab_problem"}
    config.chat = {"system": False, "tools": "none"}
    config.model = {
        "vocab_size": 274,
        "width": 32,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "mlp_width": 64,
    }
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 8,
        "max_action_tokens": 2,
        "max_context": 64,
        "deterministic": True,
    }
    config.warm_start = {
        "batch_size": 64,
        "stages": [
            {
                "steps": 1000,
                "learning_rate": 3e-3,
                "demonstrations": {"episodes": 64_000, "repeat": 1.0},
            },
            {
                "steps": 1500,
                "learning_rate": 1e-3,
                "demonstrations": {"episodes": 96_000, "seed": 1},
            },
        ],
    }
    config.evaluation = {"split": "test", "tasks": 64, "k": 4}
    return config
