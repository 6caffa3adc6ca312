"""Converts a trajectory and its statistics of a sweep to the record on disk."""

from __future__ import annotations

import codecs
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from seeupo_jax.trajectories.json_lines import plain
from seeupo_jax.trajectories.reader import SCHEMA
from seeupo_jax.types import CONTEXT, Segment, Trajectory, TrajectoryStats

DIGITS = 5  # after the point, of numbers that there are many of
_CONTROL = 0xFF  # begins a control token's bytes; in no UTF-8 text


class TokenTexts:
    """The text that each token of a sequence adds to the decoded text.

    Args:
      token_bytes: gives those of each token by id, as `Tokenizer.token_bytes`; called when they are
        first needed.
    """

    def __init__(self, token_bytes: Callable[[], Sequence[bytes]]):
        self._token_bytes = functools.cache(token_bytes)

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        """One text per token; joined they are the decoded sequence.

        A token that leaves a character incomplete adds nothing, and the one that completes it adds
        it. Bytes that are no UTF-8 are U+FFFD; an id without a text adds nothing.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        token_bytes = self._token_bytes()
        texts: list[str] = []

        def end() -> None:
            if texts:
                texts[-1] += decoder.decode(b"", final=True)
            decoder.reset()

        for token in tokens:
            data = token_bytes[token] if token < len(token_bytes) else b""
            if data[:1] == bytes([_CONTROL]):
                end()
                texts.append(data[1:].decode("utf-8", "replace"))
            else:
                texts.append(decoder.decode(data))
        end()
        return texts


def to_record(
    trajectory: Trajectory,
    *,
    split: str,
    iteration: int,
    evaluation: bool = False,
    labels: Mapping[str, str],
    texts: Callable[[Sequence[int]], list[str]],
    stats: TrajectoryStats | None = None,
) -> dict[str, Any]:
    """A trajectory's record of plain JSON values; `docs/trajectories.md` has the fields.

    Args:
      labels: of its task.
      texts: such as `TokenTexts`.
      stats: None where it was not trained on.
    """
    info = dict(trajectory.info)
    score, member = info.pop("score", None), info.pop("member", 0)
    failure = info.pop("failure", None) if trajectory.failed else None
    logp, entropy = ((), ()) if stats is None else (stats.logp, stats.entropy)
    return {
        "schema": SCHEMA,
        "split": split,
        "evaluation": evaluation,
        "iteration": int(iteration),
        "group": int(trajectory.group),
        "member": int(member),
        "task_id": trajectory.task_id,
        "seed": int(trajectory.seed),
        "labels": {str(name): str(value) for name, value in labels.items()},
        "stop": trajectory.stop,
        "failed": trajectory.failed,
        "failure": str(failure) if trajectory.failed else None,
        "reward": plain(trajectory.reward),
        "score": plain(score),
        "success": succeeded(trajectory),
        "turns": trajectory.turns,
        "turn_rewards": plain(trajectory.turn_rewards),
        "rewards": plain(trajectory.rewards),
        "named_turn_rewards": plain(trajectory.named_turn_rewards),
        **({"role_rewards": plain(roles)} if (roles := trajectory.role_rewards) else {}),
        "policy_version": trajectory.policy_version,
        **_fork(trajectory),
        "advantage": None if stats is None else _rounded([stats.advantage])[0],
        "weights": [] if stats is None else _rounded(stats.weight_K),
        "info": plain(info),
        "messages": plain(trajectory.messages),
        "segments": [
            _segment(segment, texts, logp[i : i + 1], entropy[i : i + 1])
            | _version(segment, trajectory.policy_version)
            for i, segment in enumerate(trajectory.segments)
        ],
    }


def _fork(trajectory: Trajectory) -> dict[str, int]:
    """Which trajectory of its group it continues, and after how many turns; empty: none."""
    parent = trajectory.parent
    return {} if parent is None else {"parent": int(parent), "fork": int(trajectory.fork)}


def succeeded(trajectory: Trajectory) -> bool | None:
    """Whether the environment's score is 1; None where it failed, or gave none."""
    score = trajectory.info.get("score")
    return None if trajectory.failed or score is None else bool(score >= 1)


def _segment(
    segment: Segment,
    texts: Callable[[Sequence[int]], list[str]],
    logp: Sequence[np.ndarray],
    entropy: Sequence[np.ndarray],
) -> dict[str, Any]:
    tokens = segment.tokens_L.tolist()
    acted_L = segment.turn_L != CONTEXT
    unknown_L = np.full(len(tokens), np.nan)

    def of_actions(x_L: np.ndarray) -> Any:
        return _rounded(np.where(acted_L, x_L, np.nan))

    return {
        **({"role": segment.role} if segment.role else {}),
        "tokens": tokens,
        "turn": segment.turn_L.tolist(),
        "text": texts(tokens),
        "logp": of_actions(segment.logp_L),
        "trainer_logp": of_actions([*logp, unknown_L][0]),
        "entropy": of_actions([*entropy, unknown_L][0]),
    }


def _version(segment: Segment, policy_version: int | None) -> dict[str, list[int]]:
    """The versions of its tokens, -1 at context; empty where the trajectory's says them."""
    version_L = segment.versions(policy_version)
    usual_L = replace(segment, version_L=None).versions(policy_version)
    return {} if (version_L == usual_L).all() else {"version": version_L.tolist()}


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Rounded numbers; null for NaN and infinities. Only 0 becomes 0: a forced token has logp 0."""
    numbers = np.asarray(values, np.float64).tolist()
    return [(round(x, DIGITS) or float(f"{x:.1g}")) if math.isfinite(x) else None for x in numbers]
