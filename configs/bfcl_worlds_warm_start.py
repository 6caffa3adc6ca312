"""Makes the policy that configs/study_bfcl_worlds.py begins with.

    python -m seeupo_jax.train --config=configs/bfcl_worlds_warm_start.py \\
        --workdir=runs/bfcl_worlds_warm_start

From nothing, in generated conversations of two requests to BFCL's ticket system; in half of them
the first message about a request lacks a detail. First on the reference calls, then on a
demonstrator that makes mistakes, so that the policy's episodes of a task differ. The result lies in
WORKDIR/warm_start; its time and success: docs/bfcl_worlds.md.
"""

from pathlib import Path

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import read_values

ONE_REQUEST = Path(__file__).with_name("bfcl_worlds_tiny.py")


def get_config() -> ConfigDict:
    config = ConfigDict(read_values(ONE_REQUEST))
    config.iterations = 0
    config.env.options.turns = (2, 2)
    config.env.options.max_calls = config.rollout.max_turns = 6
    config.warm_start.stages = [
        {
            "steps": 800,
            "learning_rate": 3e-3,
            "demonstrations": {"calls_per_message": "turn"},
        },
        {
            "steps": 120,
            "learning_rate": 1e-3,
            "demonstrations": {"calls_per_message": "turn", "skill": 0.4},
        },
    ]
    return config
