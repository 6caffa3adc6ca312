"""Is SeeUPO ahead? A study on the order desk: recipes tuned alike, then compared on fresh seeds.

    python -m seeupo_jax.compare --study --config=configs/study_order_desk.py \\
        --workdir=runs/study --results=docs/convergence/order_desk

`get_config()` is what all runs share, `get_study()` what they differ in. Every recipe samples as
many trajectories an iteration. SeeUPO makes one optimizer step per turn; recipes that update all
turns at once split an iteration into as many minibatches as there may be turns, so that tokens and
steps are equal. The ablation `grpo_one_step` makes one step of all an iteration's trajectories:
tokens are equal, steps are not. The first tuning runs, of 20 iterations, took 117 to 131 seconds
of one core each (190 where the policy collapsed); `--explain` estimates what is left.
"""

from ml_collections import ConfigDict

TURNS = 16
MINIBATCHES = {"algorithm.minibatches_per_turn": TURNS}
CLIP = ("algorithm.clip_low", "algorithm.clip_high")
# The defaults, which SeeUPO's authors use, and those of GSPO's; a geometric ratio hardly ever
# leaves the first.
CLIPS = ((0.2, 0.2), (3e-4, 4e-4))
RATES = (3e-5, 1e-4, 3e-4)


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 32
    config.stop_after_idle = None  # a run that collapses is trained to its end too
    config.env = {"name": "order_desk", "options": {"level": 2}}
    config.model = {"path": "package:order_desk_level2"}
    config.rollout = {
        "tasks": 8,
        "group_size": 8,
        "max_turns": TURNS,
        "max_action_tokens": 16,
        "max_context": 384,
        "temperature": 1.0,
        "deterministic": True,  # its environments answer at once
    }
    config.optimizer = {"name": "adam"}
    config.evaluation = {"every": 0, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 10, "keep": 1, "keep_best": 0, "export": False}
    config.telemetry = {"trackers": (), "display": "plain", "trajectory_share": 0.0}
    return config


def get_study() -> dict:
    return {
        "recipes": {
            "seeupo": {"recipe": "seeupo"},
            "seeupo_unweighted": {"recipe": "seeupo_unweighted"},
            "parallel": {"recipe": "parallel", **MINIBATCHES},
            "grpo": {"recipe": "grpo", **MINIBATCHES},
            "gspo": {"recipe": "gspo", **MINIBATCHES},
            "rloo": {"recipe": "rloo", **MINIBATCHES},
        },
        "reference": "seeupo",
        "choose_by": "area",
        "tuning": {
            "seeds": (100, 101),
            "grid": {"optimizer.learning_rate": RATES, CLIP: CLIPS},
            # RLOO has no clip range.
            "grids": {"rloo": {"optimizer.learning_rate": RATES, "algorithm.kl_coef": (0.0, 2e-3)}},
        },
        "seeds": tuple(range(8)),
        # What the theory assumes and training does otherwise; step lengths are in the map.
        "ablations": {
            "weight_not_clipped": {"of": "seeupo", "algorithm.weight_clip": None},
            "moments_per_turn": {"of": "seeupo", "algorithm.moments": "turn"},
            "without_momentum": {"of": "seeupo", "optimizer.kwargs": {"b1": 0.0}},
            "grpo_one_step": {"of": "grpo", "algorithm.minibatches_per_turn": 1},
        },
        "stability": {
            "seeds": (100, 101),
            "grid": {"optimizer.learning_rate": (*RATES, 1e-3), "algorithm.inner_epochs": (1, 4)},
            # RLOO has no ratio, which a second pass over the same trajectories would need.
            "grids": {
                "rloo": {
                    "optimizer.learning_rate": (*RATES, 1e-3),
                    "algorithm.minibatches_per_turn": (TURNS, 4 * TURNS),
                }
            },
        },
        # Tuning and the map take fewer iterations, and choose on other tasks.
        "exploring": {"iterations": 20, "evaluation.split": "validation"},
    }
