"""The layout of a run on a slice with the least estimated iteration."""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import jax

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.instruments.aot.expected_figures import expected_figures
from seeupo_jax.parallel.device_memory import GIB
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.parallel.program_cache import keep_no_programs
from seeupo_jax.planning.aot.measure import CompiledFigures, measure
from seeupo_jax.planning.aot.search import fits
from seeupo_jax.planning.chips import Topology, topology_devices, usable_hbm
from seeupo_jax.planning.remat import plan_remat
from seeupo_jax.planning.slices.iteration_time import Iteration, estimate_iteration
from seeupo_jax.planning.slices.slice_programs import (
    Setup,
    SliceProgram,
    choose_programs,
    list_programs,
    prepare,
)

Fields = Mapping[str, Any]  # of a configuration, as `--config.FIELD=VALUE` names them

COMPILED = 4  # layouts of the sweep, and of the sampler, that are compiled
_KINDS = {
    "sweep": ("sweep/turn",),
    "sampler": ("rollout/reshard", "rollout/prefill", "rollout/decode"),
}
_OFFLOADED = {"offload.optimizer": True, "offload.reference": True}
_MOST_CONTEXT = 4
# Estimates of activations are high: layouts up to this factor above the memory are compiled.
_SLACK = 1.25
_ROOM = 0.95  # of a device's memory, for arrays that persist besides programs' temporaries


