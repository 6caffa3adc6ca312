"""One optimizer state per turn: a step on a turn reads and writes that turn's state alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import optax

from seeupo_jax.types import TrainState


class TurnMoments(NamedTuple):
    """The states of an optimizer, one a turn, all for the same parameters."""

    sets: tuple[Any, ...]


def per_turn(optimizer: optax.GradientTransformation, turns: int) -> optax.GradientTransformation:
    """The optimizer with a state for each of so many turns; it updates with one of them."""

    def init(params: Any) -> TurnMoments:
        return TurnMoments(tuple(optimizer.init(params) for _ in range(turns)))

    return optax.GradientTransformation(init, optimizer.update)


def of_turn(state: Any, turns: Sequence[int]) -> Any:
    """A training state, or its layout, with the optimizer state of one turn, if it has several.

    Raises:
      ValueError: there is no optimizer state for this turn.
    """
    moments = state.opt_state
    if not isinstance(moments, TurnMoments):
        return state
    (turn,) = turns
    if turn >= len(moments.sets):
        raise ValueError(
            f"a trajectory has {turn + 1} turns; allowed with moments=turn: at most"
            f" {len(moments.sets)}, rollout.max_turns."
        )
    return state._replace(opt_state=moments.sets[turn])


def put_back(stepped: TrainState, previous: TrainState, turns: Sequence[int]) -> TrainState:
    """The state after a step on a turn, with the updated optimizer states of all turns.

    Args:
      stepped: the result of the step on `of_turn(previous, turns)`.
    """
    moments = previous.opt_state
    if not isinstance(moments, TurnMoments) or isinstance(stepped.opt_state, TurnMoments):
        return stepped
    (turn,) = turns
    sets = (*moments.sets[:turn], stepped.opt_state, *moments.sets[turn + 1 :])
    return stepped._replace(opt_state=TurnMoments(sets))
