"""An early choice that pays only with later skill: recipes on the order desk with referrals.

    python -m seeupo_jax.train --config=configs/order_desk_referral_warm_start.py \\
        --workdir=runs/order_desk_referral_warm_start
    python -m seeupo_jax.compare --study --config=configs/study_order_desk_referral.py \\
        --workdir=runs/study_referral --results=docs/convergence/order_desk_referral

The first policy refers half of the cases for a reward of 0.5 each, and solves fewer of the others:
a first turn that learns before the later ones gives the work up. The orders of updates and the
adapters of study_lab_problem.py, by Adam; what is predicted: docs/convergence/lab_problems.md.
"""

from pathlib import Path

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import read_values

PROBLEMS = Path(__file__).with_name("study_lab_problem.py")
START = Path(__file__).with_name("order_desk_referral_warm_start.py")
RATES = (3e-4, 1e-3, 3e-3)
ORDERS = ("seeupo", "forward", "unweighted", "parallel")


def get_config() -> ConfigDict:
    config = ConfigDict(read_values(START))
    config.iterations = 12
    config.rollout.tasks = 8
    config.stop_after_idle = None  # a run that collapses is trained to its end too
    config.model = {"path": "runs/order_desk_referral_warm_start/warm_start"}
    config.warm_start.stages = ()
    config.lora = {"rank": 8}
    config.algorithm = {"inner_epochs": 4, "kl_coef": 0.0}
    config.optimizer = {"name": "adam"}
    config.evaluation = {"every": 0, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 0, "keep": 1, "keep_best": 0, "export": False}
    config.telemetry = {"trackers": (), "display": "plain", "trajectory_share": 0.0}
    return config


def get_study() -> dict:
    study = read_values(PROBLEMS, "get_study")
    steps = study["tuning"]["grid"] | {"optimizer.learning_rate": RATES}
    return {
        "recipes": {
            name: fields
            for name, fields in study["recipes"].items()
            if name.removesuffix("_per_turn") in ORDERS
        },
        "reference": study["reference"],
        "choose_by": "area",
        "tuning": {"seeds": (100, 101), "grid": steps},
        "seeds": tuple(range(8)),
        "stability": {"seeds": (100, 101), "grid": steps},
        # The tuning chose other steps for these: at SeeUPO's.
        "ablations": {
            f"{order}_same_step": {"of": f"{order}_per_turn", "optimizer.learning_rate": RATES[1]}
            for order in ("forward", "parallel")
        },
    }
