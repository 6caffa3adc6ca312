"""Folders of runs with all that the report shows, made by hand."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.reports.html_report import report_file, write_report
from seeupo_jax.reports.run_data import load_runs

TURNS = 4


def _estimate(name, value, kind=""):
    bounds = {
        f"{name}_low{kind}": max(0.0, value - 0.08),
        f"{name}_high{kind}": min(1, value + 0.08),
    }
    return {f"{name}{kind}": value, **bounds}


def rollout(progress, i):
    """Metrics of an iteration; progress from 0 to 1."""
    wave = math.sin(1.7 * i)
    success = 0.35 + 0.55 * progress + 0.03 * wave
    values = {
        "rollout/success_rate": success,
        "rollout/reward_mean": success - 0.1,
        "rollout/turns_mean": 2.5 + wave / 2,
        "rollout/segments_mean": 1.0,
        "rollout/tokens_per_second": 4000 + 300 * wave,
        "rollout/rounds": 1,
        "rollout/stop_done": 110,
        "rollout/stop_max_turns": 12 + round(4 * wave),
        "rollout/stop_env_error": 2,
        "rollout/failed": 2,
        "rollout/failed/cause=TimeoutError: the desk did not answer": 1,
        "rollout/entropy": 0.9 - 0.6 * progress,
        "rollout/no_signal_fraction": 0.2 + 0.5 * progress,
        "sweep/tokens_per_second": 30000 + 900 * wave,
        "sweep/loss": -0.01 + 0.005 * wave,
        "sweep/grad_norm": 0.4 + 0.1 * wave,
        "sweep/clip_fraction": 0.05 + 0.04 * wave,
        "sweep/kl": 0.05 * progress,
        "logp/sampler_trainer_gap": 4e-6,
        "rollout/programs_compiled": 3 if i == 1 else 0,
        "sweep/programs_compiled": 5 if i == 1 else 0,
        "time/compile_s": 4.0 if i == 1 else 0.0,
        "time/rollout_s": 3.0 if i == 1 else 0.8 + 0.1 * wave,
        "time/sweep_s": 4.0 if i == 1 else 0.9,
        "time/environment_s": 0.1,
        "time/prefill_s": 0.15,
        "time/decode_s": 0.35,
        "time/checkpoint_s": 0.05,
    }
    for kind, size in (("action", 24), ("context", 40)):
        values[f"rollout/{kind}_tokens_mean"] = size + 3 * wave
        values[f"rollout/{kind}_tokens_p90"] = 1.6 * size + 5 * wave
    for turn in range(1, TURNS + 1):
        values[f"sweep/weight_mean/turn={turn}"] = 0.2 * wave / turn
        values[f"sweep/weight_max/turn={turn}"] = 2.5 - 0.3 * turn + 0.2 * wave
        values[f"sweep/clip_fraction/turn={turn}"] = 0.02 * turn + 0.01 * wave
        values[f"sweep/kl/turn={turn}"] = 0.01 * turn * progress
        values[f"rollout/success_rate/turns={turn}"] = min(1.0, success + 0.04 * (3 - turn))
        values[f"rollout/trajectories/turns={turn}"] = 20 + 5 * turn
    for request, bonus in (("cancel", 0.05), ("address", 0.0), ("refund", -0.1)):
        values[f"rollout/success_rate/request={request}"] = success + bonus
    return values


def evaluation(progress, prefix="eval", k=4):
    success = 0.4 + 0.5 * progress
    values = {
        **_estimate(f"{prefix}/avg@{k}", success),
        **_estimate(f"{prefix}/pass@{k}", min(1.0, success + 0.1)),
        f"{prefix}/tasks": 64,
        f"{prefix}/failed": 0,
        "time/evaluation_s": 0.7,
    }
    for request, bonus in (("cancel", 0.05), ("address", 0.0), ("refund", -0.1)):
        values |= _estimate(f"{prefix}/avg@{k}", success + bonus, f"/request={request}")
    return values


def write_run(workdir, *, iterations=12, planned=None, about=True, gain=1.0, **config):
    """A run's folder: an evaluation before, after, and every fifth iteration; returns it."""
    planned = iterations if planned is None else planned
    with MetricsWriter(workdir) as writer:
        writer.write(0, evaluation(0.0))
        for i in range(1, iterations + 1):
            progress = gain * i / planned
            writer.write(i, rollout(progress, i))
            if i % 5 == 0 or i == planned:
                writer.write(i, evaluation(progress))
    if about:
        write_about(workdir, iterations=planned, **config)
    return workdir


def recorded(workdir, name):
    """The values of a metric in a run's file, by iteration."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line[name] for line in lines if name in line}


def write_about(workdir, *, iterations=12, learning_rate=2e-4, **more):
    about = {
        "schema": 1,
        "name": workdir.name,
        "config": {
            "iterations": iterations,
            "seed": 0,
            "optimizer": {"name": "adam", "learning_rate": learning_rate, "kwargs": {}},
            "rollout": {"tasks": 16, "group_size": 8},
            "evaluation": {"split": "test", "extra_splits": []},
            **more,
        },
        "config_file": "configs/quickstart.py",
        "command": ["python", "-m", "seeupo_jax.train", "--config=configs/quickstart.py"],
        "began": "2026-01-02T03:04:05+00:00",
        "resumed": [],
        "versions": {"seeupo_jax": "0.1.0", "python": "3.11.2", "jax": "0.10.2"},
        "devices": {"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1},
        "model": {"name": "package:order_desk", "parameters": 123456},
    }
    (workdir / "run.json").write_text(json.dumps(about))


def report_of(workdir: Path, *, compare: Sequence[Path] = (), output: Path | None = None) -> Path:
    """The report of a run's folder, beside other runs, written as the command writes it."""
    return write_report(load_runs([workdir, *compare]), report_file(workdir, output))
