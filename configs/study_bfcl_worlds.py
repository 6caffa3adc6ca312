"""Is SeeUPO ahead on generated tasks over BFCL's simulators? A study as that of the order desk.

    python -m seeupo_jax.train --config=configs/bfcl_worlds_warm_start.py \\
        --workdir=runs/bfcl_worlds_warm_start
    python -m seeupo_jax.compare --study --config=configs/study_bfcl_worlds.py \\
        --workdir=runs/study_worlds --results=docs/convergence/bfcl_worlds

Conversations of two requests, of four to six turns. SeeUPO, the same update of all turns at once,
and GRPO: of six recipes on the order desk none was ahead, and these differ in what the paper is
about. Tuned alike on learning rate and clip range, then compared on fresh seeds, with as many
sampled trajectories and optimizer steps each.
"""

from pathlib import Path

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import read_values

START = Path(__file__).with_name("bfcl_worlds_warm_start.py")
TURNS = 6
MINIBATCHES = {"algorithm.minibatches_per_turn": TURNS}
CLIP = ("algorithm.clip_low", "algorithm.clip_high")
# The defaults, which SeeUPO's authors use, and those of GSPO's.
CLIPS = ((0.2, 0.2), (3e-4, 4e-4))
RATES = (3e-5, 1e-4, 3e-4)


def get_config() -> ConfigDict:
    config = ConfigDict(read_values(START))
    config.iterations = 24
    config.stop_after_idle = None  # a run that collapses is trained to its end too
    config.model = {"path": "runs/bfcl_worlds_warm_start/warm_start"}
    config.warm_start.stages = ()
    config.evaluation = {"every": 0, "split": "test", "tasks": 100, "k": 4}
    config.checkpoint = {"every": 10, "keep": 1, "keep_best": 0, "export": False}
    config.telemetry = {"trackers": (), "display": "plain", "trajectory_share": 0.0}
    return config


def get_study() -> dict:
    return {
        "recipes": {
            "seeupo": {"recipe": "seeupo"},
            "parallel": {"recipe": "parallel", **MINIBATCHES},
            "grpo": {"recipe": "grpo", **MINIBATCHES},
        },
        "reference": "seeupo",
        "choose_by": "area",
        "tuning": {
            "seeds": (100, 101),
            "grid": {"optimizer.learning_rate": RATES, CLIP: CLIPS},
        },
        "seeds": tuple(range(8)),
        "ablations": {
            "a_third_of_the_rate": {"of": "seeupo", "optimizer.learning_rate": 1e-4},
        },
        # The tuning takes fewer iterations, and chooses on other tasks.
        "exploring": {"iterations": 16, "evaluation.split": "validation"},
    }
