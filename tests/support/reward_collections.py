"""Collections of trajectories with `config.rewards`, without a model."""

from reward_cases import Paying, released
from rollout_cases import Saying, make_worker

from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.player import CollectionOptions


def collected(rewards, *, make=Paying, tasks=("good", "bad"), turns=2, engine=None):
    """A collection of a trajectory for each task, with `config.rewards`."""
    config = from_dict({"rewards": rewards})
    pool = EnvPool(lambda: make(turns), 4, workers=2, timeout_s=5.0)
    scorer = make_scorer(config.rewards)
    engine = Saying() if engine is None else engine
    worker = make_worker(engine, pool, max_turns=5, rewards=scorer)
    options = CollectionOptions(3, split="test")
    try:
        return collect(worker, None, group_requests(tasks, 1, 1), options)
    finally:
        released.set()
        pool.close()
        scorer.close()
        released.clear()
