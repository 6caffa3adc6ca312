"""The JAX side: successive sweeps of the learner on one state, also without single techniques.

The arguments of a sweep's compiled programs are recorded: their FLOPs depend on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seeupo_jax.benchmarks.comparison import SweepOutcome
from seeupo_jax.benchmarks.workloads import Inputs
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.batching import (
    SegmentBatch,
    Shapes,
    action_spans,
    all_actions,
    lay_out,
    turn_batch,
)
from seeupo_jax.learner.compiled_programs import LearnerProgram
from seeupo_jax.learner.refresh_batch import RefreshBatch
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.learner.sweep_state import OptimizerStep
from seeupo_jax.parallel.distributed import to_host
from seeupo_jax.planning.program_flops import Flops, Passes, Trips, count
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.parameter_names import leaf_at, stored_parameters
from seeupo_jax.policy.kernels.attention import Past, Tree, tree_mask_of
from seeupo_jax.policy.kernels.fused import tree_blocks
from seeupo_jax.policy.kernels.tree_attention import block_for
from seeupo_jax.policy.kernels.tree_mask import visited_blocks
from seeupo_jax.policy.network import LOGITS_AT_ONCE, TOKENS_AT_ONCE
from seeupo_jax.policy_io import build
from seeupo_jax.training import stored_update
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.trajectories.stored import read_stored
from seeupo_jax.types import NO_TARGET, TurnBatch

Score = Callable[[Any, TurnBatch], Any]
PROGRAMS = ("score", "turn_step", "refresh")  # of a learner


@dataclass(frozen=True)
class Ablation:
    """A technique that makes a sweep cheap, left out; the numbers stay the same.

    words: its replacement, in words. fields: of the configuration.
    shapes: makes the changed fields of the learner's shapes from the shapes. score: makes the
    replacement of the program that scores a sweep's trajectories, from it, the rows and the shapes.
    """

    words: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    shapes: Callable[[Shapes], Mapping[str, Any]] = lambda _: {}
    score: Callable[[Score, SegmentBatch, Shapes], Score] = lambda score, *_: score


def _score_by_turn(one_pass: Score, rows: SegmentBatch, shapes: Shapes) -> Score:
    """The result of one pass over all turns, computed by a pass over each turn's contexts."""
    spans_of_rows = all_actions(rows)
    place = {span.segment: number for number, span in enumerate(spans_of_rows)}

    def score(params: Any, batch: TurnBatch) -> np.ndarray:
        found_PA = np.zeros(batch.mask_PA.shape, np.float32)
        for turn in range(rows.turns):
            spans = action_spans(rows, [turn])
            part = turn_batch(rows, lay_out(rows, spans, shapes), shapes, {}, action=shapes.action)
            for span, logp_A in zip(spans, np.asarray(one_pass(params, part)), strict=False):
                row = place[span.segment]
                column = np.searchsorted(spans_of_rows[row].position_A, span.position_A)
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
    """The ablations that `--without` names; `all` is every one.

    Raises:
      ValueError: an unknown one.
    """
    names = tuple(ABLATIONS) if tuple(names) == ("all",) else names
    for name in names:
        if name not in ABLATIONS:
            allowed = ", ".join(("all", *ABLATIONS))
            raise ValueError(f"--without: got {name!r}; allowed: {allowed}.")
    return {name: ABLATIONS[name] for name in names}


