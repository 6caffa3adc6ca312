"""The configuration of level 2 trains and evaluates, with the categories of its tasks."""

import json

import pytest
from places import CONFIGS

from seeupo_jax import read_trajectories
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.evaluate import main
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.train import train

pytestmark = pytest.mark.usefixtures("one_device")
CONFIG = CONFIGS / "order_desk_level2.py"
SMALL = (
    "iterations=1",
    "rollout.tasks=2",
    "rollout.group_size=2",
    "rollout.prefill_tokens=32",
    "rollout.max_context=128",
    "rollout.max_turns=4",
    "evaluation.tasks=2",
    "evaluation.k=1",
    "evaluation.every=0",
    "checkpoint.export=False",
    "batching.buckets=(128,)",
    "telemetry.trackers=()",
    "telemetry.display=plain",
)


@pytest.mark.exhaustive
def test_it_trains_and_evaluates_by_category(tmp_path, capsys):
    train(load_config(CONFIG, SMALL), tmp_path)
    (line,) = [each for each in read_metrics(tmp_path) if "sweep/loss" in each]
    assert line["sweep/turns"] == 4 and line["rollout/turns_mean"] == 4
    played = [*read_trajectories(tmp_path, split="train")]
    assert len(played) == 4 and all(t["task_id"].startswith("level2/train/") for t in played)
    assert all(set(t["labels"]) == {"requests", "order", "look_ups"} for t in played)
    given = [f"--config.{value}" for value in SMALL]
    out = tmp_path / "measured.json"
    paths = (f"--config={CONFIG}", f"--workdir={tmp_path}", f"--json={out}")
    main(["evaluate", *paths, "--k=1", *given])
    assert any("order=" in name for name in json.loads(out.read_text()))
