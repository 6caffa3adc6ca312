"""The command `evaluate` plays the bundled tasks: by their solutions, by damage, by SmolLM2."""

import json

import pytest
from places import CONFIGS, MODELS
from sandbox_cases import SOLVED, needs_bubblewrap, write_programs, write_task
from scripted_harness import set_up

from seeupo_jax.evaluate import main

CONFIG = CONFIGS / "sandboxed_tasks.py"
SMOLLM2 = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [needs_bubblewrap, pytest.mark.usefixtures("one_device")]


def evaluated(folder, k, *fields):
    """What the command writes, and its episodes."""
    words = [f"--config={CONFIG}", f"--workdir={folder}", "--untrained", f"--k={k}"]
    main(["evaluate", *words, f"--json={folder}.json", *(f"--config.{each}" for each in fields)])
    summary = json.loads((folder.parent / f"{folder.name}.json").read_text())
    with open(summary["episodes"]) as file:
        return summary, [line for line in map(json.loads, file) if "task_id" in line]


@pytest.mark.parametrize("split, count", [("train", 7), ("test", 3)])
def test_evaluate_solves_all_tasks_by_their_solutions_and_none_by_damage(split, count, tmp_path):
    policy = ("model.path=package:order_desk", "optimizer.groups=()", "evaluation.tasks=7")
    policy = (*policy, f"evaluation.split={split}")
    solution = ("agent.command=bash /solution/solve.sh", "sandbox.solution=True")
    solved, episodes = evaluated(tmp_path / "solved", 2, *policy, *solution)
    assert (solved["eval/tasks"], solved["eval/failed"], len(episodes)) == (count, 0, 2 * count)
    assert solved["eval/pass@2"] == solved["eval/avg@2"] == 1.0
    assert solved["eval/pass@2/difficulty=medium"] == 1.0
    damage = "agent.command=bash -c 'for f in *; do echo damaged > $f; done; true'"
    damaged, episodes = evaluated(tmp_path / "damaged", 2, *policy, damage)
    assert damaged["eval/pass@2"] == damaged["eval/avg@2"] == damaged["eval/failed"] == 0.0
    assert {episode["reward"] for episode in episodes} == {0.0}


def test_what_a_solution_does_not_solve_is_listed(tmp_path, capsys):
    """Of a folder that has training tasks only, as the first ones that a user writes."""
    verifiers = {"broken": "echo oh; exit 3", "solved": SOLVED, "wrong": SOLVED.replace("1", "0")}
    for name, tests in verifiers.items():
        write_task(tmp_path / "tasks" / name, tests=tests)
        write_programs(tmp_path / "tasks" / name, **{"solution/solve.sh": "true\n"})
    policy = ("model.path=package:order_desk", "optimizer.groups=()")
    agent = ("agent.command=bash /solution/solve.sh", "sandbox.solution=True")
    fields = (*policy, *agent, f"tasks=harbor:{tmp_path}/tasks", "evaluation.tasks=9")
    words = [f"--config={CONFIG}", f"--workdir={tmp_path}/run", "--untrained", "--k=1"]
    main(["evaluate", *words, "--split=train", *(f"--config.{each}" for each in fields)])
    printed, logged = capsys.readouterr()
    broken, wrong = printed.splitlines()[-2:]
    assert "\nNot solved: 2\n" in printed and wrong == "  wrong: reward 0"
    assert broken.startswith("  broken: the task's verifier: it wrote no reward")
    assert "1 agents failed, 1 of them so: the task's verifier: it wrote" in logged


@pytest.mark.exhaustive
def test_smollm2_plays_a_task_through_mini_swe_agent(tmp_path, monkeypatch):
    set_up("mini_swe_agent", monkeypatch)
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2.name} is not set up: sh third_party/models/setup.sh")
    harness = ("agent.command=none", "agent.harness=mini_swe_agent", "sandbox.timeout_scale=100")
    short = ("evaluation.tasks=1", "rollout.max_turns=2", "rollout.max_action_tokens=16")
    summary, episodes = evaluated(tmp_path / "run", 1, *harness, *short)
    assert (summary["eval/tasks"], summary["eval/failed"]) == (1, 0)
    (episode,) = episodes
    system, instruction, answer, *_ = episode["messages"]
    assert system["content"].startswith("You are a helpful assistant")
    assert "/app/" in instruction["content"] and answer["role"] == "assistant"
    assert (episode["turns"], episode["stop"]) == (2, "max_turns")
