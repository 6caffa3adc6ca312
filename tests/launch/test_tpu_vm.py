"""tpu_vm.sh against a fake gcloud whose queue, refusals and hosts are set by files.

One real thing stands behind it: a host is a folder, where the real on_host.sh runs what comes by
ssh. Its Python is a shell script that plays the training.
"""

import shutil
import subprocess

import pytest
from launch_cases import TRAINING

HERE = ["--name=q", "--zone=us-east5-a", "--bucket=mine"]
KIND = ["--accelerator-type=v5p-64", "--runtime-version=v2-alpha-tpuv5"]
FAST = ["--poll=1"]

GCLOUD = r"""
[ "$1" != alpha ] || shift
host=$STAGE/host
case $4 in
    describe)
        case $* in *yaml*) echo "state: the reason" && exit;; esac
        state=$(head -n 1 "$STAGE/states")
        if [ "$(wc -l <"$STAGE/states")" -gt 1 ]; then
            sed 1d "$STAGE/states" >"$STAGE/rest" && mv "$STAGE/rest" "$STAGE/states"
        fi
        case $state in
            ABSENT) echo "ERROR: NOT_FOUND: no such queued resource" >&2; exit 1 ;;
            BROKEN) echo "ERROR: no connection" >&2; exit 1 ;;
        esac
        echo "$state" ;;
    create)
        if [ -f "$STAGE/refusal" ]; then cat "$STAGE/refusal" >&2; exit 1; fi
        mkdir -p "$host" ;;
    delete) rm -rf "$host"; cp "$STAGE/states after" "$STAGE/states" 2>/dev/null; exit 0 ;;
    scp) cp "$5" "$host/${6#*:}" ;;
    ssh)
        [ -d "$host" ] || exit 255
        for argument in "$@"; do
            case $argument in --command=*) command=${argument#--command=} ;; esac
        done
        cut() { # loses the connection, as often as the file has lines
            [ -s "$1" ] || return 0
            sed 1d "$1" >"$STAGE/rest" && mv "$STAGE/rest" "$1"
            echo "no route to the host" >&2
            exit 255
        }
        case $command in
            *follow*) cut "$STAGE/cuts"; touch "$STAGE/followed" ;;
            *code)
                cut "$STAGE/codes cut"
                case $* in *--worker=all*) cat "$STAGE/others" 2>/dev/null ;; esac ;;
        esac
        cd "$host" && HOME=$host exec sh -c "$command" ;;
esac
"""

# uv makes an environment whose Python is the training.
PYTHON = r"""
case $* in
    *venv*) mkdir -p .venv/bin && cp "$STAGE/training" .venv/bin/python ;;
esac
"""


@pytest.fixture
def cloud(stage):
    """The stage with a gcloud; `states` are what `describe` says one after the other."""
    for name in ("wc", "pwd"):
        (stage.bin / name).symlink_to(f"/usr/bin/{name}")
    stage.tool("sleep", "exec /bin/sleep 0.1")
    stage.tool("gcloud", GCLOUD)
    stage.tool("python3", PYTHON)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", stage.checkout, *command], check=True)
    (stage.checkout / "configs" / "new file.py").touch()
    (stage.checkout / "left.py").touch()
    subprocess.run(["git", "-C", stage.checkout, "add", "left.py"], check=True)
    (stage.checkout / "left.py").unlink()  # git still lists it
    (stage.checkout / ".gitignore").write_text("runs/\n")
    (stage.checkout / "runs").mkdir()
    (stage.checkout / "runs" / "large").touch()
    trains(stage, "echo it trains")
    stage.tool("mountpoint")  # the bucket is there already
    return stage


def trains(stage, body):
    stage.tool("training", body, stage.folder)


def states(stage, *names, after=("ABSENT",)):
    (stage.folder / "states").write_text("\n".join(names) + "\n")
    (stage.folder / "states after").write_text("\n".join(after) + "\n")


def verbs(stage):
    """What gcloud was asked for: its verb, and of ssh the command."""
    found = []
    for call in stage.calls("gcloud"):
        command = next((word for word in call if word.startswith("--command=")), "")
        found.append((call[4] + " " + command.removeprefix("--command=")).strip())
    return found


