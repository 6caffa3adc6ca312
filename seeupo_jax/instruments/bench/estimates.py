"""Seconds of an iteration's parts: the estimates of `aot` against measurements on a CPU.

Every conversation grows evenly to the longest context, half of each turn sampled, and nothing is
shared, as an estimate assumes (`planning.slices.iteration_time`). The chip is this machine's CPU,
with the peak of its matrix products and the bandwidth of its memory as measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seeupo_jax.benchmarks import machine
from seeupo_jax.benchmarks.jax_runner import JaxSweeps
from seeupo_jax.benchmarks.rollout import converse, make_engine
from seeupo_jax.benchmarks.settings import MODELS, BenchSettings, architecture, write_model
from seeupo_jax.benchmarks.workloads import (
    Inputs,
    Workload,
    WorkloadConversation,
    random_actions,
    trajectory_lines,
)
from seeupo_jax.cli.command_line import prepare_xla
from seeupo_jax.configuration.flags import Flags, integer, output_file
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.learner.compiled_programs import LearnerProgram
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.abstract_run import abstract_run
from seeupo_jax.planning.chips import Chip, Topology
from seeupo_jax.planning.remat import choose_remat
from seeupo_jax.planning.slices.iteration_time import (
    Iteration,
    estimate_iteration,
    program_roofline,
)
from seeupo_jax.planning.slices.roofline import Roofline
from seeupo_jax.planning.slices.slice_programs import Setup, choose_programs, list_programs

_KINDS = {"score": "sweep/score", "turn_step": "sweep/turn"}  # of a learner's programs
_SAMPLERS = {"rollout/prefill": "prefill_s", "rollout/decode": "decode_s"}  # of an engine's clock
PARTS = (*_KINDS.values(), *_SAMPLERS)


class RooflineFigures(NamedTuple):
    """Figures of a program on one device."""

    roofline: Roofline
    collectives: tuple[()] = ()


class EstimateCase(NamedTuple):
    """A model of `settings.MODELS`, and conversations of it."""

    model: str
    context: int
    turns: int
    conversations: int

    def __str__(self) -> str:
        return f"{self.model}, {self.conversations} x {self.context} tokens in {self.turns} turns"


CASES = (
    EstimateCase("tiny", 512, 2, 16),
    EstimateCase("tiny", 1024, 4, 8),
    EstimateCase("135m", 512, 4, 4),
)
SMALLEST = (EstimateCase("nano", 64, 2, 2),)


def add_flags(parser: Flags) -> None:
    """Adds the command's flags."""
    parser.flag("repeats", "timed iterations of each case", integer(1), default=3)
    parser.switch("smallest", "one small case, to try the command")
    parser.flag("json", "also write the figures to this file", output_file)


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints; the figures.

    Raises:
      ValueError: a machine without exactly one CPU device.
    """
    prepare_xla()
    device = machine.only_device()
    if device.platform != "cpu":
        raise ValueError(
            f"bench estimates: got a {device.platform}; allowed: a CPU, as with JAX_PLATFORMS=cpu."
        )
    about = machine.describe(device)  # its load, before there is ours
    peak, bandwidth = machine.matmul_peak("float32"), machine.memory_bandwidth()
    chip = Chip("cpu", 0, peak, bandwidth, 0.0, 0.0, 1, 1, 2, 1)
    print(f"{peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    for case in SMALLEST if flags.smallest else CASES:
        estimated, measured = _measure(case, chip, flags.repeats)
        for part in estimated.parts:
            if part.name in PARTS:
                row = {"case": str(case), "part": part.name, "measured_s": measured[part.name]}
                rows.append(row | {"overlap_s": part.step_s, "serial_s": part.serial_s})
                print(
                    "{case}: {part}: {overlap_s:.3f} to {serial_s:.3f} s estimated,"
                    " {measured_s:.3f} s".format(**rows[-1]),
                    flush=True,
                )
    over = sorted(row["measured_s"] / row["serial_s"] for row in rows)
    figures = {
        "benchmark": "estimates",
        "machine": about,
        "peak_flops": peak,
        "bandwidth": bandwidth,
        "rows": rows,
        "least": over[0],
        "median": float(np.median(over)),
        "most": over[-1],
    }
    print(
        "{least:.2f} to {most:.2f} times the estimate without overlap, median {median:.2f}".format(
            **figures
        )
    )
    return figures


def _measure(case: EstimateCase, chip: Chip, repeats: int) -> tuple[Iteration, dict[str, float]]:
    """The estimates of an iteration, and the measured medians of seconds, by part."""
    settings, work = BenchSettings(model=case.model, group_size=2), _conversations(case)
    arch, fields = architecture(case.model, "float32"), _fields(case, work)
    with tempfile.TemporaryDirectory() as folder:
        model, lines = Path(folder, "model"), Path(folder, "trajectories.jsonl")
        write_model(arch, model, seed=settings.seed)
        made = trajectory_lines(work, random_actions(work, settings.seed), seed=settings.seed)
        lines.write_text("\n".join(made) + "\n", encoding="utf-8")
        sweeps = JaxSweeps(Inputs(settings, arch, work, model, lines, fields))
        estimated = _estimate(fields, chip)
    timer = Timer()
    sweeps.learner = dataclasses.replace(sweeps.learner, wrap_program=timer.wrap_program)
    alone = dataclasses.replace(work, group_size=1)  # no pages are shared
    engine = make_engine(sweeps.policy.network, alone, settings)
    engine.compile(sweeps.params())
    measured: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(repeats + 1):
        timer.seconds.clear()
        sweeps.run()
        converse(engine, sweeps.params(), alone, settings.seed)
        if number:  # the first compiles
            seconds = engine.seconds()
            for part, name in _SAMPLERS.items():
                measured[part].append(seconds[name])
            for part in _KINDS.values():
                measured[part].append(timer.seconds[part])
    return estimated, {part: float(np.median(each)) for part, each in measured.items()}


def _fields(case: EstimateCase, work: Workload) -> dict[str, Any]:
    """Fields of the configuration; for a sweep also the path of a folder of weights."""
    sizes = {f"model.{name}": value for name, value in MODELS[case.model].items()}
    return sizes | {
        "model.dtype": "float32",
        "rollout.tasks": case.conversations // work.group_size,
        "rollout.group_size": work.group_size,
        "rollout.max_turns": case.turns,
        "rollout.max_context": case.context,
        "rollout.max_action_tokens": work.action_tokens,
        "rollout.decode_steps": BenchSettings.decode_steps,
        "batching.microbatch_tokens": case.context,
    }


def _conversations(case: EstimateCase) -> Workload:
    """Conversations as an estimate assumes them, of random tokens."""
    rng, step = np.random.default_rng(0), case.context // case.turns
    size = architecture(case.model, "float32").vocab_size

    def text() -> tuple[int, ...]:
        return tuple(rng.integers(0, size, step - step // 2).tolist())

    each = (
        WorkloadConversation(
            text(), (step // 2,) * case.turns, tuple(text() for _ in range(case.turns - 1))
        )
        for _ in range(case.conversations)
    )
    return Workload("estimates", tuple(each), 2, size)


def _estimate(fields: dict[str, Any], chip: Chip) -> Iteration:
    config = load_config(Config(), [f"{name}={value}" for name, value in fields.items()])
    config, _ = choose_remat(config)
    planned = vars(abstract_run(config, make_mesh(config.mesh)))
    setup = Setup(**planned, given=config, source="", topology=Topology(chip, (1,)))
    programs = {each.kind: each for each in choose_programs(list_programs(setup))}
    figures = {
        kind: RooflineFigures(program_roofline(setup, each, ())) for kind, each in programs.items()
    }
    iteration = estimate_iteration(setup, programs, figures)
    assert iteration is not None
    return iteration


class Timer:
    """Stands between a learner and its programs.

    Attributes:
      seconds: of all executions of a kind since it was cleared.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrap_program(self, name: str, program: LearnerProgram) -> LearnerProgram:
        """Calls a program for the learner, as its `wrap_program`."""
        if name not in _KINDS:
            return program

        def timed(*arguments: Any) -> Any:
            jax.block_until_ready(arguments)
            began = time.perf_counter()
            results = jax.block_until_ready(program(*arguments))
            self.seconds[_KINDS[name]] += time.perf_counter() - began
            return results

        return timed
