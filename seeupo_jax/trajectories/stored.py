"""Trajectories in a file: a JSON object per line, sampled by any program.

A line has
  tokens  ids;
  turn    of each token: -1 (context), or the index of the turn that sampled it;
  reward  a number;
  group   a whole number: trajectories of one group started from the same state;
  logp    optional, of each token: what the sampler recorded, 0 at context;
  stop    optional: done, max_turns, max_tokens, unchosen, or env_error and timeout of one that
          failed;
  turn_rewards  optional, a number per turn; without it all of `reward` belongs to the last turn;
  rewards       optional, numbers by name: the same names in every line that did not fail.
  parent  optional: the place in its group, from 0, of an earlier line that it continues;
  fork    with `parent`: how many of its first turns are that line's.
Where a context was rewritten, `tokens`, `turn` and `logp` are lists of lists, one a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seeupo_jax.configuration.user_code import NAMES, is_name
from seeupo_jax.tasks.json_rows import read_object
from seeupo_jax.tasks.row_list import short
from seeupo_jax.trajectories.forks import check_forks, find_forks
from seeupo_jax.types import CONTEXT, UNCHOSEN, RewardTable, Segment, Trajectory, learnable

REQUIRED = ("tokens", "turn", "reward", "group")
OPTIONAL = ("logp", "rewards", "stop", "turn_rewards")
FORK = ("parent", "fork")
STOPS = ("done", "max_turns", "max_tokens", UNCHOSEN, "env_error", "timeout")
_INT32 = 2**31
_LARGEST = 1e38  # about what float32 holds
_ROUNDING = 0.01  # a sampler may round the log-probability of a certain token to above 0
_SUM = 1e-6  # rewards of turns add up to one that is no further from their sum


class _Kind(NamedTuple):
    """The check of one kind of value, and its description."""

    check: Callable[[Any], bool]
    allowed: str
    dtype: type[np.generic] = np.int32


def _integer(lowest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and lowest <= value < _INT32


def _number(highest: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and -_LARGEST < value < highest


_KINDS = {
    "tokens": _Kind(_integer(0), "token ids, whole numbers >= 0"),
    "turn": _Kind(_integer(CONTEXT), "-1 at context, or the turn's index"),
    "logp": _Kind(_number(_ROUNDING), "log-probabilities, finite numbers <= 0", np.float32),
    "reward": _Kind(_number(_LARGEST), "a finite number"),
    "turn_rewards": _Kind(_number(_LARGEST), "finite numbers, one for each turn"),
    "group": _Kind(_integer(-_INT32), "a whole number"),
    "stop": _Kind(lambda value: value in STOPS, ", ".join(STOPS)),
    "parent": _Kind(_integer(0), "a place in the group, a whole number >= 0"),
    "fork": _Kind(_integer(1), "a number of turns, a whole number >= 1"),
}


def read_stored(
    path: str | Path,
    *,
    log: Callable[[str], None] = lambda sentence: None,
    grouped: bool = True,
    forks: bool = False,
    timeouts_count: bool = False,
) -> list[Trajectory]:
    """The trajectories of a file, in its order; `task_id` is the FILE:LINE of each.

    Where a line has no `logp`, that of its sampled tokens is NaN.

    Args:
      log: takes a sentence on fields that were not read, and one on lines whose `turn_rewards` do
        not add up to `reward`.
      grouped: as for `learnable`.
      forks: whether `parent` and `fork` are read or, where no line has them, found by the tokens.
      timeouts_count: whether trajectories that stopped with `timeout` after an action are learned
        from (env.timeout_as=zero_reward).

    Raises:
      ValueError: one sentence with the line, what was got and what is allowed.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(
            f"--trajectories: got {path} ({error.strerror}); allowed: a file of JSON lines."
        ) from None
    trajectories, unread = [], set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            values = read_object(line, where, f"a JSON object with {', '.join(REQUIRED)}")
            unread |= values.keys() - {*REQUIRED, *OPTIONAL, *(FORK if forks else ())}
            trajectory = _with_fork(_trajectory(values, where), values, forks)
            counts = timeouts_count and trajectory.stop == "timeout" and trajectory.turns > 0
            trajectories.append(replace(trajectory, timeout_counts=counts))
    if unread:
        log(f"{path}: fields that are not read: {', '.join(sorted(unread))}.")
    given = [t for t in trajectories if t.turn_rewards]
    mismatched = sum(not math.isclose(sum(t.turn_rewards), t.reward, abs_tol=_SUM) for t in given)
    if mismatched:
        log(
            f"{path}: turn_rewards do not add up to reward in {mismatched} of {len(given)} lines"
            " that have them: estimators of trajectories read reward, others turn_rewards."
        )
    _check_learnable(trajectories, path, grouped)
    if not forks:
        return trajectories
    trajectories = find_forks(trajectories)
    check_forks(trajectories)
    return trajectories


