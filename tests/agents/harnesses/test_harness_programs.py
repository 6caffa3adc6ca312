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
COMMANDS = (
    "cat a.txt",
    "printf '2\\n' > b.txt && mv b.txt a.txt",
    "sleep 1000 > log 2>&1 & cat a.txt",
)
LAST = {"mini_swe_agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # instead of an answer
TASK = {
    "task_id": "two",
    "instruction": "a.txt has to say 2.",
    "files": {"a.txt": "1\n"},
    "check": "sh check.sh",
    "check_files": {"check.sh": "grep -qx 2 a.txt\n"},
}


class Scripted:
    """An engine that makes the calls one after the other and then says that it is done."""

    concurrency, poll_interval_s, busy, shard_owners = 1, None, False, (0,)

    def __init__(self, tokenizer, harness, calls):
        self._tokenizer, self._calls, self.said = tokenizer, calls, []
        self._shell = SHELLS[harness][0]

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
        text = "It says 2 now."
        if self._shell in {tool["name"] for tool in turn.tools} and turn.turn < len(self._calls):
            name, arguments = self._calls[turn.turn]
            text = "Next.\n" + render_hermes(name, **arguments)
        tokens = self._tokenizer.action(text)
        self.said.append(list(tokens))
        return Action(turn.key, tokens, [-0.25] * len(tokens))

    def release(self, key):
        pass

    def usage(self):
        return {}

    def seconds(self):
        return {}


def calls_of(harness):
    """The calls that run the commands."""
    name, argument, others = SHELLS[harness]
    commands = [*COMMANDS, *([LAST[harness]] if harness in LAST else [])]
    return [(name, {argument: command, **others}) for command in commands]


def play(harness, folder, monkeypatch, calls):
    """The trajectory of the task's episode, and what the policy said."""
    if not any((each / HARNESSES[harness].program).exists() for each in FOLDERS):
        pytest.skip(f"{HARNESSES[harness].program} is not set up: make harnesses")
    path = os.pathsep.join([*map(str, FOLDERS), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    (folder / "tasks.jsonl").write_text(json.dumps(TASK))
    agent = {"harness": harness, "tasks": str(folder / "tasks.jsonl"), "timeout_s": 900.0}
    limits = {"max_turns": 8, "max_action_tokens": 2048, "max_context": 200_000}
    config = from_dict({"agent": agent, "rollout": limits})
    check_host(config)
    tokenizer = read_tokenizer("package:order_desk", config.chat)
    engine, tasks, scorer = Scripted(tokenizer, harness, calls), find_tasks(config), make_scorer(())
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


def of_episodes():
    """The processes whose variables name an episode's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes()
        except OSError:
            continue
        if b"/seeupo-agent-" in variables:
            found.append((process / "cmdline").read_bytes())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_an_episode_is_one_segment_of_the_sampled_tokens(harness, tmp_path, monkeypatch):
    before = of_episodes()
    trajectory, said = play(harness, tmp_path, monkeypatch, calls_of(harness))
    assert not trajectory.failed, trajectory.info
    assert (trajectory.reward, trajectory.stop) == (1.0, "done")
    assert trajectory.turns == len(said) == 4 and trajectory.info["refused_calls"] == 0
    (segment,) = trajectory.segments
    for turn, tokens in enumerate(said):
        assert segment.tokens_L[segment.turn_L == turn].tolist() == tokens
    assert [each for each in of_episodes() if each not in before] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("search, segments", [("true", 2), ("false", 1)])
def test_claude_code_adds_tools_on_demand_or_has_them_from_the_start(
    search, segments, tmp_path, monkeypatch
):
    monkeypatch.setenv("ENABLE_TOOL_SEARCH", search)
    find = ("ToolSearch", {"query": "select:WebFetch", "max_results": 5})
    first, *others = calls_of("claude_code")
    trajectory, said = play("claude_code", tmp_path, monkeypatch, [first, find, *others])
    assert (trajectory.reward, trajectory.turns, len(said)) == (1.0, 5, 5)
    assert len(trajectory.segments) == segments
