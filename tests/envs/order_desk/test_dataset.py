"""Demonstrations come through TensorFlow Datasets, without TensorFlow, by random access."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grain
import numpy as np
import pytest

from seeupo_jax import envs
from seeupo_jax.envs.order_desk import dataset
from seeupo_jax.envs.order_desk.dataset import builder, load
from seeupo_jax.envs.order_desk.demonstrator import demonstrate
from seeupo_jax.envs.order_desk.desk import TOOLS

OPTIONS = {"skill": 0.4, "episodes": 30, "seed": 2}
PROGRAM = """
import json, sys
from seeupo_jax.envs.order_desk.dataset import load
demonstrations = load("train", data_dir=sys.argv[1], skill=0.4, episodes=30, seed=2)
assert len(demonstrations) == 30 and demonstrations[29].messages
print(json.dumps([name for name in ("tensorflow", "jax") if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A data folder filled by another process, and the heavy modules that it imported."""
    folder = tmp_path_factory.mktemp("data")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True
    )
    return folder, json.loads(done.stdout)


@pytest.fixture(scope="module")
def train(generated):
    return load("train", data_dir=str(generated[0]), **OPTIONS)


def test_generating_and_reading_import_neither_tensorflow_nor_jax(generated):
    assert generated[1] == []


def test_files_are_array_records_and_a_second_load_writes_nothing(generated, monkeypatch):
    files = [Path(root, name) for root, _, names in os.walk(generated[0]) for name in names]
    assert sum(".array_record" in file.name for file in files) == 2  # train and test
    before = {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in files}
    monkeypatch.setattr(dataset, "demonstrate", None)  # nothing is played again
    assert len(load("test", data_dir=str(generated[0]), **OPTIONS)) == 30
    files = [Path(root, name) for root, _, names in os.walk(generated[0]) for name in names]
    assert {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in files} == before


def test_what_another_process_has_written_meanwhile_is_read(generated, tmp_path, monkeypatch):
    def prepare(_):
        shutil.copytree(generated[0], tmp_path, dirs_exist_ok=True)
        raise FileExistsError

    monkeypatch.setattr(dataset.OrderDeskDataset, "download_and_prepare", prepare)
    wanted, _ = demonstrate("train/3", skill=0.4, seed=2)
    assert load("train", data_dir=str(tmp_path), **OPTIONS)[3] == wanted


def test_a_desk_that_was_changed_is_played_again(generated, tmp_path, monkeypatch):
    for file in dataset.SOURCE.glob("*.py"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(dataset, "SOURCE", tmp_path)
    before = builder(data_dir=str(generated[0]), **OPTIONS).data_path
    assert before == builder(data_dir=str(generated[0]), **OPTIONS).data_path and before.exists()
    with (tmp_path / "desk.py").open("a") as file:
        file.write("CHANGED = True\n")
    assert not builder(data_dir=str(generated[0]), **OPTIONS).data_path.exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_record_i_is_task_i_of_the_split(generated, split):
    demonstrations = load(split, data_dir=str(generated[0]), **OPTIONS)
    assert len(demonstrations) == 30
    for index in (29, 3, 0, 3):
        wanted, _ = demonstrate(f"{split}/{index}", skill=0.4, seed=2)
        assert demonstrations[index] == wanted
        assert demonstrations[index].tools is TOOLS


def test_a_record_has_its_task_and_its_score(generated):
    source = builder(data_dir=str(generated[0]), **OPTIONS).as_data_source(split="train")
    for index in range(30):
        assert source[index]["task_id"] == f"train/{index}".encode()
        _, score = demonstrate(f"train/{index}", skill=0.4, seed=2)
        assert source[index]["score"] == np.float32(score)


def test_demonstrations_are_a_sequence(train):
    assert list(train) == [train[index] for index in range(30)]
    assert train[-1] == train[29] and train[np.int64(4)] == train[4]
    for index in (30, -31):
        with pytest.raises(IndexError):
            train[index]


def test_a_seeded_order_is_the_same_again_and_goes_on_from_its_state(train):
    def shuffled(seed):
        return iter(grain.MapDataset.source(train).shuffle(seed=seed).repeat(2).to_iter_dataset())

    first = list(shuffled(0))
    assert len(first) == 60 and first[:30] != list(train)
    assert all(any(d == t for t in first[:30]) for d in train)  # each once an epoch
    assert list(shuffled(0)) == first != list(shuffled(1))
    begun = shuffled(0)
    for _ in range(37):
        next(begun)
    state = json.loads(json.dumps(begun.get_state()))  # it lives in a checkpoint's notes
    resumed = shuffled(0)
    resumed.set_state(state)
    assert list(resumed) == first[37:]


def test_datasets_of_other_demonstrators_lie_in_other_folders(tmp_path):
    changes = [{}, {"skill": 0.402}, {"skill": 0.0}, {"episodes": 31}, {"seed": 3}]
    folders = {builder(data_dir=str(tmp_path), **(OPTIONS | c)).data_dir for c in changes}
    assert len(folders) == len(changes)
    whole = {builder(data_dir=str(tmp_path), skill=skill).data_dir for skill in (1, 1.0)}
    assert len(whole) == 1


def test_the_environment_passes_its_options_on(generated, train):
    desk = envs.make("order_desk", data_dir=str(generated[0]))
    assert desk.demonstrations("train", **OPTIONS)[7] == train[7]
    with pytest.raises(TypeError, match="skil"):
        desk.demonstrations("train", skil=0.4)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"skill": 1.5}, "order_desk skill: got 1.5; allowed: a number from 0 to 1"),
        ({"skill": -0.5}, "order_desk skill: got -0.5"),
        ({"episodes": 0}, "order_desk episodes: got 0; allowed: 1 to 50000"),
        ({"episodes": 50_001}, "order_desk episodes: got 50001"),
    ],
)
def test_an_impossible_option_is_named(tmp_path, options, reason):
    with pytest.raises(ValueError, match=reason):
        builder(data_dir=str(tmp_path), **options)
