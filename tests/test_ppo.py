"""Training order_desk with a value function of its own; `test_recipes.py` trains with a head."""

import io

import jax
import numpy as np
import pytest
from metric_names import checked
from places import TINY

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.policy_io import build
from seeupo_jax.train import iterate
from seeupo_jax.training.run import begin_run

OVERRIDES = (
    "recipe=ppo",
    "algorithm.critic.kind=model",
    "iterations=2",
    "model.path=package:order_desk",
    "warm_start.stages=()",
    "model.scan_layers=True",
    "batching.buckets=(256,)",
    "rollout.tasks=2",
    "rollout.max_context=256",
    "rollout.max_action_tokens=32",
    "rollout.prefill_tokens=32",
    "rollout.max_turns=4",
    "evaluation.tasks=1",
    "evaluation.k=1",
    "checkpoint.every=0",
    "checkpoint.export=False",
    "telemetry.trackers=()",
)
NAMES = ("value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm")


@pytest.mark.exhaustive
def test_order_desk_is_trained_with_a_value_function(tmp_path, monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    config = load_config(TINY, OVERRIDES)
    policy, params = build.load_policy(config, config.model.path)
    progress = ProgressDisplay(config.iterations, "plain", stream=io.StringIO())
    with progress, jax.set_mesh(policy.mesh):
        run, state = begin_run(config, tmp_path, progress, StopRequest(), policy, params)
        with run:
            assert iterate(run, state)
    first, second = (line for line in checked(read_metrics(tmp_path)) if "sweep/loss" in line)
    values = np.array([[line[f"sweep/{name}"] for name in NAMES] for line in (first, second)])
    assert np.isfinite(values).all() and first["sweep/critic_grad_norm"] > 0
    # Every value is 0 at first.
    assert first["sweep/explained_variance"] == 0 != second["sweep/explained_variance"]
    assert first["sweep/turns"] == first["sweep/steps"] == 1
    assert first["sweep/updates_skipped"] == second["sweep/updates_skipped"] == 0
    # Everything was compiled before the first iteration.
    assert second["sweep/programs_compiled"] == 0
    assert first["state/checksum"] != second["state/checksum"]
