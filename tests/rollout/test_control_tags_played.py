"""Calls whose tags are control tokens are calls in a rollout: they earn rewards in one segment."""

import contextlib

from chat_cases import make, with_control_tags
from rollout_cases import Saying, make_worker

from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.envs.tool_calls import ToolCallError, parse_hermes
from seeupo_jax.policy.files.huggingface_tokenizer import load
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.player import CollectionOptions
from seeupo_jax.types import CONTEXT

SAID = 'I look. <tool_call>{"name": "look", "arguments": {"at": "</tool_call>"}}</tool_call>'
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


class Rooms:
    """Three rooms, each seen by a call."""

    def task_ids(self, split):
        return ("rooms",)

    def reset(self, task_id, seed):
        self._seen = 0
        return ({"role": "user", "content": "Look around."},), (TOOL,)

    def step(self, text):
        try:
            calls = parse_hermes(text)
        except ToolCallError as error:
            return StepResult(({"role": "tool", "content": str(error)},), 0.0, False)
        self._seen += len(calls)
        answer = {"role": "tool", "content": f"room {self._seen}"}
        return StepResult((answer,), float(len(calls)), self._seen == 3)

    def score(self):
        return self._seen / 3

    def close(self):
        pass


class Calling(Saying):
    """Makes the same call in every turn."""

    def __init__(self, action):
        self._action = action

    def fits(self, context):
        return True

    def said(self, turn):
        return Action(turn.key, self._action, [-1.0] * len(self._action))


def played(tokenizer):
    with contextlib.closing(EnvPool(Rooms, 1, workers=1, timeout_s=30.0)) as pool:
        engine = Calling(tokenizer.action(SAID))
        worker = make_worker(engine, pool, tokenizer, max_turns=4)
        requests, numbers = group_requests(["rooms"], 1, 1), CollectionOptions(seed=3)
        return collect(worker, None, requests, numbers).trajectories[0]


def test_calls_of_control_tokens_earn_what_calls_of_text_earn_in_one_segment(tmp_path):
    names = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    wanted, found = played(make("qwen3")), played(load(with_control_tags(tmp_path, names), None))
    for trajectory in (wanted, found):
        assert (trajectory.reward, trajectory.stop) == (3.0, "done")
        (segment,) = trajectory.segments
        assert set(segment.turn_L.tolist()) == {CONTEXT, 0, 1, 2}
        texts = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
        assert texts == [SAID] * 3
    # The same ids: of the closing tag in the argument, too.
    assert found.segments[0].tokens_L.tolist() == wanted.segments[0].tokens_L.tolist()
