"""gpu_local.sh and cpu_processes.sh: the latter for real, with JAX in every process."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launch_cases import TRAINING
from places import ROOT
from process_cases import environment

SMALL = ["--module=small_process"]
# Its input becomes the terminal that it is of; it ignores no hangup, also where the tests do.
OF_A_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def here(stage, tmp_path):
    """The stage with this interpreter, and configurations that name what small_process does."""
    stage.python(f'exec {sys.executable} "$@"')
    for name in ("sum", "fail", "wait", "leave"):
        (stage.checkout / f"{name}.py").touch()
    stage.env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "launch"), str(ROOT)])
    return stage


def begin(stage, *arguments):
    return subprocess.Popen(
        stage.command("cpu_processes.sh", *arguments),
        env=stage.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_find_each_other_and_tell_whose_line_it_is(here):
    flags = ["-n", "2", "--devices=3", *SMALL, "--config=sum.py", "--workdir=a  b's"]
    done = here.run("cpu_processes.sh", *flags)
    assert done.returncode == 0, done.stderr
    # Gloo speaks up at any time, before what is said and after it on the same line.
    lines = re.findall(r"^(\[\d\]) .*?(devices .* sum \d|workdir .*;)", done.stdout, re.MULTILINE)
    said = ["devices 3 of 6, sum 6", "workdir a  b's;"]
    assert sorted(lines) == [(f"[{number}]", line) for number in (0, 1) for line in said]


def test_one_process_has_no_coordinator(here):
    done = here.run("cpu_processes.sh", *SMALL, "--devices=2", "--config=sum.py", "--workdir=w")
    assert done.stdout == "devices 2 of 2, sum 2\nworkdir w;"
    (call,) = [call for call in here.calls("python") if "-m" in call]
    assert call[1:] == ["-m", "small_process", "--config=sum.py", "--workdir=w"]


def test_the_others_end_with_the_one_that_fails(here):
    done = here.run("cpu_processes.sh", "-n", "3", *SMALL, "--config=fail.py", "--workdir=w")
    assert done.returncode == 1
    assert "[1] process 1 cannot go on\n" in done.stdout
    assert "cpu_processes: process 1 ended with exit code 1\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_processes_save(here, number):
    flags = ["-n", "2", *SMALL, "--config=wait.py", "--workdir=w"]
    with begin(here, *flags) as run:
        assert sorted(run.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        run.send_signal(number)
        output, _ = run.communicate(timeout=120)
    assert sorted(output.splitlines()) == ["[0] saved", "[1] saved"]
    assert run.returncode == 0


@pytest.mark.parametrize(
    "signals, grace", [([signal.SIGTERM], 1), ([signal.SIGTERM, signal.SIGINT], 60)]
)
def test_processes_that_do_not_end_are_killed_after_the_grace_or_a_second_ctrl_c(
    here, signals, grace
):
    flags = ["-n", "2", f"--grace={grace}", *SMALL, "--config=wait.py", "--workdir=stubborn"]
    with begin(here, *flags) as run:
        for _ in range(2):
            run.stdout.readline()
        for number in signals:
            run.send_signal(number)
            time.sleep(0.3)
        run.communicate(timeout=120)
    assert run.returncode == 137


@pytest.mark.skipif(shutil.which("timeout") is None, reason="it is of GNU")
def test_timeouts_two_signals_let_all_processes_save(here):
    """It sends one to its child and then one to its group, the child included."""
    flags = ["-n", "2", *SMALL, "--config=wait.py", "--workdir=slow"]
    command = [shutil.which("timeout"), "60", *here.command("cpu_processes.sh", *flags)]
    with subprocess.Popen(command, env=here.env, stdout=subprocess.PIPE, text=True) as run:
        assert sorted(run.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
        run.terminate()  # as at the end of its time
        output, _ = run.communicate(timeout=120)
    assert sorted(output.splitlines()) == ["[0] saved", "[1] saved"]


def test_closing_the_terminal_lets_all_processes_save(here, tmp_path):
    command = here.command("cpu_processes.sh", "-n", "2", *SMALL, "--config=wait.py")
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", OF_A_TERMINAL, *command, f"--workdir={tmp_path}/slow"],
        env=here.env,
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
    ) as run:
        os.close(terminal)
        shown = b""
        while shown.count(b"ready") < 2:
            shown += os.read(screen, 1)
        os.close(screen)
        assert run.wait(timeout=120) == 0
    assert sorted(file.name for file in tmp_path.glob("slow.*")) == ["slow.0", "slow.1"]


def test_a_process_that_is_left_behind_is_not_waited_for(here):
    began = time.monotonic()
    done = here.run("cpu_processes.sh", "-n", "2", *SMALL, "--config=leave.py", "--workdir=w")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] left", "[1] left"])
    assert time.monotonic() - began < 40  # what was left behind takes 60 s


def test_the_real_training_takes_the_flags_and_counts_the_devices_of_all(tmp_path):
    """Up to the checks that follow the meeting of the processes; a run itself is in test_train."""
    flags = [
        "-n",
        "2",
        "--devices=2",
        "--config=tests/support/tiny_config.py",
        f"--workdir={tmp_path}",
    ]
    script = ROOT / "launch" / "cpu_processes.sh"
    done = subprocess.run(
        [script, *flags, "--config.mesh.data=3"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    assert done.returncode == 2, done.stdout
    errors = [line for line in done.stdout.splitlines() if "error: " in line]
    assert errors and all(
        line[:11] in ("[0] error: ", "[1] error: ") and "allowed: a product of 4" in line
        for line in errors
    )


def test_the_accelerators_are_printed_before_training_starts(stage):
    stage.python('case $1 in -c) echo "gpu 8" ;; *) echo "trains on $CUDA_VISIBLE_DEVICES" ;; esac')
    done = stage.run("gpu_local.sh", "--gpus=0,3", *TRAINING)
    assert (done.returncode, done.stdout) == (0, "trains on 0,3\n")
    assert done.stderr == "gpu_local: devices: gpu 8\n"
    assert stage.calls("python")[-1] == ["python", "-m", "seeupo_jax.train", *TRAINING]


def test_a_machine_without_accelerators_gets_the_alternatives(stage):
    stage.python('echo "cpu 1"')
    done = stage.run("gpu_local.sh", *TRAINING)
    assert done.returncode == 2 and len(stage.calls()) == 1
    assert done.stderr.startswith("error: JAX finds no accelerator; allowed: a GPU")
