"""Which likeliest answers to one prompt can be of one policy."""

import json
import math

import pytest

from seeupo_jax.trajectories.policy_fingerprint import (
    check_fingerprint,
    fingerprint,
    may_be_same,
    shown,
)

HALF = math.log(0.5)
SAME = [
    ("rounding", [5, 6], [-0.3, -1.1], [5, 6], [-0.31, -1.05]),
    ("two tokens as likely as each other change places", [5, 6], [-0.7, 0], [9, 8], [-0.7, -3]),
    ("an end without a log-probability", [5, 3], [-0.3, math.nan], [5, 3], [-0.3, math.nan]),
]
OTHER = [
    ("certain of one token, certain of another", [5], [0.0], [9], [0.0]),
    ("the same text, less likely", [5, 6], [-0.3, -1.1], [5, 6], [-0.3, -1.4]),
    ("as likely, but more than half of all", [5], [HALF + 0.25], [9], [HALF + 0.25]),
    ("another text without log-probabilities", [5], [math.nan], [9], [math.nan]),
]


def compared(tokens, logp, other_tokens, other_logp):
    made = fingerprint("a", tokens, logp), fingerprint("b", other_tokens, other_logp)
    assert may_be_same(*made) == may_be_same(*made[::-1])
    return may_be_same(*made)


@pytest.mark.parametrize("case, tokens, logp, other_tokens, other_logp", SAME)
def test_what_rounding_can_do_is_no_other_policy(case, tokens, logp, other_tokens, other_logp):
    assert compared(tokens, logp, other_tokens, other_logp)


@pytest.mark.parametrize("case, tokens, logp, other_tokens, other_logp", OTHER)
def test_what_rounding_cannot_do_is(case, tokens, logp, other_tokens, other_logp):
    assert not compared(tokens, logp, other_tokens, other_logp)


def test_a_fingerprint_is_shown_with_its_text():
    made = fingerprint("Hello", [5, 3], [-0.5, math.nan])
    assert made["logp"] == [-0.5, None]
    assert shown(made) == "a policy that says 'Hello' (log-probability -0.500)"


GOOD = {"text": "ab", "tokens": [5, 3], "logp": [-0.5, None]}
DAMAGED = [
    *("text", 7, 1.5, True, [], [GOOD], {}),
    *({name: value for name, value in GOOD.items() if name != left_out} for left_out in GOOD),
    GOOD | {"more": 1},
    *(GOOD | {"text": text} for text in (None, 3, ["ab"])),
    *(GOOD | {"tokens": tokens} for tokens in (None, "53", {}, [5], [5, "3"], [5, None], [5, 3.0])),
    *(GOOD | {"tokens": [5, token]} for token in (True, -1, 10**400, [3])),
    *(GOOD | {"logp": logp} for logp in (None, 0.5, {}, [-0.5], [-0.5, -0.5, -0.5], [-0.5, "1"])),
    *(GOOD | {"logp": [-0.5, x]} for x in (math.nan, -math.inf, 10**400, True, [], {})),
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_no_fingerprint_is_one_sentence(damaged):
    with pytest.raises(ValueError, match=r"^one.jsonl line 1: fingerprint: got .*; allowed: .*\.$"):
        check_fingerprint(damaged, "one.jsonl line 1")


def test_every_fingerprint_that_is_made_passes():
    for tokens, logp in (((), ()), ((5, 3), (-0.5, math.nan)), ((2**31 - 1,), (-math.inf,))):
        made = json.loads(json.dumps(fingerprint("a", tokens, logp)))
        check_fingerprint(made, "here")
        assert may_be_same(made, made) or not tokens or made["logp"] == [None]
        assert "a policy that says" in shown(made)
