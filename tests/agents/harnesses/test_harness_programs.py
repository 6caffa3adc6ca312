"""The real programs of third_party/harnesses play episodes through the endpoint.

The policy is scripted; everything between it and the program is the run's own.
"""

import json
import os
from pathlib import Path

import pytest
from places import ROOT

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.envs.tasks import list_tasks
from seeupo_jax.envs.tool_calls import render_hermes
from seeupo_jax.evaluation.episode_host import build_host, check_host
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.rewards.scorer import make_scorer
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Action
from seeupo_jax.rollout.player import CollectionOptions, RolloutWorker

PROGRAMS = ROOT / "third_party" / "harnesses"
FOLDERS = (PROGRAMS / "node_modules" / ".bin", PROGRAMS / ".venv" / "bin")
# The tool by which each runs commands, and the argument that holds one; other arguments it needs.
SHELLS = {
    "claude_code": ("Bash", "command", {"description": "Works."}),
    "codex": ("exec_command", "cmd", {}),
    "mini_swe_agent": ("bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Works."}),
    "qwen_code": ("run_shell_command", "command", {"is_background": False}),
}
COMMANDS = ("cat a.txt", "printf '2\\n' > b.txt && mv b.txt a.txt", "sleep 1000 & cat a.txt")
LAST = {"mini_swe_agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # instead of an answer
TASK = {
    "task_id": "two",
    "instruction": "a.txt has to say 2.",
    "files": {"a.txt": "1\n"},
    "check": "sh check.sh",
    "check_files": {"check.sh": "grep -qx 2 a.txt\n"},
}


class Scripted:
    """An engine that runs the commands one after the other and then says that it is done."""

    concurrency, poll_interval_s, busy, shard_owners = 1, None, False, (0,)

    def __init__(self, tokenizer, harness):
        self._tokenizer, self._harness, self.said = tokenizer, harness, []

    def begin(self, params, **numbers):
        self._open = []

    def fits(self, context):
        return True

    def submit(self, turn):
        self._open.append(turn)

    def step(self, unfinished, stop=False):
        turns, self._open = self._open, []
        return [self._say(turn) for turn in turns] if unfinished else None

    def _say(self, turn):
        name, argument, others = SHELLS[self._harness]
        last = [LAST[self._harness]] if self._harness in LAST else []
        commands = [*COMMANDS, *last]
        text = "It says 2 now."
        if name in {tool["name"] for tool in turn.tools} and turn.turn < len(commands):
            text = "Next.\n" + render_hermes(name, **{argument: commands[turn.turn]}, **others)
        tokens = self._tokenizer.action(text)
        self.said.append(list(tokens))
        return Action(turn.key, tokens, [-0.25] * len(tokens))

    def release(self, key):
        pass

    def usage(self):
        return {}

    def seconds(self):
        return {}


def play(harness, folder, monkeypatch):
    """The trajectory of the task's episode, and what the policy said."""
    if not any((each / HARNESSES[harness].program).exists() for each in FOLDERS):
        pytest.skip(
            f"{HARNESSES[harness].program} is not set up: sh third_party/harnesses/setup.sh"
        )
    path = os.pathsep.join([*map(str, FOLDERS), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    (folder / "tasks.jsonl").write_text(json.dumps(TASK))
    agent = {"harness": harness, "tasks": str(folder / "tasks.jsonl"), "timeout_s": 900.0}
    limits = {"max_turns": 8, "max_action_tokens": 2048, "max_context": 200_000}
    config = from_dict({"agent": agent, "rollout": limits})
    check_host(config)
    tokenizer = read_tokenizer("package:order_desk", config.chat)
    engine, tasks, scorer = Scripted(tokenizer, harness), find_tasks(config), make_scorer(())
    host = build_host(config, engine, tasks, tokenizer, print)
    worker = RolloutWorker(engine, host, tokenizer, config.env, config.rollout, rewards=scorer)
    requests = group_requests(list_tasks(tasks, "train"), 1, 1)
    try:
        options = CollectionOptions(seed=0)
        (trajectory,) = collect(worker, None, requests, options).trajectories
    finally:
        host.close()
        scorer.close()
    return trajectory, engine.said


def processes_of(harness):
    """The processes that have a variable of an episode of this test."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
        except OSError:
            continue
        if b"SEEUPO_TASK=" in variables and int(process.name) != os.getpid():
            found.append((process / "cmdline").read_bytes())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_an_episode_is_one_segment_of_the_sampled_tokens(harness, tmp_path, monkeypatch):
    before = processes_of(harness)
    trajectory, said = play(harness, tmp_path, monkeypatch)
    assert not trajectory.failed, trajectory.info
    assert (trajectory.reward, trajectory.stop) == (1.0, "done")
    assert trajectory.turns == len(said) == 4 and trajectory.info["refused_calls"] == 0
    (segment,) = trajectory.segments
    for turn, tokens in enumerate(said):
        assert segment.tokens_L[segment.turn_L == turn].tolist() == tokens
    assert [each for each in processes_of(harness) if each not in before] == []
