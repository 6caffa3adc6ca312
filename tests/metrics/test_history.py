"""A table of metrics: rows by any integer, columns by name."""

import numpy as np
import pytest

from seeupo_jax.metrics.history import History

ROWS = [{"iteration": 0}, {"iteration": 1, "sweep/kl": 0.5}]


@pytest.mark.parametrize("index", [1, -1, np.int64(1), np.argmax([0.0, 0.5])])
def test_a_row_is_found_by_any_integer_as_in_a_list(index):
    assert History(ROWS)[index] == ROWS[index]


def test_columns_and_slices_are_by_name_and_by_range():
    assert History(ROWS)["sweep/kl"] == [None, 0.5]
    assert list(History(ROWS)[np.int64(1) :]) == ROWS[1:]
    with pytest.raises(KeyError, match="kl: no such metric; there are: iteration, sweep/kl"):
        History(ROWS)["kl"]
    with pytest.raises(KeyError, match="there are: none, since nothing is recorded."):
        History([])["kl"]
