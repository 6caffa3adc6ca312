"""A compiled program's figures: memory by part, FLOPs, traffic, time, and what it must not hold."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from seeupo_jax.planning import flops, hlo
from seeupo_jax.planning.collectives import Collective, collectives
from seeupo_jax.planning.hlo import Array
from seeupo_jax.planning.slices.iteration_time import program_roofline
from seeupo_jax.planning.slices.roofline import Roofline
from seeupo_jax.planning.slices.slice_programs import Setup, SliceProgram
from seeupo_jax.policy.kernels.attention import SCORES_AT_ONCE

# Passes that go through queries or tokens in chunks may hold this much of a chunk's; see
# `SCORES_AT_ONCE` and `LOGITS_AT_ONCE`. Float32.
CHUNK_BYTES = 4 * SCORES_AT_ONCE
_PACKED = 1.03  # of a program's peak, at most: its arrays without gaps between them


@dataclass(frozen=True)
class CompiledFigures:
    """The compiler's figures of a program; bytes per device.

    inside: memory of the program by part. beside: other memory that a device holds meanwhile.
    error: why it did not compile; all else but the name is empty then.
    held: arrays that it must not hold.
    """

    name: str
    compile_s: float = 0.0
    inside: Mapping[str, int] | None = None
    beside: Mapping[str, int] | None = None
    needed_flops: float = 0.0
    executed_flops: float = 0.0
    six_nd_flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    roofline: Roofline | None = None
    held: tuple[Array, ...] = ()
    largest: tuple[Array, ...] = ()
    error: str | None = None

    @property
    def kind(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def peak(self) -> int:
        """Bytes in use on a device while the program runs."""
        parts = (self.inside, self.beside)
        return sum(sum(part.values()) for part in parts if part is not None)


def measure(setup: Setup, program: SliceProgram) -> CompiledFigures:
    """Compiles a program and reads its figures; a program too large for a device has an error."""
    lowered = program.lower()
    began = time.perf_counter()
    try:
        with jax.set_mesh(program.mesh):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompiledFigures(
            program.name, time.perf_counter() - began, error=_in_a_sentence(str(error))
        )
    compile_s = time.perf_counter() - began
    text = compiled.as_text()
    mesh = program.mesh
    traffic = collectives(text, dict(mesh.shape), unknown_trips=functools.partial(_trips, program))
    work = program.work
    return CompiledFigures(
        program.name,
        compile_s,
        inside=_inside(setup, program, compiled.memory_analysis()),
        beside=other_memory(setup, program),
        needed_flops=work.needed,
        executed_flops=work.executed,
        six_nd_flops=flops.six_nd(setup.arch, work.tokens),
        collectives=tuple(traffic),
        roofline=program_roofline(setup, program, traffic),
        held=tuple(forbidden(text, setup, program)),
        largest=tuple(hlo.largest_arrays(text)),
    )


def forbidden(text: str, setup: Setup, program: SliceProgram) -> list[Array]:
    """Score matrices of whole rows, and logits of whole rows, that lie in a device's memory."""
    if program.row_length is None:
        return []
    cut, parts = program.mesh.shape["context"], program.mesh.shape["tensor"]
    length, arch = program.row_length, setup.arch
    widths = {arch.width, arch.mlp_width, arch.heads * arch.head_dim}
    widths |= {width // parts for width in widths}
    pairs = hlo.score_matrix(length, context=cut)
    words = hlo.logits(arch.vocab_size, length // cut, tensor=parts)

    def wrong(dtype: str, dims: tuple[int, ...]) -> bool:
        # Activations may be as wide as rows are long; tables of token vectors have no tokens.
        tokens = tuple(dim for dim in dims if dim not in widths)
        return pairs(dtype, tokens) or words(dtype, tokens)

    return [array for array in hlo.find_shapes(text, wrong) if array.bytes > CHUNK_BYTES]


def _in_a_sentence(error: str) -> str:
    """The compiler's error for a program that is too large, without its list of buffers."""
    line = error.partition("RESOURCE_EXHAUSTED:")[2].strip().partition("\n")[0]
    return line.rstrip(".") + "."


def _trips(program: SliceProgram, scope: str) -> int:
    """The iterations of a loop of unknown count; those of the outer loop are the program's."""
    return program.trips if re.search(r"(turn|score|scorer|value|decode)/while$", scope) else 1


def _inside(setup: Setup, program: SliceProgram, memory: jax.stages.CompiledMemoryStats) -> dict:
    """A program's memory by part: arguments and results by what they are, then the rest."""
    parts = {name: setup.parts[name] for name in program.uses if name in setup.parts}
    made = {name: setup.parts[name] for name in program.makes if name in setup.parts}
    # Parameters that a program does not read (a prefill has no use for the head) are no arguments.
    rest = max(0, memory.argument_size_in_bytes - sum(parts.values()))
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes - sum(made.values())
    total = temporary_bytes(memory)
    temporaries = {"temporaries": total}
    if program.kind == "sweep/turn":  # the loop over microbatches adds gradients up
        grads = min(setup.parts["parameters"], total)
        temporaries = {"gradients": grads, "activations": total - grads}
    return (
        parts
        | made
        | {"batch, padding": rest + max(0, results)}
        | temporaries
        | {"code": memory.generated_code_size_in_bytes}
    )


def temporary_bytes(memory: jax.stages.CompiledMemoryStats) -> int:
    """Bytes of a device that a program uses in addition to its arguments and results.

    What XLA for TPU lays out is compared with a chip's memory. Of programs with loops it reports up
    to 1.7 times that as temporaries. Its peak is up to 2% below what it lays out, or more: it also
    counts what lies in VMEM, and in the host's memory.
    """
    arguments = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    peak = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    return min(memory.temp_size_in_bytes, max(0, round(_PACKED * peak) - arguments))


def other_memory(setup: Setup, program: SliceProgram) -> dict[str, int]:
    """The parts that a device holds while the program runs and that the program does not use."""
    resident = setup.resident(program.kind)
    in_program = (*program.uses, *program.makes)
    return {name: size for name, size in resident.items() if name not in in_program}
