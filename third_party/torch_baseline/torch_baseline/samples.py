"""Every turn of every trajectory as a sample of its own, in microbatches of like lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torch_baseline.trajectories import Trajectory


@dataclass(frozen=True)
class Sample:
    """A context and the action after it.

    position: where in `tokens` the action's tokens stand.
    real: False for what stands in for a turn that the trajectory does not have.
    """

    trajectory: int
    tokens: np.ndarray
    position: np.ndarray
    real: bool = True


@dataclass(frozen=True)
class Microbatch:
    """Samples as the rows [R] of one forward pass, with X action tokens together.

    tokens: int64 [R, L], padded on the right, where no causal query looks: no mask is needed.
    row, position, target: int64 [X], of each action token: its row, its place, its id.
    size: float32 [R], action tokens of a row. trajectory: int64 [R]. real: bool [R].
    length: tokens that are no padding.
    """

    tokens: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    target: torch.Tensor
    size: torch.Tensor
    trajectory: torch.Tensor
    real: torch.Tensor
    length: int


def samples_of(
    trajectories: Sequence[Trajectory], kept: np.ndarray, turn: int, *, null_turns: bool
) -> list[Sample]:
    """The samples of one turn.

    Args:
      null_turns: a trajectory without the turn is there too, by its last turn's sample.
    """
    samples = []
    for i in np.flatnonzero(kept):
        real = _sample(trajectories[i], int(i), turn)
        if real is not None:
            samples.append(real)
        elif null_turns and trajectories[i].turns:
            last = _sample(trajectories[i], int(i), trajectories[i].turns - 1)
            samples.append(Sample(last.trajectory, last.tokens, last.position, real=False))
    return samples


def _sample(trajectory: Trajectory, index: int, turn: int) -> Sample | None:
    for segment in trajectory.segments:
        position = np.flatnonzero(segment.turn == turn)
        if position.size:
            return Sample(index, segment.tokens[: position[-1] + 1], position)
    return None


def microbatches(samples: Sequence[Sample], budget: int, device: torch.device) -> list[Microbatch]:
    """Samples by falling length, as many together as stay within `budget` tokens, or one."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: len(s.tokens), reverse=True):
        fits = batches and (len(batches[-1]) + 1) * len(batches[-1][0].tokens) <= budget
        if fits:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return [_microbatch(rows, device) for rows in batches]


def _microbatch(samples: Sequence[Sample], device: torch.device) -> Microbatch:
    longest = len(samples[0].tokens)
    tokens = np.zeros((len(samples), longest), np.int64)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
    sizes = np.array([len(sample.position) for sample in samples])

    def put(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # Copies from pinned memory do not make the host wait.
        tensor = tensor.pin_memory() if device.type == "cuda" else tensor
        return tensor.to(device, non_blocking=True)

    return Microbatch(
        tokens=put(tokens),
        row=put(np.repeat(np.arange(len(samples)), sizes)),
        position=put(np.concatenate([sample.position for sample in samples])),
        target=put(np.concatenate([sample.tokens[sample.position] for sample in samples])),
        size=put(sizes.astype(np.float32)),
        trajectory=put(np.array([sample.trajectory for sample in samples])),
        real=put(np.array([sample.real for sample in samples])),
        length=sum(len(sample.tokens) for sample in samples),
    )
