"""The writer keeps a share of the groups, within a size, and never ends a training."""

import random
import threading

import numpy as np
import pytest

from seeupo_jax import read_trajectories
from seeupo_jax.trajectories import trajectory_writer
from seeupo_jax.trajectories.reader import FOLDER, TrajectoryFile, find_shards
from seeupo_jax.trajectories.trajectory_record import TokenTexts
from seeupo_jax.trajectories.trajectory_writer import TrajectoryWriter, dispensable
from seeupo_jax.types import Segment, Trajectory, TrajectoryStats

LABELS = {"task0": {"kind": "x"}}


def texts(tokens):
    return [chr(97 + token) for token in tokens]


def made(workdir, **options):
    logged = []
    return TrajectoryWriter(workdir, texts=texts, log=logged.append, **options), logged


def train(iteration):
    return TrajectoryFile(iteration, "train", False)


def evaluation(iteration, split="test"):
    return TrajectoryFile(iteration, split, True)


def trajectories(groups=4, size=2, noise=0):
    """`noise` characters a trajectory that do not compress."""
    rng = random.Random(groups)
    return [
        Trajectory.of(
            (Segment(np.array([0, 1]), np.array([-1, 0]), np.array([0, -0.5], np.float32)),),
            float(member),
            group,
            task_id=f"task{group}",
            info={"score": 1.0, "member": member},
            messages=({"role": "user", "content": "".join(rng.choices("abcdefgh", k=noise))},),
        )
        for group in range(groups)
        for member in range(size)
    ]


def kept(workdir, **which):
    return [(r["iteration"], r["group"], r["member"]) for r in read_trajectories(workdir, **which)]


def test_all_that_is_given_is_kept_with_what_was_learned(tmp_path):
    keeper, logged = made(tmp_path)
    given = trajectories()
    nothing = (np.full(2, np.nan, np.float32),)
    stats = [
        TrajectoryStats(0.5, np.ones(1, np.float32), nothing, nothing),
        *[None] * (len(given) - 1),
    ]
    # Given out of order, kept in order.
    keeper.write(train(3), given[::-1], LABELS, stats[::-1])
    keeper.write(evaluation(3), given[:2], LABELS)
    keeper.close()
    assert kept(tmp_path, split="train") == [(3, g, m) for g in range(4) for m in range(2)]
    assert kept(tmp_path, split="test") == [(3, 0, 0), (3, 0, 1)]
    first, *rest = read_trajectories(tmp_path, split="train")
    assert (first["advantage"], first["weights"], first["labels"]) == (0.5, [1.0], {"kind": "x"})
    assert {(r["advantage"], *r["weights"]) for r in rest} == {(None,)}
    assert rest[-1]["labels"] == {} and logged == [] and keeper.removed == 0


def test_a_share_keeps_whole_groups_and_the_same_ones_in_every_life(tmp_path):
    def groups_kept(name, iteration=1, seed=0, share=0.5, shard=train):
        (tmp_path / name).mkdir()
        keeper, _ = made(tmp_path / name, share=share, seed=seed)
        keeper.write(shard(iteration), trajectories(200), {})
        keeper.close()
        found = kept(tmp_path / name)
        groups = {group for _, group, _ in found}
        assert len(found) == 2 * len(groups)
        return groups

    half = groups_kept("a")
    assert 70 < len(half) < 130
    assert groups_kept("b") == half
    assert groups_kept("c", seed=1) != half and groups_kept("d", iteration=2) != half
    assert groups_kept("h", shard=evaluation) != half
    assert groups_kept("e", share=0.2) < half  # a larger share keeps what a smaller one did
    assert groups_kept("f", share=0.0) == set() and not [*(tmp_path / "f").iterdir()]
    assert len(groups_kept("g", share=1.0)) == 200


def size_on_disk(workdir):
    return sum(file.stat().st_size for file in (workdir / FOLDER).iterdir())


def test_old_shards_give_way_to_new_ones_before_the_bound_is_passed(tmp_path, monkeypatch):
    bound, largest = 120_000, []
    keeper, logged = made(tmp_path, mib=bound / 2**20)
    for iteration in range(1, 41):
        keeper.write(train(iteration), trajectories(2, noise=10_000), {})
        keeper.wait()
        largest.append(size_on_disk(tmp_path))
    keeper.close()
    assert max(largest) <= bound and largest[-1] > bound / 2
    left = [shard.iteration for shard in find_shards(tmp_path)]
    assert left[0] == 1 and left[-1] == 40
    gaps = np.diff(left)[:-1]  # the newest one has just come
    assert len(left) > 4 and max(gaps) <= 2.5 * min(gaps)  # evenly spread
    assert keeper.removed == 40 - len(left) == len(logged)
    assert "removed train_0000" in logged[0] and "trajectory_mib=" in logged[0]


