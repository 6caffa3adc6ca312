"""SmolLM2-135M-Instruct becomes an order-desk agent on two CPU cores: docs/smollm2_agent.md.

    sh third_party/models/setup.sh .venv/bin/python smollm2
    python -m seeupo_jax.sft --config=configs/smollm2_agent.py --data=demonstrations \\
        --workdir=runs/smollm2_sft --config.optimizer.learning_rate=3e-4 \\
        --config.optimizer.schedule=linear
    python -m seeupo_jax.train --config=configs/smollm2_agent.py --workdir=runs/smollm2_agent \\
        --config.model.path=runs/smollm2_sft/policy

First it imitates a demonstrator that fails in four of ten cases, then SeeUPO trains it on what
its own episodes come to. The upper ten of thirty layers train, or with `smollm2_agent.py:lora`
adapters on them: a step through all layers takes twice as long.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party

LOWER_LAYERS = [
    {"pattern": "layers/?/*", "frozen": True},
    {"pattern": "layers/1?/*", "frozen": True},
]


def get_config(trains: str = "layers") -> ConfigDict:
    if trains not in ("layers", "lora"):
        raise ValueError(f"got {trains!r}; allowed: layers, lora")
    config = ConfigDict()
    config.iterations = 12
    config.env = {"name": "order_desk"}
    config.chat = {"tools": "signatures"}  # the tools' JSON would be longer than the conversation
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "float32",  # faster than bfloat16 on a CPU
    }
    config.sft = {
        "options": {"skill": 0.6, "episodes": 500},
        "batch_size": 16,
        "steps": 96,
        "eval_every": 32,
    }
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 48,
        "max_context": 640,
        "deterministic": True,
    }
    config.algorithm = {"kl_coef": 0.1}  # with 0 one kind of request is given up sooner
    config.batching = {"buckets": (2560,), "microbatch_tokens": 2560}
    config.optimizer = {
        "name": "adamw",
        "learning_rate": 2e-5,
        "groups": [{"pattern": "embedding", "frozen": True}, *LOWER_LAYERS],
    }
    if trains == "lora":
        config.lora = {"rank": 32}
        config.optimizer.learning_rate = 1e-4
        config.optimizer.groups = LOWER_LAYERS
    config.evaluation = {"every": 6, "split": "test", "tasks": 32, "k": 4}
    config.checkpoint = {"every": 6}
    return config