class JaxSweeps:
    """Successive sweeps, each starting from the previous one's weights.

    Args:
      ablation: technique that the sweep leaves out.

    Attributes:
      metrics, steps: of the last sweep.
    """

    def __init__(self, inputs: Inputs, ablation: Ablation = ALL_ON) -> None:
        fields = inputs.fields | ablation.fields | {"model.path": str(inputs.model)}
        config = load_config(Config(), [f"{name}={value}" for name, value in fields.items()])
        # Microbatches and rows have the shapes of the `update` command.
        config, self.trajectories = stored_update.prepare_update(
            config, str(inputs.lines), lambda sentence: None
        )
        config, _ = choose_remat(config)
        self.policy, params = build.load_policy(config, config.model.path)
        learner, self.state, self.reference = build_learner(config, self.policy, params)
        shapes = dataclasses.replace(learner.shapes, **ablation.shapes(learner.shapes))
        self._rows, self._recorder = SegmentBatch.of(self.trajectories), Recorder()

        def wrap_program(name: str, program: LearnerProgram) -> Any:
            program = self._recorder.wrap_program(name, program)
            return ablation.score(program, self._rows, shapes) if name == "score" else program

        self.learner = dataclasses.replace(learner, shapes=shapes, wrap_program=wrap_program)
        self.metrics: dict[str, float] = {}
        self.steps: Sequence[OptimizerStep] = ()

    def run(self, lines: Path | None = None, stop: Callable[[], bool] = lambda: False) -> float:
        """Runs one sweep; the seconds it took.

        Args:
          lines: a file of other trajectories, no longer than those of the inputs; reading it back
            is no part of a sweep, nor timed.
          stop: as of `sweep`.
        """
        trajectories = self.trajectories if lines is None else read_stored(lines)
        began = time.perf_counter()
        with jax.set_mesh(self.policy.mesh):
            self.state, self.metrics, _, self.steps = sweep(
                self.learner,
                self.state,
                self.reference,
                trajectories,
                iteration=stored_update.ITERATION,
                stop=stop,
            )
        jax.block_until_ready(self.state)
        return time.perf_counter() - began

    def recorded(self) -> list[ProgramCall]:
        """Runs one sweep, and records the arguments of its programs."""
        with self._recorder.recording() as calls:
            self.run()
        return list(calls)

    def flops(self, calls: list[ProgramCall]) -> dict[str, Flops]:
        """Of a sweep's calls, by program."""
        platform = self.policy.mesh.devices.flat[0].platform
        with jax.set_mesh(self.policy.mesh):
            return flops(calls, self.policy.network.arch, platform)

    def outcome(self) -> SweepOutcome:
        """The outcome of the last sweep over the inputs' trajectories, and the current weights."""
        steps = [stored_update.step_values(self._rows, step) for step in self.steps]
        return SweepOutcome(steps, self.tensors())

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
    tensors = {}
    for stored in stored_parameters(arch, params):
        leaf = leaf_at(params, stored.path)
        leaf = np.asarray(to_host(leaf if stored.layer is None else leaf[stored.layer]), np.float32)
        tensors[stored.names[0]] = leaf.T if stored.transposed else leaf
    return tensors


@dataclass(frozen=True)
class ProgramCall:
    """One execution: the program, the shapes of its arguments, and those that determine its work.

    refresh_batch: None without a refresh in it.
    """

    name: str
    program: LearnerProgram
    shapes: tuple[Any, ...]
    batch: TurnBatch
    refresh_batch: RefreshBatch | None

    @property
    def positions(self) -> int:
        """Of tokens that went through the network, padding included."""
        _, R, L = self.batch.tokens_MRL.shape
        rows = int(self.batch.microbatches) * R * L
        if self.refresh_batch is None:
            return rows
        *_, C = self.refresh_batch.tokens_MQRC.shape
        return rows + int(np.sum(self.refresh_batch.chunks_M)) * R * C


class Recorder:
    """Stands between a learner and its programs, and writes down calls while it is asked to."""

    def __init__(self) -> None:
        self.calls: list[ProgramCall] = []
        self._recording = False

    def wrap_program(self, name: str, program: LearnerProgram) -> LearnerProgram:
        """Calls a program for the learner, as its `wrap_program`."""
        return functools.partial(self._call, name, program) if name in PROGRAMS else program

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[ProgramCall]]:
        """Records the calls meanwhile."""
        self.calls, self._recording = [], True
        try:
            yield self.calls
        finally:
            self._recording = False

    def _call(self, name: str, program: LearnerProgram, *arguments: Any) -> Any:
        if self._recording:
            shapes = jax.tree.map(_shape, arguments)
            batch, *rest = arguments[1:3]
            refresh_batch = rest[0] if name == "turn_step" else None
            self.calls.append(ProgramCall(name, program, shapes, batch, refresh_batch))
        return program(*arguments)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    # Laid out as it was: the program that ran is not traced again.
    where = x.sharding if isinstance(x, jax.Array) else None
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=where)


