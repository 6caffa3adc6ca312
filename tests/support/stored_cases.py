"""Files of trajectories, as another program would write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seeupo_jax.types import Trajectory


def to_line(trajectory: Trajectory, *, logp: bool = True) -> dict[str, Any]:
    """What stands in a trajectory's line; without `logp` where nobody recorded it."""
    many = len(trajectory.segments) > 1

    def each(name: str) -> list[Any]:
        lists = [getattr(segment, name).tolist() for segment in trajectory.segments]
        return lists if many else lists[0]

    line = {"tokens": each("tokens_L"), "turn": each("turn_L"), "logp": each("logp_L")}
    line |= {"reward": trajectory.reward, "group": trajectory.group, "stop": trajectory.stop}
    if trajectory.turn_rewards:
        line["turn_rewards"] = list(trajectory.turn_rewards)
    return line if logp else {name: value for name, value in line.items() if name != "logp"}


def write(file: Path, trajectories: Sequence[Trajectory], *, logp: bool = True) -> Path:
    lines = [json.dumps(to_line(trajectory, logp=logp)) for trajectory in trajectories]
    file.write_text("\n".join(lines) + "\n")
    return file
