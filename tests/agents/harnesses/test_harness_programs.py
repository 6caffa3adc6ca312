"""The real programs of third_party/harnesses play episodes through the endpoint.

The policy is scripted; everything between it and the program is the run's own.
"""

import json

import pytest
from scripted_harness import check_episode, episode_processes, play, set_up

from seeupo_jax.agents.harnesses.table import HARNESSES
from seeupo_jax.configuration.loading import from_dict

COMMANDS = ("cat a.txt", "printf '2\\n' > b.txt && mv b.txt a.txt", "sleep 1000 & cat a.txt")
TASK = {
    "task_id": "two",
    "instruction": "a.txt has to say 2.",
    "files": {"a.txt": "1\n"},
    "check": "sh check.sh",
    "check_files": {"check.sh": "grep -qx 2 a.txt\n"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", sorted(HARNESSES))
def test_an_episode_is_one_segment_of_the_sampled_tokens(harness, tmp_path, monkeypatch):
    set_up(harness, monkeypatch)
    before = episode_processes()
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK))
    agent = {"harness": harness, "tasks": str(tmp_path / "tasks.jsonl"), "timeout_s": 900.0}
    limits = {"max_turns": 8, "max_action_tokens": 2048, "max_context": 200_000}
    trajectory, said = play(from_dict({"agent": agent, "rollout": limits}), COMMANDS)
    check_episode(trajectory, said, turns=4)
    assert [each for each in episode_processes() if each not in before] == []
