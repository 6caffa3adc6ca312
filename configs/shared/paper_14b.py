"""What the configurations of the paper's 14B models share; a benchmark's own are beside it.

Meshes are for a slice of 64 TPU chips of any kind; `configs/layouts` has better ones for some.
Sources: [paper] is arXiv:2602.06554, [code] the authors' code (AgentEvolver, branch `seeupo`).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "dtype": "bfloat16",  # ours: of activations; parameters are float32
        "scan_layers": True,  # ours: one layer is compiled, not 40 or 48
        "remat": "full",  # ours
    }
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 4}  # ours: a slice of 64 chips as 16 x 4
    config.env = {
        "workers": 64,  # ours: threads that step environments
        "timeout_s": 120.0,  # ours
    }
    config.algorithm = {
        "order": "reverse",  # [paper] eq. 6 to 8
        "ratio": "geometric",  # [code] exp of the mean, as GSPO
        "scale": "batch",  # [code] batch standardisation; never the group's deviation [paper]
        "advantage_clip": 3.0,  # [code]
        "weight_clip": 0.2,  # [code] M and its factors in [0.8, 1.2]
        "clip_low": 0.2,  # [code]
        "clip_high": 0.2,  # [code]
        "kl_coef": 0.002,  # [code] k3
    }
    config.optimizer = {
        "name": "adamw",  # ours
        "learning_rate": 1e-6,  # [code] one step a turn
        "max_grad_norm": 1.0,  # ours
    }
    config.rollout = {
        "tasks": 32,  # [code]
        "group_size": 8,  # [code]
        "max_turns": 10,  # [code] a turn is a model call
        "temperature": 0.9,  # [code]
        "mesh": {"data": -1, "tensor": 4},  # ours: every 4 chips hold the whole policy to decode
    }
    config.evaluation = {
        "every": 5,  # [code]
        "split": "test",
        "k": 4,  # [code] four runs a task
    }
    config.checkpoint = {"every": 5, "keep": 2}  # ours
    return config
