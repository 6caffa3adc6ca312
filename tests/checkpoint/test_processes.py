"""Several processes save and restore what one does, and fail alike."""

import json
import shutil

import checkpoint_cases
import jax
import numpy as np
import pytest
from fault_fs import FaultFs
from process_cases import run_processes

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.metrics.checksum import checksum


def run(part, directory, out, **options):
    """What each of two processes with two devices tells of its part."""
    program = "checkpoint_process.py"
    return run_processes(program, 2, 2, out, directory, part, read=json.loads, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where two processes with a mesh of 2 x 2 saved, and what they told."""
    directory = tmp_path_factory.mktemp("shared")
    return directory, run("save", directory, tmp_path_factory.mktemp("told"))


def alike(logged, *names):
    """What all processes say of some things."""
    said = [{name: one[name] for name in names} for one in logged]
    assert said[0] == said[1]
    return said[0]


def test_all_processes_see_the_same_and_only_the_first_keeps_the_books(saved):
    directory, logged = saved
    assert alike(logged, "latest", "best", "log") == {"latest": 3, "best": 1, "log": []}
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "3"]
    assert logged[0]["hashed"] and not logged[1]["hashed"]


def test_a_lock_is_held_by_the_first_for_all_and_all_are_told_that_it_is_taken(saved):
    directory, logged = saved
    assert alike(logged, "taken")["taken"].startswith(
        f"--output: got {directory / 'taken'}, in use by process "
    )


def test_a_host_that_cannot_write_ends_the_save_on_all(saved):
    directory, logged = saved
    assert alike(logged, "full")["full"] == (
        f"checkpoint 4 could not be written to {directory}: File too large;"
        " checkpoint 3 there is intact."
    )
    assert max(one["full_s"] for one in logged) < 20  # Orbax alone would wait for 300


def test_a_process_that_cannot_sync_ends_the_save_on_all(saved):
    _, logged = saved
    assert [one["unsynced"] for one in logged] == [
        "Input/output error",
        "[Errno 5] Input/output error",
    ]


def test_a_folder_that_hosts_do_not_share_is_refused_by_all(saved):
    for workdir, directory in (one["blind"] for one in saved[1]):
        assert workdir.startswith("--workdir: got ")
        assert directory.startswith("config.checkpoint.directory: got ")
        other = ", which is another one on process 1 than on process 0; allowed: a folder that all"
        assert workdir.endswith(f"{other} hosts share.")
        assert directory.endswith(f"{other} hosts share, or gs://BUCKET/PATH.")


@pytest.mark.parametrize("shape", [None, (4, 1), (1, 8)])
def test_one_process_restores_what_two_saved(saved, shape):
    where = None if shape is None else checkpoint_cases.mesh(*shape)
    example = checkpoint_cases.state(where, 0)
    _, state, extra = Checkpoints(saved[0], keep=2).restore(example)
    assert checksum(state) == checksum(checkpoint_cases.state(None, 3))
    assert extra == {"step": 3}
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(example), strict=True):
        assert got.sharding == wanted.sharding


@pytest.mark.exhaustive
def test_two_processes_pass_over_the_same_damage_and_go_on(saved, tmp_path):
    directory, _ = saved
    (file,) = (directory / "3" / "state" / "state" / "ocdbt.process_1" / "d").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    faults = FaultFs(tmp_path / "faults", directory) if shutil.which("cc") else None
    variables = None if faults is None else faults.environment
    logged = run("restore", directory, tmp_path, variables=variables)
    wanted = {
        "latest": 3,
        "newest": [3, {"step": 3}],  # of which no array is read
        "step": 2,
        "extra": {"step": 2},
        "checksum": checksum(checkpoint_cases.state(None, 2)),
        "same_layout": True,
        "other": "checkpoint 3 is of another model or optimizer: params/w is float32[512,64] in it"
        " and float32[3] in this run; allowed: the configuration it was saved with, or a new"
        " workdir.",
        "unknown": f"step: got 9; allowed: those in {directory}: 1, 2, 3.",
        "saved": 5,
        "rollouts": [0.0, np.full(3, np.float32(0.1)).tobytes().hex(), None],
    }
    assert alike(logged, *wanted) == wanted
    (sentence,) = logged[0]["log"]
    assert "checkpoint 3 has a file state/state/ocdbt.process_1/d/" in sentence
    assert logged[1]["log"] == []
    stored = [path.name for path in tmp_path.iterdir() if path.name.endswith(".rollouts")]
    assert stored == ["checkpoint_process_2_2_0.rollouts"]  # only process 0 writes
    hashed = [{path for path in one["hashed"] if "/2/" in path} for one in logged]
    every = {str(path) for path in (directory / "2" / "state").rglob("*") if path.is_file()}
    assert hashed[0] | hashed[1] == every and not hashed[0] & hashed[1]
    assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "5"]
    newest = Checkpoints(directory, keep=2).restore(checkpoint_cases.state(None, 0))
    np.testing.assert_array_equal(
        newest[1]["params"]["w"], checkpoint_cases.state(None, 2)["params"]["w"]
    )
    if faults is not None:
        check_each_synced_what_it_wrote(faults.calls(), directory / "5")


def check_each_synced_what_it_wrote(calls, checkpoint):
    """Process 0 syncs every file; process 1, on a host of its own, what only it may still hold."""
    changed = [(call.kind, call.path) for call in calls]
    before = changed[: changed.index(("rename", str(checkpoint / "manifest.json")))]
    metadata = checkpoint / "state" / "state" / "array_metadatas"
    for process, times in ((0, 1), (1, 2)):
        assert before.count(("sync", str(metadata / f"process_{process}"))) == times
