"""A reward per turn from reference calls: `seeupo_jax.rewards.matched_calls:MatchedCalls`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seeupo_jax.configuration.user_code import shown
from seeupo_jax.envs.base import Tool, check_choice
from seeupo_jax.envs.call_matching import MATCHINGS, matching_rewards
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, parse_python
from seeupo_jax.envs.tool_formats.formats import TOOL_FORMATS
from seeupo_jax.envs.tool_formats.tool_format import ToolFormat
from seeupo_jax.rewards.finished_episode import HISTORY, FinishedEpisode


class MatchedCalls:
    """Matches the calls of an episode with the reference calls of its task (MatchTIR).

    Args:
      matching: one of `MATCHINGS`.
      format: how the policy writes calls, a tool format or `python`. A message that cannot be read
        holds no call.
      field: of `info`, where the environment puts the reference: a list of
        {"name": str, "arguments": {...}}.
    """

    def __init__(
        self, *, matching: str = "hard", format: str = "hermes", field: str = "reference_calls"
    ):
        check_choice("matching", matching, MATCHINGS)
        check_choice("format", format, _READERS)
        self._matching, self._read, self._field = matching, _READERS[format], field

    def __call__(self, episode: FinishedEpisode) -> list[float]:
        """The reward of each turn, in [0, 1].

        Raises:
          ValueError: the environment gave no reference calls.
        """
        answers = (m for m in episode.messages if m["role"] == "assistant" and HISTORY not in m)
        turns = [self._calls(message["content"], episode.tools) for message in answers]
        return matching_rewards(turns, self._reference(episode.info), self._matching)

    def _calls(self, text: str, tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        try:
            return self._read(text, tools)
        except ToolCallError:
            return ()

    def _reference(self, info: Mapping[str, Any]) -> list[ToolCall]:
        calls = info.get(self._field)
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise ValueError(
                f"info[{self._field!r}]: got {shown(calls)}; allowed: a list of reference calls,"
                ' each {"name": text, "arguments": dict}.'
            )
        return [ToolCall(call["name"], call["arguments"]) for call in calls]


def _reader(
    tool_format: ToolFormat,
) -> Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]:
    return lambda text, tools: tool_format.read(text, tools).calls


_READERS: Mapping[str, Callable[[str, Sequence[Tool]], tuple[ToolCall, ...]]] = {
    "hermes": _reader(TOOL_FORMATS["hermes"]),
    "python": lambda text, tools: parse_python(text),
    **{name: _reader(each) for name, each in TOOL_FORMATS.items()},
}


def _is_call(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"name", "arguments"}:
        return False
    return isinstance(value["name"], str) and isinstance(value["arguments"], Mapping)
