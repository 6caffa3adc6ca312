"""A request may say what holds anyway."""

import pytest

from seeupo_jax.agents.calls import CallRefused
from seeupo_jax.agents.dialects.sampling_rules import SamplingRules

TRUNCATED = [{"top_p": 0.9}, {"top_p": 1}, {"top_k": 1}, {"top_k": 50}, {"top_k": -1}]


@pytest.mark.parametrize("fields", TRUNCATED, ids=str)
def test_no_truncation_changes_the_likeliest_token(fields):
    assert SamplingRules(0.0).conflicting_fields(fields) == []


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 1}, {"top_k": 50}], ids=str)
def test_where_tokens_are_drawn_another_truncation_is_refused(fields):
    with pytest.raises(CallRefused, match=f"^{next(iter(fields))}: got .*; allowed: "):
        SamplingRules(1.0).conflicting_fields(fields)


def test_no_number_of_candidates_is_below_zero():
    with pytest.raises(CallRefused, match="^top_k: got -2; allowed: -1 or 0 or 1,"):
        SamplingRules(0.0).conflicting_fields({"top_k": -2})