def check_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    vocab_size: int,
    max_positions: int,
    unassigned_V: np.ndarray | None = None,
    max_reward: float = math.inf,
    recorded: bool = False,
) -> None:
    """Checks that a model can be trained on trajectories of `read_stored`.

    Args:
      vocab_size, max_positions: of the model.
      unassigned_V: True at ids that no token has; None: every id has a token.
      max_reward: the largest magnitude of a reward.
      recorded: whether the sampler's log-probabilities are needed.

    Raises:
      ValueError: one sentence with the line, what was got and what is allowed.
    """
    for trajectory in trajectories:
        rewards = {"reward": (trajectory.reward,), "turn_rewards": trajectory.turn_rewards}
        rewards |= {f"rewards[{name}]": (number,) for name, number in trajectory.rewards.items()}
        for name, values in rewards.items():
            largest = max(values, key=abs, default=0.0)
            if abs(largest) > max_reward:
                allowed = f"a number of magnitude at most {max_reward:g} (config.env.max_reward)"
                raise ValueError(
                    f"{trajectory.task_id}: {name}: got {largest:g}; allowed: {allowed}."
                )
        for segment in trajectory.segments:
            where, highest = trajectory.task_id, segment.tokens_L.max(initial=0)
            if highest >= vocab_size:
                allowed = f"ids below the model's vocabulary of {vocab_size}"
                raise ValueError(f"{where}: tokens: got {highest}; allowed: {allowed}.")
            sampled_L = segment.tokens_L[segment.turn_L != CONTEXT]
            if unassigned_V is not None and unassigned_V[sampled_L].any():
                never = sampled_L[unassigned_V[sampled_L]][0]
                allowed = "in turns ids of the tokenizer, since the policy samples no others"
                raise ValueError(f"{where}: tokens: got {never}; allowed: {allowed}.")
            if segment.tokens_L.size > max_positions:
                allowed = f"at most the {max_positions} positions that the model was made for"
                raise ValueError(
                    f"{where}: tokens: got {segment.tokens_L.size}; allowed: {allowed}."
                )
            if recorded and np.isnan(segment.logp_L).any():
                allowed = "a number for each token, which config.algorithm.importance reads"
                raise ValueError(f"{where}: logp: got none; allowed: {allowed}.")


def _trajectory(values: Mapping[str, Any], where: str) -> Trajectory:
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        has = ", ".join(values)
        raise ValueError(
            f"{where}: got no {', '.join(missing)} but {short(has)}; allowed: an object with"
            f" {', '.join(REQUIRED)}, and {', '.join(OPTIONAL)} if known."
        )
    stop = values.get("stop", "done")
    for name, value in {"reward": values["reward"], "group": values["group"], "stop": stop}.items():
        _check(name, value, where)
    tokens, turn = (_lists(name, values[name], where) for name in ("tokens", "turn"))
    logp = _lists("logp", values["logp"], where) if "logp" in values else _unknown(turn)
    for name, lists in {"turn": turn, "logp": logp}.items():
        _check_lengths(name, lists, tokens, where)
    _check_turns(turn, where)
    trajectory = Trajectory.of(
        tuple(Segment(*arrays) for arrays in zip(tokens, turn, logp, strict=True)),
        float(values["reward"]),
        values["group"],
        task_id=where,
        stop=stop,
        rewards=_rewards(values.get("rewards", {}), where),
    )
    if "turn_rewards" not in values:
        return trajectory
    turn_rewards = _turn_rewards(values["turn_rewards"], trajectory.turns, where)
    table = RewardTable.of(trajectory.reward, turn_rewards, trajectory.rewards)
    return replace(trajectory, reward_table=table)


def _turn_rewards(value: Any, turns: int, where: str) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != turns:
        got = f"{len(value)} numbers" if isinstance(value, list) else short(value)
        allowed = f"a list of a number for each turn, {turns}"
        raise ValueError(f"{where}: turn_rewards: got {got}; allowed: {allowed}.")
    for reward in value:
        _check("turn_rewards", reward, where)
    return tuple(map(float, value))


def _with_fork(trajectory: Trajectory, values: Mapping[str, Any], reads: bool) -> Trajectory:
    given = [name for name in FORK if name in values]
    if not reads or not given:
        return trajectory
    if len(given) < len(FORK):
        where, (name,) = trajectory.task_id, given
        raise ValueError(f"{where}: got {name} alone; allowed: {' and '.join(FORK)} together.")
    for name in FORK:
        _check(name, values[name], trajectory.task_id)
    return replace(trajectory, parent=values["parent"], fork=values["fork"])


