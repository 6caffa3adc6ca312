"""Checkpoints come back bit for bit, or are passed over with one sentence that says why."""

import asyncio
import errno
import gc
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import loaded_python
import numpy as np
import optax
import pytest
from etils import epath
from fault_fs import FaultFs
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.serialization import ocdbt_utils
from orbax.checkpoint.experimental.v1._src.synchronization.compatibility import async_futures
from process_cases import environment

from seeupo_jax.checkpoint import Checkpoints, SaveError, check_path, check_writable
from seeupo_jax.checkpoint import checkpoints as checkpoints_module
from seeupo_jax.checkpoint.manifest import is_checkpoint
from seeupo_jax.checkpoint.storage import Folder
from seeupo_jax.types import TrainState


def _bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def _assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert _bits(a) == _bits(b)


def _state(fill=1.0, width=64):
    params = {"embed": jnp.full((8, width), fill), "norm": {"scale": jnp.full((width,), fill)}}
    opt_state = optax.adam(1e-3).init(params)
    return TrainState(params, opt_state, jnp.int32(3), jnp.int32(0))


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    """A directory with the checkpoints 10 and 20; tests work on copies of it."""
    directory = tmp_path_factory.mktemp("two_saves")
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(10, _state(1.0), {"iteration": 1})
    checkpoints.save(20, _state(2.0), {"iteration": 2})
    checkpoints.close()
    return directory


@pytest.fixture
def saved(two_saves, tmp_path):
    return Path(shutil.copytree(two_saves, tmp_path / "copy"))


def _open(directory, keep=2, **options):
    log = []
    return Checkpoints(directory, keep, log=log.append, **options), log


def _steps(directory):
    return sorted(int(path.name) for path in directory.iterdir())


def _files_with_data(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(path.relative_to(folder).as_posix() for path in files)


def test_every_bit_comes_back(tmp_path):
    odd_nans = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x7F800000], np.uint32)
    state = {
        "float32": jnp.asarray(odd_nans.view(np.float32)),
        "bfloat16": jax.lax.bitcast_convert_type(
            jnp.asarray([0x7FC1, 0x8000, 0x3F81], jnp.uint16), jnp.bfloat16
        ),
        "int32": jnp.int32(-(2**31)),
        "key_data": jax.random.key_data(jax.random.key(7)),
        "keys": jax.random.split(jax.random.key(7), 3),
        "flags": jnp.asarray([True, False]),
    }
    checkpoints, log = _open(tmp_path)
    checkpoints.save(0, state, {})
    step, restored, _ = checkpoints.restore(state)
    assert step == 0 and log == []
    _assert_same_bits(restored, state)


def test_containers_and_notes_come_back(saved):
    checkpoints, _ = _open(saved)
    assert checkpoints.latest() == 20
    step, state, extra = checkpoints.restore(_state(0.0))
    assert (step, extra) == (20, {"iteration": 2})
    _assert_same_bits(state, _state(2.0))


@pytest.mark.parametrize("name", ["lr[2e-4]", "[!a]", "a*b", "a?b", "{a,b}", "seed 1%20#2", "学习"])
def test_a_folder_s_name_is_no_pattern(tmp_path, name):
    other = tmp_path / "axb" / "1" / "state.orbax-checkpoint-tmp" / "state"  # a*b and a?b match it
    (other / "ocdbt.process_0").mkdir(parents=True)  # its save has just begun
    checkpoints, log = _open(tmp_path / name)
    checkpoints.save(1, _state(3.0), {})
    _assert_same_bits(checkpoints.restore(_state())[1], _state(3.0))
    assert log == [] and os.listdir(other / "ocdbt.process_0") == []


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path):
    checkpoints, log = _open(tmp_path / "missing")
    assert checkpoints.latest() is None
    assert checkpoints.restore(_state()) is None
    assert not (tmp_path / "missing").exists() and log == []


