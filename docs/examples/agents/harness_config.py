"""A coding agent that others wrote, trained on tasks with a check: docs/agents.md."""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 10
    config.agent = {
        "harness": "mini_swe_agent",
        "tasks": "docs/examples/agents/harness_tasks.jsonl",
    }
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "float32",  # faster than bfloat16 on a CPU
    }
    config.rollout = {
        "tasks": 4,
        "group_size": 4,
        "max_turns": 8,
        "max_action_tokens": 256,
        "max_context": 4096,
        "temperature": 1.0,
    }
    config.batching = {"microbatch_tokens": 4096}
    config.optimizer = {"name": "adamw", "learning_rate": 1e-5}
    config.evaluation = {"every": 5, "split": "test", "tasks": 2, "k": 4}
    config.checkpoint = {"every": 5}
    return config
