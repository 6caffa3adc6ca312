"""What all launch scripts have in common: help, checks of arguments and tools, dry runs."""

import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch_cases import TRAINING
from places import ROOT

TPU = ["--name=q", "--zone=us-east5-a"]
MORE = ["--accelerator-type=v5p-64", "--runtime-version=v2-alpha-tpuv5", "--bucket=mine"]
XPK = ["--cluster=c", "--workload=w"]
GKE = ["run", *XPK, "--tpu-type=t", "--image=i"]

JOBSET = ["--name=r", "--topology=v5p:4x4x4", "--image=i"]
GCLUSTER = ["run", "--name=r", "--compute-type=v5p-64", "--image=i"]

SCRIPTS = {  # a whole command of each
    "jobset.sh": ["run", *JOBSET, "--bucket=mine"],
    "gcluster.sh": GCLUSTER,
    "tpu_vm.sh": ["all", *TPU, *MORE],
    "gke_xpk.sh": ["run", *XPK, "--tpu-type=v5p-64", "--image=i"],
    "gpu_slurm.sh": ["submit"],
    "gpu_local.sh": [],
    "cpu_processes.sh": [],
}

WRONG = [
    ("tpu_vm.sh", [], "got ''; allowed: all, create"),
    ("tpu_vm.sh", ["start"], "got 'start'; allowed: all, create"),
    ("tpu_vm.sh", ["create", "--zone=z"], "--name: got nothing"),
    ("tpu_vm.sh", ["create", "--name=My_TPU", "--zone=z"], "--name: got 'My_TPU'; allowed: lower"),
    ("tpu_vm.sh", ["create", "--name=" + "a" * 41, "--zone=z"], "--name: got 41 characters"),
    ("tpu_vm.sh", ["create", "--name=q"], "--zone: got nothing"),
    ("tpu_vm.sh", ["create", *TPU], "--accelerator-type: got nothing"),
    ("tpu_vm.sh", ["create", *TPU, *MORE, "--slices=0"], "--slices: got '0'; allowed: a whole"),
    ("tpu_vm.sh", ["create", *TPU, *MORE, "--spot=yes"], "--spot: got a value, 'yes'"),
    ("tpu_vm.sh", ["create", *TPU, "--runtime-version"], "--runtime-version: got nothing"),
    # as of an empty variable without quotes: --project $UNSET --dry-run
    ("tpu_vm.sh", ["delete", *TPU, "--project", "--dry-run"], "--project: got nothing; allowed: a"),
    ("tpu_vm.sh", ["create", *TPU, *MORE, "--ref", "--spot"], "--ref: got nothing; allowed: a"),
    ("tpu_vm.sh", ["create", *TPU, "--sppot"], "got '--sppot'; allowed: --spot --keep-alive"),
    ("tpu_vm.sh", ["create", *TPU, "--x$(id)=1"], "got '--x$(id)=1'; allowed: --spot"),
    ("tpu_vm.sh", ["create", *TPU, "spot"], "got 'spot'; allowed: --spot"),
    ("tpu_vm.sh", ["delete", *TPU, *TRAINING], "delete: got '--config=configs/quickstart.py'"),
    ("tpu_vm.sh", ["run", *TPU, "--bucket=gs://b"], "--bucket: got 'gs://b'; allowed: the name"),
    ("tpu_vm.sh", ["run", *TPU], "--config: got nothing"),
    ("tpu_vm.sh", ["run", *TPU, "--config=configs/no.py", "--workdir=d"], "got 'configs/no.py'"),
    ("tpu_vm.sh", ["run", *TPU, "--config=/a.py", "--workdir=d"], "allowed: a path relative"),
    ("tpu_vm.sh", ["run", *TPU, *TRAINING[:1]], "--workdir: got nothing"),
    ("tpu_vm.sh", ["run", *TPU, *TRAINING, "--dry-run"], "--dry-run: got it after --config"),
    ("tpu_vm.sh", ["run", *TPU, *TRAINING, "--a=b\nc"], "got an argument of several lines"),
    (
        "tpu_vm.sh",
        ["run", *TPU, "--spot", *TRAINING[:1], "--workdir=runs/x"],
        "--workdir: got 'runs/x', which is lost with the machine; allowed: a folder of a bucket",
    ),
    (
        "tpu_vm.sh",
        ["run", *TPU, "--spot", *TRAINING, "--config.checkpoint.directory=/tmp/c"],
        "--config.checkpoint.directory: got '/tmp/c', which is lost with the machine",
    ),
    *(
        ("gke_xpk.sh", [*GKE, *TRAINING, *given], f"--config.checkpoint{words}")
        for given, words in (
            (["--override=checkpoint.directory=/tmp/c"], ".directory: got '/tmp/c', which is lost"),
            (["--override", "checkpoint.directory=c"], ".directory: got 'c', which is lost"),
            (['--config.checkpoint={"directory": "/tmp/c"}'], ': got \'{"directory": "/tmp/c'),
            (["--override=checkpoint={'keep': 3}"], ": got '{'keep': 3}', whose folder this"),
        )
    ),
    (
        "gke_xpk.sh",
        [*GKE, *TRAINING[:1], "--workdir=d", "--config.checkpoint.directory=None"],
        "--workdir: got 'd', which is lost with the machine",
    ),
    (
        "tpu_vm.sh",
        ["all", *TPU, *MORE, "--delete-when-done", *TRAINING[:1], "--workdir=runs/x"],
        "--workdir: got 'runs/x', which is lost with the machine",
    ),
    (
        "tpu_vm.sh",
        ["resume", *TPU, *MORE, *TRAINING[:1], "--workdir=runs/x"],
        "--workdir: got 'runs/x', which is lost with the machine",
    ),
    (
        "tpu_vm.sh",
        ["all", *TPU, *MORE[:2], "--bucket=yours", *TRAINING],
        "--bucket: got 'yours'; allowed: 'mine', as in --workdir=/mnt/mine/run 1",
    ),
    (
        "tpu_vm.sh",
        [
            "all",
            *TPU,
            *MORE[:2],
            *TRAINING[:1],
            "--workdir=d",
            "--config.checkpoint.directory=/mnt/b/c",
        ],
        "--bucket: got ''; allowed: 'b', as in --config.checkpoint.directory=/mnt/b/c",
    ),
    # After a preemption it asks for a new TPU.
    ("tpu_vm.sh", ["run", *TPU, "--keep-alive", *TRAINING], "--accelerator-type: got nothing"),
    (
        "tpu_vm.sh",
        ["run", *TPU, MORE[0], "--keep-alive", *TRAINING],
        "--runtime-version: got nothing",
    ),
    (
        "tpu_vm.sh",
        ["run", *TPU, *MORE[:2], "--keep-alive", *TRAINING],
        "--bucket: got ''; allowed: 'mine', as in --workdir=/mnt/mine/run 1",
    ),
    (  # the stage's checkout is no clone
        "tpu_vm.sh",
        ["run", *TPU, *MORE, "--keep-alive", *TRAINING],
        "got no git repository to install from",
    ),
    ("gke_xpk.sh", ["submit"], "got 'submit'; allowed: run, logs"),
    ("gke_xpk.sh", ["run", "--cluster=c"], "--workload: got nothing"),
    ("gke_xpk.sh", ["run", *XPK], "--tpu-type: got nothing"),
    ("gke_xpk.sh", ["run", *XPK, "--tpu-type=t"], "--image: got nothing"),
    ("gke_xpk.sh", ["run", *XPK, "--priority=top"], "--priority: got 'top'; allowed: very-low"),
    ("gke_xpk.sh", ["logs", *XPK], "--zone: got nothing"),
    (
        "gke_xpk.sh",
        [*GKE, *TRAINING[:1], "--workdir=gs://b/x"],
        "--workdir: got 'gs://b/x', which is lost",
    ),
    (
        "tpu_vm.sh",
        ["create", *TPU, *MORE, "--spot", "--reserved"],
        "--spot: got it with --reserved",
    ),
    (
        "tpu_vm.sh",
        ["create", *TPU, *MORE, "--reservation=r", "--spot"],
        "--spot: got it with --reservation; allowed: one of them",
    ),
    (
        "tpu_vm.sh",
        ["create", *TPU, *MORE, "--reservation=r", "--reserved"],
        "--reserved: got it with --reservation",
    ),
    (
        "tpu_vm.sh",
        ["create", *TPU, *MORE, "--valid-until-duration=6h", "--valid-until-time=2030-01-01"],
        "--valid-until-duration: got it with --valid-until-time",
    ),
    ("jobset.sh", ["apply"], "got 'apply'; allowed: run, logs, wait, delete"),
    ("jobset.sh", ["logs"], "--name: got nothing"),
    ("jobset.sh", ["run", "--name=" + "a" * 41], "--name: got 41 characters; allowed: at most 40"),
    ("jobset.sh", ["run", "--name=r"], "--topology: got nothing"),
    (
        "jobset.sh",
        ["run", "--name=r", "--topology=v9:2x2"],
        "--topology: got 'v9:2x2'; allowed: v4",
    ),
    (
        "jobset.sh",
        ["run", "--name=r", "--topology=v5p-64"],
        "--topology: got 'v5p-64'; allowed: v4",
    ),
    ("jobset.sh", ["run", "--name=r", "--topology=v5p:4x4"], "got 'v5p:4x4'; allowed: 3 sides"),
    ("jobset.sh", ["run", "--name=r", "--topology=v6e:4x4x"], "got 'v6e:4x4x'; allowed: 2 sides"),
    ("jobset.sh", ["run", "--name=r", "--topology=v6e:4xa"], "got 'a'; allowed: a whole number"),
    (
        "jobset.sh",
        ["run", *JOBSET, "--chips-per-host=3"],
        "--chips-per-host: got 3; allowed: a div",
    ),
    (
        "jobset.sh",
        ["run", *JOBSET, "--topology=v6e:2x2", "--slices=2"],
        "--slices: got 2 of one host each; allowed: 1, or slices of several hosts",
    ),
    ("jobset.sh", ["run", *JOBSET[:2]], "--image: got nothing"),
    ("jobset.sh", ["run", *JOBSET[:2], "--image=a: b"], "--image: got 'a: b'; allowed: letters"),
    ("jobset.sh", ["run", *JOBSET, "--queue=a b"], "--queue: got 'a b'; allowed: letters"),
    ("jobset.sh", ["run", *JOBSET, *TRAINING], "--bucket: got ''; allowed: 'mine'"),
    ("jobset.sh", ["run", *JOBSET, "--bucket=gs://b"], "--bucket: got 'gs://b'; allowed: the name"),
    (
        "jobset.sh",
        ["run", *JOBSET, *TRAINING[:1], "--workdir=runs/x"],
        "--workdir: got 'runs/x', which is lost with the machine",
    ),
    ("gcluster.sh", ["submit"], "got 'submit'; allowed: run, logs, status, delete"),
    (
        "gcluster.sh",
        ["run", "--name=" + "a" * 29],
        "--name: got 29 characters; allowed: at most 28",
    ),
    ("gcluster.sh", GCLUSTER[:2], "--compute-type: got nothing"),
    ("gcluster.sh", GCLUSTER[:3], "--image: got nothing"),
    (
        "gcluster.sh",
        [*GCLUSTER, *TRAINING[:1], "--workdir=gs://b/x"],
        "--workdir: got 'gs://b/x', which is lost",
    ),
    *(
        (script, [*arguments, *TRAINING, "--role=rollout"], words)
        for script, arguments, words in (
            (
                "tpu_vm.sh",
                ["all", *TPU, *MORE],
                "--accelerator-type: got 'v5p-64' with --role=rollout; allowed: one host",
            ),
            (
                "tpu_vm.sh",
                ["run", *TPU, "--slices=2"],
                "--slices: got 2 with --role=rollout; allowed: 1",
            ),
            ("gcluster.sh", GCLUSTER, "--compute-type: got 'v5p-64' with --role=rollout"),
            ("gke_xpk.sh", GKE, "--role: got rollout; allowed: none, since jobset.sh"),
            ("jobset.sh", ["run", *JOBSET, "--bucket=mine"], "--role: got rollout; allowed: none"),
            ("cpu_processes.sh", ["-n", "2"], "-n: got 2 with --role=rollout; allowed: 1"),
        )
    ),
    (
        "tpu_vm.sh",
        ["run", *TPU, *TRAINING[:1], "--workdir=d", "--role", "rollout"],
        "--workdir: got 'd' with --role=rollout; allowed: the trainer's",
    ),
    *(
        ("jobset.sh", ["run", *JOBSET, "--bucket=mine", *given, *TRAINING], words)
        for given, words in (
            (["--worker-spot"], "--workers: got nothing with options of workers"),
            (["--workers=two"], "--workers: got 'two'; allowed: a whole number"),
            (["--workers=2"], "--worker-topology: got nothing; allowed: a value such as v6e:2x4"),
            (
                ["--workers=2", "--worker-topology=v6e:4x4"],
                "--worker-topology: got 'v6e:4x4' of several hosts; allowed: one host",
            ),
            (
                ["--workers=2", "--worker-topology=v5p:2x2x2"],
                "--worker-topology: got 'v5p:2x2x2' of several hosts",
            ),
            (
                ["--workers=2", "--worker-topology=v6e:2x4"],
                "--config.rollout.port: got nothing with --workers",
            ),
        )
    ),
    (
        "jobset.sh",
        [
            *["run", *JOBSET, "--workers=2", "--worker-topology=v6e:2x4", TRAINING[0]],
            *["--workdir=d", "--config.rollout.port=1", "--config.rollout.host=::"],
            "--config.checkpoint.directory=gs://b/c",
        ],
        "--workdir: got 'd' with --workers; allowed: a folder that they share",
    ),
    *(
        (
            script,
            [*arguments, *TRAINING, "--config.rollout.port=8790"],
            "--config.rollout.host: got nothing with --config.rollout.port; allowed: an address",
        )
        for script, arguments in (
            ("jobset.sh", ["run", *JOBSET, "--bucket=mine"]),
            ("gcluster.sh", GCLUSTER),
            ("gke_xpk.sh", GKE),
            ("tpu_vm.sh", ["all", *TPU, *MORE]),
            ("gpu_slurm.sh", ["submit"]),
        )
    ),
    ("gpu_slurm.sh", ["submit", "--after=x", *TRAINING], "--after: got 'x'; allowed: a whole"),
    ("jobset.sh", ["logs", "--name=r", "--worker=x"], "--worker: got 'x'; allowed: a number"),
    ("gpu_slurm.sh", ["logs", "--job=7_"], "--job, of 7_ the task: got ''; allowed: a whole"),
    ("gpu_slurm.sh", ["submit", "--nodes=two"], "--nodes: got 'two'; allowed: a whole number"),
    ("gpu_slurm.sh", ["submit", "--job-name=a b"], "--job-name: got 'a b'"),
    ("gke_xpk.sh", ["logs", *XPK, "--zone", "--dry-run"], "--zone: got nothing; allowed: a"),
    ("gpu_slurm.sh", ["submit", "--partition", *TRAINING], "--partition: got nothing; allowed: a"),
    ("gpu_slurm.sh", ["logs"], "--job: got ''; allowed: a whole number"),
    ("gpu_local.sh", [], "--config: got nothing"),
    ("gpu_local.sh", ["--gpus=0-3", *TRAINING], "--gpus: got '0-3'; allowed: numbers"),
    ("cpu_processes.sh", ["-n", "08", *TRAINING], "-n: got '08'; allowed: a whole number"),
    ("cpu_processes.sh", ["--devices", "two", *TRAINING], "--devices: got 'two'"),
    ("gpu_local.sh", ["--gpus", "--dry-run", *TRAINING], "--gpus: got nothing; allowed: a"),
    ("cpu_processes.sh", ["-n", "--dry-run", *TRAINING], "--processes: got nothing; allowed: a"),
    ("cpu_processes.sh", ["-n"], "--processes: got nothing; allowed: a value"),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_its_usage(stage, script):
    done = stage.run(script, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: launch/{script}")


@pytest.mark.parametrize("script, arguments, words", WRONG)
def test_a_mistake_is_one_sentence_before_anything_runs(stage, script, arguments, words):
    for name in ("gcloud", "xpk", "sbatch", "kubectl", "gcluster"):
        stage.tool(name)
    done = stage.run(script, *arguments)
    assert done.returncode == 2 and not stage.calls()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert words in done.stderr and "; allowed: " in done.stderr


TOOLS = {
    "tpu_vm.sh": "gcloud",
    "jobset.sh": "kubectl",
    "gcluster.sh": "gcluster",
    "gke_xpk.sh": "xpk",
    "gpu_slurm.sh": "sbatch",
}


@pytest.mark.parametrize("script, tool", TOOLS.items())
def test_a_missing_tool_is_told(stage, script, tool):
    stage.python()
    done = stage.run(script, *SCRIPTS[script], *TRAINING)
    assert done.returncode == 2
    assert done.stderr == f"error: '{tool}' is not installed, or not on PATH.\n"


@pytest.mark.parametrize("script, arguments", SCRIPTS.items())
def test_a_dry_run_needs_no_tools_and_runs_none(stage, script, arguments):
    before = sorted(path for path in stage.folder.rglob("*"))
    done = stage.run(script, *arguments, "--dry-run", *TRAINING)
    assert done.returncode == 0, done.stderr
    assert not done.stderr and not stage.calls()
    assert sorted(path for path in stage.folder.rglob("*")) == before
    assert done.stdout


@pytest.mark.parametrize(
    "config", ["configs/quickstart.py:v5p:4x4x4", "package:quickstart", "somewhere.own:get_config"]
)
@pytest.mark.parametrize("script, arguments", SCRIPTS.items())
def test_a_configuration_may_have_an_argument_or_be_no_file(stage, script, arguments, config):
    done = stage.run(script, *arguments, "--dry-run", f"--config={config}", *TRAINING[1:])
    assert done.returncode == 0, done.stderr
    assert config in done.stdout


@pytest.mark.parametrize(
    "script, arguments", [(s, a) for s, a in SCRIPTS.items() if s != "jobset.sh"]
)  # which prints no shell but a JobSet
def test_arguments_of_the_training_arrive_unchanged(stage, script, arguments):
    """Through one shell in a dry run, and through a second one on another machine."""
    done = stage.run(script, *arguments, "--dry-run", "--module=my.module", *TRAINING)
    found = []
    for line in done.stdout.splitlines():
        for word in shlex.split(line):
            found.append(word)
            if word.startswith("--command="):
                found += shlex.split(word.removeprefix("--command="))
    start = found.index("my.module")
    assert found[start + 1 : start + 4] == TRAINING


def test_a_value_that_begins_with_dashes_is_taken_behind_an_equals_sign(stage):
    done = stage.run("tpu_vm.sh", "delete", *TPU, "--project=--dry-run")
    assert done.returncode == 2 and "'gcloud' is not installed" in done.stderr
    done = stage.run("tpu_vm.sh", "delete", *TPU, "--project=--spot", "--dry-run")
    assert "--project=--spot" in shlex.split(done.stdout)


def test_a_new_line_of_shell_is_never_made_of_an_argument(stage):
    done = stage.run("cpu_processes.sh", "--dry-run", *TRAINING[:2], "--x='; touch made; '")
    assert subprocess.run(["sh", "-n"], input=done.stdout, text=True).returncode == 0
    assert shlex.split(done.stdout.splitlines()[-1])[-1] == "--x='; touch made; '"


def test_scripts_are_plain_posix_shell_and_shellcheck_finds_nothing():
    scripts = sorted((ROOT / "launch").glob("*.sh"))
    for path in scripts:
        runnable = bool(path.stat().st_mode & stat.S_IXUSR)
        assert path.read_text().startswith("#!/bin/sh\n" if runnable else "# shellcheck shell=sh\n")
    checker = shutil.which("shellcheck", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([checker, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
