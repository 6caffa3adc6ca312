"""Environments that do to their process what they must not do to a trainer's."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from seeupo_jax.envs.base import StepResult, TransientError


class Wild:
    """Its task's name says what a step does; a number is how many steps pass without anything."""

    def __init__(self, folder="."):
        self._folder, self._kept = Path(folder), []

    def task_ids(self, split):
        return ["2", "exit"]

    def reset(self, task_id, seed):
        self._task, self._steps = task_id, 0
        once = self._folder / task_id
        if task_id == "dies once" and not once.exists():
            once.touch()
            os._exit(4)
        return ({"role": "user", "content": "1 2"},), ()

    def step(self, text):
        self._steps += 1
        getattr(self, f"_{self._task}", lambda: None)()
        done = self._task.isdecimal() and self._steps == int(self._task)
        info = {"pid": os.getpid(), "jax": "jax" in sys.modules}
        return StepResult(({"role": "tool", "content": "7"},), 0.5, done, info)

    def score(self):
        return self._steps / 8

    def close(self):
        if self._task == "close":
            (self._folder / "closed").touch()

    def _exit(self):
        os._exit(7)

    def _segfault(self):
        ctypes.string_at(0)

    def _hang(self):
        child = subprocess.Popen(["sleep", "1000"])
        (self._folder / "hangs").write_text(f"{os.getpid()} {child.pid}\n")
        while True:
            time.sleep(1000)

    def _leak(self):
        self._kept.append(bytearray(2**28))

    def _prints(self):
        os.write(1, b"not an answer\n")
        print("nor this", flush=True)
        assert sys.stdin.read() == ""

    def _shut(self):
        os.closerange(3, 100)

    def _busy(self):
        if self._steps == 1 and not self._kept:
            self._kept.append("asked")
            self._steps = 0
            raise TransientError("not yet")


# A child, a grandchild, a session, and a daemon whose parent has ended; says which they are.
_FAMILY = """
sleep 1000 & echo $! >> {0}
(sleep 1000 & echo $! >> {0}; wait) &
setsid sh -c 'sleep 1000 & echo $! >> {0}; wait' &
(setsid sh -c 'echo $$ >> {0}; exec sleep 1000' &)
"""


class Parent(Wild):
    """Starts other processes with each `reset`; a task that ends in `_c` hangs in C code."""

    def reset(self, task_id, seed):
        pids = self._folder / "pids"
        subprocess.run(["sh", "-c", _FAMILY.format(pids)], check=True)
        while len(pids.read_text().split()) < 4:
            time.sleep(0.01)
        return super().reset(task_id, seed)

    def _hang_in_c(self):
        (self._folder / "hangs").write_text(f"{os.getpid()}")
        ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it keeps Python's lock

    def close(self):
        (self._folder / "closed").touch()


class Paying(Wild):
    """Pays a last reward that says how the episode ended."""

    def finish(self, stop):
        return {"max_turns": 2.0, "max_tokens": 4.0}[stop]


class Screen(Wild):
    """Its `info` and its messages hold an image of more numbers than an `info` may have values."""

    def _seen(self, role):
        return {"role": role, "content": "1 2", "image": np.ones((300, 300, 3), np.uint8)}

    def reset(self, task_id, seed):
        super().reset(task_id, seed)
        return (self._seen("user"),), ()

    def step(self, text):
        seen = self._seen("tool")
        return StepResult((seen,), 1.0, True, {"screen": seen["image"]})


class Rolling:
    """Begins otherwise each time; can be copied."""

    def __init__(self):
        self._steps = 0

    def task_ids(self, split):
        return ["a", "b"]

    def reset(self, task_id, seed):
        self._steps = 0
        return ({"role": "user", "content": str(time.monotonic_ns())},), ()

    def step(self, text):
        self._steps += 1
        return StepResult(({"role": "tool", "content": f"{self._steps}"},), 0.0, self._steps == 3)

    def score(self):
        return self._steps / 3

    def fork(self):
        copy = type(self)()
        copy._steps = self._steps
        return copy

    def close(self):
        pass
