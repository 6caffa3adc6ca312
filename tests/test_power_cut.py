"""A power cut at any moment leaves what a run has reported as saved.

Training, supervised training, an update and an export run once, in one process, on a disk of their
own where root can mount one. Its copies are what power cuts leave. The calls that changed files are
logged, and tell what a disk may hold at the worst, on machines without root too.
"""

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import learner_cases
import pytest
import run_cases
import sft_cases
import stored_cases
from disk_model import DiskModel, all_names, by_chance, only_synced, write_disk
from etils import epath
from fault_fs import FaultFs
from places import SUPPORT, TINY
from process_cases import environment
from small_disk import can_mount, power_cut, require_root, small_disk

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.checkpoint.manifest import check_files, read_manifest
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.metrics.run_manifest import read_run_manifest
from seeupo_jax.trajectories.reader import find_shards, read_shard

TRAINED, SUPERVISED = 4, 6  # iterations, and steps
# What other programs read, and by which command it is left.
FOLDERS = {"train/policy": "train", "sft/policy": "sft", "updated": "update", "exported": "export"}
# What a line of metrics has of each iteration of training, and of each step.
PER_ITERATION = {"train": "rollout/success_rate", "sft": "sft/loss"}


class Played(NamedTuple):
    """Commands that have run.

    ended: after how many calls that change files each had. cuts: for each power cut sentences on
    what it has lost. folders: the files of `FOLDERS`.
    """

    faults: FaultFs
    ended: dict[str, int]
    cuts: list[list[str]]
    folders: dict[str, dict[str, bytes]]


def files(folder):
    """What files hold, by name.

    A file like .tmpX9a7bc is what safetensors renames by a call that is not logged.
    """
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("[!.]*.*")}


def steps(names):
    return sorted(int(name) for name in names if name.isdecimal())


def lost_of_run(run, begun, *, ended, per_iteration):
    """What a run's folder lacks after a power cut, in sentences.

    Args:
      begun: the steps whose checkpoints were there or begun when the power was cut; all but the
        last of them were waited for. ended: so was that.
      per_iteration: the metric that a line of each has.
    """
    wanted = max(begun if ended else begun[:-1], default=0)
    said = []
    found = Checkpoints(run / "checkpoints", 1, 0, log=said.append).newest(
        {}, partial=True, optional=True
    )
    newest = 0 if found is None else found[0]
    lost = [said_of for said_of in said if "not finished" not in said_of]
    if newest < wanted:
        lost.append(f"checkpoint {newest} is the newest, and {wanted} was saved")
    for manifest in (run / "checkpoints").glob("*/manifest.json"):  # what counts is whole
        folder = epath.Path(manifest.parent)
        check_files(folder, read_manifest(folder)["files"])
    if newest and read_run_manifest(run) is None:
        lost.append("run.json cannot be read")
    lines = read_metrics(run, log=lost.append) if run.is_dir() else []
    recorded = [line["iteration"] for line in lines if per_iteration in line]
    if recorded != list(range(1, len(recorded) + 1)) or len(recorded) < newest:
        lost.append(f"metrics are of {recorded}, and the checkpoint is of {newest}")
    return lost + lost_trajectories(run, newest)


def lost_trajectories(run, newest):
    lost = []
    for file in (run / "rollouts").glob("*.rollouts"):
        data = file.read_bytes()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            lost.append(f"{file.name} is damaged")
    shards = find_shards(run)
    for shard in shards:
        list(read_shard(shard.path(run), log=lost.append))
    trained = [shard.iteration for shard in shards if not shard.evaluation]
    if shards and trained[:newest] != list(range(1, newest + 1)):
        lost.append(f"trajectories are of {trained}, and the checkpoint is of {newest}")
    return lost


def lost_by(disk, names, ended, folders):
    """What a disk lacks after a power cut.

    Args:
      names: by run, of the checkpoints that processes saw when the power was cut.
      ended: names of the commands that had ended.
      folders: what these of `FOLDERS` have in the end.
    """
    lost = []
    for run, checkpoints in names.items():
        each = lost_of_run(
            disk / run,
            steps(checkpoints),
            ended=run in ended,
            per_iteration=PER_ITERATION[run],
        )
        lost += [f"{run}: {sentence}" for sentence in each]
    for name, wanted in folders.items():
        there = files(disk / name)
        if there != wanted and (there or FOLDERS[name] in ended):
            lost.append(f"{name} has {sorted(there)}")
    return lost


