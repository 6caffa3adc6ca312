"""A policy that process 0 cannot write ends the run on all processes, and none waits for it."""

import json

import learner_cases
import numpy as np
from process_cases import run_processes
from safetensors.numpy import load_file

from seeupo_jax.policy.files.weights import from_pretrained


def test_what_cannot_be_written_is_an_error_of_all_processes(tmp_path):
    told = run_processes("policy_folder_process.py", 2, 2, tmp_path, tmp_path, read=json.loads)
    first, second = told
    assert (first["written"], first["no folder"]) == ("", "Not a directory")
    assert "File too large" in first["no room"] and first["written again"] == ""
    assert second["no room"] in first["no room"]
    assert second | {"no room": ""} == first | {"no room": ""}
    folder = tmp_path / "policy"
    model, _ = from_pretrained(folder, dtype="float32")
    assert model.arch.width == learner_cases.ARCH.width
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(embedding, learner_cases.policy()[1]["embedding"])