def test_a_tpu_is_asked_for_and_waited_for(cloud):
    states(cloud, "ABSENT", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE")
    done = cloud.run(
        "tpu_vm.sh", "create", *HERE, *KIND, *FAST, "--spot", "--project", "my-project"
    )
    assert done.returncode == 0, done.stderr
    end = ["--zone=us-east5-a", "--project=my-project", "--quiet"]
    base = ["gcloud", "compute", "tpus", "queued-resources"]
    describe = [*base, "describe", "q", "--format=value(state.state)", *end]
    create = [*base, "create", "q", *KIND, "--node-id=q", "--spot", *end]
    assert cloud.calls("gcloud") == [describe, create, describe, describe, describe]
    assert done.stderr == "tpu_vm: q is WAITING_FOR_RESOURCES\ntpu_vm: q is ACTIVE\n"


def test_several_slices_are_one_resource_of_several_nodes(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    assert cloud.run("tpu_vm.sh", "create", *HERE, *KIND, "--slices=4").returncode == 0
    (create,) = [call for call in cloud.calls("gcloud") if call[4] == "create"]
    assert create[6:10] == [*KIND, "--node-count=4", "--node-prefix=q"] and "--spot" not in create


KEPT = [
    *["--reserved", "--valid-until-duration=6h", "--service-account=a@p.iam.gserviceaccount.com"],
    *["--network=n", "--subnetwork=s", "--internal-ips"],
]


def test_capacity_time_identity_and_network_are_asked_for(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    done = cloud.run("tpu_vm.sh", "create", *HERE, *KIND, *KEPT)
    assert done.returncode == 0, done.stderr
    (create,) = [call for call in cloud.calls("gcloud") if call[4] == "create"]
    assert create[6:] == [*KIND, "--node-id=q", *KEPT, "--zone=us-east5-a", "--quiet"]


def test_one_reservation_is_asked_for_by_name(cloud):
    """Which only the alpha commands can, as of November 2026."""
    name = "--reservation=projects/other/reservations/r"
    states(cloud, "ABSENT", "ACTIVE")
    limit = "--valid-until-time=2030-01-01T00:00:00Z"
    assert cloud.run("tpu_vm.sh", "create", *HERE, *KIND, name, limit).returncode == 0
    first, create, last = cloud.calls("gcloud")
    assert create[:6] == ["gcloud", "alpha", "compute", "tpus", "queued-resources", "create"]
    assert create[7:] == [*KIND, "--node-id=q", name, limit, "--zone=us-east5-a", "--quiet"]
    assert "alpha" not in first + last


def test_hosts_without_external_addresses_are_reached_by_a_tunnel(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, "--internal-ips", *TRAINING)
    assert done.returncode == 0, done.stderr
    reached = [call for call in cloud.calls("gcloud") if call[4] in ("ssh", "scp")]
    assert {call[4] for call in reached} == {"ssh", "scp"}
    assert all("--tunnel-through-iap" in call for call in reached)
    others = [call for call in cloud.calls("gcloud") if call[4] not in ("ssh", "scp")]
    assert not any("--tunnel-through-iap" in call for call in others)
    assert cloud.run("tpu_vm.sh", "status", *HERE, "--internal-ips").returncode == 0
    assert "--tunnel-through-iap" in cloud.calls("gcloud")[-1]


def test_a_refused_request_is_reported_in_the_words_of_the_cloud(cloud):
    states(cloud, "ABSENT")
    (cloud.folder / "refusal").write_text("ERROR: Quota 'TPUV5PPerProject' exceeded. Limit: 0\n")
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *TRAINING)
    assert done.returncode == 1
    assert "Quota 'TPUV5PPerProject' exceeded" in done.stderr
    assert done.stderr.endswith(
        "tpu_vm: error: the request for the TPU was rejected; see the output above.\n"
    )
    assert verbs(cloud) == ["describe", "create"]


@pytest.mark.parametrize("end", ["FAILED", "SUSPENDED"])
def test_a_request_that_comes_to_nothing_is_reported_with_the_reason(cloud, end):
    states(cloud, "ABSENT", "PROVISIONING", end)
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, *TRAINING)
    assert done.returncode == 1 and "state: the reason" in done.stderr
    assert f"error: q became {end} instead of ACTIVE" in done.stderr
    assert verbs(cloud) == ["describe", "create", "describe", "describe", "describe"]


def test_the_queue_is_left_after_the_limit_not_the_resource(cloud):
    states(cloud, "ABSENT", "WAITING_FOR_RESOURCES")
    done = cloud.run("tpu_vm.sh", "create", *HERE, *KIND, *FAST, "--wait-limit=1")
    assert done.returncode == 1
    assert "is WAITING_FOR_RESOURCES after 1 s (--wait-limit); it stays in the queue" in done.stderr


def test_a_state_that_cannot_be_asked_for_starts_nothing(cloud):
    states(cloud, "BROKEN")
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *TRAINING)
    assert done.returncode == 1 and "ERROR: no connection" in done.stderr
    assert verbs(cloud) == ["describe"]


