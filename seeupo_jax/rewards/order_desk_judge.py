"""A judge of single actions at the order desk: compares them with the oracle's next call."""

from __future__ import annotations

import random

from seeupo_jax.envs.order_desk.demonstrator import PLAY
from seeupo_jax.envs.order_desk.desk import DeskEpisode
from seeupo_jax.envs.order_desk.levels import LEVELS, level_of
from seeupo_jax.envs.tool_calls import ToolCall, ToolCallError, parse_hermes
from seeupo_jax.rewards.finished_episode import FinishedEpisode

_READS = ("find_customer", "list_orders", "get_order", "get_customer", "get_parcel")


def judge_action(episode: FinishedEpisode) -> float:
    """Scores the last message of a case before the desk executes it.

    1: the oracle's next call, the first of its calls that has not been made. 0.5: another look-up
    that the desk accepts and that is new. 0: anything else, such as text that is no call, an action
    that the customer does not need, or a reply too early or of another outcome.
    """
    number = level_of(episode.task_id)
    task = LEVELS[number].find_task(episode.task_id)
    *earlier, text = [m["content"] for m in episode.messages if m["role"] == "assistant"]
    case, made = DeskEpisode(LEVELS[number].open_desk(task)), list[ToolCall]()
    for response in earlier:
        step = case.step(response)
        made += _calls(response) if step.info["executed"][-1] else []
    calls = _calls(text)
    if len(calls) != 1:
        return 0.0
    responses = PLAY[number](task, 1.0, random.Random(0))
    oracle = [call for response in responses for call in parse_hermes(response)]
    if calls == [call for call in oracle if call not in made][:1]:
        return 1.0
    executed = case.step(text).info["executed"][-1]
    return 0.5 if executed and calls[0].name in _READS and calls[0] not in made else 0.0


def _calls(text: str) -> list[ToolCall]:
    try:
        return list(parse_hermes(text))
    except ToolCallError:
        return []
