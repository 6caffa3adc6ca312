"""SeeUPO on BFCL v4 multi-turn with Qwen3-14B, by the paper's settings.

    python -m seeupo_jax.train --config=configs/qwen3_14b_bfcl.py --workdir=runs/14b

The official data and simulators: `sh third_party/bfcl/setup.sh .venv/bin/python`. Ids 0-99 are
trained on, 100-199 evaluated on.
The model is downloaded by you:

    hf download Qwen/Qwen3-14B --local-dir models/Qwen3-14B

`--config=configs/qwen3_14b_bfcl.py:v5p:4x4x4` lays the run out for a slice, as found by
`python -m seeupo_jax.aot --tune` (docs/tpu.md); docs/hardware.md tells what each holds. Nothing of
this configuration has been trained here.
Sources: [paper] is arXiv:2602.06554, [code] the authors' code (AgentEvolver, branch `seeupo`).
"""

from pathlib import Path

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import lay_out, read_values

QWEN25 = Path(__file__).with_name("qwen25_14b_bfcl.py")  # all but the model
LAYOUTS = Path(__file__).parent / "layouts" / "qwen3_14b_bfcl.json"


def get_config(slice: str | None = None) -> ConfigDict:
    config = ConfigDict(read_values(QWEN25))
    config.model.path = "models/Qwen3-14B"  # [paper]
    return lay_out(config, LAYOUTS, slice)
