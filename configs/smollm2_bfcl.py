"""SeeUPO on the real BFCL v4 multi-turn tasks with SmolLM2-135M-Instruct: a smoke run on CPU.

    sh third_party/models/setup.sh .venv/bin/python smollm2
    sh third_party/bfcl/setup.sh .venv/bin/python
    python -m seeupo_jax.train --config=configs/smollm2_bfcl.py --workdir=runs/smollm2_bfcl

The official tasks, tools, simulators and verdict, with a published chat model: prompts of three
thousand tokens, tools listed in the system message. A model of this size writes no readable call;
the run shows that the real benchmark goes through the loop on a laptop, in half an hour
(docs/bfcl.md).
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 1
    config.env = {
        "name": "bfcl",
        "options": {
            "category": "multi_turn_base",
            "reward": "fraction",
            "max_observation_chars": 600,
        },
    }
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "float32",  # faster than bfloat16 on a CPU
        "scan_layers": True,
        "remat": "full",
    }
    config.rollout = {
        "tasks": 1,
        "group_size": 2,
        "max_turns": 3,
        "max_action_tokens": 64,
        "max_context": 6144,
        "temperature": 0.7,
        "deterministic": True,
    }
    config.batching = {"microbatch_tokens": 6144}
    config.optimizer = {"name": "adamw", "learning_rate": 1e-5}
    config.evaluation = {"every": 0, "tasks": 1, "k": 2}
    config.checkpoint = {"every": 0, "export": False}
    return config
