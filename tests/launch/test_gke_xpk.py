"""gke_xpk.sh against stand-ins of xpk, gcloud and kubectl."""

import subprocess

import pytest
from launch_cases import TRAINING

HERE = ["--cluster=c", "--workload=my-run"]
RUN = ["run", *HERE, "--tpu-type=v5p-64", "--image=registry/image:1"]


@pytest.fixture
def cluster(stage):
    for name in ("xpk", "gcloud", "kubectl"):
        stage.tool(name)
    return stage


def test_a_workload_is_one_jobset_of_several_slices_that_restarts(cluster):
    place = ["--zone=us-east5-a", "--project=my-project"]
    more = ["--slices=4", "--max-restarts=7", "--grace=90", "--priority=high"]
    done = cluster.run("gke_xpk.sh", *RUN, *place, *more, *TRAINING)
    assert done.returncode == 0, done.stderr
    create, listing = cluster.calls()
    (command,) = [word for word in create if word.startswith("--command=")]
    create.remove(command)
    assert create == [
        *["xpk", "workload", "create", "--workload=my-run", "--tpu-type=v5p-64", "--num-slices=4"],
        *["--docker-image=registry/image:1", "--priority=high", "--max-restarts=7"],
        *["--restart-on-exit-codes=1", "--termination-grace-period-seconds=90", "--cluster=c"],
        *place,
    ]
    assert listing == ["xpk", "workload", "list", "--filter-by-job=my-run", "--cluster=c", *place]


def test_the_command_of_a_pod_hears_sigterm_and_gets_its_arguments_whole(cluster):
    """As xpk writes it into the pod: (COMMAND) & in a bash that sends SIGTERM to what `$!` is."""
    cluster.run("gke_xpk.sh", *RUN, *TRAINING)
    (command,) = [word for word in cluster.calls("xpk")[0] if word.startswith("--command=")]
    cluster.tool(
        "python", 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done'
    )
    pod = f"trap 'kill -TERM $!' TERM; ({command.removeprefix('--command=')}) & pid=$!\n"
    pod += "while kill -0 $pid 2>/dev/null; do sleep 0.1; done; wait $pid; exit $?"
    with subprocess.Popen(
        ["/bin/bash", "-c", pod],
        cwd=cluster.checkout,
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "saved\n"
    assert process.returncode == 143  # which JobSet takes for an end that calls for a restart
    assert cluster.calls("python") == [["python", "-m", "seeupo_jax.train", *TRAINING]]


def test_what_xpk_refuses_is_reported_with_its_exit_code(cluster):
    cluster.tool("xpk", "echo '[XPK] insufficient quota' >&2; exit 3")
    done = cluster.run("gke_xpk.sh", *RUN, *TRAINING)
    assert done.returncode == 3 and len(cluster.calls()) == 1
    assert done.stderr.startswith("[XPK] insufficient quota\ngke_xpk: error: xpk rejected")


def test_checkpoints_in_a_bucket_allow_any_workdir(cluster):
    group = '--config.checkpoint={"keep": 3}'  # before a field of it, which then stands
    kept = ["--workdir=runs/x", group, "--override=checkpoint.directory=gs://mine/x"]
    assert cluster.run("gke_xpk.sh", *RUN, TRAINING[0], *kept).returncode == 0
    assert cluster.run("gke_xpk.sh", *RUN, TRAINING[0], kept[0]).returncode == 2


def test_the_first_hosts_log_is_followed(cluster):
    done = cluster.run("gke_xpk.sh", "logs", *HERE, "--zone=us-east5-a")
    assert done.returncode == 0
    login, logs = cluster.calls()
    assert login[1:] == ["container", "clusters", "get-credentials", "c", "--location=us-east5"]
    assert logs[:5] == ["kubectl", "logs", "--follow", "--tail=-1", "--container=jax-tpu"]
    assert logs[5].startswith("--selector=jobset.sigs.k8s.io/jobset-name=my-run,")


@pytest.mark.parametrize("code", [0, 125])
def test_waiting_ends_as_the_workload_does(cluster, code):
    cluster.tool("xpk", f"exit {code}")
    assert cluster.run("gke_xpk.sh", "wait", *HERE).returncode == code
    assert cluster.calls() == [
        ["xpk", "workload", "list", "--wait-for-job-completion=my-run", "--cluster=c"]
    ]


def test_a_workload_is_deleted_without_a_question(cluster):
    assert cluster.run("gke_xpk.sh", "delete", *HERE).returncode == 0
    assert cluster.calls() == [
        ["xpk", "workload", "delete", "--workload=my-run", "--force", "--cluster=c"]
    ]
