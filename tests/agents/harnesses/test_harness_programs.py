"""The real programs of third_party/harnesses play episodes through the endpoint.

The policy is scripted; everything between it and the program is the run's own.
"""

import json

import pytest
from scripted_harness import calls_of, check_episode, play, processes_of, set_up

from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.configuration.loading import from_dict

COMMANDS = (
    "cat a.txt",
    "printf '2\\n' > b.txt && mv b.txt a.txt",
    "sleep 1000 > log 2>&1 & cat a.txt",
)
TASK = {
    "task_id": "two",
    "instruction": "a.txt has to say 2.",
    "files": {"a.txt": "1\n"},
    "check": "sh check.sh",
    "check_files": {"check.sh": "grep -qx 2 a.txt\n"},
}


def episode(harness, folder, calls):
    """The trajectory of the task's episode, and what the policy said."""
    (folder / "tasks.jsonl").write_text(json.dumps(TASK))
    agent = {"harness": harness, "tasks": str(folder / "tasks.jsonl"), "timeout_s": 900.0}
    limits = {"max_turns": 8, "max_action_tokens": 2048, "max_context": 200_000}
    return play(from_dict({"agent": agent, "rollout": limits}), calls)


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_an_episode_is_one_segment_of_the_sampled_tokens(harness, tmp_path, monkeypatch):
    set_up(harness, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where episodes have their folders
    trajectory, said = episode(harness, tmp_path, calls_of(harness, COMMANDS))
    check_episode(trajectory, said, turns=4)
    assert processes_of(tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("search, segments", [("true", 2), ("false", 1)])
def test_claude_code_adds_tools_on_demand_or_has_them_from_the_start(
    search, segments, tmp_path, monkeypatch
):
    set_up("claude_code", monkeypatch)
    monkeypatch.setenv("ENABLE_TOOL_SEARCH", search)
    find = ("ToolSearch", {"query": "select:WebFetch", "max_results": 5})
    first, *others = calls_of("claude_code", COMMANDS)
    trajectory, said = episode("claude_code", tmp_path, [first, find, *others])
    assert (trajectory.reward, trajectory.turns, len(said)) == (1.0, 5, 5)
    assert len(trajectory.segments) == segments
