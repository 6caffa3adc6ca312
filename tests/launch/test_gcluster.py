"""gcluster.sh against a stand-in of the Cluster Toolkit's gcluster."""

import subprocess

import pytest
from launch_cases import TRAINING

RUN = ["run", "--name=my-run", "--compute-type=v5p-64", "--image=registry/image:1"]
PLACE = ["--cluster=c", "--location=us-east5", "--project=p"]


@pytest.fixture
def toolkit(stage):
    stage.tool("gcluster")
    return stage


def test_a_job_restarts_except_after_a_mistake(toolkit):
    more = ["--slices=4", "--restarts=7", "--grace=90", "--priority=high", "--queue=team"]
    mount = "--mount=gs://mine;/mnt/mine;rw;options=implicit-dirs,rename-dir-limit=200000"
    done = toolkit.run("gcluster.sh", *RUN, *PLACE, *more, mount, *TRAINING)
    assert done.returncode == 0, done.stderr
    (submit,) = toolkit.calls()
    (command,) = [word for word in submit if word.startswith("--command=")]
    submit.remove(command)
    assert submit == [
        *["gcluster", "job", "submit", "--name=my-run", "--compute-type=v5p-64", "--num-slices=4"],
        *["--image=registry/image:1", "--restarts=7"],
        "--restart-on-exit-codes=1,134,135,137,139,143",
        *["--grace-period=90s", mount, "--queue=team", "--priority=high", *PLACE],
    ]


def test_the_command_of_a_pod_is_training_itself_with_its_arguments_whole(toolkit):
    """gcluster puts it behind `/bin/bash -c`."""
    toolkit.run("gcluster.sh", *RUN, *TRAINING)
    (command,) = [word for word in toolkit.calls()[0] if word.startswith("--command=")]
    assert command.startswith("--command=exec launch/on_host.sh run ")
    toolkit.tool("python")
    done = subprocess.run(
        ["/bin/bash", "-c", command.removeprefix("--command=")],
        cwd=toolkit.checkout,
        env=toolkit.env,
    )
    assert done.returncode == 0
    assert toolkit.calls("python") == [["python", "-m", "seeupo_jax.train", *TRAINING]]


def test_a_worker_is_a_job_of_its_own_whose_process_is_alone(toolkit):
    place = [*RUN[:2], "--compute-type=v6e-8", RUN[-1]]
    done = toolkit.run("gcluster.sh", *place, *TRAINING, "--role=rollout")
    assert done.returncode == 0, done.stderr
    (command,) = [word for word in toolkit.calls()[0] if word.startswith("--command=")]
    toolkit.tool("python")
    line = ["/bin/bash", "-c", command.removeprefix("--command=")]
    subprocess.run(line, cwd=toolkit.checkout, env=toolkit.env, check=True)
    assert "on_host.sh run --alone python " in command
    wanted = ["python", "-m", "seeupo_jax.train", *TRAINING, "--role=rollout"]
    assert toolkit.calls("python") == [wanted]


def test_a_name_of_more_than_28_characters_is_refused_before_anything_is_made(toolkit):
    arguments = [each.replace("my-run", "n" * 29) for each in RUN]
    done = toolkit.run("gcluster.sh", *arguments, *TRAINING)
    assert done.returncode == 2 and not toolkit.calls()
    assert done.stderr == "error: --name: got 29 characters; allowed: at most 28.\n"
    arguments = [each.replace("my-run", "n" * 28) for each in RUN]
    assert toolkit.run("gcluster.sh", *arguments, *TRAINING).returncode == 0


def test_what_gcluster_refuses_is_reported_with_its_exit_code(toolkit):
    toolkit.tool("gcluster", "echo 'no such cluster' >&2; exit 3")
    done = toolkit.run("gcluster.sh", *RUN, *TRAINING)
    assert done.returncode == 3
    assert done.stderr.startswith("no such cluster\ngcluster: error: gcluster rejected the job")


@pytest.mark.parametrize(
    "command, words",
    [
        ("logs", ["logs", "my-run", "--follow"]),
        ("status", ["list", "--name-contains=my-run"]),
        ("delete", ["cancel", "my-run"]),
    ],
)
def test_a_job_is_followed_listed_and_ended(toolkit, command, words):
    assert toolkit.run("gcluster.sh", command, "--name=my-run", *PLACE).returncode == 0
    assert toolkit.calls() == [["gcluster", "job", *words, *PLACE]]
