"""An environment whose rewards depend on every word, for runs of a policy that knows nothing."""

import dataclasses
import time
import zlib

from seeupo_jax.envs.base import StepResult


class Echo:
    """Task `tN`: N % 4 + 1 turns; what is said is answered, and rewarded as if by chance."""

    def task_ids(self, split):
        return [f"t{number}" for number in range(12 if split == "train" else 6)]

    def reset(self, task_id, seed):
        number = int(task_id[1:])
        self._turns, self._said = number % 4 + 1, []
        return ({"role": "user", "content": f"order {number}: " + "again " * (number % 5)},), ()

    def step(self, text):
        self._said.append(text)
        done = len(self._said) == self._turns
        answer = () if done else ({"role": "tool", "content": f"you said {len(text)} signs"},)
        return StepResult(answer, self._chance(), done)

    def score(self):
        return float(self._chance() > 0.5)

    def close(self):
        pass

    def _chance(self):
        return zlib.crc32(repr(self._said).encode()) / 2**32


class Settled(Echo):
    """As `Echo`, but nothing that is said changes the rewards of a task of odd number."""

    def reset(self, task_id, seed):
        self._odd = int(task_id[1:]) % 2 == 1
        return super().reset(task_id, seed)

    def _chance(self):
        return 0.25 if self._odd else super()._chance()


class Validated(Echo):
    """As `Echo`, with tasks to choose a checkpoint by."""

    def task_ids(self, split):
        return ["t20", "t21", "t22"] if split == "validation" else super().task_ids(split)


class Indifferent(Echo):
    """As `Echo`, but nothing that is said changes any reward."""

    def _chance(self):
        return 0.25


class Partial(Echo):
    """As `Echo`, but no episode succeeds, whatever its reward."""

    def score(self):
        return 0.9 * self._chance()


class Broken(Echo):
    """No episode of it begins."""

    def reset(self, task_id, seed):
        raise ConnectionError("no server listens")


class Named(Echo):
    """As `Echo`, with a reward of the name of a function of this module."""

    def step(self, text):
        return dataclasses.replace(super().step(text), rewards={"judge": 1.0})


class Slow(Echo):
    """As `Echo`, but each answer takes a fifth of a second."""

    def step(self, text):
        time.sleep(0.2)
        return super().step(text)


class Lost(Echo):
    """Its server is gone once a first episode, that of the checks before a run, has begun."""

    _begun = 0

    def reset(self, task_id, seed):
        Lost._begun += 1
        if Lost._begun > 1:
            raise ConnectionError("no server listens")
        return super().reset(task_id, seed)


def judge(episode):
    """Scores what was said last: its length, in characters modulo 7."""
    return len(episode.messages[-1]["content"]) % 7 / 7


class Sleepy(Echo):
    """As `Echo`, but each answer takes half a second, and the first one of four turns a minute."""

    def step(self, text):
        time.sleep(60 if self._turns == 4 and not self._said else 0.5)
        return super().step(text)