def _check(name: str, value: Any, where: str) -> None:
    kind = _KINDS[name]
    if not kind.check(value):
        raise ValueError(f"{where}: {name}: got {short(value)}; allowed: {kind.allowed}.")


def _rewards(value: Any, where: str) -> dict[str, float]:
    """Numbers by name."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: rewards: got {short(value)}; allowed: numbers by name.")
    for name, number in value.items():
        if not is_name(name):
            raise ValueError(f"{where}: rewards: got the name {short(name)}; allowed: {NAMES}.")
        kind = _KINDS["reward"]
        if not kind.check(number):
            got = short(number)
            raise ValueError(f"{where}: rewards[{name}]: got {got}; allowed: {kind.allowed}.")
    return {name: float(number) for name, number in value.items()}


def _lists(name: str, value: Any, where: str) -> list[np.ndarray]:
    """A list of numbers, or of such lists, one a segment, as arrays."""
    if not isinstance(value, list):
        allowed = "a list, or a list of lists, one a segment"
        raise ValueError(f"{where}: {name}: got {short(value)}; allowed: {allowed}.")
    lists = value if value and isinstance(value[0], list) else [value]
    for part in lists:
        for item in part if isinstance(part, list) else [part]:
            _check(name, item, where)
    if not all(isinstance(part, list) for part in lists):
        raise ValueError(f"{where}: {name}: got lists and numbers; allowed: one or the other.")
    return [np.array(part, _KINDS[name].dtype) for part in lists]


def _unknown(turn: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.where(turn_L == CONTEXT, 0, np.nan).astype(np.float32) for turn_L in turn]


def _check_lengths(
    name: str, lists: Sequence[np.ndarray], tokens: Sequence[np.ndarray], where: str
) -> None:
    """Checks that there are as many numbers as tokens, segment by segment."""
    got, wanted = ([len(part) for part in parts] for parts in (lists, tokens))
    if got != wanted:
        got, wanted = (sizes[0] if len(sizes) == 1 else sizes for sizes in (got, wanted))
        raise ValueError(
            f"{where}: {name}: got {got} numbers; allowed: one for each token, {wanted}."
        )


def _check_turns(turn: Sequence[np.ndarray], where: str) -> None:
    """Turns count from 0, none twice and none left out, and rise within a segment."""
    turns: list[int] = []
    for turn_L in turn:
        acted = turn_L[turn_L != CONTEXT]
        if acted.size and turn_L[0] != CONTEXT:
            allowed = "-1, since something must stand before an action"
            raise ValueError(f"{where}: turn: got {turn_L[0]} first; allowed: {allowed}.")
        falls = np.flatnonzero(np.diff(acted) < 0)
        if falls.size:
            before, after = acted[falls[0] : falls[0] + 2]
            raise ValueError(
                f"{where}: turn: got {after} after {before}; allowed: indices that do not decrease."
            )
        turns += np.unique(acted).tolist()
    if sorted(turns) != list(range(len(turns))):
        got = ", ".join(map(str, turns))
        raise ValueError(
            f"{where}: turn: got the turns {short(got)}; allowed: 0, 1, 2, ..., each in one"
            " segment and none left out."
        )


def _check_names(trajectories: Sequence[Trajectory]) -> None:
    """Lines that did not fail have the same names."""
    names = {name for t in trajectories if not t.failed for name in t.rewards}
    for trajectory in trajectories:
        missing = sorted(names - trajectory.rewards.keys())
        if missing and not trajectory.failed:
            has = ", ".join(trajectory.rewards) or "none"
            raise ValueError(
                f"{trajectory.task_id}: rewards: got {short(has)} without {missing[0]}, which"
                " another line has; allowed: the same names in every line that did not fail."
            )


def _check_learnable(trajectories: Sequence[Trajectory], path: str | Path, grouped: bool) -> None:
    if not trajectories:
        raise ValueError(f"{path}: got no line; allowed: a JSON object for each trajectory.")
    _check_names(trajectories)
    learnable_N = learnable(trajectories, grouped=grouped)
    if not learnable_N.any() and not grouped:
        raise ValueError(f"{path}: got failed trajectories only; allowed: at least one other.")
    if not learnable_N.any():
        raise ValueError(
            f"{path}: got no group with two trajectories that did not fail; allowed: at least one,"
            " since rewards are compared within groups."
        )
    if not any(t.turns for t, keep in zip(trajectories, learnable_N, strict=True) if keep):
        raise ValueError(f"{path}: got no turn to update; allowed: at least one turn >= 0.")