class Commands:
    """A process that runs commands below a folder; with an image, power cuts while it does."""

    def __init__(self, process, faults, place, image, scratch):
        self.cuts, self.ended = [], {}
        self._process, self._faults = process, faults
        self._place, self._image, self._scratch = place, image, scratch
        self._cut_at = 0

    def run(self, module, *arguments):
        """Runs a command to its end; meanwhile, and at once afterwards, the power is cut."""
        self._process.stdin.write(json.dumps([module, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        while not select.select([self._process.stdout], [], [], 0.2)[0]:
            self._process.send_signal(signal.SIGSTOP)
            self._cut()
            self._process.send_signal(signal.SIGCONT)
        assert json.loads(self._process.stdout.readline()) == 0
        self.ended[module] = self._faults.counted
        self._cut()

    def _cut(self):
        if self._image is None or self._faults.counted == self._cut_at:
            return
        self._cut_at = self._faults.counted
        folders = {run: self._place / run / "checkpoints" for run in PER_ITERATION}
        names = {run: os.listdir(each) if each.is_dir() else [] for run, each in folders.items()}
        known = {
            name: files(self._place / name)
            for name, command in FOLDERS.items()
            if command in self.ended
        }
        with power_cut(self._image, self._scratch) as disk:
            self.cuts.append(lost_by(disk, names, self.ended, known))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("power_cut")
    model = run_cases.save_policy(folder / "model")
    desk = sft_cases.write_desk(folder / "desk.jsonl")
    stored = stored_cases.write(folder / "stored.jsonl", learner_cases.ragged())
    with contextlib.ExitStack() as held:
        image, place = None, folder / "place"
        if can_mount():
            image, place = held.enter_context(small_disk(folder / "mounted"))
        else:
            place.mkdir()
        faults = FaultFs(folder / "faults", place)
        process = subprocess.Popen(
            [sys.executable, SUPPORT / "commands_process.py"],
            env=environment() | faults.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        held.enter_context(process)
        held.callback(process.kill)
        commands = Commands(process, faults, place, image, folder / "cut")
        for name, arguments in arguments_of(model, desk, stored, place).items():
            commands.run(name, *arguments)
        folders = {name: files(place / name) for name in FOLDERS}
        yield Played(faults, commands.ended, commands.cuts, folders)


def arguments_of(model, desk, stored, place):
    """Of each command."""
    train = run_cases.command(
        model,
        place / "train",
        f"--config.iterations={TRAINED}",
        "--config.checkpoint.keep=1",
        "--config.checkpoint.keep_best=0",
        "--config.evaluation.tasks=1",
        "--config.evaluation.every=0",
        "--config.rollout.tasks=2",
        "--config.telemetry.trackers=()",
    )[3:]
    return {
        "train": train,
        # Without evaluations between the steps only a checkpoint has their lines synced.
        "sft": sft_cases.arguments(
            model, desk, place / "sft", f"sft.steps={SUPERVISED}", "sft.eval_every=100"
        ),
        "update": [
            f"--config={TINY}",
            f"--model={model}",
            f"--trajectories={stored}",
            f"--output={place / 'updated'}",
            "--config.batching.buckets=(32,)",
            "--config.rollout.max_context=32",
            "--config.rollout.max_action_tokens=8",
        ],
        "export": [*train, f"--output={place / 'exported'}"],
    }


def test_a_power_cut_leaves_what_was_saved_on_ext4(played):
    require_root()
    assert len(played.cuts) > 8
    assert [lost for lost in played.cuts if lost] == []


@pytest.mark.parametrize("kind", ["only what was synced", "all names", "some names"])
def test_a_disk_with_no_more_than_what_was_synced_has_what_was_saved(played, tmp_path, kind):
    model, before, cuts = DiskModel(played.faults), None, 0
    calls = played.faults.calls()
    for number, (call, after) in enumerate(zip(calls, [*calls[1:], None], strict=True), 1):
        model.apply(call)
        # Of calls of a kind in a row the disk after the last is tried; so of a file that is opened.
        if call.kind == "open" or (after is not None and after.kind == call.kind):
            continue
        view = {"only what was synced": only_synced, "all names": all_names}.get(kind)
        part, *_ = call.path.removeprefix(f"{played.faults.root}/").split("/")
        disk = model.disk(view or by_chance(f"{number}"), part)  # all else is as it was
        if disk == before:
            continue
        before, cuts = disk, cuts + 1
        place = tmp_path / f"{number}"
        write_disk(disk, place)
        names = {run: model.names(f"{run}/checkpoints") for run in PER_ITERATION if run == part}
        folders = {n: held for n, held in played.folders.items() if n.split("/")[0] == part}
        ended = [name for name, calls in played.ended.items() if calls <= number]
        lost = lost_by(place, names, ended, folders)
        assert lost == [], f"after call {number}: {call}"
        shutil.rmtree(place)
    assert cuts > 50
