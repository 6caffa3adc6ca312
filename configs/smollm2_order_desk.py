"""SeeUPO on the order desk with a published chat model, SmolLM2-135M-Instruct: a smoke run on CPU.

    sh third_party/models/setup.sh .venv/bin/python smollm2
    python -m seeupo_jax.train --config=configs/smollm2_order_desk.py --workdir=runs/smollm2

Real weights out of a GGUF file, its own vocabulary and chat template, the desk's tools listed in
the system message. A model of this size rarely works a case out: the run shows that the loop holds
for a folder or a file that a user brings, not that the agent becomes good. On two CPU cores an
iteration took 165 s, and 5.8 GB at the most; success stayed at 0.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import third_party


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 3
    config.env = {"name": "order_desk"}
    config.model = {
        "path": third_party("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        "dtype": "float32",  # faster than bfloat16 on a CPU
        "scan_layers": True,  # with both, one layer's activations are held instead of thirty
        "remat": "full",
    }
    config.rollout = {
        "tasks": 1,
        "group_size": 4,
        "max_turns": 3,
        "max_action_tokens": 48,
        "max_context": 1024,
        "temperature": 0.7,
    }
    config.batching = {"microbatch_tokens": 2048}
    config.optimizer = {"name": "adamw", "learning_rate": 1e-5}
    config.evaluation = {"every": 0, "tasks": 1, "k": 4}
    config.checkpoint = {"every": 0}
    return config
