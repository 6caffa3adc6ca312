"""Small environments for mixtures; imported by processes of their own, which import no jax."""

from seeupo_jax import envs
from seeupo_jax.envs.base import Demonstration, StepResult


class Maze:
    """Tasks go one step; the task's number is the reward."""

    def __init__(self, size=4, seeded=False):
        self._size, self.seeds = size, []
        self.closed = False
        if seeded:
            self.reset = self._reset_seeded

    def task_ids(self, split):
        if split == "validation":
            raise ValueError("no such split")
        return [f"{split}/a:{number}" for number in range(self._size)]

    def reset(self, task_id, seed):
        self._number = int(task_id.rpartition(":")[2])
        return ({"role": "user", "content": "1"},), ({"name": "17 18"},)

    def _reset_seeded(self, task_id, seed, *, episode_seed=None):
        self.seeds.append(episode_seed)
        return Maze.reset(self, task_id, seed)

    def step(self, text):
        return StepResult((), float(self._number), True)

    def score(self):
        return 1.0

    def finish(self, stop):
        return 0.5

    def labels(self, task_id):
        return {"env": "mine", "size": str(self._size)}

    def close(self):
        self.closed = True


class Shown(Maze):
    def demonstrations(self, split, *, first=0):
        return [
            Demonstration(({"role": "user", "content": f"{self._size} {number}"},))
            for number in range(first, self._size)
        ]

    def vocabulary(self):
        return ["north", f"size {self._size}"]


class Wrapper:
    """Another environment, all of which it passes on."""

    def __init__(self, name, **options):
        self._inner = envs.make(name, **options)

    def __getattr__(self, name):
        return getattr(self._inner, name)