class MeshChoice(NamedTuple):
    """A mesh with the fields tried together with it; figures: of the largest program of each kind.

    needs: bytes of a device, by estimate.
    """

    fields: Fields
    setup: Setup
    needs: int
    programs: dict[str, SliceProgram]
    figures: dict[str, CompiledFigures]

    @property
    def iteration(self) -> Iteration:
        estimate = estimate_iteration(self.setup, self.programs, self.figures)
        assert estimate is not None  # each kind has figures, if expected ones
        return estimate

    @property
    def fits(self) -> bool:
        return all(fits(self.setup, each) for each in self.figures.values())

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, where nothing overlaps."""
        return self.iteration.serial_s


class Tuned(NamedTuple):
    """The layout that `tune` found.

    fields: of the configuration. figures: of the programs that were compiled with them, by kind.
    """

    fields: dict[str, Any]
    figures: dict[str, CompiledFigures]


def tune(setup: Setup, log: Callable[[str], None]) -> Tuned | None:
    """The layout with the shortest estimated iteration among those that fit.

    The trainer's mesh and its rematerialisation are chosen first, then the sampler's mesh, its
    concurrency and its cache. In each step all candidates are ranked by formulas and the first
    `COMPILED` are compiled, so that memory and communication come from the compiler.

    Args:
      log: takes a line for each compiled candidate.

    Returns: None if no compiled candidate fits.
    """
    sweep = _shortest("sweep", setup, sweep_fields(setup), log)
    if sweep is None:
        log("nothing fits; once more with what can wait in the host's memory there")
        setup = prepare(with_fields(setup.given, _OFFLOADED), setup.topology)
        sweep = _shortest("sweep", setup, sweep_fields(setup), log)
    if sweep is None:
        return None
    sampler = _shortest("sampler", sweep.setup, sampler_fields(sweep.setup), log)
    if sampler is None:
        return None
    figures = {
        kind: each.figures[kind]
        for each, part in ((sweep, "sweep"), (sampler, "sampler"))
        for kind in _KINDS[part]
        if kind in each.figures
    }
    waiting = {f"offload.{part}": True for part, on in vars(setup.given.offload).items() if on}
    return Tuned({**waiting, **sweep.fields, **sampler.fields}, figures)


def sweep_fields(setup: Setup) -> Iterator[Fields]:
    """Meshes of the trainer that shard heads, rows and tokens, with their rematerialisations."""
    topology, expert = setup.topology, setup.mesh.shape["expert"]
    for tensor, context in itertools.product(_doubling(setup.arch.heads), _doubling(_MOST_CONTEXT)):
        cut = topology.slices * expert * tensor * context
        if topology.devices % cut:
            continue
        mesh = {
            "data": topology.slices,
            "fsdp": topology.devices // cut,
            "expert": expert,
            "context": context,
            "tensor": tensor,
        }
        for remat in _remats(setup, mesh):
            yield {"mesh": mesh, "model.remat": remat}


def _remats(setup: Setup, mesh: Mapping[str, int]) -> list[str]:
    """Rematerialisations that fit by the estimate of memory; none: the mesh does not fit."""
    config = dataclasses.replace(setup.given, mesh=schema.Mesh(**mesh))
    devices = topology_devices(setup.topology)
    hbm = usable_hbm(devices[0])
    try:
        plan = plan_remat(config, make_mesh(config.mesh, devices), hbm)
    except ValueError:
        return []
    return [name for name in plan.activations if plan.needed(name) <= _SLACK * hbm]


def sampler_fields(setup: Setup) -> Iterator[Fields]:
    """Meshes of the sampler, with as many conversations at once as their caches have room for."""
    cache = {} if setup.given.rollout.cache_gib is None else {"rollout.cache_gib": None}
    for tensor, concurrency in itertools.product(
        _doubling(setup.arch.heads), _doubling(setup.trajectories)
    ):
        replicas, rest = divmod(setup.topology.devices, tensor)
        across = setup.topology.devices // setup.topology.slices % tensor  # no axis but data is
        if not rest and not across and concurrency >= replicas:
            mesh = {"data": -1, "tensor": tensor}
            yield {"rollout.mesh": mesh, "rollout.concurrency": concurrency} | cache


def _doubling(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def with_fields(config: Config, fields: Fields) -> Config:
    """The configuration with these fields.

    Raises:
      ValueError: one that is not allowed.
    """
    return load_config(config, [f"{name}={value!r}" for name, value in fields.items()])


def _shortest(
    part: str,
    setup: Setup,
    tried: Iterable[Fields],
    log: Callable[[str], None],
) -> MeshChoice | None:
    """The candidate with the shortest iteration by the compiler; None if none fits."""
    compiled_choices = list[MeshChoice]()
    ranked = _ranked(part, setup, tried)
    log(f"{part}: {len(ranked)} layouts")
    compiled, too_much = 0, math.inf
    for choice in ranked:
        least = choice.iteration.step_s
        if choice.needs >= too_much or any(least >= other.seconds for other in compiled_choices):
            continue  # longer also where all of its communication is hidden
        found = _compiled(choice, _KINDS[part], log)
        if found is not None and found.fits:
            compiled_choices.append(found)
        elif found is not None:
            too_much = choice.needs
        compiled += 1
        if len(compiled_choices) == COMPILED or compiled == 2 * COMPILED:
            break
    return min(compiled_choices, key=lambda choice: choice.seconds, default=None)


def _compiled(
    choice: MeshChoice, kinds: tuple[str, ...], log: Callable[[str], None]
) -> MeshChoice | None:
    """It with the compiler's figures, up to a program that does not fit; None where it fails.

    A process of its own compiles: libtpu ends it for some meshes, and keeps gigabytes for each.
    """
    flags = _flags(choice.fields)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            run = pool.submit(_figures, choice.setup.given, choice.setup.topology, kinds)
            figures = run.result()
        except (BrokenProcessPool, jax.errors.JaxRuntimeError):
            log(f"  {flags}: the compiler fails")
            return None
    measured = choice._replace(figures=choice.figures | figures)
    if not measured.fits:
        log(f"  {flags}: {[*figures][-1]} does not fit")
        return measured
    made, peak = measured.iteration, max(each.peak for each in figures.values())
    log(
        f"  {flags}: {peak / GIB:.2f} GiB, an iteration of {made.step_s:.3g} to"
        f" {made.serial_s:.3g} s ({choice.seconds:.3g} by formula), {made.published_s:.3g} s at"
        " published efficiency"
    )
    return measured


def _figures(
    config: Config, topology: Topology, kinds: tuple[str, ...]
) -> dict[str, CompiledFigures]:
    """Figures of the largest programs of these kinds, up to one that does not fit; by kind."""
    jax.config.update("jax_platforms", "cpu")
    keep_no_programs()
    setup = prepare(config, topology)
    programs = {program.kind: program for program in choose_programs(list_programs(setup))}
    figures: dict[str, CompiledFigures] = {}
    for kind in (kind for kind in kinds if kind in programs):
        figures[kind] = measure(setup, programs[kind])
        if not fits(setup, figures[kind]):
            break
    return figures


def _ranked(
    part: str,
    given: Setup,
    tried: Iterable[Fields],
) -> list[MeshChoice]:
    """Valid candidates with room for persistent arrays, the shortest iteration by formula first."""
    choices = []
    for fields in tried:
        try:
            setup = prepare(with_fields(given.given, fields), given.topology)
        except ValueError:
            continue
        hbm = usable_hbm(setup.mesh.devices.flat[0])
        needs = max(sum(setup.resident(kind).values()) for kind in _KINDS[part])
        if needs > _ROOM * hbm:
            continue
        if part == "sweep":
            needs = plan_remat(setup.given, setup.mesh, hbm).needed(setup.given.model.remat)
        programs = {program.kind: program for program in choose_programs(list_programs(setup))}
        figures = {kind: expected_figures(setup, program) for kind, program in programs.items()}
        choices.append(MeshChoice(fields, setup, needs, programs, figures))
    return sorted(choices, key=lambda choice: choice.seconds)


def _flags(fields: Fields) -> str:
    """The fields in words, without mesh axes that cut nothing."""
    words = []
    for name, value in fields.items():
        if isinstance(value, dict):
            cut = [f"{axis} {size}" for axis, size in value.items() if size not in (1, -1)]
            words.append(f"{name} {' x '.join(cut) or 'data'}")
        elif value is not None:
            words.append(f"{name} {value}")
    return ", ".join(words)
