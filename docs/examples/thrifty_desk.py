"""The order desk with a cost per message: an environment that wraps another one."""

from dataclasses import replace

from seeupo_jax import envs


class ThriftyDesk:
    def __init__(self, price=0.05):
        self.desk, self.price = envs.make("order_desk"), price

    def task_ids(self, split):
        return self.desk.task_ids(split)

    def labels(self, task_id):
        return self.desk.labels(task_id)

    def reset(self, task_id, seed):
        return self.desk.reset(task_id, seed)

    def step(self, text):
        result = self.desk.step(text)
        return replace(result, reward=result.reward - self.price)

    def score(self):
        return self.desk.score()

    def close(self):
        self.desk.close()
