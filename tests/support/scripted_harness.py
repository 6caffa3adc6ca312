"""A policy that has a harness run commands, and a run that lets it play."""

import os
from pathlib import Path

import pytest
from places import ROOT

from seeupo_jax.agents.agent_tasks import find_tasks
from seeupo_jax.agents.harnesses.table import HARNESSES
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
LAST = {"mini_swe_agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # instead of an answer


def set_up(harness, monkeypatch):
    """Finds a harness's real program; without it the test is skipped."""
    if not any((each / HARNESSES[harness].program).exists() for each in FOLDERS):
        pytest.skip(f"{HARNESSES[harness].program} is not set up: make harnesses")
    monkeypatch.setenv("PATH", os.pathsep.join([*map(str, FOLDERS), os.environ["PATH"]]))


def calls_of(harness, commands):
    """The calls that run the commands."""
    name, argument, others = SHELLS[harness]
    commands = [*commands, *([LAST[harness]] if harness in LAST else [])]
    return [(name, {argument: command, **others}) for command in commands]


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
        text = "It is done."
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


def play(config, calls):
    """The trajectory of the only task's episode, and the tokens of each answer of the policy."""
    check_host(config)
    tokenizer = read_tokenizer("package:order_desk", config.chat)
    engine = Scripted(tokenizer, config.agent.harness, calls)
    tasks, scorer = find_tasks(config), make_scorer(())
    host = build_host(config, engine, tasks, tokenizer, print)
    worker = RolloutWorker(engine, host, tokenizer, config.env, config.rollout, rewards=scorer)
    requests = group_requests(list_tasks(tasks, "train"), 1, 1)
    try:
        (trajectory,) = collect(worker, None, requests, CollectionOptions(seed=0)).trajectories
    finally:
        host.close()
        scorer.close()
    return trajectory, engine.said


def check_episode(trajectory, said, turns):
    """Whether the policy solved the task, in one segment of the tokens that it sampled."""
    assert not trajectory.failed, trajectory.info
    assert (trajectory.reward, trajectory.stop) == (1.0, "done"), trajectory.info
    assert trajectory.turns == len(said) == turns and trajectory.info["refused_calls"] == 0
    (segment,) = trajectory.segments
    for turn, tokens in enumerate(said):
        assert segment.tokens_L[segment.turn_L == turn].tolist() == tokens


def processes_of(folder):
    """The command lines of processes whose words or variables name a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((process / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if str(folder).encode() in words + variables:
            found.append(words)
    return found
