"""The way to the PyTorch baseline: found beside the package, or one sentence."""

import sys

import pytest

from seeupo_jax.benchmarks import torch_runner


def test_a_module_of_the_baseline_is_found_once():
    module = torch_runner.load("trajectories")
    assert module.__name__ == "torch_baseline.trajectories"
    before = list(sys.path)
    assert torch_runner.load("trajectories") is module
    assert sys.path == before


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_without_pytorch_one_sentence_says_what_to_install(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"{library}.*allowed: .*pip install torch"):
        torch_runner.load("generate")


def test_without_the_folder_one_sentence_says_where_it_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_runner, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no folder .*nowhere; allowed: a checkout"):
        torch_runner.load("generate")