def flops(calls: list[ProgramCall], arch: Architecture, platform: str) -> dict[str, Flops]:
    """Of all calls together, by program; each program is traced once a shape."""
    traced: dict[Any, Any] = {}
    total = dict.fromkeys(PROGRAMS, Flops())
    for call in calls:
        leaves, tree = jax.tree.flatten(call.shapes)
        key = (call.name, tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in traced:
            bound = call.program
            traced[key] = bound.func.trace(*bound.args, *call.shapes).jaxpr
        done = count(traced[key], trips(call, arch, platform), platform)
        total[call.name] = total[call.name].plus(done)
    return total


def trips(call: ProgramCall, arch: Architecture, platform: str = "cpu") -> Trips:
    """How often the loops of an execution run; windows are not counted."""
    batch, more, M = call.batch, call.refresh_batch, int(call.batch.microbatches)
    rows = [Tree(batch.depth_MRL[m], batch.end_MRL[m]) for m in range(M)]
    trees = [(tree, None) for tree in rows]
    passes = _passes(trees, [batch.target_MRX[m] for m in range(M)], arch, platform)
    if more is None:
        return Trips(M, passes)
    chunks = [(m, q) for m in range(M) for q in range(int(more.chunks_M[m]))]
    below = [
        (Tree(more.depth_MQRC[m, q], more.end_MQRC[m, q]), Past((), rows[m], more.at_MQRC[m, q]))
        for m, q in chunks
    ]
    targets = [more.target_MQRC[m, q] for m, q in chunks]
    return Trips(M, passes, len(chunks) / M if M else 0.0, _passes(below, targets, arch, platform))


def _passes(
    trees: list[tuple[Tree, Past | None]], targets: list[Any], arch: Architecture, platform: str
) -> Passes:
    """The average number of passes over these microbatches or chunks."""
    if not trees:
        return Passes(0.0, 0.0)
    block, blocks = block_for(arch.heads, arch.longest), tree_blocks(platform, arch.dtype)
    visits = np.concatenate([_visited(*tree, block, block).reshape(-1) for tree in trees])
    pairs: tuple[float, float] | tuple[None, None] = None, None
    if blocks is not None:  # of the platform's kernel, held by queries and by keys
        held, met = blocks
        by_queries = np.mean([_visited(*tree, held, met).sum() for tree in trees])
        pairs = float(by_queries), float(np.mean([_visited(*t, met, held).sum() for t in trees]))
    return Passes(float(visits.mean()), _predicting(targets, arch), *pairs)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _visited(tree: Tree, past: Past | None, block: int, key_block: int) -> jax.Array:
    """Blocks of keys that each block of queries meets, [rows, blocks of queries]."""
    return visited_blocks(tree_mask_of(tree, past), block=block, key_block=key_block).sum(2)


def _predicting(targets: list[Any], arch: Architecture) -> float:
    """The share of the chunks of tokens, as `network.token_logp` cuts them, that predict any."""
    at_once = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // arch.vocab_size))
    computed = []
    for target_RX in targets:
        flat = np.asarray(target_RX).reshape(-1)
        chunks = -(-flat.size // at_once)
        chunk = -(-flat.size // chunks)
        padded = np.pad(flat, (0, chunks * chunk - flat.size), constant_values=NO_TARGET)
        computed += (padded.reshape(chunks, chunk) != NO_TARGET).any(1).tolist()
    return float(np.mean(computed))
