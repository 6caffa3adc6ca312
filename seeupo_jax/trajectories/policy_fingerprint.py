"""Fingerprint of a served policy: its likeliest answer to a fixed prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from seeupo_jax.tasks.row_list import short

FINGERPRINT = "fingerprint"  # its name among the settings of an evaluation
# Nats per token. The same weights differ by rounding, with the batch and the kernel.
LOGP_BOUND = 0.2
_LARGEST = 1e9  # magnitude of a log-probability; of -inf it is not known


def fingerprint(text: str, tokens: Sequence[int], logp: Sequence[float]) -> dict[str, Any]:
    """A fingerprint as JSON holds it; a log-probability that is not known is None."""
    known = [value if math.isfinite(value) else None for value in logp]
    return {"text": text, "tokens": list(tokens), "logp": known}


def check_fingerprint(value: Any, where: str) -> None:
    """Whether a value from a file is a fingerprint, as `fingerprint` makes it.

    Raises:
      ValueError: it is not; one sentence that begins with `where` it is.
    """
    whole = isinstance(value, dict) and value.keys() == {"text", "tokens", "logp"}
    if whole and isinstance(value["text"], str) and _are(value["tokens"], _is_token):
        if _are(value["logp"], _is_logp) and len(value["logp"]) == len(value["tokens"]):
            return
    raise ValueError(
        f"{where}: {FINGERPRINT}: got {short(value)}; allowed: an object with text, tokens (ids)"
        " and logp (for each token a number, or null)."
    )


def _are(values: Any, kind: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(kind, cast("list[Any]", values)))


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_logp(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= _LARGEST)


def may_be_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two fingerprints can be of the same weights, rounded differently.

    They can where log-probabilities are within `LOGP_BOUND` up to the first token that differs, and
    that token can be a tie: of two likeliest tokens that changed places neither has more than half
    of the probability.
    """
    values = (part[name] for name in ("tokens", "logp") for part in (one, other))
    for token, other_token, *logp in zip(*values, strict=False):
        known = [value for value in logp if value is not None]
        if len(known) == 2 and abs(known[0] - known[1]) > LOGP_BOUND:
            return False
        if token != other_token:
            return bool(known) and max(known) <= math.log(0.5) + LOGP_BOUND
    return True


def shown(of: Mapping[str, Any]) -> str:
    """A fingerprint in an error's sentence."""
    logp = sum(value for value in of["logp"] if value is not None)
    return f"a policy that says {of['text']!r} (log-probability {logp:.3f})"
