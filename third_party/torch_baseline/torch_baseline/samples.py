"""Every turn of every trajectory as a sample, in microbatches of rows of like lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    group: int
    tokens: np.ndarray
    position: np.ndarray
    real: bool = True


@dataclass(frozen=True)
class Row:
    """Samples [S] in one row: what all of them begin with, then the rest of each in turn.

    common: tokens that they have in common. start: [S], where in the row the rest of each begins.
    """

    samples: tuple[Sample, ...]
    common: int

    @property
    def start(self) -> np.ndarray:
        rests = [len(sample.tokens) - self.common for sample in self.samples]
        return self.common + np.cumsum([0, *rests[:-1]])

    @property
    def length(self) -> int:
        return self.common + sum(len(sample.tokens) - self.common for sample in self.samples)

    @property
    def tokens(self) -> np.ndarray:
        """[L]."""
        first = self.samples[0].tokens[: self.common]
        return np.concatenate([first, *(sample.tokens[self.common :] for sample in self.samples)])

    @property
    def depth(self) -> np.ndarray:
        """[L], the place of each token in its sample."""
        rests = [np.arange(self.common, len(sample.tokens)) for sample in self.samples]
        return np.concatenate([np.arange(self.common), *rests])

    @property
    def branch(self) -> np.ndarray:
        """[L], the sample of each token, and -1 of all."""
        sizes = [self.common, *(len(sample.tokens) - self.common for sample in self.samples)]
        return np.repeat(np.arange(-1, len(self.samples)), sizes)

    def place(self, sample: int, position: np.ndarray) -> np.ndarray:
        """Where in the row tokens of a sample stand."""
        return np.where(
            position < self.common, position, self.start[sample] + position - self.common
        )


@dataclass(frozen=True)
class Microbatch:
    """Rows [R] of one forward pass, of S samples with X action tokens together.

    tokens: int64 [R, L], padded on the right.
    depth, visible: int64 [R, L], places of the tokens in their samples; bool [R, 1, L, L], which
      keys each query looks at. Neither where every row is one sample: no causal query looks at
      padding.
    source, target, row: int64 [X], of each action token: which of the R x L tokens it follows, its
      id, its sample.
    size: float32 [S], action tokens of a sample. trajectory: int64 [S]. real: bool [S].
    length: tokens that are no padding.
    """

    tokens: torch.Tensor
    depth: torch.Tensor | None
    visible: torch.Tensor | None
    source: torch.Tensor
    target: torch.Tensor
    row: torch.Tensor
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
            samples.append(replace(last, real=False))
    return samples


def _sample(trajectory: Trajectory, index: int, turn: int) -> Sample | None:
    for segment in trajectory.segments:
        position = np.flatnonzero(segment.turn == turn)
        if position.size:
            tokens = segment.tokens[: position[-1] + 1]
            return Sample(index, trajectory.group, tokens, position)
    return None


def microbatches(
    samples: Sequence[Sample], budget: int, device: torch.device, *, share_prefixes: bool = False
) -> list[Microbatch]:
    """Rows by falling length, as many together as stay within `budget` tokens, or one.

    Args:
      share_prefixes: the samples of a group share a row, as far as `budget` allows.
    """
    rows = _shared(samples, budget) if share_prefixes else [Row((one,), 0) for one in samples]
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_microbatch(rows, device) for rows in batches]


def _shared(samples: Sequence[Sample], budget: int) -> list[Row]:
    """Rows of the samples of one group each, which begin alike."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    rows = []
    for group in groups.values():
        common = _common([sample.tokens for sample in group])
        rows.append(Row(tuple(group[:1]), common))
        for sample in group[1:]:
            longer = Row((*rows[-1].samples, sample), common)
            if longer.length <= budget:
                rows[-1] = longer
            else:
                rows.append(Row((sample,), common))
    return rows


def _common(tokens: Sequence[np.ndarray]) -> int:
    """How many tokens all begin with."""
    shortest = min(map(len, tokens))
    stacked = np.stack([each[:shortest] for each in tokens])
    differ = (stacked != stacked[0]).any(axis=0)
    return int(np.argmax(differ)) if differ.any() else shortest


def _microbatch(rows: Sequence[Row], device: torch.device) -> Microbatch:
    longest = rows[0].length
    tokens, depth = np.zeros((2, len(rows), longest), np.int64)
    branch = np.full((len(rows), longest), -2)  # of padding, which sees padding
    source, target = [], []
    for number, row in enumerate(rows):
        own = slice(0, row.length)
        tokens[number, own], depth[number, own], branch[number, own] = (
            row.tokens,
            row.depth,
            row.branch,
        )
        for index, sample in enumerate(row.samples):
            source.append(number * longest + row.place(index, sample.position - 1))
            target.append(sample.tokens[sample.position])
    samples = [sample for row in rows for sample in row.samples]
    sizes = np.array([len(sample.position) for sample in samples])

    def put(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # Copies from pinned memory do not make the host wait.
        tensor = tensor.pin_memory() if device.type == "cuda" else tensor
        return tensor.to(device, non_blocking=True)

    alone = all(len(row.samples) == 1 for row in rows)
    return Microbatch(
        tokens=put(tokens),
        depth=None if alone else put(depth),
        visible=None if alone else _visible(put(branch)),
        source=put(np.concatenate(source)),
        target=put(np.concatenate(target)),
        row=put(np.repeat(np.arange(len(samples)), sizes)),
        size=put(sizes.astype(np.float32)),
        trajectory=put(np.array([sample.trajectory for sample in samples])),
        real=put(np.array([sample.real for sample in samples])),
        length=sum(row.length for row in rows),
    )


def _visible(branch: torch.Tensor) -> torch.Tensor:
    """[R, 1, L, L]: of the tokens before a query those of its branch and of all."""
    key, query = branch[:, None, None, :], branch[:, None, :, None]
    return ((key == query) | (key == -1)).tril()
