"""A run of a minute: a policy made from nothing, then four iterations of SeeUPO."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 4
    config.log_checksum = True
    config.chat = {"system": False, "tools": "none"}
    config.model = {
        "vocab_size": 768,
        "width": 32,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "mlp_width": 64,
    }
    demonstrations = {"skill": 0.5, "episodes": 400}
    stage = {"steps": 120, "learning_rate": 1e-2, "demonstrations": demonstrations}
    config.warm_start = {"batch_size": 16, "stages": [stage]}
    config.rollout = {
        "tasks": 4,
        "group_size": 4,
        "max_action_tokens": 16,
        "max_context": 128,
        "prefill_tokens": 32,
        "deterministic": True,
    }
    config.batching = {"buckets": (64, 128)}
    config.evaluation = {"every": 2, "tasks": 4, "k": 2}
    config.checkpoint = {"every": 1, "keep": 2}
    config.telemetry = {"display": "plain"}
    return config
