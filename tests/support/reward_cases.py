"""Reward functions as users write them, some of which fail."""

import asyncio
import dataclasses
import threading
import time

from seeupo_jax.envs.base import StepResult

released = threading.Event()  # lets hung calls end with the test
cancelled = threading.Event()  # a coroutine was
seen = []


def length(episode):
    seen.append(episode)
    episode.messages[0]["content"] = "changed by a reward function"  # its own copy
    return len(episode.answer)


def one(episode):
    return 1


async def patient(episode, *, factor=1.0):
    await asyncio.sleep(0.01)
    return factor * episode.turns


def rising(episode):
    """A reward for each turn."""
    return [0.5 * turn for turn in range(episode.turns)]


def one_too_few(episode):
    return [1.0] * (episode.turns - (episode.task_id == "bad"))


def broken(episode):
    if episode.task_id == "bad":
        raise KeyError("no such field")
    return 1.0


def hangs(episode):
    released.wait(30 if episode.task_id == "bad" else 0)
    return 1.0


async def hangs_awaiting(episode):
    try:
        await asyncio.sleep(30 if episode.task_id == "bad" else 0)
    except asyncio.CancelledError:
        cancelled.set()
        raise
    return 1.0


async def blocks(episode):
    released.wait(30 if episode.task_id == "bad" else 0)
    return 1.0


def waits(episode):
    """Only a sampler that goes on meanwhile releases it."""
    return 1.0 if released.wait(10) else float("nan")


def infinite(episode):
    return float("inf") if episode.task_id == "bad" else 1


def words(episode):
    return "1.0" if episode.task_id == "bad" else 1


def huge(episode):
    return 2e6 if episode.task_id == "bad" else 1


async def own_timeout(episode):
    if episode.task_id == "bad":
        raise TimeoutError("of its own")
    return 1.0


def quits(episode):
    return exit(3) if episode.task_id == "bad" else 1.0


async def quits_awaiting(episode):
    if episode.task_id == "bad":
        exit(3)
    await asyncio.sleep(0.01)
    return 1.0


async def quits_in_a_task(episode):
    return (await asyncio.gather(quits_awaiting(episode)))[0]


class Deleted:
    """A number that is gone, as a jax array is after `delete`."""

    def __float__(self):
        raise RuntimeError("Array has been deleted")


def deleted(episode):
    return Deleted() if episode.task_id == "bad" else 1.0


async def deleted_later(episode):
    return [0.0, Deleted()] if episode.task_id == "bad" else 1.0


class Counting:
    """Counts the calls that run at once."""

    most = now = 0
    lock = threading.Lock()

    def __init__(self, *, seconds):
        if seconds < 0:
            raise ValueError(f"seconds: got {seconds}; allowed: a number >= 0.")
        self._seconds = seconds

    def __call__(self, episode):
        with self.lock:
            Counting.now += 1
            Counting.most = max(self.most, self.now)
        time.sleep(self._seconds)
        with self.lock:
            Counting.now -= 1
        return 1.0


def two(episode, more):
    return 1.0


class NotCalled:
    pass


@dataclasses.dataclass
class Near:
    """Its `close` is a number."""

    close: float = 0.1

    def __call__(self, episode):
        return self.close


class Unclosable:
    def __call__(self, episode):
        return 1.0

    def close(self):
        raise OSError("the connection is gone")


class Closed(Unclosable):
    made = count = 0

    def __init__(self):
        Closed.made += 1

    def close(self):
        Closed.count += 1


class Paying:
    """Pays 0.25 a step and, by name, 0.5 for each; ends after `turns` steps."""

    def __init__(self, turns=2):
        self._turns = turns

    def task_ids(self, split):
        return ["good", "bad"]

    def reset(self, task_id, seed):
        self._step = 0
        return ({"role": "user", "content": "1"},), ({"name": "17 18"},)

    def step(self, text):
        self._step += 1
        done = self._step == self._turns
        return StepResult(
            ({"role": "tool", "content": "2"},), 0.25, done, {"gold": 7}, {"form": 0.5}
        )

    def score(self):
        return self._step / 10

    def close(self):
        pass


class Failing(Paying):
    """The same, but the second step of the bad task fails."""

    def reset(self, task_id, seed):
        self._bad = task_id == "bad"
        return super().reset(task_id, seed)

    def step(self, text):
        if self._bad and self._step == 1:
            raise OSError("the connection is gone")
        return super().step(text)


class Correcting(Paying):
    """The same, but `form` pays 0.5 first, then 0.25, and takes back what the step before got."""

    def step(self, text):
        result = super().step(text)
        form = [*[0.0] * (self._step - 1), 0.5]
        if self._step > 1:
            form[-2:] = -0.5, 0.25
        return StepResult(result.observation, 0.25, result.done, {}, {"form": form})


class Showing(Paying):
    """The same with messages of an assistant, which the policy has not sampled."""

    example = {"role": "assistant", "content": "6 6"}

    def reset(self, task_id, seed):
        messages, tools = super().reset(task_id, seed)
        return (*messages, self.example), tools

    def step(self, text):
        result = super().step(text)
        return dataclasses.replace(result, observation=(*result.observation, self.example))


class Plain(Paying):
    """The same without names."""

    def step(self, text):
        result = super().step(text)
        return StepResult(result.observation, result.reward, result.done, result.info)
