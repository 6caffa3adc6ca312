"""What files of JSON are written and read with."""

import os

from seeupo_jax.trajectories.json_lines import write_atomically


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    both_ends = os.open(pipe, os.O_RDWR)  # so that neither of them waits
    try:
        write_atomically(pipe, b"a page")
        assert pipe.is_fifo() and os.read(both_ends, 6) == b"a page"
    finally:
        os.close(both_ends)