def test_notes_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path):
    checkpoints, _ = _open(tmp_path)
    with pytest.raises(TypeError):
        checkpoints.save(1, _state(), {"array": np.zeros(2)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep, kept", [(1, [4]), (2, [3, 4]), (9, [0, 1, 2, 3, 4])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep, kept):
    checkpoints, _ = _open(tmp_path, keep)
    for step in range(5):
        checkpoints.save(step, {"x": jnp.full((2,), float(step))}, {})
    checkpoints.close()
    assert _steps(tmp_path) == kept
    assert checkpoints.best() is None


NAN = float("nan")


@pytest.mark.parametrize(
    "scores, keep, keep_best, kept, best",
    [
        ([0.1, 0.9, 0.3, 0.2], 1, 1, [1, 3], 1),  # the best of the others
        ([0.1, 0.3, 0.2, 0.9], 1, 1, [1, 3], 3),  # the newest is the best, one more is kept
        ([0.5, 0.5, 0.5, 0.5], 1, 1, [2, 3], 3),  # of equals the newer
        ([0.9, 0.1, 0.8, 0.2, 0.3], 2, 2, [0, 2, 3, 4], 0),
        ([None, NAN, -1.0, None, NAN], 1, 3, [2, 4], 2),  # none and NaN are never the best
        ([0.9, 0.1, 0.2], 2, 0, [1, 2], 2),
    ],
)
def test_the_best_of_the_others_are_kept(tmp_path, scores, keep, keep_best, kept, best):
    checkpoints, _ = _open(tmp_path, keep, keep_best=keep_best)
    for step, score in enumerate(scores):
        checkpoints.save(step, {"x": jnp.full((2,), float(step))}, {}, score)
    checkpoints.close()
    assert _steps(tmp_path) == kept and checkpoints.best() == best


def test_only_scores_that_were_measured_alike_are_compared(tmp_path):
    """One that was measured otherwise stays until there are enough of the others."""
    checkpoints, _ = _open(tmp_path, 1, measured=lambda extra: extra["k"])
    for step, (k, score, kept, best) in enumerate(
        [
            (1, 0.5, [0], 0),
            (1, 0.9, [0, 1], 1),
            (2, None, [1, 2], 1),
            (2, 0.3, [1, 3], 3),
            (2, 0.2, [3, 4], 3),
            (1, 0.1, [3, 5], 5),
        ]
    ):
        checkpoints.save(step, {"x": jnp.zeros(2)}, {"k": k}, score)
        checkpoints.wait()
        assert (_steps(tmp_path), checkpoints.best()) == (kept, best)
    checkpoints.close()


def test_a_best_checkpoint_that_is_damaged_is_none(tmp_path):
    checkpoints, log = _open(tmp_path, 3)
    for step, score in enumerate([0.5, 0.9, 0.7]):
        checkpoints.save(step, _state(float(step)), {}, score)
    checkpoints.wait()
    manifest = tmp_path / "1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0.9", "1.0"))
    assert checkpoints.best() == 2
    (tmp_path / "2" / "state" / "_CHECKPOINT_METADATA").unlink()
    assert checkpoints.restore(_state())[0] == 0 and len(log) == 2
    assert checkpoints.best() == 0


def test_a_given_step_is_restored(saved):
    checkpoints, log = _open(saved)
    step, state, extra = checkpoints.restore(_state(), step=10)
    assert (step, extra, log) == (10, {"iteration": 1}, [])
    _assert_same_bits(state, _state(1.0))
    with pytest.raises(ValueError, match="step: got 15; allowed: those in .*copy: 10, 20"):
        checkpoints.restore(_state(), step=15)
    with pytest.raises(ValueError, match="step: got 1; allowed: those in .*nothing: none"):
        _open(saved / "nothing")[0].restore(_state(), step=1)
    (saved / "10" / "state" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(
        ValueError, match="checkpoint 10 lacks .*_CHECKPOINT_METADATA; allowed: an intact"
    ):
        checkpoints.restore(_state(), step=10)
    assert checkpoints.restore(_state())[0] == 20


def test_a_step_saved_again_is_there_at_every_moment(saved, monkeypatch):
    checkpoints, log = _open(saved)

    def full(folder):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("seeupo_jax.checkpoint.checkpoints.list_files", full)
        checkpoints.save(20, _state(9.0), {"iteration": 9})
        with pytest.raises(SaveError, match="checkpoint 20 there is intact"):
            checkpoints.wait()
    assert checkpoints.restore(_state())[2] == {"iteration": 2}
    for fill in (3.0, 4.0):
        checkpoints.save(20, _state(fill), {"iteration": fill})
    checkpoints.close()
    assert checkpoints.latest() == 20 and log == []
    step, state, extra = checkpoints.restore(_state())
    assert (step, extra) == (20, {"iteration": 4.0})
    _assert_same_bits(state, _state(4.0))
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20.2"]


_DAMAGE = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "grown": lambda data: data + b"\0",
    "flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
}


@pytest.mark.parametrize("damage", _DAMAGE)
def test_damage_to_any_file_falls_back_to_the_checkpoint_before(saved, damage):
    folder = saved / "20"
    for name in _files_with_data(folder):
        whole = (folder / name).read_bytes()
        data = _DAMAGE[damage](whole)
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
        checkpoints, log = _open(saved)
        step, state, extra = checkpoints.restore(_state())
        assert (step, extra) == (10, {"iteration": 1}), name
        _assert_same_bits(state, _state(1.0))
        (sentence,) = log
        assert "checkpoint 20 " in sentence
        assert name in sentence or "not finished" in sentence
        (folder / name).write_bytes(whole)
    assert _open(saved)[0].restore(_state())[0] == 20


