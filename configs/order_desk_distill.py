"""On-policy distillation on the order desk: quickstart's policy teaches the bundled one.

    make quickstart
    python -m seeupo_jax.train --config=configs/order_desk_distill.py --workdir=runs/distill

The student begins as `quickstart.py` does. Its advantages are log(teacher / student) of each token
that it samples, instead of rewards, so a task needs no second trajectory to be compared with. An
iteration has a quarter of quickstart's trajectories and four optimizer steps. The tokens that it
samples until it is as good as its teacher: docs/distillation.md.
"""

from ml_collections import ConfigDict

from seeupo_jax.configuration.config_file import read_values


def get_config() -> ConfigDict:
    config = ConfigDict(read_values("package:quickstart"))
    config.recipe = "opd"
    config.teacher = {"path": "runs/quickstart/policy"}
    config.iterations = 12
    config.rollout.tasks = 32
    config.rollout.group_size = 1
    config.algorithm = {"minibatches_per_turn": 4}
    config.optimizer.learning_rate = 5e-4
    config.evaluation.every = 2
    return config
