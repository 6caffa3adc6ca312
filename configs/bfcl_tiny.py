"""SeeUPO on the real BFCL v4 multi-turn base tasks, with a small randomly initialised policy.

    python -m seeupo_jax.train --config=configs/bfcl_tiny.py --workdir=runs/bfcl_tiny

Real data, real simulators and the official verdict of the `bfcl-eval` wheel (see
third_party/bfcl/README.md). A policy of a million parameters that has read a hundred conversations
cannot solve new tasks: it memorises the train tasks, and SeeUPO makes it surer of them. What this
shows is that the loop is made for real environments: contexts of a thousand tokens, ten turns,
tools with schemas, results that come from running code. Measured results: docs/bfcl_tiny.md.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 10
    config.env = {
        "name": "bfcl",
        "options": {"category": "multi_turn_base", "max_calls": 10, "max_observation_chars": 300},
    }
    config.chat = {"system": False, "tools": "signatures"}
    config.model = {
        "vocab_size": 1536,
        "width": 128,
        "layers": 3,
        "heads": 2,  # attention over a thousand tokens is most of the time on a CPU
        "kv_heads": 2,
        "head_dim": 64,
        "mlp_width": 384,
    }
    config.warm_start = {
        "batch_size": 8,
        "stages": [
            {
                "steps": 320,
                "learning_rate": 3e-3,
                "demonstrations": {"calls_per_message": "turn"},
            }
        ],
    }
    config.rollout = {
        "tasks": 8,
        "group_size": 4,
        "max_turns": 10,
        "max_action_tokens": 160,
        "max_context": 1536,
        "temperature": 1.0,
        "deterministic": True,  # its environments answer at once
    }
    config.batching = {"microbatch_tokens": 3072}
    config.optimizer = {"name": "adam", "learning_rate": 3e-5}
    config.evaluation = {"every": 0, "tasks": 100, "k": 1, "extra_splits": ("train",)}
    config.checkpoint = {"every": 5}
    return config