def test_what_does_not_fit_at_all_is_told_and_removes_nothing(tmp_path):
    keeper, logged = made(tmp_path, mib=0.01)
    keeper.write(train(1), trajectories(1), {})
    keeper.write(train(2), trajectories(4, noise=50_000), {})
    keeper.close()
    assert [shard.iteration for shard in find_shards(tmp_path)] == [1]
    assert len(logged) == 1 and "train_000002.jsonl.gz has" in logged[0] and "not kept" in logged[0]


def test_a_shard_that_is_written_again_does_not_count_twice(tmp_path):
    keeper, _ = made(tmp_path)
    keeper.write(train(1), trajectories(2, noise=5000), {})
    keeper.wait()
    size = size_on_disk(tmp_path)
    keeper.close()
    keeper, logged = made(tmp_path, mib=1.5 * size / 2**20)
    keeper.write(train(1), trajectories(2, noise=5000), {})
    keeper.close()
    assert size_on_disk(tmp_path) == size and logged == []


@pytest.mark.parametrize(
    ("shards", "goes"),
    [
        ([train(1), train(2), train(4)], train(2)),
        ([train(1), train(2), train(3), train(7), train(8)], train(2)),
        ([train(1), train(5), train(6), train(7)], train(6)),
        # Neighbours are of one kind: evaluations are ten iterations apart.
        ([train(9), train(10), train(11), *map(evaluation, (0, 10, 20))], train(10)),
        ([train(1), train(30), *map(evaluation, (0, 10, 20))], evaluation(10)),
        ([train(9), evaluation(0)], evaluation(0)),
        ([train(3), train(9)], train(3)),
        ([train(9)], None),
    ],
)
def test_which_shard_goes(shards, goes):
    assert dispensable(shards, besides=evaluation(99)) == goes


def test_resuming_removes_what_runs_again_and_what_was_cut_short(tmp_path):
    keeper, _ = made(tmp_path)
    for shard in [*map(train, (1, 2, 3, 4)), *map(evaluation, (0, 2, 4))]:
        keeper.write(shard, trajectories(1), {})
    keeper.wait()
    for end in (".tmp", ".0a1b2c3d.tmp"):  # of an earlier version; of this one
        (tmp_path / FOLDER / (train(3).name + end)).write_text("half")
    (tmp_path / FOLDER / "index.html").write_text("a page")
    keeper.resume_from(3)
    left = sorted([train(1), train(2), evaluation(0), evaluation(2)])
    assert find_shards(tmp_path) == left
    assert len([*(tmp_path / FOLDER).iterdir()]) == len(left) + 1
    keeper.write(train(2), trajectories(1)[:1], {})
    keeper.close()
    assert kept(tmp_path, split="train") == [(1, 0, 0), (1, 0, 1), (2, 0, 0)]


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    keeper, logged = made(tmp_path)
    monkeypatch.setattr(trajectory_writer, "write_shard", full)
    for iteration in (1, 2, 3):
        keeper.write(train(iteration), trajectories(), {})
    keeper.wait()
    assert len(logged) == 1 and "No space left" in logged[0] and "training continues" in logged[0]
    monkeypatch.undo()
    keeper.write(train(4), trajectories(1), {})  # there is room again
    keeper.close()
    assert kept(tmp_path) == [(4, 0, 0), (4, 0, 1)]


def test_a_tokenizer_without_bytes_costs_the_records_only(tmp_path):
    def unknown():
        raise ValueError("tokenizer: its tokens' bytes are hidden")

    logged = []
    keeper = TrajectoryWriter(tmp_path, texts=TokenTexts(unknown), log=logged.append)
    keeper.write(train(1), trajectories(), {})
    keeper.close()
    assert len(logged) == 1 and "hidden" in logged[0]


def test_writing_is_in_the_background_and_few_shards_wait(tmp_path, monkeypatch):
    going, threads = threading.Event(), []

    def slow(*given):
        threads.append(threading.current_thread())
        assert going.wait(30)

    monkeypatch.setattr(trajectory_writer, "write_shard", slow)
    keeper, _ = made(tmp_path)
    keeper.write(train(1), trajectories(), {})
    keeper.write(train(2), trajectories(), {})  # neither waits
    last = threading.Thread(target=keeper.write, args=(train(3), trajectories(), {}))
    last.start()
    last.join(0.3)
    assert last.is_alive()  # two are in memory
    going.set()
    last.join(30)
    keeper.close()
    assert len(threads) == 3 and threading.main_thread() not in threads
