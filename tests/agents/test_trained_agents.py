"""Agents of docs/agents.md that are trained: one that compacts its history, and langgraph's."""

import numpy as np
import pytest
from places import ROOT

from docs.examples.agents import compaction, order_desk_cases
from seeupo_jax import load_config, read_trajectories, train
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.policy import from_pretrained

EXAMPLES = ROOT / "docs" / "examples" / "agents"
PYTHON = ROOT / "third_party" / "agents" / ".venv" / "bin" / "python"
SMALL = [  # the same shapes of programs for both
    "rollout.tasks=1",
    "rollout.group_size=4",
    "rollout.max_turns=7",
    "rollout.max_context=128",
    "rollout.prefill_tokens=32",
    "batching.buckets=(128,)",
    "evaluation.tasks=1",
    "evaluation.k=1",
    "rollout.deterministic=True",
    "checkpoint.export=False",
    "checkpoint.keep_best=0",  # else another split would be played
    "telemetry.display=plain",
]


pytestmark = pytest.mark.usefixtures("one_device")


def run(file, overrides, workdir):
    """The records of a run's trajectories, and the metrics of its iterations."""
    train(load_config(file, [*SMALL, *overrides]), workdir)
    metrics = [each for each in read_metrics(workdir) if "sweep/turns" in each]
    return list(read_trajectories(workdir, split="train")), metrics


@pytest.fixture(scope="module")
def compacted(tmp_path_factory):
    """Two iterations, with a reward that tells the episodes of a policy without training apart."""
    return run(
        EXAMPLES / "compaction_config.py",
        [
            "iterations=2",
            "warm_start.stages=()",
            "rewards=[{'function': 'docs.examples.own_rewards:brevity'}]",
        ],
        tmp_path_factory.mktemp("compacted"),
    )


def summarised(records):
    """Those of episodes that came to a summary, with the number of its turn."""
    found = []
    for record in records:
        asked = [
            number
            for number, message in enumerate(record["messages"])
            if message["content"] == compaction.SUMMARISE["content"]
        ]
        if asked:
            before = record["messages"][: asked[0]]
            found.append((record, sum(message["role"] == "assistant" for message in before)))
    return found


def test_a_summary_is_a_turn_and_what_follows_it_a_segment(compacted):
    records, _ = compacted
    pairs = summarised(records)
    assert len(pairs) > len(records) / 2
    for record, turn in pairs:
        first, *later = record["segments"]
        assert max(first["turn"]) == turn == compaction.LONGEST // 2
        assert record["turns"] == 1 + max(max(each["turn"]) for each in record["segments"])
        sampled = "".join(
            text for text, of in zip(first["text"], first["turn"], strict=True) if of == turn
        )
        assert sampled.startswith(record["info"]["summary"])
        for segment in later[:1]:
            context = "".join(
                text for text, of in zip(segment["text"], segment["turn"], strict=True) if of < 0
            )
            assert record["info"]["summary"] in context
            assert min(of for of in segment["turn"] if of >= 0) == turn + 1


def test_a_summary_receives_the_credit_of_its_episode(compacted):
    records, metrics = compacted
    trained = [(record, turn) for record, turn in summarised(records) if record["weights"]]
    for record, turn in trained:
        assert (record["weights"][turn] != 0) == (record["advantage"] != 0)
    assert any(record["weights"][turn] for record, turn in trained)
    assert len(metrics) == 2 and all(each["logp/sampler_trainer_gap"] < 1e-4 for each in metrics)
    assert max(each["sweep/turns"] for each in metrics) >= 5


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("langgraph is not set up: sh third_party/agents/setup.sh")
    folder = tmp_path_factory.mktemp("graph")
    order_desk_cases.write(folder / "cases.jsonl", train=8, test=2)
    command = f"{PYTHON} {EXAMPLES / 'langgraph_desk.py'}"
    # Each episode is a process that imports langgraph.
    choices = ["iterations=1", "rollout.group_size=2", f"agent.tasks={folder / 'cases.jsonl'}"]
    workdir = folder / "run"
    return run(ROOT / "configs/quickstart.py", [*choices, f"agent.command={command}"], workdir)


def test_an_agent_of_langgraph_is_one_segment_as_the_environment_has_it(graph):
    records, metrics = graph
    _, tokenizer = from_pretrained("package:order_desk")
    for record in records:
        assert not record["failed"] and len(record["segments"]) == 1
        (segment,) = record["segments"]
        first = record["messages"][0 if record["messages"][0]["role"] == "user" else 1]
        opening = list(tokenizer.begin([first], ()).tokens)
        assert segment["tokens"][: len(opening)] == opening
        assert np.all(np.array(segment["turn"][: len(opening)]) == -1)
    assert [each["logp/sampler_trainer_gap"] < 1e-4 for each in metrics] == [True]