def test_a_file_of_another_size_is_damage(saved):
    largest = max((saved / "20" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    checkpoints, log = _open(saved)
    assert checkpoints.restore(_state())[0] == 10
    assert "bytes" in log[0] and "were written" in log[0]


def test_what_would_be_loaded_is_known_by_sizes_without_hashes(saved):
    largest = max((saved / "20" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    checkpoints, log = _open(saved)
    largest.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert checkpoints.newest(_state()) == (20, {"iteration": 2})
    assert log == []
    largest.write_bytes(whole[:-7])
    name = largest.relative_to(saved / "20").as_posix()
    had = f"has {len(whole) - 7} bytes in {name} where {len(whole)} were written"
    assert checkpoints.newest(_state()) == (10, {"iteration": 1})
    assert log == [f"{saved}: checkpoint 20 {had}; it is skipped."]
    with pytest.raises(ValueError, match="^.*: checkpoint 20 has .*; allowed: an intact one.$"):
        checkpoints.newest(_state(), step=20)


def test_a_failure_to_load_files_that_are_whole_is_not_damage(saved, monkeypatch):
    def out_of_memory(path, abstract):
        raise MemoryError("out of memory")

    checkpoints, log = _open(saved)
    with monkeypatch.context() as patch:
        patch.setattr("seeupo_jax.checkpoint.checkpoints.ocp.load", out_of_memory)
        with pytest.raises(MemoryError):
            checkpoints.restore(_state())
    assert log == [] and checkpoints.restore(_state())[0] == 20


def test_changed_notes_are_damage(saved):
    manifest = saved / "20" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"iteration": 2', '"iteration": 3'))
    checkpoints, log = _open(saved)
    assert checkpoints.restore(_state())[2] == {"iteration": 1}
    assert "manifest.json" in log[0]


def _as_folder(path):
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("")


def _as_file(path):
    shutil.rmtree(path)
    path.write_text("no folder")


def _as_loop(path):
    path.unlink()
    path.symlink_to(path.name)


_NAMED = re.compile(r"\d+(\.\d+)?")
_DEEP = "[" * 100_000 + "]" * 100_000
_WRECKS = {
    "manifest is a folder": ("manifest.json", _as_folder),
    "manifest is bytes": ("manifest.json", lambda path: path.write_bytes(b"\xff\x00garbage")),
    "manifest is empty": ("manifest.json", lambda path: path.write_text("")),
    "manifest is null": ("manifest.json", lambda path: path.write_text("null")),
    "manifest is deep": ("manifest.json", lambda path: path.write_text(_DEEP)),
    "manifest is deep inside": (
        "manifest.json",
        lambda path: path.write_text(f'{{"sha256": "", "manifest": {_DEEP}}}'),
    ),
    "manifest points to itself": ("manifest.json", _as_loop),
    "state is a file": ("state", _as_file),
    "state is empty": ("state", lambda path: (shutil.rmtree(path), path.mkdir())),
    "checkpoint is empty": ("", lambda path: (shutil.rmtree(path), path.mkdir())),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wreck", _WRECKS)
def test_a_wrecked_checkpoint_falls_back_to_the_one_before_and_makes_room(saved, wreck):
    name, do = _WRECKS[wreck]
    do(saved / "20" / name)
    checkpoints, log = _open(saved)
    step, state, _ = checkpoints.restore(_state())
    assert step == 10 and "checkpoint 20 " in log[0] and log[0].endswith("it is skipped.")
    _assert_same_bits(state, _state(1.0))
    assert checkpoints.best() is None
    assert checkpoints.newest(_state())[0] == 10
    checkpoints.save(20, _state(7.0), {})  # as the run does that begins again from 10
    checkpoints.close()
    again, log = _open(saved)
    step, state, _ = again.restore(_state())
    assert (step, log) == (20, [])
    _assert_same_bits(state, _state(7.0))
    assert sorted(_NAMED.sub("N", path.name) for path in saved.iterdir()) == ["N", "N"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wreck", _WRECKS)
def test_where_no_other_is_left_a_wrecked_checkpoint_is_a_sentence_and_no_fresh_start(saved, wreck):
    shutil.rmtree(saved / "10")
    name, do = _WRECKS[wreck]
    do(saved / "20" / name)
    checkpoints, log = _open(saved)
    if (
        wreck.startswith("checkpoint") or "itself" in wreck
    ):  # as a run that was killed in its first save leaves it
        assert checkpoints.restore(_state()) is None and "was not finished" in log[0]
        return
    with pytest.raises(ValueError, match="all checkpoints are damaged: checkpoint 20 ") as error:
        checkpoints.restore(_state())
    with pytest.raises(ValueError, match=f"^{re.escape(str(error.value))}$"):
        checkpoints.newest(_state())
    assert checkpoints.newest(_state(), optional=True) is None
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_the_user_has_in_the_directory_is_left_alone(saved):
    """Also where it is named like a checkpoint, or like a folder of the run."""
    mine = ["20", "2023", "2024/photo.jpg", "30/state/of.txt", "40/manifest.json", "50.1/x/y"]
    shutil.rmtree(saved / "20")
    for name in mine:
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_text("{}")
    checkpoints, log = _open(saved, keep=1)
    assert checkpoints.restore(_state())[0] == 10 and log == []
    for step in (20, 30):
        checkpoints.save(step, _state(3.0), {})
    checkpoints.wait()
    checkpoints.clear()
    assert sorted(_files_with_data(saved)) == mine
    checkpoints.save(30, _state(3.0), {})
    checkpoints.close()
    again, log = _open(saved)
    assert (again.restore(_state())[0], log) == (30, [])
    assert {path.name for path in saved.iterdir()} - {n.partition("/")[0] for n in mine} == {"30.1"}
    again.clear()
    assert sorted(_files_with_data(saved)) == mine


def _removals(folder, order):
    """What a removal of a folder deletes, one after the other."""
    for path in order(list(folder.iterdir())):
        if path.is_dir():
            yield from _removals(path, order)
        else:
            yield path
    yield folder


@pytest.mark.parametrize("order", [sorted, lambda paths: sorted(paths, reverse=True)])
@pytest.mark.parametrize("is_written", [True, False])
def test_a_removal_that_is_killed_anywhere_is_finished_by_the_next_save(saved, order, is_written):
    removed = saved / "10"
    if is_written:
        (removed / "manifest.json").unlink()  # it goes first
    else:  # the save was killed, too
        (removed / "manifest.json").rename(removed / "manifest.json.unfinished")
    for path in list(_removals(removed, order))[:-1]:
        assert is_checkpoint(epath.Path(removed)), path
        path.rmdir() if path.is_dir() else path.unlink()
    checkpoints, _ = _open(saved)
    checkpoints.save(30, _state(3.0), {})
    checkpoints.close()
    assert _steps(saved) == [20, 30]


def test_a_checkpoint_that_is_a_link_is_pruned_without_touching_what_it_points_to(saved):
    elsewhere = saved.parent / "another_disk"
    shutil.move(saved / "10", elsewhere)
    (saved / "10").symlink_to(elsewhere)
    files = _files_with_data(elsewhere)
    checkpoints, log = _open(saved)
    checkpoints.save(30, _state(3.0), {})
    checkpoints.close()
    assert _steps(saved) == [20, 30] and log == []
    assert _files_with_data(elsewhere) == files and "manifest.json" in files


def test_a_checkpoint_that_cannot_be_removed_ends_no_save_and_is_tried_again(saved, monkeypatch):
    """As a folder on NFS, of which a reader has a file open."""
    rmtree = Folder.rmtree

    def busy(path, **options):
        if path.name in ("10", "30"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        return rmtree(path, **options)

    (saved / "30").mkdir()  # of a save that was killed
    checkpoints, log = _open(saved, keep=1)
    sentence = "could not be removed: Directory not empty; the next save tries again."
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "rmtree", busy)
        for step, left in ((30, ["10", "30", "30.1"]), (40, ["10", "30", "40"])):
            log.clear()
            checkpoints.save(step, _state(3.0), {})
            checkpoints.wait()
            assert sorted(path.name for path in saved.iterdir()) == left
            assert sorted(log) == [f"{saved}/{name} {sentence}" for name in ("10", "30")]
        assert checkpoints.restore(_state())[0] == 40
    checkpoints.save(50, _state(3.0), {})
    checkpoints.close()
    assert _steps(saved) == [50]


def test_the_last_of_more_than_ten_saves_of_a_step_counts(saved):
    for attempt in (9, 10):
        shutil.copytree(saved / "20", saved / f"20.{attempt}")
    checkpoints, _ = _open(saved)
    checkpoints.save(30, _state(3.0), {})
    checkpoints.close()
    assert {path.name for path in saved.iterdir()} == {"20.10", "30"}


def test_what_is_cleared_is_gone_with_its_directory(saved):
    checkpoints, _ = _open(saved)
    checkpoints.clear()
    assert not saved.exists() and checkpoints.latest() is None


def test_when_all_are_damaged_the_error_names_each(saved):
    for step in ("10", "20"):
        shutil.rmtree(saved / step / "state")
    checkpoints, _ = _open(saved)
    with pytest.raises(ValueError, match="checkpoint 20 lacks .* checkpoint 10 lacks"):
        checkpoints.restore(_state())
    assert checkpoints.restore(_state(), optional=True) is None


def test_a_damaged_checkpoint_neither_blocks_nor_outlives_the_next_save(saved):
    (saved / "20" / "state" / "_CHECKPOINT_METADATA").unlink()
    checkpoints, _ = _open(saved)
    assert checkpoints.restore(_state())[0] == 10
    assert _steps(saved) == [10, 20]  # reading alone removes nothing
    checkpoints.save(15, _state(5.0), {})
    checkpoints.wait()
    assert _steps(saved) == [10, 15]
    for step in (20, 30):
        checkpoints.save(step, _state(6.0), {})
    checkpoints.close()
    assert _steps(saved) == [20, 30]
    again, log = _open(saved)
    _assert_same_bits(again.restore(_state())[1], _state(6.0))
    assert log == []


def _wider(state):
    params = {**state.params, "norm": {"scale": jnp.zeros(65)}}
    return state._replace(params=params)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (_wider, r"params/norm/scale is float32\[64\] in it and float32\[65\] in this run"),
        (
            lambda state: state._replace(step=jnp.float32(0)),
            r"step is int32\[\] in it and float32\[\] in this run",
        ),
        (
            lambda state: state._replace(opt_state=optax.sgd(0.1).init(state.params)),
            r"opt_state/0/count is int32\[\] in it and missing in this run",
        ),
        (
            lambda state: state._replace(params={**state.params, "bias": jnp.zeros(2)}),
            r"params/bias is missing in it and float32\[2\] in this run",
        ),
    ],
)
def test_another_model_or_optimizer_is_an_error_that_names_the_leaf(saved, change, sentence):
    checkpoints, log = _open(saved)
    with pytest.raises(ValueError, match=f"checkpoint 20 is of another .*{sentence}"):
        checkpoints.restore(change(_state()))
    assert log == []


def test_a_part_of_the_state_can_be_restored_alone(saved):
    checkpoints, _ = _open(saved)
    _, part, _ = checkpoints.restore({"params": _state().params}, partial=True)
    _assert_same_bits(part, {"params": _state(2.0).params})
    with pytest.raises(ValueError, match="params/bias is missing in it"):
        checkpoints.restore({"params": {"bias": jnp.zeros(2)}}, partial=True)
    fewer = {"params": {"norm": _state().params["norm"]}}  # as where the others are frozen
    with pytest.raises(ValueError, match="is of another model .*: params/.* and missing in this"):
        checkpoints.restore(fewer, partial=True)


def test_buffers_donated_right_after_save_are_saved_as_they_were(tmp_path):
    advance = jax.jit(lambda x: jax.tree.map(lambda v: v * 2 + 1, x), donate_argnums=0)
    state = {f"w{i}": jnp.full((500_000,), float(i)) for i in range(4)}
    checkpoints, _ = _open(tmp_path, keep=5)
    wanted = []
    for step in range(3):
        wanted.append(jax.tree.map(lambda v: np.array(v, copy=True), state))
        checkpoints.save(step, state, {})
        for _ in range(3):
            state = advance(state)
    jax.block_until_ready(state)
    for step in (2, 1, 0):
        got_step, restored, _ = checkpoints.restore(state)
        assert got_step == step
        for name, value in wanted[step].items():
            np.testing.assert_array_equal(restored[name], value)
        shutil.rmtree(tmp_path / str(step))


def test_a_sharded_state_is_restored_on_another_mesh(tmp_path):
    def mesh(*shape):
        axis_types = (jax.sharding.AxisType.Auto,) * 2
        return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=axis_types)

    def put(mesh, spec, value):
        return jax.device_put(value, jax.NamedSharding(mesh, jax.P(*spec)))

    values = {"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "count": np.int32(5)}
    old = {
        "w": put(mesh(4, 2), ("fsdp", "tensor"), values["w"]),
        "count": put(mesh(4, 2), (), values["count"]),
        "key": put(mesh(4, 2), (), jax.random.key(3)),
    }
    new = {
        "w": put(mesh(2, 4), (None, "fsdp"), np.zeros((8, 8), np.float32)),
        "count": put(mesh(2, 4), (), np.int32(0)),
        "key": put(mesh(2, 4), (), jax.random.key(0)),
    }
    checkpoints, _ = _open(tmp_path)
    checkpoints.save(1, old, {})
    _, restored, _ = checkpoints.restore(new)
    for name, leaf in new.items():
        assert restored[name].sharding == leaf.sharding
        assert _bits(restored[name]) == _bits(old[name])
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((8, 8))})
    _, on_one, _ = checkpoints.restore(shapes, partial=True)
    assert len(on_one["w"].sharding.device_set) == 1
    np.testing.assert_array_equal(on_one["w"], values["w"])


def test_what_was_free_of_a_device_is_restored_free(tmp_path):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P("fsdp")))
    state = {"w": sharded, "step": jnp.int32(2), "key": jax.random.key(1)}
    checkpoints, _ = _open(tmp_path)
    checkpoints.save(1, state, {})
    _, restored, _ = checkpoints.restore(state)
    _assert_same_bits(restored, state)
    # On one program with the sharded leaf; a leaf committed to one device is refused there.
    jax.jit(lambda s: s["w"] * s["step"] + jax.random.uniform(s["key"], (8,)))(restored)


