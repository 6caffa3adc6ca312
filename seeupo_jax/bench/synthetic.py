"""Trajectories to sweep over: a workload's conversations with actions and rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seeupo_jax.bench.workload import Conversation, Workload
from seeupo_jax.types import CONTEXT

Actions = Sequence[Sequence[Sequence[int]]]  # [conversation][turn], token ids
Logp = Sequence[Sequence[Sequence[float]]]  # of each


def random_actions(work: Workload, seed: int) -> Actions:
    """Actions of the workload's lengths, every token of its vocabulary as likely as any other."""
    rng = np.random.default_rng((seed, 1))
    return [
        [rng.integers(0, work.vocab_size, length).tolist() for length in conversation.lengths]
        for conversation in work.conversations
    ]


def records(
    work: Workload, actions: Actions, *, seed: int, logp: Logp | None = None
) -> list[dict[str, Any]]:
    """The lines of a trajectory file (`trajectories/stored.py`), as plain values.

    Rewards are uniform in [0, 1).

    Args:
      logp: by the sampler; None: those of a uniform guess, since no choice of the benchmarks reads
        what the sampler recorded.
    """
    reward = np.random.default_rng((seed, 2)).random(len(work.conversations)).tolist()
    guess = -math.log(work.vocab_size)
    logp = [[[guess] * len(act) for act in said] for said in actions] if logp is None else logp
    return [
        _record(conversation, said, its_logp)
        | {"reward": reward[number], "group": number // work.group_size}
        for number, (conversation, said, its_logp) in enumerate(
            zip(work.conversations, actions, logp, strict=True)
        )
    ]


def _record(
    conversation: Conversation, said: Sequence[Sequence[int]], said_logp: Sequence[Sequence[float]]
) -> dict[str, Any]:
    tokens, turn = list(conversation.prompt), [CONTEXT] * len(conversation.prompt)
    logp = [0.0] * len(tokens)
    for number, (action, its_logp) in enumerate(zip(said, said_logp, strict=True)):
        heard = conversation.observations[number] if number + 1 < len(said) else ()
        tokens += [*action, *heard]
        turn += [number] * len(action) + [CONTEXT] * len(heard)
        logp += [*its_logp, *[0.0] * len(heard)]
    return {"tokens": tokens, "turn": turn, "logp": logp}


def write(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """A trajectory file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
