"""What an evaluation's episodes are played with, so that those of another are not taken for its."""

import json

import pytest

from seeupo_jax.configuration.loading import from_dict, load_config
from seeupo_jax.runtime.evaluation_run import episodes_name, evaluation_settings
from seeupo_jax.runtime.resuming import chat_note
from seeupo_jax.trajectories.episodes import EpisodeFile, read_played


def settings(*overrides, **same):
    return evaluation_settings(load_config({}, overrides), "test", 4, same)


def test_episodes_that_were_sampled_in_int8_are_of_another_evaluation():
    plain, coarse = settings(), settings("rollout.quantize=int8")
    assert coarse == plain | {"config.rollout.quantize": "int8"}
    name = episodes_name(coarse | {"iteration": 30})
    assert name == "test-k4-temperature1.0-iteration30-int8.jsonl"
    server = {"server": "http://localhost:1", "model": "x"}
    assert settings("rollout.quantize=int8", **server) == plain | server


def test_episodes_that_another_chat_of_the_model_folder_played_are_not_taken(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = from_dict({"model": {"path": str(tmp_path)}})
    path = tmp_path / "one.jsonl"

    def now(**chat):
        (tmp_path / "chat.json").write_text(json.dumps({"system": False, "tools": "json"} | chat))
        return evaluation_settings(config, "test", 4, {}, chat_note(config, tmp_path))

    EpisodeFile(path, evaluation_settings(config, "test", 4, {})).close()
    EpisodeFile(path, now()).close()  # of a version that noted none
    path.unlink()
    for _ in range(2):
        EpisodeFile(path, now()).close()
    for read in (EpisodeFile, read_played):
        with pytest.raises(ValueError, match="^chat.system: got True; allowed: False, with which"):
            read(path, now(system=True))
