"""Our side: sweeps of the learner, one after the other on one state; and what can be left out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seeupo_jax.bench.comparison import Outcome
from seeupo_jax.bench.inputs import Inputs
from seeupo_jax.bench.program_recorder import Call, Recorder, flops
from seeupo_jax.configuration import loading
from seeupo_jax.learner.batching import (
    Rows,
    Shapes,
    action_spans,
    all_actions,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.learner import Program
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_state import Step
from seeupo_jax.parallel.distributed import to_host
from seeupo_jax.planning.program_flops import Flops
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.parameter_names import at, stored_tensors
from seeupo_jax.runtime import build, stored_update
from seeupo_jax.trajectories.stored import read_trajectories
from seeupo_jax.types import TurnBatch

ITERATION = 1  # of every sweep: it seeds only what these sweeps do not do
Score = Callable[[Any, TurnBatch], Any]


@dataclass(frozen=True)
class Ablation:
    """A technique that makes a sweep cheap, left out; the numbers stay the same.

    words: what is done instead. fields: of the configuration.
    shapes: fields of the learner's shapes that differ, from the shapes. score: from the program
    that scores a sweep's trajectories, their rows and the shapes to what is called instead.
    """

    words: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    shapes: Callable[[Shapes], Mapping[str, Any]] = lambda _: {}
    score: Callable[[Score, Rows, Shapes], Score] = lambda score, *_: score


def _score_by_turn(one_pass: Score, rows: Rows, shapes: Shapes) -> Score:
    """What one pass gives for all turns, from a pass over each turn's contexts."""
    whole = all_actions(rows)
    place = {span.segment: number for number, span in enumerate(whole)}

    def score(params: Any, batch: TurnBatch) -> np.ndarray:
        found_PA = np.zeros(batch.mask_PA.shape, np.float32)
        for turn in range(rows.turns):
            spans = action_spans(rows, [turn])
            own = turn_batch(rows, lay_out(rows, spans, shapes), shapes, {}, action=shapes.action)
            for span, logp_A in zip(spans, np.asarray(one_pass(params, own)), strict=False):
                row = place[span.segment]
                column = np.searchsorted(whole[row].position_A, span.position_A)
                found_PA[row, column] = logp_A[: column.size]
        return found_PA

    return score


ALL_ON = Ablation("")
ABLATIONS = {
    "share_prefixes": Ablation(
        "every member of a group has its own copy of the prompt",
        fields={"batching.share_prefixes": False},
    ),
    "fused_refresh": Ablation(
        "new log-probabilities from a pass after each step",
        fields={"algorithm.refresh": "separate"},
    ),
    "one_old_pass": Ablation(
        "old and reference log-probabilities from a pass for each turn", score=_score_by_turn
    ),
    "truncation": Ablation(
        "a turn's rows reach to the end of their trajectories",
        shapes=lambda _: {"truncate": False},
    ),
    "buckets": Ablation(
        "rows are padded to one length", shapes=lambda shapes: {"lengths": shapes.lengths[-1:]}
    ),
    "tree_attention": Ablation(
        "scores of all pairs of tokens, and a mask", fields={"model.attention": "all_pairs"}
    ),
}


def ablations(names: Sequence[str]) -> dict[str, Ablation]:
    """Those that `--without` names; `all` is every one.

    Raises:
      ValueError: an unknown one.
    """
    names = tuple(ABLATIONS) if tuple(names) == ("all",) else names
    for name in names:
        if name not in ABLATIONS:
            allowed = ", ".join(("all", *ABLATIONS))
            raise ValueError(f"--without: got {name!r}; allowed: {allowed}.")
    return {name: ABLATIONS[name] for name in names}


class OurSweeps:
    """Sweeps that go on from each other's weights.

    Args:
      ablation: what is left out of the sweep.

    Attributes:
      metrics, steps: of the last sweep.
    """

    def __init__(self, inputs: Inputs, ablation: Ablation = ALL_ON) -> None:
        nested: dict[str, Any] = {}  # as `loading.from_dict` takes fields
        fields = inputs.fields | ablation.fields | {"model.path": str(inputs.model)}
        for name, value in fields.items():
            group, _, leaf = name.rpartition(".")
            (nested.setdefault(group, {}) if group else nested)[leaf] = value
        config = loading.from_dict(nested)
        # Shapes of microbatches and rows are what any user of the `update` command gets.
        config, self.trajectories = stored_update.prepare(
            config, str(inputs.lines), lambda sentence: None
        )
        config, _ = choose_remat(config)
        self.policy, params = build.load_policy(config, config.model.path)
        optimizer = make_optimizer(config.optimizer, total_steps=build.total_steps(config))
        self.state = build.new_state(config, self.policy, optimizer, params)
        self.reference = build.place_reference(config, params)
        learner = build.build_learner(config, self.policy, optimizer, self.state)
        shapes = dataclasses.replace(learner.shapes, **ablation.shapes(learner.shapes))
        self._rows, self._recorder = Rows.of(self.trajectories), Recorder()

        def through(name: str, program: Program) -> Any:
            program = self._recorder.through(name, program)
            return ablation.score(program, self._rows, shapes) if name == "score" else program

        self.learner = dataclasses.replace(learner, shapes=shapes, through=through)
        self.metrics: dict[str, float] = {}
        self.steps: Sequence[Step] = ()

    def run(self, lines: Path | None = None) -> float:
        """One sweep; the seconds it took.

        Args:
          lines: a file of other trajectories, no longer than those of the inputs; reading it back
            is no part of a sweep, nor timed.
        """
        trajectories = self.trajectories if lines is None else read_trajectories(lines)
        began = time.perf_counter()
        with jax.set_mesh(self.policy.mesh):
            self.state, self.metrics, _, self.steps = sweep(
                self.learner, self.state, self.reference, trajectories, iteration=ITERATION
            )
        jax.block_until_ready(self.state)
        return time.perf_counter() - began

    def recorded(self) -> list[Call]:
        """One sweep: what its programs were given."""
        with self._recorder.recording() as calls:
            self.run()
        return list(calls)

    def flops(self, calls: list[Call]) -> dict[str, Flops]:
        """Of a sweep's calls, by program."""
        platform = self.policy.mesh.devices.flat[0].platform
        with jax.set_mesh(self.policy.mesh):
            return flops(calls, self.policy.network.arch, platform)

    def outcome(self) -> Outcome:
        """What the last sweep over the inputs' trajectories did, and the weights as they are."""
        return Outcome([_plain(self._rows, step) for step in self.steps], self.tensors())

    def params(self) -> Any:
        """The parameters, as the sampler takes them."""
        return self.policy.merged(self.state.params)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights, by their names in files."""
        return by_file_name(self.policy.network.arch, self.params())

    @property
    def state_bytes(self) -> int:
        """Weights, the reference policy's, and the optimizer's state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.state, self.reference)))


def by_file_name(arch: Architecture, params: Any) -> dict[str, np.ndarray]:
    """A tree of the parameters' kind as float32 arrays, by their names in files."""
    found = {}
    for stored in stored_tensors(arch, params):
        leaf = np.asarray(to_host(at(params, stored.path)), np.float32)
        found[stored.names[0]] = leaf.T if stored.transposed else leaf
    return found


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
