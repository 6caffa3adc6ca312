"""SmolLM2-135M-Instruct learns to call the tools of BFCL's simulators: minutes of one H200.

    sh third_party/models/setup.sh .venv/bin/python smollm2
    sh third_party/bfcl/setup.sh .venv/bin/python
    python -m seeupo_jax.sft --config=configs/smollm2_bfcl_worlds.py --data=demonstrations \\
        --workdir=runs/smollm2_bfcl_sft --config.optimizer.learning_rate=3e-4 \\
        --config.optimizer.schedule=linear
    python -m seeupo_jax.train --config=configs/smollm2_bfcl_worlds.py \\
        --workdir=runs/smollm2_bfcl_worlds --config.model.path=runs/smollm2_bfcl_sft/policy

Generated conversations of one or two requests, over one or two of the eight simulators. First it
imitates a demonstrator that makes mistakes, then SeeUPO trains it on what its own episodes come to.
Nothing of the benchmark's 800 tasks is used. What came out: docs/bfcl_worlds.md.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 12
    config.env = {
        "name": "bfcl_worlds",
        "options": {
            "categories": ("multi_turn_base",),
            "turns": (1, 2),
            "train_tasks": 6000,
            "max_calls": 6,
            "max_observation_chars": 600,
        },
    }
    config.chat = {"tools": "signatures"}  # their JSON would be longer than the conversation
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "bfloat16",
        "scan_layers": True,
    }
    config.sft = {
        "options": {"skill": 0.7, "calls_per_message": "turn"},
        "batch_size": 32,
        "steps": 400,
        "eval_every": 200,
    }
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 192,
        "max_context": 4096,
        "deterministic": True,  # its environments answer at once
    }
    config.batching = {"buckets": (8192,), "microbatch_tokens": 8192}
    config.optimizer = {
        "name": "adamw",
        "learning_rate": 2e-5,
        "groups": [{"pattern": "embedding", "frozen": True}],
    }
    config.evaluation = {"every": 6, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 6}
    return config