def test_the_checkout_is_on_every_host_as_it_is_here(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    cloud.run("tpu_vm.sh", "create", *HERE[:2], *KIND)
    package = cloud.folder / "host" / "seeupo_jax"
    (package / ".venv").mkdir(parents=True)
    (package / ".venv" / "kept").touch()
    (package / "runs").mkdir()
    (package / "runs" / "kept").touch()
    for name in ("gone.py", "models", "third_party"):
        (package / name).touch()
    done = cloud.run("tpu_vm.sh", "install", *HERE[:2], "--setup=touch 'set up'")
    assert done.returncode == 0, done.stderr
    scp, ssh = cloud.calls("gcloud")[-2:]
    assert scp[4] == "scp" and scp[6:9] == ["q:seeupo_jax.tar.gz", "--node=all", "--worker=all"]
    assert ssh[4:8] == ["ssh", "q", "--node=all", "--worker=all"]
    names = {str(path.relative_to(package)) for path in package.rglob("*")}
    kept = {".venv/kept", "runs/kept", "models", "third_party"}
    assert {"configs/new file.py", "launch/on_host.sh", "set up", *kept} < names
    assert not {"gone.py", "left.py", "runs/large"} & names
    assert cloud.calls("python3")[-1][-2:] == ["jax[tpu]", "uv"]


def test_a_checkout_with_the_weights_of_a_model_is_refused(cloud):
    cloud.tool("du", 'for file; do echo "10 $file"; done; echo "600000 a model/weights"')
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *TRAINING)
    assert done.returncode == 2 and not cloud.calls("gcloud")
    assert "got 600 MB, 'a model/weights' its largest file; allowed: 500 MB." in done.stderr


def test_what_is_no_clone_is_refused(cloud):
    shutil.rmtree(cloud.checkout / ".git")
    done = cloud.run("tpu_vm.sh", "install", *HERE)
    assert done.returncode == 2 and not cloud.calls("gcloud")
    assert f"{cloud.checkout}: got no git repository" in done.stderr


def test_a_git_repository_can_be_installed_instead_and_a_bucket_mounted(cloud):
    command = ["--git=https://example.com/a b.git", "--ref=v1"]
    done = cloud.run("tpu_vm.sh", "install", *HERE, "--dry-run", *command)
    clone, mount = done.stdout.splitlines()
    assert "git clone --quiet '\\''https://example.com/a b.git'\\'' seeupo_jax" in clone
    assert "git fetch --quiet origin v1" in clone and "on_host.sh install" in clone
    assert "'--command=seeupo_jax/launch/on_host.sh mount mine'" in mount


def test_training_runs_on_all_hosts_with_its_arguments_and_its_log_is_shown(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, "--delete-when-done", *TRAINING)
    assert done.returncode == 0, done.stderr
    assert "it trains" in done.stdout and "training has ended" in done.stderr
    assert cloud.calls("training") == [["training", "-m", "seeupo_jax.train", *TRAINING]]
    (start,) = [call for call in cloud.calls("gcloud") if "on_host.sh start" in str(call)]
    assert start[5:8] == ["q", "--node=all", "--worker=all"]
    # A host that has restarted mounts the bucket anew, before it reads a checkpoint.
    assert "launch/on_host.sh mount mine && launch/on_host.sh start" in str(start)
    follow, code = cloud.calls("gcloud")[-3:-1]
    assert follow[6:8] == code[6:8] == ["--node=0", "--worker=0"]
    assert cloud.calls("gcloud")[-1][4:7] == ["delete", "q", "--force"]


