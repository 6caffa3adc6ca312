"""Makes the policy that configs/study_bfcl_worlds.py begins with.

    python -m seeupo_jax.train --config=configs/bfcl_worlds_warm_start.py \\
        --workdir=runs/bfcl_worlds_warm_start

From nothing, in generated conversations of two requests to BFCL's ticket system; in half of them
the first message about a request lacks a detail. First on the reference calls, then on a
demonstrator that makes mistakes, so that the policy's episodes of a task differ. The result lies in
WORKDIR/warm_start; its time and success: docs/bfcl_worlds.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 0
    config.env = {
        "name": "bfcl_worlds",
        "options": {
            "categories": ("multi_turn_base", "multi_turn_miss_param"),
            "turns": (2, 2),
            "train_tasks": 20_000,
            "classes": ("TicketAPI",),
            "max_calls": 6,
            "max_observation_chars": 300,
        },
    }
    config.chat = {"system": False, "tools": "signatures"}
    config.model = {
        "vocab_size": 1536,
        "width": 128,
        "layers": 3,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "mlp_width": 384,
    }
    config.warm_start = {
        "batch_size": 32,
        "stages": [
            {
                "steps": 800,
                "learning_rate": 3e-3,
                "demonstrations": {"calls_per_message": "turn"},
            },
            {
                "steps": 120,
                "learning_rate": 1e-3,
                "demonstrations": {"calls_per_message": "turn", "skill": 0.4},
            },
        ],
    }
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 160,
        "max_context": 1024,
        "temperature": 1.0,
        "deterministic": True,  # its environments answer at once
    }
    config.batching = {"microbatch_tokens": 8192}
    config.optimizer = {"name": "adam", "learning_rate": 3e-5}
    config.evaluation = {"split": "test", "tasks": 100, "k": 4}
    return config
