"""Tabular problems of several turns: the reward of every action sequence, and the optimum.

A policy observes only its earlier actions; the reward comes after the last turn, unless the problem
says what single turns pay.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Of numpy and of zipfile, on a damaged file: by its compression, its header, and its size.
_UNREADABLE = (
    *(ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error),
    *(RuntimeError, tokenize.TokenError, MemoryError),
)


@dataclass(frozen=True)
class Problem:
    """A jackpot for each sequence of K actions, of A each: its mean, and how often it pays.

    A sequence pays mean / probability with its probability, else 0.

    Args:
      name: what tables and plots call it.
      mean: shape (A,) x K, A >= 2 and K >= 1, reward units; the largest is > 0.
      probability: the same shape, in (0, 1]; 1 where the reward has no noise.
      turn_mean: shape (K,) + (A,) x K, each turn's reward, which depends on no later action;
        estimators of turns see it instead of the reward. None: the last turn gets all of it.
      noise: >= 0, reward units; each turn pays as much more or less by a coin, with turn_mean only.

    Raises:
      ValueError: other shapes or values.
    """

    name: str
    mean: np.ndarray
    probability: np.ndarray
    turn_mean: np.ndarray | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        shape = np.shape(self.mean)
        for array in ("mean", "probability", "turn_mean", "noise"):
            if vars(self)[array] is not None:
                object.__setattr__(self, array, self._numbers(array))
        if not shape or len(set(shape)) != 1 or shape[0] < 2:
            raise ValueError(
                f"{self.name}: got mean of shape {shape}; allowed: one axis per turn, at least one,"
                " all of the same length, which is the number of actions, at least 2."
            )
        if self.probability.shape != shape:
            raise ValueError(
                f"{self.name}: got probability of shape {self.probability.shape}; allowed: that of"
                f" mean, {shape}."
            )
        wrong = self.probability[~((self.probability > 0) & (self.probability <= 1))]
        if wrong.size:
            raise ValueError(f"{self.name}: got a probability of {wrong[0]:g}; allowed: (0, 1].")
        if self.optimum <= 0:
            raise ValueError(
                f"{self.name}: got no mean above {self.optimum:g}; allowed: an optimum > 0, of"
                " which results are shares."
            )

        self._check_turn_rewards()

    def _check_turn_rewards(self) -> None:
        if self.noise < 0 or (self.noise > 0 and self.turn_mean is None) or self.noise.ndim:
            raise ValueError(
                f"{self.name}: got a noise of {self.noise}; allowed: a number >= 0, 0 without"
                " turn_mean."
            )
        if self.turn_mean is None:
            return
        if self.turn_mean.shape != (self.turns, *self.mean.shape):
            raise ValueError(
                f"{self.name}: got turn_mean of shape {self.turn_mean.shape}; allowed: one array of"
                f" mean's shape for each turn, {(self.turns, *self.mean.shape)}."
            )
        for turn, mean in enumerate(self.turn_mean):
            later = tuple(range(turn + 1, self.turns))
            if later and np.any(np.ptp(mean, axis=later)):
                raise ValueError(
                    f"{self.name}: got a turn_mean of turn {turn} that depends on later actions;"
                    " allowed: on those up to it."
                )

    @property
    def turns(self) -> int:
        """K."""
        return self.mean.ndim

    @property
    def actions(self) -> int:
        """A, in each turn."""
        return self.mean.shape[0]

    @property
    def optimum(self) -> float:
        """Expected reward of the best policy, by backward induction."""
        value = self.mean
        for _ in range(self.turns):
            value = value.max(axis=-1)
        return float(value)

    def _numbers(self, array: str) -> np.ndarray:
        values = np.asarray(vars(self)[array])
        if values.dtype.kind not in "biuf":
            raise ValueError(f"{self.name}: got {array} of {values.dtype}; allowed: numbers.")
        values = values.astype(np.float64)
        wrong = values[~np.isfinite(values)]
        if wrong.size:
            raise ValueError(f"{self.name}: got {wrong[0]} in {array}; allowed: finite numbers.")
        return values


def load_problem(path: str | Path) -> Problem:
    """The problem of an `.npz` file, named like the file.

    Args:
      path: holds the array `mean`; `probability`, unless no reward has noise; and `turn_mean` and
        `noise` if turns have rewards.

    Raises:
      ValueError: no such file, not an `.npz` file, no `mean`, or arrays that are no problem.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--problem_file: got {path}, which is no file; allowed: an .npz file.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"--problem_file: got {path}, which is not in the .npz format.")
    try:
        with np.load(path) as file:
            allowed = ("mean", "probability", "turn_mean", "noise")
            arrays = {key: file[key] for key in allowed if key in file}
            names = ", ".join(file.files)
    except _UNREADABLE as error:
        why = str(error) or type(error).__name__
        raise ValueError(f"--problem_file: got {path}, which numpy cannot read: {why}.") from None
    if "mean" not in arrays:
        raise ValueError(f"--problem_file: got {path} with {names or 'no array'}; allowed: mean.")
    return Problem(path.stem, **{"probability": np.ones(arrays["mean"].shape)} | arrays)