def test_a_worker_that_is_preempted_comes_back_as_a_worker(cloud):
    states(cloud, "ABSENT", "ACTIVE", after=("ACTIVE",))
    trains(cloud, PREEMPTED)
    kind = ["--accelerator-type=v6e-8", KIND[1], "--spot", "--keep-alive"]
    role = [*TRAINING, "--role=rollout"]
    done = cloud.run("tpu_vm.sh", "all", *HERE, *kind, *FAST, *role)
    assert done.returncode == 0 and "goes on" in done.stdout, done.stderr
    assert cloud.calls("training") == [["training", "-m", "seeupo_jax.train", *role]] * 2
    starts = [verb for verb in verbs(cloud) if "on_host.sh start" in verb]
    assert len(starts) == 2 and all("start --alone .venv/bin/python" in start for start in starts)


def test_training_that_fails_is_reported_with_its_exit_code(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    trains(cloud, "echo 'error: no such model' >&2; exit 2")
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, "--keep-alive", *TRAINING)
    assert done.returncode == 2
    assert "error: training failed with exit code 2; the last lines of every host" in done.stderr
    assert "error: no such model" in done.stdout
    assert verbs(cloud)[-1] == "ssh tail -n 20 seeupo_jax_run/log"


PREEMPTED = r"""
echo "attempt"
[ -e "$STAGE/second" ] && echo "goes on" && exit 0
touch "$STAGE/second"
printf 'SUSPENDED\n' >"$STAGE/states"
rm -rf "$STAGE/host" # nothing of it is left
"""
# The state follows after the end of the first host's run.
LATE = r"""
[ -e "$STAGE/second" ] && echo "goes on" && exit 0
touch "$STAGE/second"
while [ ! -e "$STAGE/followed" ]; do sleep 0.05; done
printf 'ACTIVE\nACTIVE\nSUSPENDED\n' >"$STAGE/states"
exit """


@pytest.mark.parametrize(
    "training, cuts",
    [
        (PREEMPTED, 0),
        # It waited for another host, which was lost; before, connections to the log were lost.
        (LATE + "134", 5),
    ],
)
def test_a_tpu_that_is_taken_away_is_replaced_and_the_same_command_given_again(
    cloud, training, cuts
):
    again = ("WAITING_FOR_RESOURCES", "ACTIVE")
    states(cloud, "ABSENT", "ACTIVE", after=again)
    (cloud.folder / "cuts").write_text("cut\n" * cuts)
    trains(cloud, training)
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, "--spot", "--keep-alive", *TRAINING)
    assert done.returncode == 0, done.stderr
    assert "goes on" in done.stdout
    assert cloud.calls("training") == [["training", "-m", "seeupo_jax.train", *TRAINING]] * 2
    asked = [verb.split()[0] for verb in verbs(cloud)]
    assert asked.count("create") == 2 and asked.count("delete") == 1
    assert asked[asked.index("delete") :][:5] == ["delete", "create", "describe", "describe", "scp"]
    assert "q is SUSPENDED: it was preempted" in done.stderr
    assert "restart 1 of 50" in done.stderr


@pytest.mark.parametrize("others, code", [("lost", 0), ("1\n1", 1)])
def test_a_run_that_failed_is_started_again_where_a_host_has_restarted(cloud, others, code):
    states(cloud, "ABSENT", "ACTIVE")
    (cloud.folder / "others").write_text(f"{others}\n")
    trains(
        cloud, '[ -e "$STAGE/second" ] && echo "goes on" && exit 0; touch "$STAGE/second"; exit 1'
    )
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, "--keep-alive", *TRAINING)
    assert done.returncode == code, done.stderr
    assert ("goes on" in done.stdout, "restart 1 of 50" in done.stderr) == (not code,) * 2
    assert ("training failed with exit code 1" in done.stderr) == bool(code)
    assert "delete" not in verbs(cloud)
    first, *second = [at for at, verb in enumerate(verbs(cloud)) if "on_host.sh start" in verb]
    assert len(second) == (not code)
    for at in second:  # the hosts that have not restarted still wait for the one that has
        stop = cloud.calls("gcloud")[at - 1]
        everywhere = ["ssh", "q", "--node=all", "--worker=all"]
        assert stop[4:9] == [*everywhere, "--command=seeupo_jax/launch/on_host.sh stop"]


def test_a_state_that_cannot_be_asked_for_is_no_preemption(cloud):
    states(cloud, "ABSENT", "ACTIVE", "ACTIVE", "BROKEN", "ACTIVE")
    (cloud.folder / "cuts").write_text("cut\n" * 3)  # one look at the state after each
    trains(cloud, 'while [ ! -e "$STAGE/followed" ]; do sleep 0.05; done; echo it trains')
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, "--keep-alive", *TRAINING)
    assert done.returncode == 0 and "it trains" in done.stdout
    assert "ERROR: no connection" in done.stderr and "preempted" not in done.stderr
    asked = [verb.split()[0] for verb in verbs(cloud)]
    assert asked.count("create") == 1 and "delete" not in asked


