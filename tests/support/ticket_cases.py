"""Trajectories of tickets, made up, and worlds in which they are compared bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from seeupo_jax.rollout.asynchronous.work import FinishedMember, Ticket
from seeupo_jax.types import Segment, Trajectory

ODD = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 0x00000001], np.uint32)


def trajectory(task_id: str, number: int, member: int, version: int = 0) -> Trajectory:
    """Of a ticket's member: NaNs of every kind, texts that are not valid, several segments."""
    rng = np.random.default_rng([number, member])

    def segment(turn: int) -> Segment:
        length = int(rng.integers(3, 40))
        return Segment(
            rng.integers(0, 2**31, length, np.int32),
            np.where(np.arange(length) < 2, -1, turn).astype(np.int32),
            np.concatenate([ODD.view("f4"), rng.normal(size=length).astype("f4")])[:length],
        )

    return Trajectory.of(
        tuple(segment(turn) for turn in range(1 + member % 2)),
        float(rng.normal()),
        number,
        task_id,
        messages=({"role": "user", "content": "naïve \ud800 \0"},),
        info={"member": member, "score": 1 / 3},
        policy_version=version,
    )


def play(ticket: Ticket, version: int = 0) -> list[FinishedMember]:
    """What a worker delivers of a ticket."""
    number = ticket.number
    return [
        FinishedMember(number, member, trajectory(ticket.task_id, number, member, version))
        for member in ticket.members
    ]


def bits(value: Any) -> Any:
    """Of a number, an array, or whatever holds some: equal ones are equal to the bit."""
    if dataclasses.is_dataclass(value):
        return {name: bits(item) for name, item in vars(value).items()}
    if isinstance(value, tuple | list):
        return tuple(bits(item) for item in value)
    if isinstance(value, float):
        return np.float64(value).tobytes()
    return (value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value
