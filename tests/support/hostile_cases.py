"""What the protocol of environments does not allow, method by method."""

import numpy as np

from seeupo_jax.envs.base import StepResult

SAYS = ({"role": "tool", "content": "7"},)
USER = ({"role": "user", "content": "1 2"},)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Hostile:
    """Its task's name says which method returns what; every other answer is healthy."""

    answers = {
        # reset
        "none": ("reset", lambda: None),
        "words": ("reset", lambda: ("hello", ())),
        "three": ("reset", lambda: (USER, (), 1)),
        "role": ("reset", lambda: (({"role": "robot", "content": "1"},), ())),
        "content": ("reset", lambda: (({"role": "user", "content": None},), ())),
        "half": ("reset", lambda: (({"role": "user", "content": "\ud800"},), ())),
        "tool": ("reset", lambda: (USER, ("look",))),
        "toolset": ("reset", lambda: (USER, ({"name": "look", "parameters": {"enum": {1}}},))),
        # step
        "nothing": ("step", lambda: None),
        "tuple": ("step", lambda: (SAYS, 1.0, False, {})),
        "info": ("step", lambda: StepResult(SAYS, 0.5, False, None)),
        "list": ("step", lambda: StepResult(SAYS, 0.5, False, [1])),
        "text": ("step", lambda: StepResult("hello", 0.5, False)),
        "number": ("step", lambda: StepResult(5, 0.5, True)),
        "strings": ("step", lambda: StepResult(("hello",), 0.5, True)),
        "person": ("step", lambda: StepResult(({"role": 5, "content": "1"},), 0.5, True)),
        "reward": ("step", lambda: StepResult(SAYS, "0.5", False)),
        "vector": ("step", lambda: StepResult(SAYS, np.ones(2), False)),
        "unpaid": ("step", lambda: StepResult(SAYS, None, False)),
        "done": ("step", lambda: StepResult(SAYS, 0.5, "no")),
        "states": ("step", lambda: StepResult(SAYS, 0.5, False, {"states": ["a", "b", "c"]})),
        "executed": ("step", lambda: StepResult(SAYS, 0.5, False, {"executed": [1]})),
        "unnamed": ("step", lambda: StepResult(SAYS, 0.5, False, {}, [0.5])),
        "misnamed": ("step", lambda: StepResult(SAYS, 0.5, False, {}, {"a/b": 0.5})),
        "renamed": ("step", lambda: StepResult(SAYS, 0.5, False, {}, {"env": 0.5})),
        "endless": ("step", lambda: StepResult(SAYS, 0.5, False, {}, {"form": float("inf")})),
        "unspeakable": ("step", lambda: raise_(Unspeakable())),
        "exit": ("step", lambda: raise_(SystemExit(3))),
        "interrupt": ("step", lambda: raise_(KeyboardInterrupt())),
        # score
        "two": ("score", lambda: 2.0),
        "nan": ("score", lambda: float("nan")),
        "unscored": ("score", lambda: None),
        "lost": ("score", lambda: raise_(LookupError("gone"))),
    }

    def task_ids(self, split):
        return list(self.answers)

    def reset(self, task_id, seed):
        self._task = task_id
        return self._or("reset", (USER, ()))

    def step(self, text):
        return self._or("step", StepResult(SAYS, 0.5, True, {}))

    def score(self):
        return self._or("score", 0.5)

    def close(self):
        pass

    def _or(self, method, healthy):
        where, answer = self.answers.get(self._task, ("", None))
        return answer() if where == method else healthy


class Held(Hostile):
    """Counts those that are open; one that has played no episode closes with an error."""

    open = 0

    def __init__(self):
        self._task, Held.open = None, Held.open + 1

    def task_ids(self, split):
        return ["healthy"]

    def close(self):
        Held.open -= 1
        if self._task is None:
            raise OSError("it was never begun")


def raise_(error):
    raise error
