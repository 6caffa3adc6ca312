"""What was finished is there after a kill, a power cut and a full disk, bit for bit."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from disk_model import DiskModel, all_names, by_chance, only_synced, write_disk
from fault_fs import FaultFs
from process_cases import environment
from ticket_cases import bits, trajectory

from seeupo_jax.rollout.collect import Collected
from seeupo_jax.rollout.rollout_log import LoggedMember, RolloutLog
from seeupo_jax.rollout.rollout_store import RolloutStore
from seeupo_jax.types import Trajectory

TASKS = ("a", "b", "a")


def member(group, number, version=3):
    return LoggedMember(
        group, number, trajectory(TASKS[group], group, number), {version: f"p{version}"}
    )


MEMBERS = [member(0, 0), member(2, 3), member(1, 0), member(0, 1, 4), member(1, 1)]


@pytest.fixture
def said():
    return []


@pytest.fixture
def written(tmp_path, said):
    return RolloutLog(tmp_path / "rollouts", "hash", log=said.append)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rollouts" / "7.log"


def write(log, deliveries=(MEMBERS[:2], MEMBERS[2:3], MEMBERS[3:])):
    log.begin(7, TASKS)
    for delivery in deliveries:
        log.append(7, delivery)


@pytest.fixture
def again(tmp_path, said):
    """Opens the log as another process does."""
    return lambda: RolloutLog(tmp_path / "rollouts", "hash", log=said.append)


def stored(logged):
    return {key: bits(trajectory) for key, trajectory in logged.trajectories.items()}


def wanted(members):
    return {(each.group, each.member): bits(each.trajectory) for each in members}


def test_every_bit_comes_back_with_the_tasks_and_the_policies(written, said, again):
    write(written)
    logged = again().load(7)
    assert logged.tasks == TASKS and stored(logged) == wanted(MEMBERS) and said == []
    assert logged.origins == {(m.group, m.member): m.sampled_by for m in MEMBERS}


def test_an_iteration_that_was_begun_has_its_tasks(written, said, again):
    written.begin(7, TASKS)
    assert again().load(7) == (TASKS, {}, {})
    assert again().load(8) is None and said == []


def test_a_resumed_run_appends_behind_what_is_there(written, said, again):
    write(written, [MEMBERS[:2]])
    resumed = again()
    resumed.load(7)
    resumed.append(7, MEMBERS[2:])
    assert stored(again().load(7)) == wanted(MEMBERS) and said == []


def test_a_member_that_was_sampled_again_is_the_later_one(written, again):
    discarded = LoggedMember(1, 0, trajectory("b", 9, 9), {2: "p2"})
    write(written, [[discarded], MEMBERS])
    logged = again().load(7)
    assert stored(logged) == wanted(MEMBERS) and logged.origins[1, 0] == {3: "p3"}


def test_what_is_begun_again_is_empty(written, said, again):
    write(written)
    written.begin(7, TASKS[::-1])
    assert again().load(7) == (TASKS[::-1], {}, {})


def test_a_file_cut_at_any_byte_keeps_what_is_whole_and_says_what_is_lost(
    written, said, file, again
):
    written.begin(7, TASKS)
    ends = [file.stat().st_size]
    for each in MEMBERS:
        written.append(7, [each])
        ends.append(file.stat().st_size)
    data = file.read_bytes()
    for cut in [*range(0, ends[1]), *range(ends[1], ends[-1], 7), *ends]:
        file.write_bytes(data[:cut])
        said.clear()
        logged = again().load(7)
        whole = sum(end <= cut for end in ends)
        if whole == 0:
            assert logged is None and "7.log changed after it was written" in said[0]
            continue
        assert stored(logged) == wanted(MEMBERS[: whole - 1])
        lost = cut - ends[whole - 1]
        assert said == (
            [
                f"{file} is damaged after {whole - 1} conversations, as after a power cut: its last"
                f" {lost} bytes are dropped, and the conversations in them are sampled again (at"
                " least 1)."
            ]
            if lost
            else []
        )


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"roll" + b"\xff" * 8, b"roll" + bytes(8), b"x"])
def test_what_is_appended_behind_damage_is_kept(written, said, file, tail, again):
    write(written, [MEMBERS[:2]])
    whole = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(tail)
    resumed = again()
    assert stored(resumed.load(7)) == wanted(MEMBERS[:2])
    assert f"its last {len(tail)} bytes are dropped" in said.pop()
    resumed.append(7, MEMBERS[2:])
    assert stored(again().load(7)) == wanted(MEMBERS) and said == []
    assert file.read_bytes()[whole:].startswith(b"roll")


def test_damage_within_a_file_costs_what_lies_behind_it_and_is_counted(written, said, file, again):
    written.begin(7, TASKS)
    written.append(7, MEMBERS[:2])
    place = file.stat().st_size
    written.append(7, MEMBERS[2:])
    data = bytearray(file.read_bytes())
    data[place + 50] ^= 1
    file.write_bytes(data)
    assert stored(again().load(7)) == wanted(MEMBERS[:2])
    assert (
        f"damaged after 2 conversations, as after a power cut: its last {len(data) - place}"
        in (said[0])
    )
    assert "(at least 3)" in said[0] and len(said) == 1


def test_what_other_settings_or_versions_wrote_is_thrown_away(written, said, file):
    write(written)
    other = RolloutLog(file.parent, "another hash", log=said.append)
    assert other.load(7) is None and "with another seed, environment" in said.pop()
    file.rename(file.with_name("8.log"))
    assert written.load(8) is None and "discarded and sampled again." in said.pop()
    other.begin(8, TASKS)
    assert other.load(8) == (TASKS, {}, {}) and said == []


def test_what_is_saved_as_a_whole_needs_no_log(written, said, file):
    write(written)
    collected = Collected(tuple(each.trajectory for each in MEMBERS), 0.0, 0.0, 0, 0)
    store = RolloutStore(file.parent, log=said.append)
    store.save(7, collected, on_saved=lambda: written.remove(7))
    store.close()
    assert [each.name for each in file.parent.iterdir()] == ["7.rollouts"]
    written.append(7, MEMBERS[:1])  # a delivery that comes too late
    assert not file.exists() and said == []


def test_what_could_not_be_saved_as_a_whole_keeps_its_log(written, said, file):
    write(written)
    endless = {}
    endless["self"] = endless
    collected = Collected((Trajectory.of((), 0.0, 0, info=endless),), 0, 0, 0, 0)
    store = RolloutStore(file.parent, log=said.append)
    store.save(7, collected, on_saved=lambda: written.remove(7))
    store.close()
    assert "could not be written" in said[0] and file.exists()


def test_what_a_checkpoint_covers_is_forgotten(written, file):
    written.forget(5)  # where there is no folder yet
    for iteration in (1, 2, 3, 10):
        written.begin(iteration, TASKS)
    for name in ("2.log.0a1b2c3d.tmp", "1.rollouts", "notes.log"):
        file.with_name(name).write_bytes(b"")
    written.forget(3)
    assert {each.name for each in file.parent.iterdir()} == {"10.log", "1.rollouts", "notes.log"}


PROGRAM = """
import sys
from pathlib import Path
from seeupo_jax.rollout.rollout_log import RolloutLog
from test_rollout_log import MEMBERS, TASKS
log = RolloutLog(Path(sys.argv[1]), "hash", log=lambda text: print("said", text, flush=True))
"""


def run_program(program, folder, faults=None, wait=True):
    path = os.pathsep.join([os.path.dirname(__file__), environment()["PYTHONPATH"]])
    variables = environment() | {"PYTHONPATH": path}
    if faults is not None:
        variables |= {"LD_PRELOAD": "", **faults.environment}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program, str(folder)],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    if not wait:
        return process
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return printed


def test_a_killed_process_loses_nothing_that_it_has_acknowledged(tmp_path, said):
    program = (
        "log.begin(7, TASKS)\n"
        "for each in MEMBERS[:-1]:\n"
        "    log.append(7, [each])\n"
        "    print('acknowledged', flush=True)\n"
        "while True: log.append(7, MEMBERS[-1:])\n"
    )
    process = run_program(program, tmp_path, wait=False)
    try:
        for _ in MEMBERS[:-1]:
            assert process.stdout.readline() == "acknowledged\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    logged = RolloutLog(tmp_path, "hash", log=said.append).load(7)
    assert stored(logged).items() >= wanted(MEMBERS[:-1]).items()


@pytest.fixture
def faults(tmp_path):
    return FaultFs(tmp_path / "faults", tmp_path / "root")


def test_a_power_cut_at_any_moment_leaves_what_was_acknowledged(faults, tmp_path):
    """On a disk that holds what was synced, and of the rest anything or nothing."""
    faults.root.mkdir()
    program = (
        "from fault_fs import FaultFs\n"
        "faults = FaultFs.attached()\n"
        "log.begin(7, TASKS)\n"
        "print(len(faults.calls()))\n"
        "for each in MEMBERS:\n"
        "    log.append(7, [each])\n"
        "    print(len(faults.calls()))\n"
    )
    ended = [int(line) for line in run_program(program, faults.root / "run", faults).split()]
    model, views, losses = DiskModel(faults), 0, 0
    for count, call in enumerate(faults.calls(), start=1):
        model.apply(call)
        for view in (only_synced, all_names, *(by_chance(f"{count}-{i}") for i in range(6))):
            place, said = tmp_path / f"disk{views}", []
            write_disk(model.disk(view, "run"), place)
            views += 1
            logged = RolloutLog(place / "run", "hash", log=said.append).load(7)
            acknowledged = sum(end <= count for end in ended)
            if acknowledged:
                assert stored(logged).items() >= wanted(MEMBERS[: acknowledged - 1]).items()
            losses += bool(said)
    assert len(ended) == 1 + len(MEMBERS) and losses > 0


def test_a_full_disk_is_one_sentence_and_the_log_goes_on_when_there_is_room(faults):
    faults.root.mkdir()
    program = (
        "import errno\n"
        "from fault_fs import FaultFs\n"
        "faults = FaultFs.attached()\n"
        "log.begin(7, TASKS)\n"
        "log.append(7, MEMBERS[:1])\n"
        "for kind in ('write', 'sync'):\n"
        f"    faults.fail(1, {errno.ENOSPC}, sticky=True, kinds=(kind,))\n"
        "    log.append(7, MEMBERS[1:2])\n"
        "    log.append(7, MEMBERS[1:2])\n"
        "    assert faults.failed == 2\n"
        "    faults.count()\n"
        "    log.append(7, MEMBERS[2:4] if kind == 'write' else MEMBERS[4:])\n"
        f"faults.fail(1, {errno.ENOSPC}, sticky=True)\n"
        "log.begin(8, TASKS)\n"
        "log.append(8, MEMBERS)\n"
    )
    printed = run_program(program, faults.root, faults).splitlines()
    sentence = (
        "said {}.log could not be written (No space left on device): if the run is killed, it will"
        " sample conversations of iteration {} again."
    )
    first, last = (sentence.format(faults.root / str(k), k) for k in (7, 8))
    assert printed == [first, first, last]
    said = []
    log = RolloutLog(faults.root, "hash", log=said.append)
    assert stored(log.load(7)) == wanted([MEMBERS[0], *MEMBERS[2:]])
    assert log.load(8) is None and said == []