def coordination() -> Problem:
    """Turns must agree: equal actions pay 1, 0.7 or 0.4, any others 0.

    Isolates credit among turns: an action's value depends on the later ones, which at first mostly
    disagree.
    """
    mean = np.zeros((3, 3, 3, 3))
    np.einsum("aaaa->a", mean)[:] = 1.0, 0.7, 0.4  # a view of the diagonal
    return _without_noise("coordination", mean)


def lottery() -> Problem:
    """First action 0 pays 0.5 for sure, others are tickets: 8 one time in eight, so 1 on average.

    Isolates the scale of the advantages: no turn depends on another. In a group of 16 without a win
    every ticket lost; divided by their own standard deviation, such groups weigh as much as those
    with a win, where that is larger.
    """
    mean, probability = np.ones((3, 3, 3)), np.full((3, 3, 3), 1 / 8)
    mean[0], probability[0] = 0.5, 1.0
    return Problem("lottery", mean, probability)


def deceptive() -> Problem:
    """First action 0 pays 0.5 for sure, a chain of four actions 1 pays 1, all else nothing.

    Isolates the schedule of updates: the chain's first action is worth 1/8 as long as the later
    turns are what they were, and 1 after their update. A policy that moves to the safe action in
    one large step never samples the chain again.
    """
    mean = np.zeros((2,) * 4)
    mean[0] = 0.5
    mean[1, 1, 1, 1] = 1.0
    return _without_noise("deceptive", mean)


def delayed() -> Problem:
    """The last of six actions must repeat the first: that pays 1 after action 1, 0.5 after 0.

    Isolates credit over time: the four turns between have no effect on the reward.
    """
    mean = np.zeros((2,) * 6)
    mean[0, ..., 0] = 0.5
    mean[1, ..., 1] = 1.0
    return _without_noise("delayed", mean)


def stochastic() -> Problem:
    """Each of three actions adds its share, but one reward in four is given, four times as large.

    Isolates noise: rewards vary more than what they depend on.
    """
    share_A = np.array([0.0, 1.0, 2.0]) / 6
    mean = share_A[:, None, None] + share_A[None, :, None] + share_A[None, None, :]
    return Problem("stochastic", mean, np.full(mean.shape, 1 / 4))


def random() -> Problem:
    """Each of 64 sequences pays a fixed random number of [0, 1].

    The control: no structure that favours a recipe.
    """
    return _without_noise("random", np.random.default_rng(7).uniform(size=(4, 4, 4)))


def long() -> Problem:
    """Eight turns of two actions; the reward is the square of the share of action 1.

    Isolates length: M is a product of seven ratios, and at first one in seven of the last turn's
    128 contexts gets no trajectory at all in an iteration's 256.
    """
    count = np.indices((2,) * 8).sum(axis=0)
    return _without_noise("long", (count / 8) ** 2)


def rare_turn() -> Problem:
    """The fourth of eight turns pays 1 if it and the two before are action 1; coins pay 2 or -2.

    Isolates noise in a long episode: at first one trajectory in eight has the good turn, which
    moves the reward by a deviation of 0.33, and the coins of all eight turns by one of 5.7. Rewards
    before a turn do not depend on its action, and those long after it hardly do.
    """
    turn_mean = np.zeros((8, *(2,) * 8))
    turn_mean[3, :, 1, 1, 1] = 1.0
    mean = turn_mean.sum(axis=0)
    return Problem("rare_turn", mean, np.ones_like(mean), turn_mean, 2.0)


def matched_trace() -> Problem:
    """Six calls of four must be those of a reference: the outcome pays 1 then, each call 1/6.

    Isolates a reward that is seen in the trace alone: one trajectory in 4096 has the outcome at
    first, one call in four is matched.
    """
    reference = (0, 1, 2, 3, 1, 0)
    matches = [np.indices((4,) * 6)[turn] == call for turn, call in enumerate(reference)]
    mean = np.all(matches, axis=0).astype(float)
    return Problem("matched_trace", mean, np.ones_like(mean), np.stack(matches) / 6)


def _without_noise(name: str, mean: np.ndarray) -> Problem:
    return Problem(name, mean, np.ones_like(mean))


_ALL = (
    coordination,
    lottery,
    deceptive,
    delayed,
    stochastic,
    random,
    long,
    rare_turn,
    matched_trace,
)

PROBLEMS: dict[str, Callable[[], Problem]] = {problem.__name__: problem for problem in _ALL}
