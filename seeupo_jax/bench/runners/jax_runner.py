"""Our side: sweeps of the learner, one after the other on one state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seeupo_jax.bench.runners.ablations import ALL_ON, Ablation
from seeupo_jax.bench.runners.program_recorder import Call, Recorder, flops
from seeupo_jax.bench.runners.same_update import Outcome
from seeupo_jax.bench.swept_fields import nested
from seeupo_jax.configuration import loading
from seeupo_jax.learner.batching import Rows
from seeupo_jax.learner.learner import Program
from seeupo_jax.learner.optimizer import make_optimizer
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_state import Step
from seeupo_jax.parallel.distributed import to_host
from seeupo_jax.planning.program_flops import Flops
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy.files.parameter_names import at, stored_tensors
from seeupo_jax.runtime import build, stored_update
from seeupo_jax.types import Trajectory

ITERATION = 1  # of every sweep: it seeds only what these sweeps do not do


class OurSweeps:
    """Sweeps that go on from each other's weights.

    Args:
      folder: of the model. path: of the trajectories.
      values: fields of the configuration, by `choices.values`.
      ablation: what is left out of the sweep.

    Attributes:
      metrics, steps: of the last sweep.
    """

    def __init__(
        self, folder: Path, path: Path, values: Mapping[str, Any], ablation: Ablation = ALL_ON
    ) -> None:
        fields = nested(dict(values) | dict(ablation.fields) | {"model.path": str(folder)})
        chosen = loading.from_dict(fields)
        # Shapes of microbatches and rows are what any user of the `update` command gets.
        chosen, self.trajectories = stored_update.prepare(chosen, str(path), lambda sentence: None)
        chosen, _ = choose_remat(chosen)
        self.policy, params = build.load_policy(chosen, chosen.model.path)
        optimizer = make_optimizer(chosen.optimizer, total_steps=build.total_steps(chosen))
        self.state = build.new_state(chosen, self.policy, optimizer, params)
        self.reference = build.place_reference(chosen, params)
        learner = build.build_learner(chosen, self.policy, optimizer, self.state)
        shapes, rows = ablation.shapes(learner.shapes), Rows.of(self.trajectories)
        self._recorder = Recorder()

        def through(name: str, program: Program) -> Any:
            program = self._recorder.through(name, program)
            return ablation.score(program, rows, shapes) if name == "score" else program

        self.learner = dataclasses.replace(learner, shapes=shapes, through=through)
        self.metrics: dict[str, float] = {}
        self.steps: Sequence[Step] = ()

    def run(
        self,
        trajectories: Sequence[Trajectory] | None = None,
    ) -> float:
        """One sweep; the seconds it took.

        Args:
          trajectories: to sweep over instead of the file's; no longer than those.
        """
        chosen = self.trajectories if trajectories is None else trajectories
        began = time.perf_counter()
        with jax.set_mesh(self.policy.mesh):
            self.state, self.metrics, _, self.steps = sweep(
                self.learner, self.state, self.reference, chosen, iteration=ITERATION
            )
        jax.block_until_ready(self.state)
        return time.perf_counter() - began

    def recorded(self) -> tuple[Outcome, list[Call]]:
        """One sweep: what it did, and what its programs were given."""
        with self._recorder.recording() as calls:
            self.run()
        rows = Rows.of(self.trajectories)
        return Outcome([_plain(rows, step) for step in self.steps], self.tensors()), list(calls)

    def flops(self, calls: list[Call]) -> dict[str, Flops]:
        """Of a sweep's calls, by program."""
        platform = self.policy.mesh.devices.flat[0].platform
        with jax.set_mesh(self.policy.mesh):
            return flops(calls, self.policy.network.arch, platform)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights, by their names in files."""
        params = self.policy.merged(self.state.params)
        return {
            stored.names[0]: to_host(leaf.T if stored.transposed else leaf)
            for stored in stored_tensors(self.policy.network.arch, params)
            for leaf in [at(params, stored.path)]
        }

    @property
    def state_bytes(self) -> int:
        """Weights, the reference policy's, and the optimizer's state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.state, self.reference)))


def _plain(rows: Rows, step: Step) -> dict[str, Any]:
    """A step as plain values by the names of the `update` command's JSON."""
    found = {name: float(value) for name, value in jax.device_get(step.metrics).items()}
    weight_N = np.full(rows.trajectories, np.nan)
    for segment, owner in enumerate(rows.trajectory_S):  # all of a trajectory's tokens have one
        weight_N[owner] = step.advantage[segment][0]
    weight_N *= np.asarray(step.cumulative_ratio_N)
    return {
        "turns": list(step.turns),
        "loss": found["loss"],
        "kl": found["kl"] / found["actions"],
        "weights": weight_N.tolist(),
    }
