"""The report: tables for people, and all figures for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.parallel.mesh import row_shards
from seeupo_jax.planning import flops
from seeupo_jax.planning.aot import calibration
from seeupo_jax.planning.aot.measure import CompiledFigures
from seeupo_jax.planning.aot.search import fits
from seeupo_jax.planning.chips import usable_hbm
from seeupo_jax.planning.collectives import by_kind_and_axis
from seeupo_jax.planning.dealt_conversations import dealt_lines
from seeupo_jax.planning.slices.iteration_time import LEFT_OUT, estimate_iteration
from seeupo_jax.planning.slices.slice_programs import Setup, SliceProgram

_LABEL, _COLUMN = 22, 19  # widths
_PHASES = ("sweep", "rollout")
_LAST = ("batch, padding", "gradients", "activations", "temporaries", "code")


class Report:
    """The figures of a configuration's programs on a topology.

    Attributes:
      figures: by kind of program, in the order they were measured.
    """

    def __init__(self, setup: Setup, path: str):
        self._setup, self._path = setup, path
        self._programs: dict[str, SliceProgram] = {}
        self.figures: dict[str, CompiledFigures] = {}

    def add(self, program: SliceProgram, figures: CompiledFigures) -> None:
        """Takes a program's figures in."""
        self._programs[program.kind], self.figures[program.kind] = program, figures

    @property
    def hbm(self) -> int:
        """Bytes of a device that programs may use."""
        return usable_hbm(self._setup.mesh.devices.flat[0])

    @property
    def fits(self) -> bool:
        return all(fits(self._setup, figures) for figures in self.figures.values())

    @property
    def held(self) -> list[str]:
        """Arrays that no program may hold."""
        return [
            f"{figures.name} holds {array.dtype}{list(array.dims)} ({array.bytes / GIB:.1f} GiB)"
            for figures in self.figures.values()
            for array in figures.held
        ]

    def head(self) -> str:
        """The head of the report: the model, the topology and the mesh."""
        setup, chip = self._setup, self._setup.topology.chip
        topology, shapes, plan = setup.topology, setup.learner.shapes, setup.engine.plan
        count, effort = flops.parameters(setup.arch) / 1e9, jax.config.jax_optimization_level
        return "\n".join(
            (
                f"{self._path} on {topology}: {topology.devices} devices in {topology.hosts}"
                f" hosts, each {self.hbm / GIB:.2f} GiB for programs,"
                f" {chip.peak_flops / chip.devices / 1e12:.0f} TFLOP/s,"
                f" {chip.hbm_bandwidth / chip.devices / 1e9:.0f} GB/s",
                f"model: {count:.2f} B parameters, from {setup.source}",
                f"mesh: {_axes(setup.mesh)}; the sampler's: {_axes(setup.sampler_mesh)}",
                f"sweep: {setup.trajectories} conversations in microbatches of {shapes.rows}"
                f" rows, on {row_shards(setup.mesh)} row shards; rows of up to"
                f" {shapes.lengths[-1]} tokens, actions of up to {shapes.action}; attention:"
                f" {setup.arch.attention}; remat: {setup.arch.remat}",
                f"rollout: {plan.slots * plan.shards} slots for"
                f" {plan.concurrency * plan.shards} conversations on {plan.shards} row shards, a"
                f" cache of {plan.bytes / GIB:.2f} GiB per device",
                *dealt_lines(setup.config.rollout, plan),
                *([] if effort == "UNKNOWN" else [f"compiled at optimization level {effort}"]),
            )
        )

    def text(self) -> str:
        """All tables."""
        done = [each for each in self.figures.values() if each.error is None]
        blocks = [self._memory(done), self._work(done), _traffic(done)] if done else []
        blocks += [self._verdict(), self._proof(), self._iteration()]
        return "\n\n".join(block for block in blocks if block)

    def _memory(self, done: Sequence[CompiledFigures]) -> str:
        """HBM of one device by part; parts that the program does not use are in brackets."""
        present = {name for each in done for part in (each.inside, each.beside) for name in part}
        parts = [name for name in (*self._setup.parts, *_LAST) if name in present]

        def cell(each: CompiledFigures, name: str) -> str:
            if name in each.beside:
                return f"({each.beside[name] / GIB:.2f})"
            return f"{each.inside[name] / GIB:.2f}" if name in each.inside else ""

        rows = [(name, [cell(each, name) for each in done]) for name in parts]
        rows.append(("total", [f"{each.peak / GIB:.2f}" for each in done]))
        share = [f"{100 * each.peak / self.hbm:.0f}%" for each in done]
        return _table("GiB per device", done, [*rows, ("share of available", share)])

    def _work(self, done: Sequence[CompiledFigures]) -> str:
        """FLOPs of all devices together, and the time that one execution takes at least."""
        columns: dict[str, Callable[[CompiledFigures], str]] = {
            "TFLOP of the model": lambda f: _number(f.needed_flops / 1e12),
            "TFLOP executed": lambda f: _number(f.executed_flops / 1e12),
            "of 6·P·tokens": lambda f: _share(f.executed_flops, f.six_nd_flops),
            "communication, GiB": lambda f: _number(sum(c.total for c in f.collectives) / GIB),
            "compute, s": lambda f: _number(f.roofline.compute_s),
            "memory, s": lambda f: _number(f.roofline.memory_s),
            "network, s": lambda f: _number(f.roofline.network_s),
            "bound by": lambda f: f.roofline.bound,
            "published, s": lambda f: _number(f.roofline.published_s),
            "MFU at best": lambda f: self._mfu(f, f.roofline.step_s),
            "MFU, published": lambda f: self._mfu(f, f.roofline.published_s),
            "compiled in, s": lambda f: f"{f.compile_s:.0f}",
        }
        rows = [(name, [show(each) for each in done]) for name, show in columns.items()]
        return _table(f"work of {self._setup.mesh.size} devices", done, rows)

    def _mfu(self, figures: CompiledFigures, seconds: float) -> str:
        """The model's FLOPs in this time, as a share of the peak."""
        if not figures.needed_flops:
            return ""
        topology = self._setup.topology
        peak = topology.chips * topology.chip.peak_flops
        return f"{100 * figures.needed_flops / (seconds * peak):.0f}%"

    def _verdict(self) -> str:
        lines = []
        for phase in _PHASES:
            mine = [f for kind, f in self.figures.items() if kind.startswith(phase)]
            for failed in [each for each in mine if each.error is not None]:
                lines.append(f"{phase}: fits: no: {failed.name}: {failed.error}")
            sizes = [each for each in mine if each.error is None]
            if sizes:
                top = max(sizes, key=lambda each: each.peak)
                verdict = "yes" if top.peak <= self.hbm else "no"
                lines.append(
                    f"{phase}: fits: {verdict}: {top.peak / GIB:.2f} of {self.hbm / GIB:.2f} GiB"
                    f" during {top.name}"
                )
        return "\n".join(lines)

    def _proof(self) -> str:
        if self.held:
            return "\n".join(("arrays that must not be there:", *self.held))
        names = [f.name for kind, f in self.figures.items() if kind.startswith("sweep/")]
        good = [name for name in names if self.figures[name.partition(" ")[0]].error is None]
        if not good:
            return ""
        return f"no score matrix and no logits of whole rows in {', '.join(good)}"

    def _iteration(self) -> str:
        made = estimate_iteration(self._setup, self._programs, self.figures)
        if made is None:
            return ""
        setup, rollout = self._setup, self._setup.config.rollout
        chip, best = setup.topology.chip, _span(made.step_s, made.serial_s)
        lines = [
            f"one iteration, estimated: {_number(made.published_s)} s on the devices at published"
            f" efficiency; at best {best} (full overlap to no overlap)",
            f"  published efficiency: {100 * chip.compute_efficiency:.0f}% of the peak FLOP/s,"
            f" {100 * chip.memory_efficiency:.0f}% of the memory's bandwidth",
            f"  left out: {'; '.join(LEFT_OUT)}",
            f"  assuming {setup.trajectories} conversations that grow evenly to"
            f" {rollout.max_context} tokens in {rollout.max_turns} turns, {made.sampled} sampled"
            " tokens per turn, and all slots busy",
        ]
        lines += [
            f"  {part.name}: {part.times:,.0f} x, {_number(part.published_s)} s; at best"
            f" {_span(part.step_s, part.serial_s)}"
            for part in made.parts
        ]
        return "\n".join([*lines, f"  {calibration.in_words()}"])

    def values(self) -> dict[str, Any]:
        """Everything, for JSON."""
        setup = self._setup
        made = estimate_iteration(setup, self._programs, self.figures)
        totals = ("step_s", "serial_s", "published_s")

        def entry(each: CompiledFigures) -> dict[str, Any]:
            traffic = by_kind_and_axis(each.collectives)
            extra = {"traffic": list(map(dataclasses.asdict, traffic)), "peak": each.peak}
            return dataclasses.asdict(each) | extra | {"fits": fits(setup, each)}

        return {
            "config_file": self._path,
            "config": to_dict(setup.given),
            "architecture": dataclasses.asdict(setup.arch),
            "source": setup.source,
            "parameters": flops.parameters(setup.arch),
            "topology": str(setup.topology),
            "devices": setup.topology.devices,
            "mesh": dict(setup.mesh.shape),
            "sampler_mesh": dict(setup.sampler_mesh.shape),
            "hbm_bytes": self.hbm,
            "parts": dict(setup.parts),
            "programs": {name: entry(each) for name, each in self.figures.items()},
            "fits": self.fits,
            "held": self.held,
            "iteration": None
            if made is None
            else dataclasses.asdict(made) | {name: getattr(made, name) for name in totals},
            "efficiency": {
                "compute": setup.topology.chip.compute_efficiency,
                "memory": setup.topology.chip.memory_efficiency,
            },
            "left_out": LEFT_OUT,
            "measured_over_estimate": calibration.factors(),
        }


def _traffic(done: Sequence[CompiledFigures]) -> str:
    """The traffic of each program's collectives to a device, largest first."""
    lines = [
        f"{each.name}: "
        + ", ".join(
            f"{traffic.kind} over {'+'.join(traffic.axes)} {traffic.count} x,"
            f" {_number(traffic.bytes / GIB)} GiB"
            for traffic in by_kind_and_axis(each.collectives)
        )
        for each in done
        if each.collectives
    ]
    return "\n".join(("collectives, communication volume per device", *lines)) if lines else ""


def _table(
    title: str, columns: Sequence[CompiledFigures], rows: Sequence[tuple[str, list[str]]]
) -> str:
    """Rows of cells below the programs' names, whose phase is left out."""
    names = [each.name.partition("/")[2] for each in columns]
    lines = [(title, names), *rows]
    return "\n".join(
        label.ljust(_LABEL) + "".join(cell.rjust(_COLUMN) for cell in cells)
        for label, cells in lines
    )


def _axes(mesh: Any) -> str:
    """The axes that cut anything."""
    cut = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    return " x ".join(cut) if cut else "one device"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of else ""


def _span(least: float, most: float) -> str:
    return f"{_number(least)} to {_number(most)} s"
