"""A path means what it meant where it was given, whatever folder the process is in later."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from seeupo_jax import read_trajectories
from seeupo_jax.checkpoint import Checkpoints, find_directory
from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.configuration.supervised_schema import WarmStartStage
from seeupo_jax.metrics.metrics_log import MetricsWriter, read_metrics
from seeupo_jax.policy_io.policy_folder import export_policy
from seeupo_jax.supervised.warm_starting import start_policy
from seeupo_jax.trajectories.reader import TrajectoryFile, pack_shard, write_shard


@pytest.fixture
def there(tmp_path, monkeypatch):
    """The folder that the process is in; a call leaves it for another one."""
    folder, other = tmp_path / "there", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    monkeypatch.chdir(folder)
    return folder, lambda: monkeypatch.chdir(other)


@pytest.mark.parametrize("kind", [str, Path])
def test_checkpoints_lie_where_their_folder_was_opened(there, kind):
    folder, leave = there
    checkpoints = Checkpoints(kind("saved"), 1)
    leave()
    checkpoints.save(1, {"w": jnp.ones(3)}, {})
    checkpoints.close()
    assert (folder / "saved" / "1" / "manifest.json").is_file()
    assert checkpoints.restore({"w": jnp.zeros(3)})[0] == 1


def test_the_directory_of_checkpoints_is_absolute_and_a_bucket_stays_one(there):
    folder, _ = there
    for workdir in ("run", Path("run")):
        assert find_directory(schema.Checkpoint(), workdir) == str(folder / "run" / "checkpoints")
        options = schema.Checkpoint(directory="saved")
        assert find_directory(options, workdir) == str(folder / "saved")
        bucket = schema.Checkpoint(directory="gs://bucket/path")
        assert find_directory(bucket, workdir) == "gs://bucket/path"


def test_metrics_lie_where_their_writer_was_made(there):
    folder, leave = there
    with MetricsWriter("run", ("tensorboard",)) as writer:
        leave()
        writer.write(1, {"a": 1})
    assert read_metrics(folder / "run") == [{"iteration": 1, "a": 1}]
    assert list((folder / "run" / "tensorboard").iterdir())


def test_trajectories_are_read_from_where_they_were_asked_for(there):
    folder, leave = there
    # A record that lacks its fields, which names the file that it was found in.
    write_shard(
        folder / "run", TrajectoryFile(1, "train", evaluation=False), pack_shard([{"schema": 1}])
    )
    records = read_trajectories("run")
    leave()
    with pytest.raises(ValueError, match=f"^{folder / 'run'}/.*got no split"):
        list(records)


def test_an_export_names_the_folders_that_were_meant(there):
    folder, _ = there
    with pytest.raises(ValueError, match=f"--workdir: got {folder / 'run'}, which is not there"):
        export_policy(schema.Config(), "run", "latest", "out")


def test_the_policy_of_a_warm_start_is_also_left_where_the_configuration_says(there):
    folder, _ = there
    made = folder / "run" / "warm_start"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    options = schema.WarmStart(stages=(WarmStartStage(),), output="models/warm")
    for content in ("{}", "changed"):  # a second life leaves what is there
        assert start_policy(schema.Config(warm_start=options), folder / "run", None, None)
        assert (folder / "models" / "warm" / "config.json").read_text() == content
        (folder / "models" / "warm" / "config.json").write_text("changed")
    assert [path.name for path in (folder / "models").iterdir()] == ["warm"]


def test_an_estimator_and_a_recipe_of_a_file_are_found_after_the_folder_is_left(there):
    folder, leave = there
    text = "from seeupo_jax.algorithms.estimators import grae\nOWN, RECIPE = grae.ESTIMATOR, {}\n"
    (folder / "own_parts_here.py").write_text(text)
    values = {
        "recipe": "own_parts_here.py:RECIPE",
        "algorithm": {"advantage": "own_parts_here.py:OWN"},
    }
    config = from_dict(values)
    leave()
    assert from_dict(values) == config and config.algorithm.grouped
