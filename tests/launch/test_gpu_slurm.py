"""gpu_slurm.sh against stand-ins of Slurm; the batch script runs for real."""

import shutil
import subprocess
from pathlib import Path

import pytest
from launch_cases import TRAINING

# Two tasks one after the other, as two nodes would run them at once.
SRUN = r"""
shift
echo "${SRUN_CPUS_PER_TASK-}" >"$STAGE/cpus"
code=0
for number in 0 1; do
    [ "$number" -lt "$SLURM_JOB_NUM_NODES" ] || continue
    SLURM_PROCID=$number "$@" || code=$?
done
exit $code
"""
WAITS = 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done'


@pytest.fixture
def slurm(stage):
    stage.tool("sbatch", "echo '123;cluster'")
    stage.tool("srun", SRUN)
    stage.tool("scontrol", 'case "$*" in *hostnames*) printf "gpu-07\\ngpu-09\\n" ;; esac')
    stage.tool("squeue", "echo RUNNING")
    stage.tool("scancel")
    stage.python()
    return stage


def job(stage, nodes=1, shell=(), alone=(), more=None):
    """The batch script as Slurm starts it on the first node, by `shell` if given."""
    training = [".venv/bin/python", "-m", "it", *TRAINING]
    command = stage.command("slurm_job.sh", "logs/run", *alone, *training)
    (stage.checkout / "logs").mkdir(exist_ok=True)
    slurm = {
        "SLURM_JOB_ID": "4099",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "g[7,9]",
        "SLURM_CPUS_PER_TASK": "32",
    }
    return subprocess.Popen(
        [*shell, *command],
        cwd=stage.checkout,
        env=stage.env | slurm | (more or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_job_is_submitted_with_time_to_save_and_a_way_back_into_the_queue(slurm):
    more = ["--nodes=2", "--time=12:00:00", "--partition=gpu", "--account=me", "--job-name=run"]
    done = slurm.run("gpu_slurm.sh", "submit", *more, "--gpus-per-node=4", *TRAINING)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job 123; log: runs/slurm/run-123.log\n"
    assert Path(slurm.checkout, "runs", "slurm").is_dir()
    assert slurm.calls() == [
        [
            *["sbatch", "--parsable", "--job-name=run", "--nodes=2", "--ntasks-per-node=1"],
            *["--gpus-per-node=4", "--cpus-per-task=32", "--requeue", "--signal=B:TERM@120"],
            *["--open-mode=append", "--output=runs/slurm/%x-%j.log", f"--chdir={slurm.checkout}"],
            *["--time=12:00:00", "--partition=gpu", "--account=me"],
            *["launch/slurm_job.sh", "runs/slurm/run", ".venv/bin/python"],
            *["-m", "seeupo_jax.train", *TRAINING],
        ]
    ]


def test_workers_are_the_tasks_of_an_array(slurm):
    role = [*TRAINING, "--role=rollout"]
    more = ["--nodes=4", "--job-name=workers", "--after=122"]
    done = slurm.run("gpu_slurm.sh", "submit", *more, *role)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "job 123; log: runs/slurm/workers-123_TASK.log\n"
    (submit,) = slurm.calls()
    assert {"--nodes=1", "--array=1-4", "--requeue", "--dependency=after:122"} < set(submit)
    assert "--output=runs/slurm/%x-%A_%a.log" in submit
    script = submit.index("launch/slurm_job.sh")
    python = [".venv/bin/python", "-m", "seeupo_jax.train"]
    assert submit[script + 1 :] == ["runs/slurm/workers", "--alone", *python, *role]


def test_a_job_that_slurm_refuses_is_told(slurm):
    slurm.tool("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    done = slurm.run("gpu_slurm.sh", "submit", *TRAINING)
    assert done.returncode == 1 and not done.stdout
    assert "Invalid account" in done.stderr and "Slurm rejected the job" in done.stderr


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_node_runs_one_process_that_knows_its_place(slurm, nodes):
    with job(slurm, nodes) as batch:
        assert batch.wait(10) == 0, batch.stdout.read()
    place = ["--coordinator=gpu-07:61443", "--num_processes=2"]
    wanted = [["python", "-m", "it", *TRAINING]]
    if nodes == 2:
        wanted = [[*wanted[0], *place, f"--process_id={number}"] for number in (0, 1)]
    assert slurm.calls("python") == wanted
    assert slurm.calls("srun")[0][1] == "--kill-on-bad-exit=1"
    # A step does not inherit its job's CPUs per task since Slurm 22.05.
    assert (slurm.folder / "cpus").read_text() == "32\n"
    assert not [call for call in slurm.calls("scontrol") if "requeue" in call]


def test_a_job_whose_time_is_nearly_over_saves_and_is_put_back(slurm):
    slurm.tool("scancel", 'kill -TERM "$(cat "$STAGE/pid")"')  # Slurm signals the step
    slurm.python(f'echo $PPID >"$STAGE/pid"; {WAITS}')
    with job(slurm) as batch:
        assert batch.stdout.readline() == "ready\n"
        batch.terminate()
        assert batch.stdout.read().startswith("saved\n")
    assert batch.returncode == 0
    assert slurm.calls("scancel") == [["scancel", "--signal=TERM", "4099"]]
    assert slurm.calls("scontrol")[-1] == ["scontrol", "requeue", "4099"]


def test_a_job_that_was_stopped_and_killed_before_it_had_saved_is_put_back(slurm):
    # Where the step ends before scancel does, the shell has seen both when its `wait` ends.
    slurm.tool("scancel", 'kill -KILL "$(cat "$STAGE/pid")"; sleep 0.2')
    slurm.python(f'echo $$ >"$STAGE/pid"; {WAITS}')
    with job(slurm) as batch:
        assert batch.stdout.readline() == "ready\n"
        batch.terminate()
        assert "saved" not in batch.stdout.read()
    assert batch.returncode == 128 + 9
    assert slurm.calls("scontrol")[-1] == ["scontrol", "requeue", "4099"]


# In bash, before one line of the script: Slurm's signal, when the step is already there.
EARLY = r"""
trap '[ "$BASH_COMMAND" != "step=\$!" ] || {
    until [ -e "$STAGE/up" ]; do sleep 0.05; done
    kill -TERM $$
}' DEBUG
"""


def test_a_signal_before_the_script_knows_its_step_reaches_the_step(slurm):
    slurm.tool("srun", 'touch "$STAGE/up"; exec sleep 5')  # ends with 0 unless it is told
    (slurm.folder / "early").write_text(EARLY)
    slurm.env["BASH_ENV"] = str(slurm.folder / "early")
    with job(slurm, shell=[shutil.which("bash")]) as batch:
        assert batch.wait(30) == 128 + 15, batch.stdout.read()
    assert not slurm.calls("scancel")
    assert slurm.calls("scontrol") == [["scontrol", "requeue", "4099"]]


def preempt(slurm, **options):
    """Slurm signals the processes of the step, and not the batch script."""
    slurm.python(f'echo $PPID >"$STAGE/pid"; {WAITS}')
    with job(slurm, **options) as batch:
        assert batch.stdout.readline() == "ready\n"
        subprocess.run(["kill", (slurm.folder / "pid").read_text().strip()], check=True)
        assert batch.stdout.read().startswith("saved\n")
    return batch.returncode


def test_a_preempted_job_is_put_back(slurm):
    assert preempt(slurm) == 0
    assert slurm.calls("scontrol") == [["scontrol", "requeue", "4099"]]


def test_a_preempted_worker_is_put_back_without_the_others_of_its_array(slurm):
    array = {"SLURM_ARRAY_JOB_ID": "4099", "SLURM_ARRAY_TASK_ID": "3"}
    assert preempt(slurm, alone=["--alone"], more=array) == 0
    # The number of the array, which one of its tasks has too, would be all of them.
    assert slurm.calls("squeue")[0][2] == "--jobs=4099_3"
    assert slurm.calls("scontrol") == [["scontrol", "requeue", "4099_3"]]
    assert slurm.calls("python") == [["python", "-m", "it", *TRAINING]]


def test_a_cancelled_job_is_not_put_back(slurm):
    slurm.tool("squeue", "echo COMPLETING")
    assert preempt(slurm) == 0
    assert not slurm.calls("scontrol")


def test_a_job_that_fails_is_not_put_back(slurm):
    slurm.python("exit 3")
    with job(slurm) as batch:
        assert batch.wait(10) == 3
    assert not slurm.calls("scontrol")


def test_a_number_of_an_earlier_run_says_nothing_of_this_one(slurm):
    (slurm.checkout / "logs").mkdir()
    (slurm.checkout / "logs" / "run.4099.0").write_text("143\n")
    (slurm.checkout / "logs" / "run.4099.1").write_text("143\n")
    with job(slurm) as batch:
        assert batch.wait(10) == 0
    assert not slurm.calls("scontrol")


def test_a_job_can_be_asked_to_save_and_be_cancelled(slurm):
    assert slurm.run("gpu_slurm.sh", "stop", "--job=7").returncode == 0
    assert slurm.run("gpu_slurm.sh", "cancel", "--job=7").returncode == 0
    assert slurm.calls() == [["scancel", "--batch", "--signal=TERM", "7"], ["scancel", "7"]]


def test_the_log_of_a_job_is_followed(slurm):
    (slurm.bin / "tail").unlink()
    slurm.tool("tail")
    assert slurm.run("gpu_slurm.sh", "logs", "--job=7").returncode == 0
    assert slurm.run("gpu_slurm.sh", "logs", "--job=7_2").returncode == 0
    logs = [f"runs/slurm/seeupo_jax-{number}.log" for number in ("7", "7_2")]
    assert slurm.calls() == [["tail", "-n", "+1", "-F", log] for log in logs]
