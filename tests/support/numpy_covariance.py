"""Clip-Cov and KL-Cov of the twin: which tokens of a step are limited, and how; plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def limited(
    now: Sequence[np.ndarray],
    old: Sequence[np.ndarray],
    advantage: Sequence[np.ndarray],
    weight: Sequence[np.ndarray],
    options: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per action of a step: M of each token, 0 where Clip-Cov drew it; 1 where KL-Cov picked it.

    Clip-Cov must draw all tokens within its bounds here: which of them it draws is not known.
    """
    logp, credit = np.concatenate(now), np.concatenate(advantage)
    covariance = (logp - logp.mean()) * (credit - credit.mean())
    count = max(1, int(options.covariance["share"] * len(logp)))
    selected = np.zeros(len(logp), bool)
    if options.covariance["kind"] == "kl":
        for place in sorted(range(len(logp)), key=lambda j: (-covariance[j], j))[:count]:
            selected[place] = True
    else:
        assert options.covariance["kind"] == "clip", options.covariance
        ratio = np.exp(logp - np.concatenate(old))
        for j in range(len(logp)):
            too_high = credit[j] > 0 and ratio[j] > 1 + options.clip_high
            too_low = credit[j] < 0 and ratio[j] < 1 - options.clip_low
            inside = options.covariance["low"] < covariance[j] < options.covariance["high"]
            selected[j] = inside and not too_high and not too_low
        assert selected.sum() <= count
    ends = np.cumsum([len(x) for x in now])[:-1]
    parts = np.split(selected.astype(float), ends)
    if options.covariance["kind"] == "kl":
        return list(weight), parts
    return [w * (1 - part) for w, part in zip(weight, parts, strict=True)], [0 * p for p in parts]
