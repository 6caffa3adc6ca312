"""A run whose programs compile for four TPU chips in seconds."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 1_024,
        "width": 384,
        "layers": 2,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 128,
        "mlp_width": 384,
        "dtype": "bfloat16",
        "scan_layers": True,
        "remat": "full",
    }
    config.mesh = {"data": 1, "fsdp": 2, "tensor": 2}
    config.optimizer = {"name": "adamw", "learning_rate": 1e-4}
    config.rollout = {
        "tasks": 4,
        "group_size": 2,
        "max_turns": 4,
        "max_action_tokens": 64,
        "max_context": 512,
        "mesh": {"data": 2, "tensor": 2},
    }
    config.batching = {"buckets": (256, 512)}
    return config
