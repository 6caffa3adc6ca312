"""The programs of sweeps are listed by shapes: a host need not hold what a slice computes."""

import tracemalloc

import jax
import learner_cases as cases
import numpy as np
import pytest

from seeupo_jax.learner.program_warming import sweep_programs
from seeupo_jax.learner.shapes import Shapes, row_lengths

MIB = 2**20
# 2**26 tokens in the longest rows: an array of them is 256 MiB, of which a batch has five.
LONG = Shapes(row_lengths(65_536, block=128), action=64, rows=8, trajectories=1_024, turns=4)


@pytest.mark.parametrize("choices", [{}, {"refresh": "separate", "old_policy": "turn"}], ids=str)
def test_listing_programs_takes_no_memory_for_their_tokens(choices):
    learner = cases.learner(shapes=LONG, **choices)
    state, reference = cases.new_state(learner.optimizer), cases.policy()[1]
    tracemalloc.start()
    try:
        programs = list(sweep_programs(learner, LONG.trajectories))
        arguments = [each.arguments(state, reference) for each in programs]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB
    names = {program.name.partition(" ")[0] for program in programs}
    assert len(programs) > len(LONG.lengths) and "sweep/turn" in names
    leaves = jax.tree.leaves(arguments)
    assert max(x.nbytes for x in leaves if isinstance(x, np.ndarray | jax.Array)) < MIB
    structs = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    assert max(x.size for x in structs) >= 2**26