def test_a_failed_save_is_reported_by_the_next_call_and_is_no_checkpoint(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    checkpoints, log = _open(tmp_path)
    checkpoints.save(1, _state(1.0), {})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr("seeupo_jax.checkpoint.checkpoints.list_files", full)
        checkpoints.save(2, _state(2.0), {})
        with pytest.raises(
            SaveError, match="checkpoint 2 could not be written .*No space left.* 1 there is intact"
        ):
            checkpoints.save(3, _state(3.0), {})
    assert checkpoints.latest() == 1
    checkpoints.save(2, _state(4.0), {})
    checkpoints.close()
    assert _steps(tmp_path) == [1, 2]
    _assert_same_bits(_open(tmp_path)[0].restore(_state())[1], _state(4.0))


@pytest.mark.parametrize("others", [[(0.5, "a"), None], [None, (9.0, "b"), (0.5, "a")]])
@pytest.mark.parametrize("own", [None, (3.0, "c")])
def test_all_processes_end_with_what_failed_first(tmp_path, monkeypatch, others, own):
    """Others fail for want of the process that did."""
    monkeypatch.setattr(checkpoints_module, "gather", lambda value: [value, *others])
    checkpoints, _ = _open(tmp_path)
    checkpoints._pending = Future()
    checkpoints._pending.set_result(own)
    with pytest.raises(SaveError, match="^a$"):
        checkpoints.wait()


def test_a_state_that_orbax_has_not_put_together_is_no_checkpoint(saved, monkeypatch):
    async def skipped(*_, **__):
        """As where it finds nothing that a process wrote, which is a warning."""

    checkpoints, _ = _open(saved)
    with monkeypatch.context() as patch:
        patch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", skipped)
        checkpoints.save(30, _state(3.0), {})
        with pytest.raises(SaveError) as failed:
            checkpoints.wait()
    assert str(failed.value) == (
        f"checkpoint 30 could not be written to {saved}: Orbax left no state/state/manifest.ocdbt,"
        " without which it cannot be loaded; checkpoint 20 there is intact."
    )
    assert _steps(saved) == [10, 20] and checkpoints.restore(_state())[0] == 20


def test_what_an_interrupted_orbax_save_leaves_is_passed_over_and_overwritten(saved):
    leftover = saved / "30" / "state.orbax-checkpoint-tmp"
    shutil.copytree(saved / "20" / "state", leftover)
    (saved / "40").mkdir()
    checkpoints, log = _open(saved)
    assert checkpoints.latest() == 20
    assert checkpoints.restore(_state())[0] == 20
    assert [("checkpoint 40" in log[0]), ("checkpoint 30" in log[1])] == [True, True]
    checkpoints.save(30, _state(3.0), {})
    checkpoints.close()
    assert _steps(saved) == [20, 30]
    _assert_same_bits(_open(saved)[0].restore(_state())[1], _state(3.0))


_SAVE_AND_BE_KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import jax.numpy as jnp, numpy as np
from seeupo_jax.checkpoint import Checkpoints

directory, moments = Path(sys.argv[1]), random.Random(int(sys.argv[2]))

def save_forever():
    checkpoints = Checkpoints(directory, keep=2, log=lambda _: None)
    step = 0
    if (found := checkpoints.restore({"w": jnp.zeros(2_000_000)})) is not None:
        step, state, extra = found
        assert extra == {"step": step} and (np.asarray(state["w"]) == step).all()
    print(step, flush=True)
    while True:
        step += 1
        checkpoints.save(step, {"w": jnp.full((2_000_000,), float(step))}, {"step": step})

def newest():
    return max((int(path.name) for path in directory.iterdir()), default=0)

for _ in range(8):
    goal = newest() + 3
    child = os.fork()  # before jax has started anything
    if child == 0:
        save_forever()
    while newest() < goal and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    time.sleep(moments.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_runs_killed_while_saving_go_on_from_a_whole_checkpoint(tmp_path):
    program, tmp_path = tmp_path / "program.py", tmp_path / "checkpoints"
    program.write_text(_SAVE_AND_BE_KILLED)
    tmp_path.mkdir()
    args = [sys.executable, program, str(tmp_path), "0"]
    done = loaded_python.run(args, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    restored = [int(line) for line in done.stdout.split()]
    assert len(restored) == 8 and restored[0] == 0
    # Each got three saves further; at most the one under way and the one before it were lost.
    assert all(later > earlier for earlier, later in itertools.pairwise(restored))
    checkpoints, _ = _open(tmp_path)
    step, state, _ = checkpoints.restore({"w": jnp.zeros(2_000_000)})
    assert step > restored[-1]
    for later in (step + 1, step + 2):
        checkpoints.save(later, state, {})
    checkpoints.close()
    assert _steps(tmp_path) == [step + 1, step + 2]


def test_manifest_is_readable_by_people(saved):
    manifest = json.loads((saved / "20" / "manifest.json").read_text())["manifest"]
    assert manifest["leaves"]["params/embed"] == "float32[8,64]"
    assert manifest["extra"] == {"iteration": 2}


def test_a_workdir_is_made_and_left_empty(tmp_path):
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_a_workdir_where_folders_cannot_be_renamed_is_refused(tmp_path, monkeypatch):
    """As in a bucket with a flat namespace that gcsfuse mounts with its defaults."""
    rename = os.rename

    def refuse(source, target, **options):
        if os.path.isdir(source) and os.listdir(source):
            raise OSError(errno.EMFILE, "Too many open files")
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(
        ValueError, match="folders cannot be renamed .*; allowed: .*dir-limit=200000"
    ):
        check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_processes_of_one_number_in_two_containers_do_not_remove_each_others_file(
    tmp_path, monkeypatch
):
    both, folder = threading.Barrier(2, timeout=30), type(epath.Path(tmp_path))
    write = folder.write_text

    def written(path, text):
        write(path, text)
        both.wait()

    monkeypatch.setattr(folder, "write_text", written)
    with ThreadPoolExecutor(2) as processes:
        assert list(processes.map(check_writable, [tmp_path, tmp_path])) == [None, None]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "below", "far/below"])
def test_a_workdir_that_is_or_lies_below_a_file_is_refused(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="--workdir: got .*file.* allowed: a folder"):
        check_writable(file / below)


_FILL_THE_DISK = """
import resource, sys
import jax.numpy as jnp, numpy as np
from seeupo_jax.checkpoint import Checkpoints, SaveError
checkpoints = Checkpoints(sys.argv[1], keep=2)
noise = np.random.default_rng(0).random(1_000_000, np.float32)  # which does not compress
checkpoints.save(1, {"w": jnp.asarray(noise[:1000])}, {})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    checkpoints.save(2, {"w": jnp.asarray(noise)}, {})
    checkpoints.wait()
except SaveError as error:
    print(error)
checkpoints.save(3, {"w": jnp.asarray(noise[:1000])}, {})
checkpoints.close()
"""
_NO_LIMIT = 2**40


def _fill(directory, limit):
    """What a run prints that cannot write its second checkpoint; its third is a small one."""
    program = directory.parent / "program.py"
    program.write_text(_FILL_THE_DISK)
    args = [sys.executable, program, str(directory), str(limit)]
    done = loaded_python.run(args, env=environment(), timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]
    return done.stdout


def _assert_only_the_second_is_missing(directory):
    assert _steps(directory) == [1, 3]
    checkpoints, log = _open(directory)
    for step in (1, 3):
        assert checkpoints.restore({"w": jnp.zeros(1000)}, step=step)[0] == step
    assert log == []


def test_a_file_that_grows_too_large_is_told_in_a_sentence_and_cleaned_up(tmp_path):
    assert _fill(tmp_path, 1_000_000) == (
        f"checkpoint 2 could not be written to {tmp_path}: File too large;"
        " checkpoint 1 there is intact.\n"
    )
    _assert_only_the_second_is_missing(tmp_path)


def test_a_full_disk_is_told_in_a_sentence_and_cleaned_up(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk])
    if made.returncode:
        pytest.skip("only root can make a disk of 2 MB here")
    try:
        assert _fill(disk, _NO_LIMIT) == (
            f"checkpoint 2 could not be written to {disk}: No space left on device;"
            " checkpoint 1 there is intact.\n"
        )
        _assert_only_the_second_is_missing(disk)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