def test_restarts_have_an_end(cloud):
    states(cloud, "ABSENT", "ACTIVE", after=("FAILED",))
    trains(cloud, PREEMPTED)
    limit = ["--keep-alive", "--max-restarts=2"]
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, *limit, *TRAINING)
    assert done.returncode == 1
    assert done.stderr.endswith("not started again within --max-restarts=2.\n")
    assert [verb for verb in verbs(cloud) if verb == "delete"] == ["delete"] * 2


def test_without_keep_alive_a_preemption_ends_with_what_to_do_and_resume_does_it(cloud):
    states(cloud, "ABSENT", "ACTIVE", after=("ABSENT", "ACTIVE"))
    trains(cloud, PREEMPTED)
    done = cloud.run("tpu_vm.sh", "all", *HERE, *KIND, *FAST, *TRAINING)
    assert done.returncode == 1 and "resume' with the same arguments" in done.stderr
    done = cloud.run("tpu_vm.sh", "resume", *HERE, *KIND, *FAST, *TRAINING)
    assert done.returncode == 0 and "goes on" in done.stdout


def test_a_run_that_is_under_way_is_watched_not_started_twice(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    trains(cloud, 'echo it trains; while [ ! -e "$STAGE/enough" ]; do sleep 0.1; done')
    command = cloud.command("tpu_vm.sh", "all", *HERE, *KIND, *FAST, *TRAINING)
    first = subprocess.Popen(command, env=cloud.env, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "it trains\n"
    first.terminate()  # the terminal is closed; the run goes on
    with first:
        pass
    (cloud.folder / "codes cut").write_text("cut\n" * 2)  # no answer is not taken for no run
    second = subprocess.Popen(command, env=cloud.env, stdout=subprocess.PIPE, text=True)
    assert second.stdout.readline() == "it trains\n"
    (cloud.folder / "enough").touch()
    second.communicate(timeout=120)
    assert second.returncode == 0 and len(cloud.calls("training")) == 1
    assert [verb.split()[0] for verb in verbs(cloud)].count("scp") == 1


@pytest.mark.parametrize("command", [["all", *KIND], ["run"]])
def test_where_the_first_host_does_not_answer_nothing_is_installed_or_started(cloud, command):
    states(cloud, "ACTIVE")
    (cloud.folder / "host").mkdir()
    (cloud.folder / "codes cut").write_text("cut\n" * 9)
    done = cloud.run("tpu_vm.sh", *command, *HERE, *FAST, *TRAINING)
    assert done.returncode == 1 and "no route to the host\n" in done.stderr
    assert done.stderr.endswith("see the output above. Nothing was installed or started.\n")
    assert all(verb == "describe" or verb.endswith("on_host.sh code") for verb in verbs(cloud))


def test_a_stop_lets_training_save_and_differs_from_its_end(cloud):
    states(cloud, "ABSENT", "ACTIVE")
    trains(cloud, 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.1; done')
    options = ["--keep-alive", "--delete-when-done"]
    command = cloud.command("tpu_vm.sh", "all", *HERE, *KIND, *FAST, *options, *TRAINING)
    with subprocess.Popen(command, env=cloud.env, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        assert cloud.run("tpu_vm.sh", "stop", *HERE).returncode == 0
        assert run.stdout.read().startswith("saved\n")
    assert run.returncode == 143 and len(cloud.calls("training")) == 1
    assert "delete" not in verbs(cloud)  # it is there for the next `run`


def test_delete_and_status(cloud):
    states(cloud, "SUSPENDED")
    (cloud.folder / "host").mkdir()
    done = cloud.run("tpu_vm.sh", "status", *HERE)
    assert done.stdout == "SUSPENDED\n"
    assert verbs(cloud) == ["describe", "ssh seeupo_jax/launch/on_host.sh code"]
    assert cloud.run("tpu_vm.sh", "delete", *HERE).returncode == 0
    end = ["--force", "--zone=us-east5-a", "--quiet"]
    assert cloud.calls("gcloud")[-1][4:] == ["delete", "q", *end]
