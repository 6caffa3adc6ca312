"""How long the devices of one process have nothing to do in a rollout and in a sweep.

The devices are idle from the end of a program until the next one is given to them. In a rollout
these are the engine's prefills and decodings; in a sweep the scoring of the old and the reference
policy and the steps of the turns. Before each rollout step and each turn the processes agree, once
through the side channel and once by a collective of the devices, which waits for the programs in
flight: then nothing is left in flight when the next one is prepared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import multihost_utils

from seeupo_jax.benchmarks.jax_runner import JaxSweeps
from seeupo_jax.benchmarks.rollout import converse, make_engine
from seeupo_jax.benchmarks.workloads import Inputs
from seeupo_jax.configuration.schema import Mesh
from seeupo_jax.learner.compiled_programs import LearnerProgram
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.parallel.distributed import gather, max_over_processes
from seeupo_jax.parallel.mesh import sampler_mesh
from seeupo_jax.rollout.engine.clock import Clock, Dispatch, DispatchTimes

CHANNEL, COLLECTIVE = "side channel", "device collective"
ROLLOUT, SWEEP = "rollout", "sweep"
# A learner's program -> the part of its results that no later program takes the memory of.
_KEPT: dict[str, Callable[[Any], Any]] = {
    "score": lambda logp_PA: logp_PA,
    "turn_step": lambda result: result.metrics,
}


class IdleTimes(NamedTuple):
    """Of one process and one rollout or sweep.

    busy_s, idle_s: of its devices, from their first program to the end of their last.
    agreements: how often the processes agreed. agreeing_s: seconds that the host spent on it.
    """

    busy_s: float
    idle_s: float
    agreements: int
    agreeing_s: float

    @property
    def idle(self) -> float:
        """The share of the time in which the devices were idle."""
        return self.idle_s / (self.busy_s + self.idle_s)


def max_by_collective(wants: Sequence[int]) -> list[int]:
    """As `max_over_processes`, by a program of the devices."""
    return multihost_utils.process_allgather(np.array(wants, np.int32)).max(axis=0).tolist()


WAYS: Mapping[str, Callable[[Sequence[int]], list[int]]] = {
    CHANNEL: max_over_processes,
    COLLECTIVE: max_by_collective,
}


class Agreement:
    """What an engine and a sweep agree by, in one of `WAYS`, with its seconds.

    Attributes:
      way: a name of `WAYS`. count, seconds: since `begin`.
    """

    def __init__(self) -> None:
        self.begin(CHANNEL)

    def begin(self, way: str) -> None:
        """Starts from zero, in this way."""
        self.way, self.count, self.seconds = way, 0, 0.0

    def __call__(self, wants: Sequence[int]) -> list[int]:
        began = time.perf_counter()
        agreed = WAYS[self.way](wants)
        self.count, self.seconds = self.count + 1, self.seconds + time.perf_counter() - began
        return agreed


class ProcessWork:
    """This process's part of the rollouts and sweeps, which all processes do together.

    Attributes:
      results: what came of the first rollout and the first sweep: hashes of every bit by name, and
        the values of the sweep's steps.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._work, self._seed = inputs.work, inputs.settings.seed
        self._agree = Agreement()
        sweeps = self._sweeps = JaxSweeps(inputs)
        sweeps.learner = dataclasses.replace(sweeps.learner, wrap_program=self._noted)
        self._begin_sweep()
        mesh = sampler_mesh(sweeps.policy.mesh, Mesh(data=-1))
        self._engine = make_engine(
            sweeps.policy.network, inputs.work, inputs.settings, mesh=mesh, agree=self._agree
        )
        self._engine.compile(sweeps.params())
        self.results = {
            "rollout_hash": self._rollout_hash(),
            "sweep_hash": self._sweep_hash(),
            "steps": [
                {name: np.asarray(value).tolist() for name, value in step.items()}
                for step in sweeps.outcome().steps
            ],
        }

    def measure(self, part: str, way: str) -> IdleTimes:
        """The times of one more rollout or sweep."""
        gather(None)  # all processes begin at once
        self._agree.begin(way)
        busy_s, idle_s = {ROLLOUT: self._rollout, SWEEP: self._sweep}[part]()
        return IdleTimes(busy_s, idle_s, self._agree.count, self._agree.seconds)

    def _rollout(self) -> tuple[float, float]:
        converse(self._engine, self._sweeps.params(), self._work, self._seed)
        return sum(self._engine.seconds().values()), self._engine.idle_s

    def _sweep(self) -> tuple[float, float]:
        self._begin_sweep()
        self._sweeps.run(stop=lambda: bool(self._agree([0])[0]))
        busy_s = sum(map(self._times.wait, self._dispatches))
        self._times.close()
        return busy_s, self._times.idle_s

    def _begin_sweep(self) -> None:
        self._times, self._dispatches = DispatchTimes(), list[Dispatch]()

    def _noted(self, name: str, program: LearnerProgram) -> Any:
        """A learner's program whose executions are noted, as its `wrap_program`."""
        if name not in _KEPT:
            return program

        def noted(*arguments: Any) -> Any:
            began = Clock.now()
            results = program(*arguments)
            self._dispatches.append(self._times.note(began, _KEPT[name](results)))
            return results

        return noted

    def _rollout_hash(self) -> str:
        played = converse(self._engine, self._sweeps.params(), self._work, self._seed)
        sampled = {
            key: (tokens, logp)
            for key, (tokens, logp) in enumerate(zip(played.actions, played.logp, strict=True))
            if tokens
        }
        every = {key: value for part in gather(sampled) for key, value in part.items()}
        return hashlib.sha256(repr(sorted(every.items())).encode()).hexdigest()

    def _sweep_hash(self) -> str:
        self._sweep()
        return checksum(self._sweeps.state)