_FAIL_TO_SYNC = """
import errno, sys
import jax.numpy as jnp
from fault_fs import FaultFs
from seeupo_jax.checkpoint import Checkpoints, SaveError
faults, syncs = FaultFs.attached(), {"kinds": ("sync",)}
checkpoints = Checkpoints(sys.argv[1], keep=9)
def save(step):
    checkpoints.save(step, {"w": jnp.full(8, float(step))}, {})
    checkpoints.wait()
save(1)
faults.count(**syncs)
save(2)
count = faults.counted
for step in range(3, 3 + count):
    faults.fail(step - 2, errno.EIO, **syncs)
    try:
        save(step)
    except SaveError as error:
        print(error)
    else:
        print(f"{step}: {faults.failed} of {faults.counted} failed")
faults.count()
save(3 + count)
"""


@pytest.mark.exhaustive
def test_a_disk_that_takes_not_all_of_a_checkpoint_leaves_the_one_before_it(tmp_path):
    """Whatever cannot be synced, the manifest's name after its renaming included."""
    saved = tmp_path / "saved"
    faults = FaultFs(tmp_path / "faults", saved)
    done = subprocess.run(
        [sys.executable, "-c", _FAIL_TO_SYNC, saved],
        env=environment() | faults.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sentences = done.stdout.splitlines()
    assert len(sentences) > 12  # of files, folders and the manifest
    assert sentences == [
        f"checkpoint {step} could not be written to {saved}: Input/output error; checkpoint 2"
        " there is intact."
        for step in range(3, 3 + len(sentences))
    ]
    assert _steps(saved) == [1, 2, 3 + len(sentences)]


def test_what_is_not_on_the_disk_yet_is_no_finished_checkpoint(tmp_path, monkeypatch):
    """What it covers, such as a sweep that was stopped, may not be removed."""
    free, fsync, manifest = threading.Event(), os.fsync, tmp_path / "1" / "manifest.json"

    def slow(descriptor):
        if manifest.exists():
            free.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    checkpoints, _ = _open(tmp_path)
    checkpoints.save(1, _state(), {})
    while not manifest.exists():
        time.sleep(0.01)
    assert checkpoints.latest() is None
    free.set()
    checkpoints.wait()
    assert checkpoints.latest() == 1


def test_a_directory_that_cannot_be_made_is_told_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints, _ = _open(tmp_path / "file")
    with pytest.raises(SaveError, match="checkpoint 1 could not .*: Not a directory; no other is"):
        checkpoints.save(1, _state(), {})


@pytest.mark.parametrize(
    "path", ["/runs/a\\b", "gs://ours/a\\b", "gs://ours/lr[1]", "gs://ours/a*"]
)
def test_a_path_below_which_checkpoints_would_not_be_found_is_refused(path):
    with pytest.raises(ValueError, match=re.escape(f"--workdir: got {path}; allowed where check")):
        check_path(path, "--workdir")
    check_path("gs://ours/lr=1e-4, seed 1", "--workdir")
    check_path("/runs/lr[1e-4]*?", "--workdir")


@pytest.mark.parametrize("bucket", ["gs://", "gs://ab", "gs://Bad_Bucket!/x", "gs:///x"])
def test_what_names_no_bucket_is_refused(bucket):
    with pytest.raises(ValueError, match=f"directory: got {bucket}; allowed: gs://BUCKET/PATH"):
        check_writable(bucket, "config.checkpoint.directory")


def test_a_bucket_without_gcsfs_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"--workdir: got gs://ours/run, but gcsfs is not .*\[gcs"):
        check_writable("gs://ours/run")


