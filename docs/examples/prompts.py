"""Single-turn tasks: prompts of a file, each answered in one message."""

import json

from seeupo_jax.envs import StepResult


class Prompts:
    def __init__(self, file):
        with open(file, encoding="utf-8") as lines:
            self.tasks = {task["id"]: task for task in map(json.loads, lines)}

    def task_ids(self, split):
        names = [name for name, task in self.tasks.items() if task["split"] == split]
        if not names:
            raise ValueError(f"prompts: got split {split!r}; allowed: one that the file has.")
        return names

    def reset(self, task_id, seed):
        self.task, self.right = self.tasks[task_id], False
        return ({"role": "user", "content": self.task["prompt"]},), ()

    def step(self, text):
        self.right = text.split()[-1:] == [self.task["answer"]]
        return StepResult((), float(self.right), True, {"answer": self.task["answer"]})

    def score(self):
        return float(self.right)

    def close(self):
        pass
