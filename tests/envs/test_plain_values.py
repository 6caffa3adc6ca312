"""What a user's classes hold becomes what JSON does."""

import json
import math

import numpy as np
import pytest

from seeupo_jax.envs.plain_values import plain


@pytest.mark.parametrize(
    "value, held",
    [
        (np.longdouble(0.5), 0.5),
        (np.array([0.5, 2], np.longdouble), [0.5, 2.0]),
        (np.longdouble("inf"), "inf"),
        (np.clongdouble(1 + 2j), "(1+2j)"),
        (np.array([1 + 2j], np.clongdouble), ["(1+2j)"]),
        (np.float16(0.5), 0.5),
        (math.pi, math.pi),
    ],
)
def test_numbers_of_any_precision_are_floats_or_their_text(value, held):
    got = plain({"n": value})["n"]
    assert (got, type(got)) == (held, type(held))
    json.dumps(got, allow_nan=False)


# The bounds of int64, by hand.
@pytest.mark.parametrize(
    "number, held",
    [
        (-9223372036854775808, -9223372036854775808),
        (-9223372036854775809, "-9223372036854775809"),
        (9223372036854775807, 9223372036854775807),
        (9223372036854775808, "9223372036854775808"),
    ],
)
def test_integers_beyond_int64_are_texts(number, held):
    assert plain(number) == held