def test_what_threads_report_after_a_failed_save_is_no_trace_and_all_else_is(monkeypatch, tmp_path):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    Checkpoints(tmp_path, 1).close()
    Checkpoints(tmp_path, 1).close()
    loop = asyncio.new_event_loop()
    loop.close()
    for fails in (lambda: loop.call_soon_threadsafe(print), lambda: 1 / 0):
        with pytest.raises((RuntimeError, ZeroDivisionError)) as error:
            fails()
        sys.unraisablehook(types.SimpleNamespace(exc_value=error.value, object=None))
    assert [type(each.exc_value) for each in heard] == [ZeroDivisionError]


def test_a_second_task_of_orbax_that_fails_is_no_trace_and_one_of_another_is(caplog, tmp_path):
    Checkpoints(tmp_path, 1).close()

    async def fail():
        raise OSError("ours")

    async def leave(failed):
        tasks = [asyncio.create_task(each) for each in (async_futures([failed]), fail())]
        await asyncio.sleep(0.2)
        assert all(task.done() for task in tasks)  # nobody asks what with

    failed = Future()
    failed.set_exception(OSError("theirs"))
    asyncio_utils.run_sync(leave(failed))
    gc.collect()
    assert [str(record.exc_info[1]) for record in caplog.records] == ["ours"]
