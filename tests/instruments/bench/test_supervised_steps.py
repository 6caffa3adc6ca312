"""The benchmark of supervised steps: all sides compute the same, and are timed."""

import dataclasses

import numpy as np
import pytest
import torch
from bench_cases import SETTINGS, small  # noqa: F401

from seeupo_jax.benchmarks import benchmark_report, comparison
from seeupo_jax.instruments.bench import supervised_steps
from seeupo_jax.types import Segment


def test_padded_and_packed_steps_of_transformers_are_ours_and_are_timed(capsys):
    settings = dataclasses.replace(SETTINGS, group_size=3, repeats=1)
    found = supervised_steps.run(dataclasses.replace(settings, torch_tokens=128))
    sides = found["contenders"]
    assert list(sides) == ["seeupo_jax", "PyTorch, padded", "PyTorch, packed"]
    assert found["verified"]["differences"].keys() == sides.keys() - {"seeupo_jax"}
    for apart in found["verified"]["differences"].values():
        assert max(apart.values()) < 1e-4
    assert min(found["verified"]["moved"].values()) > 1e-3  # or nothing would be shown
    assert sides["PyTorch, packed"]["positions"] == found["workload"]["tokens"]
    assert sides["PyTorch, padded"]["positions"] >= found["workload"]["tokens"]
    assert found["ratio"] > 0 and found["against"] in sides
    assert "a step" in capsys.readouterr().out.splitlines()[0]
    page = benchmark_report.page({"sft_long": found}, {})
    assert "## Supervised step" in page and "| PyTorch, packed |" in page


def test_sides_that_differ_are_not_timed(monkeypatch):
    real = supervised_steps.TorchSteps.step
    monkeypatch.setattr(
        supervised_steps.TorchSteps, "step", lambda self: real(self)._replace(loss=0.0)
    )
    monkeypatch.setattr(comparison, "alternate", None)  # which would be an error
    settings = dataclasses.replace(SETTINGS, batches=("padded",))
    with pytest.raises(ValueError, match="padded differ: loss by .*Nothing was timed"):
        supervised_steps.run(settings)


def test_a_gradient_of_another_size_is_found_though_it_is_clipped(monkeypatch):
    """Both sides clip what is three times as large to the same step."""
    real = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: real(3 * loss))
    monkeypatch.setattr(comparison, "alternate", None)
    settings = dataclasses.replace(SETTINGS, batches=("padded",))
    with pytest.raises(ValueError, match="padded differ: grad_norm by 0.67"):
        supervised_steps.run(settings)


def test_conversations_are_packed_whole_into_few_rows():
    segments = [_of(size) for size in (5, 3, 2, 2)]
    rows = list(supervised_steps.packed(segments, 6))
    sizes = [[len(segment.tokens_L) for (row,) in [each] for segment in row] for each in rows]
    assert sizes == [[5], [3, 2], [2]]


def _of(size):
    return Segment(np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros(size, np.float32))
