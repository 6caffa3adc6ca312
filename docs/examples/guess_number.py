"""A number to guess from hints: a complete environment."""

import random
import re

from seeupo_jax.envs import StepResult

RULES = "Guess a whole number from 1 to 100 in at most 7 messages. Write one number a message."
SIZES = {"train": 1000, "test": 100}


class GuessNumber:
    def __init__(self, max_turns=7):
        self.max_turns = max_turns

    def task_ids(self, split):
        if split not in SIZES:
            raise ValueError(f"guess_number split: got {split!r}; allowed: {', '.join(SIZES)}.")
        return [f"{split}/{index}" for index in range(SIZES[split])]

    def reset(self, task_id, seed):
        self.number = random.Random(task_id).randint(1, 100)  # the task decides, not the seed
        self.turns, self.won = 0, False
        return ({"role": "system", "content": RULES}, {"role": "user", "content": "Begin."}), ()

    def step(self, text):
        self.turns += 1
        guesses = re.findall(r"\d+", text)[-1:]  # the policy may think before it answers
        self.won = guesses == [str(self.number)]
        done = self.won or self.turns == self.max_turns
        return StepResult(self.hint(guesses), float(self.won), done, {"guesses": self.turns})

    def hint(self, guesses):
        if not guesses:
            return ({"role": "user", "content": "Write a number."},)
        word = "higher" if int(guesses[0][:9]) < self.number else "lower"
        return ({"role": "user", "content": f"The number is {word}."},)

    def score(self):
        return float(self.won)

    def close(self):
        pass
