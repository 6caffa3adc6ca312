"""Gymnasium's slippery lake, for a policy that reads and writes numbers."""

from seeupo_jax.envs.gymnasium_text import GymnasiumText


class Lake(GymnasiumText):
    """Shows the number of the field; 5 is up, which slips along the first row: no hole is there."""

    def __init__(self, train_tasks=1000):
        super().__init__(
            "FrozenLake-v1",
            kwargs={"render_mode": "ansi", "is_slippery": True},
            actions=["1", "2", "3", "5"],
            train_tasks=train_tasks,
        )

    def _shown(self, observation):
        return str(int(observation))


class DeafLake:
    """A wrapper from before `episode_seed`: what it passes on lacks it."""

    def __init__(self):
        self._lake = Lake()

    def __getattr__(self, name):
        return getattr(self._lake, name)

    def reset(self, *arguments, **named):
        assert not named
        return self._lake.reset(*arguments)
