"""SeeUPO on AppWorld with Qwen2.5-14B, by the paper's settings.

    python -m seeupo_jax.train --config=configs/qwen25_14b_appworld.py --workdir=runs/14b

AppWorld needs a set-up of its own and its tasks: third_party/appworld/README.md. The paper trains
on the 90 train tasks and evaluates on the 57 of `dev`, which is our split `test`.
The model is downloaded by you:

    hf download Qwen/Qwen2.5-14B-Instruct --local-dir models/Qwen2.5-14B-Instruct

`--config=configs/qwen25_14b_appworld.py:v5p:4x4x4` lays the run out for a slice, as found by
`python -m seeupo_jax.aot --tune` (docs/tpu.md); docs/hardware.md tells what each holds. Nothing of
this configuration has been trained here.
Sources: [paper] is arXiv:2602.06554, [code] the authors' code (AgentEvolver, branch `seeupo`).
"""

from pathlib import Path

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import lay_out, read_values

SHARED = Path(__file__).parent / "shared" / "paper_14b.py"
LAYOUTS = Path(__file__).parent / "layouts" / "qwen25_14b_appworld.json"


def get_config(slice: str | None = None) -> ConfigDict:
    config = ConfigDict(read_values(SHARED))
    config.iterations = 150  # [code] 75 epochs of 90 tasks, two batches each
    config.model.path = "models/Qwen2.5-14B-Instruct"  # [paper] Qwen2.5-14B; instruct: ours
    config.env.name = "appworld"
    config.env.options = {
        "reward": "shaped",  # [code] 1 + 0.5 score when solved, 0.5 score else, -1 degenerate
        "max_calls": 10,  # [code]
        "max_output_tokens": 3000,  # [code] longer output is cut
    }
    config.rollout.max_action_tokens = 3000  # [code] the response length
    config.rollout.max_context = 16000  # [code] 13000 of prompt and 3000 of response
    config.rollout.concurrency = 64  # ours: AppWorld servers that run at once
    config.batching = {"microbatch_tokens": 16384}  # ours: of one device, the longest context
    config.evaluation.tasks = 57  # [code] all of dev
    return lay_out(config, LAYOUTS, slice)
