"""The table of lengths is what the official data and the tokenizer give."""

from pathlib import Path

import pytest

from seeupo_jax.benchmarks.workloads import bfcl_lengths
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.policy.files.tokenizer import load_tokenizer
from third_party.bfcl.lengths import MAX_TURNS, lengths_of, main

MODELS = Path(__file__).parents[2] / "third_party" / "models"


def test_the_tables_first_lines_are_what_is_measured():
    demonstrations = Bfcl(max_calls=1000).demonstrations("train")
    tokenizer = load_tokenizer(MODELS / "qwen3")
    found = [lengths_of(tokenizer, demonstrations[index]) for index in range(3)]
    stored = [[t.prompt, list(t.actions), list(t.observations)] for t in bfcl_lengths()[:3]]
    assert found == stored
    longest = max(found, key=lambda row: len(row[1]))
    assert len(longest[1]) <= MAX_TURNS and len(longest[2]) == len(longest[1]) - 1


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["", f"--tokenizer={tmp_path}", f"--output={tmp_path / 'out.json'}"])
    assert "--tokenizer: got" in capsys.readouterr().err
