"""A formula's estimate of a program's figures without compiling it, for ranking layouts."""

from __future__ import annotations

import jax.numpy as jnp

from seeupo_jax.parallel.mesh import kv_copies, kv_heads_of_device
from seeupo_jax.planning import flops
from seeupo_jax.planning.aot.measure import CompiledFigures
from seeupo_jax.planning.collectives import Collective, received
from seeupo_jax.planning.slices.iteration_time import program_roofline
from seeupo_jax.planning.slices.slice_programs import Setup, SliceProgram

_FLOAT32 = 4
# Passes over the layers of a step's microbatch: forwards, backwards, and the refresh of weights;
# where activations are computed again, forwards once more.
_PASSES = {"none": 3, "dots": 4, "attention": 4, "full": 4}


def expected_figures(setup: Setup, program: SliceProgram) -> CompiledFigures:
    """FLOPs and memory traffic as `measure` has them, with the least communication that it needs.

    Parameters are gathered over `fsdp` for each pass and their gradients summed for each
    microbatch; over `tensor` each layer sums its tokens' vectors twice, and gathers the key-value
    head that several devices share; over `context` each layer gathers keys and values.
    """
    traffic = tuple(each for each in _traffic(setup, program) if each.group > 1)
    work = program.work
    return CompiledFigures(
        program.name,
        needed_flops=work.needed,
        executed_flops=work.executed,
        six_nd_flops=flops.six_nd(setup.arch, work.tokens),
        collectives=traffic,
        roofline=program_roofline(setup, program, traffic),
    )


def _traffic(setup: Setup, program: SliceProgram) -> list[Collective]:
    arch, shape = setup.arch, program.mesh.shape
    item = jnp.dtype(arch.dtype).itemsize
    passes = _PASSES[arch.remat] if program.kind == "sweep/turn" else 1
    times = program.trips * passes
    shards = program.mesh.size // (shape["tensor"] * shape["context"])
    tokens = program.work.tokens / shards / shape["context"]  # of a device, in one execution
    held = flops.gathered_parameters(arch, shape)
    kv_heads = kv_heads_of_device(arch.heads, arch.kv_heads, shape["tensor"])
    copies = kv_copies(arch.heads, arch.kv_heads, shape["tensor"])
    head_bytes = 2 * arch.layers * tokens * arch.head_dim * item  # of keys and of values

    def over(axis: str, kind: str, size: float, count: int) -> Collective:
        """A device's operand of `size` bytes, `count` times."""
        group = shape[axis]
        return Collective(kind, (axis,), group, received(kind, group) * size, count, "expected")

    traffic = [
        over("tensor", "all-reduce", 2 * arch.layers * tokens * arch.width * item, passes),
        over(
            "context",
            "all-gather",
            kv_heads * head_bytes,
            passes,
        ),
    ]
    if copies > 1:  # each has computed a part of the head
        size = received("all-gather", copies) * head_bytes / copies
        traffic.append(Collective("all-gather", ("tensor",), copies, size, passes, "expected"))
    if program.kind.startswith("sweep"):
        traffic.append(over("fsdp", "all-gather", held * item / shape["fsdp"], times))
    if program.kind == "sweep/turn":
        traffic.append(over("fsdp", "reduce-scatter", held * _FLOAT32, program.trips))
    return traffic
