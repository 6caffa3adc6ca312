"""A game of two roles for tests: each reads numbers of its own, and what the other said."""

from seeupo_jax.envs.base import StepResult

ROLES = ("a", "b")


class Duel:
    """Turns alternate; the task `a:b:TURNS` names who plays, and how many turns there are."""

    def reset(self, task_id, seed):
        *self._players, turns = task_id.split(":")
        self._turns, self._said = int(turns), []
        return ({"role": "user", "content": "12"},), ()

    @property
    def role(self):
        return self._players[len(self._said) % 2]

    def step(self, text):
        self._said.append(text)
        first = len(self._said) < 2
        heard = f"{'14 ' if first else ''}{text}".split()[:2]
        observation = ({"role": "user", "content": " ".join(heard)},)
        if len(self._said) < self._turns:
            return StepResult(observation, 0.25, False, role=self.role)
        info = {"states": [str(turn) for turn in range(self._turns)]}
        rewards = {self._players[0]: 1.0, self._players[1]: -1.0}
        return StepResult((), 0.25, True, info, role_rewards=rewards)

    def score(self):
        return 1.0

    def close(self):
        pass
