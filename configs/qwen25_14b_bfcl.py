"""SeeUPO on BFCL v4 multi-turn with Qwen2.5-14B, by the paper's settings.

    python -m seeupo_jax.train --config=configs/qwen25_14b_bfcl.py --workdir=runs/14b

The official data and simulators: `sh third_party/bfcl/setup.sh .venv/bin/python`. Ids 0-99 are
trained on, 100-199 evaluated on.
The model is downloaded by you:

    hf download Qwen/Qwen2.5-14B-Instruct --local-dir models/Qwen2.5-14B-Instruct

The sizes are for a slice of 64 TPU chips; docs/tpu.md tells what each holds. Nothing of this
configuration has been trained here.
Sources: [paper] is arXiv:2602.06554, [code] the authors' code (AgentEvolver, branch `seeupo`).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 150  # [code] 50 epochs of 100 tasks, three batches each
    config.model = {
        "path": "models/Qwen2.5-14B-Instruct",  # [paper] Qwen2.5-14B; instruct: ours
        "dtype": "bfloat16",  # ours: of activations; parameters are float32
        "scan_layers": True,  # ours: one layer is compiled, not 48
        "remat": "full",  # ours
    }
    config.mesh = {"data": 1, "fsdp": -1, "tensor": 4}  # ours: a slice of 64 chips as 16 x 4
    config.env = {
        "name": "bfcl",
        "options": {
            "category": "multi_turn_base",  # [paper]
            "format": "hermes",  # [code] tools in the chat template, <tool_call> blocks
            "reward": "shaped",  # [code] 1 + 0.5 score when solved, 0.5 score else, -1 degenerate
            "max_calls": 10,  # [code]
            "max_observation_chars": 12_000,  # ours, for the 3000 tokens of [code]
        },
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
        "max_action_tokens": 4000,  # [code] the response length
        "max_context": 18000,  # [code] 14000 of prompt and 4000 of response
        "temperature": 0.9,  # [code]
        "mesh": {"data": -1, "tensor": 4},  # ours: every 4 chips hold the whole policy to decode
    }
    config.batching = {"microbatch_tokens": 18432}  # ours: of one device, the longest context
    config.evaluation = {
        "every": 5,  # [code]
        "split": "test",
        "tasks": 100,  # [code] ids 100 to 199
        "k": 4,  # [code] four runs a task
    }
    config.checkpoint = {"every": 5, "keep": 2}  # ours
    return config
