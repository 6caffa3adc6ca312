"""SeeUPO on BFCL v4 multi-turn with Qwen2.5-14B, by the paper's settings.

    python -m seeupo_jax.train --config=configs/qwen25_14b_bfcl.py --workdir=runs/14b

The official data and simulators: `sh third_party/bfcl/setup.sh .venv/bin/python`. Ids 0-99 are
trained on, 100-199 evaluated on.
The model is downloaded by you:

    hf download Qwen/Qwen2.5-14B-Instruct --local-dir models/Qwen2.5-14B-Instruct

`--config=configs/qwen25_14b_bfcl.py:v5p:4x4x4` lays the run out for a slice, as found by
`python -m seeupo_jax.aot --tune` (docs/tpu.md); docs/hardware.md tells what each holds. Nothing of
this configuration has been trained here.
Sources: [paper] is arXiv:2602.06554, [code] the authors' code (AgentEvolver, branch `seeupo`).
"""

from pathlib import Path

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import lay_out, read_values

SHARED = Path(__file__).parent / "shared" / "paper_14b.py"
LAYOUTS = Path(__file__).parent / "layouts" / "qwen25_14b_bfcl.json"


def get_config(slice: str | None = None) -> ConfigDict:
    config = ConfigDict(read_values(SHARED))
    config.iterations = 150  # [code] 50 epochs of 100 tasks, three batches each
    config.model.path = "models/Qwen2.5-14B-Instruct"  # [paper] Qwen2.5-14B; instruct: ours
    config.env.name = "bfcl"
    config.env.options = {
        "category": "multi_turn_base",  # [paper]
        "format": "hermes",  # [code] tools in the chat template, <tool_call> blocks
        "reward": "shaped",  # [code] 1 + 0.5 score when solved, 0.5 score else, -1 degenerate
        "max_calls": 10,  # [code]
        "max_observation_chars": 12_000,  # ours, for the 3000 tokens of [code]
    }
    config.rollout.max_action_tokens = 4000  # [code] the response length
    config.rollout.max_context = 18000  # [code] 14000 of prompt and 4000 of response
    config.batching = {"microbatch_tokens": 18432}  # ours: of one device, the longest context
    config.evaluation.tasks = 100  # [code] ids 100 to 199
    return lay_out(config, LAYOUTS, slice)
