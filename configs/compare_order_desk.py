"""The order desk for comparing recipes: each from the bundled example policy, on the same budget.

    python -m seeupo_jax.compare --config=configs/compare_order_desk.py --workdir=runs/compare

Every recipe has the same tasks and the same numbers of trajectories and iterations. SeeUPO makes
one step per turn, up to six per iteration. Recipes that update all turns at once would make one,
so `seeupo_jax.compare` splits their trajectories of an iteration into six minibatches
(`--equal_steps`). All else is as in `quickstart.py`, but for the evaluation, which is before and
after only, and the trained policy, which is not exported.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.iterations = 25
    config.env = {"name": "order_desk"}
    config.model = {"path": "package:order_desk"}
    config.rollout = {
        "tasks": 16,
        "group_size": 8,
        "max_turns": 6,
        "max_action_tokens": 16,
        "max_context": 128,
        "temperature": 1.0,
        "deterministic": True,  # its environments answer at once
    }
    config.batching = {"microbatch_tokens": 512}
    config.optimizer = {"name": "adam", "learning_rate": 2e-4}
    config.evaluation = {"every": 0, "split": "test", "tasks": 64, "k": 4}
    config.checkpoint = {"every": 10, "keep": 1, "keep_best": 0, "export": False}
    config.telemetry = {"trackers": (), "display": "plain"}
    return config
