"""SmolLM2-135M-Instruct works in a shell, in sandboxes: docs/sandboxed_tasks.md.

    sh third_party/models/setup.sh .venv/bin/python smollm2
    python -m seeupo_jax.train --config=configs/sandboxed_tasks.py --workdir=runs/sandboxed

The ten bundled tasks are small. A model of this size seldom solves one: the run shows that all
parts work together, and is the beginning of a configuration for a larger model.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 2
    config.tasks = "harbor:package:sandboxed_tasks"
    config.agent = {"command": "python docs/examples/agents/shell_agent.py"}
    config.sandbox = {"timeout_scale": 10.0}  # a CPU samples slowly
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "float32",  # faster than bfloat16 on a CPU
    }
    config.rollout = {
        "tasks": 2,
        "group_size": 2,
        "max_turns": 3,
        "max_action_tokens": 48,
        "max_context": 2048,
    }
    config.batching = {"buckets": (512, 2048), "microbatch_tokens": 2048}
    config.optimizer = {
        "name": "adamw",
        "learning_rate": 2e-5,
        "groups": [
            {"pattern": "embedding", "frozen": True},
            {"pattern": "layers/?/*", "frozen": True},
            {"pattern": "layers/1?/*", "frozen": True},
        ],
    }
    config.evaluation = {"every": 0, "split": "test", "tasks": 3, "k": 1}
    config.checkpoint = {"every": 2, "export": False}
    return config
