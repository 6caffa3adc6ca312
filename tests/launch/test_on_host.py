"""The commands of a host of a cluster, run for real."""

import signal
import subprocess
import time

import pytest

TRAINING = 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done'


@pytest.fixture
def host(stage):
    stage.env["HOME"] = str(stage.folder)
    return stage


def wait_for(what, timeout=60):
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 3, 143])
def test_run_ends_as_its_command_does(host, code):
    done = host.run("on_host.sh", "run", "sh", "-c", f'echo "$1"; exit {code}', "sh", "a  b'c")
    assert (done.returncode, done.stdout) == (code, "a  b'c\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("with_file, code", [(False, 143), (True, 0)])
def test_a_run_that_only_saved_differs_from_one_that_is_done(host, number, with_file, code):
    file = host.folder / "exit code"
    arguments = ["--code", str(file)] if with_file else []
    command = host.command("on_host.sh", "run", *arguments, "sh", "-c", TRAINING)
    process = subprocess.Popen(command, env=host.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == code
    assert not with_file or file.read_text() == "143\n"


def test_a_command_that_fails_after_the_signal_has_failed(host):
    command = host.command("on_host.sh", "run", "sh", "-c", TRAINING.replace("exit 0", "exit 5"))
    process = subprocess.Popen(command, env=host.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == 5


SLICE = {  # as GKE sets them in a pod of several slices
    "MEGASCALE_COORDINATOR_ADDRESS": "slice-0-0",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "TPU_WORKER_HOSTNAMES": "slice-1-0,slice-1-1",
    "TPU_WORKER_ID": "1",
}
NAMES = " ".join(f"${name}" for name in SLICE)


def test_a_command_that_is_alone_sees_no_slice(host):
    host.env |= SLICE
    shown = ["sh", "-c", f"echo {NAMES}"]
    assert host.run("on_host.sh", "run", *shown).stdout == " ".join(SLICE.values()) + "\n"
    file = host.folder / "exit code"
    done = host.run("on_host.sh", "run", "--code", str(file), "--alone", *shown)
    assert done.stdout == "localhost 0\n" and file.read_text() == "0\n"
    host.env = {name: value for name, value in host.env.items() if name not in SLICE}
    assert host.run("on_host.sh", "run", "--alone", *shown).stdout == "\n"
    assert host.run("on_host.sh", "run", "--alone").returncode == 2  # no command


def test_a_run_in_the_background_is_followed_stopped_and_asked_for_its_end(host):
    def code():
        return host.run("on_host.sh", "code").stdout.strip()

    assert code() == "none"
    assert host.run("on_host.sh", "follow").returncode == 2
    done = host.run("on_host.sh", "start", "sh", "-c", TRAINING, "sh", "it's")
    assert (done.returncode, done.stdout) == (0, "")
    log = host.folder / "seeupo_jax_run" / "log"
    wait_for(lambda: log.exists() and log.read_text() == "ready\n")
    assert code() == "running"
    boot = log.with_name("boot")
    now = boot.read_text()
    boot.write_text("of another start of the machine: the number is another process's\n")
    assert code() == "lost" and host.run("on_host.sh", "follow").stdout == "ready\n"
    boot.write_text(now)
    twice = host.run("on_host.sh", "start", "true")
    assert twice.returncode == 2 and "is active" in twice.stderr
    follower = subprocess.Popen(
        host.command("on_host.sh", "follow"), env=host.env, stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout.readline() == "ready\n"
    assert host.run("on_host.sh", "stop").returncode == 0
    assert follower.communicate(timeout=60)[0] == "saved\n" and follower.returncode == 0
    assert code() == "143"
    assert host.run("on_host.sh", "start", "sh", "-c", "exit 7").returncode == 0
    wait_for(lambda: code() == "7")


def test_a_run_that_the_host_took_down_is_lost(host):
    host.run("on_host.sh", "start", "sh", "-c", TRAINING)
    pid = (host.folder / "seeupo_jax_run" / "pid").read_text().strip()
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", pid], capture_output=True, text=True)
    subprocess.run(["kill", "-KILL", pid, *children.stdout.split()], check=True)
    wait_for(lambda: host.run("on_host.sh", "code").stdout == "lost\n")


def test_the_environment_is_made_by_uv_once(host):
    host.tool(
        "python3",
        'case "$*" in *venv*) mkdir -p .venv/bin; touch .venv/bin/python;'
        " chmod +x .venv/bin/python;; esac",
    )
    assert host.run("on_host.sh", "install", "jax[tpu]").returncode == 0
    uv = ["python3", "-m", "uv"]
    into = ["pip", "install", "--quiet", "--python", ".venv/bin/python", "--editable", ".[gcs]"]
    pip = ["python3", "-m", "pip", "install", "--user", "--quiet", "--disable-pip-version-check"]
    made = [*uv, "venv", "--quiet", "--python", "3.12", ".venv"]
    assert host.calls() == [[*pip, "uv"], made, [*uv, *into, "jax[tpu]", "uv"]]
    set_up = "test -x .venv/bin/python && touch 'set up'; exit 3"
    assert host.run("on_host.sh", "install", "jax[tpu]", set_up).returncode == 3
    assert host.calls()[3:] == [[*pip, "uv"], [*uv, *into, "jax[tpu]", "uv"]]
    assert (host.checkout / "set up").exists()


def test_a_bucket_is_mounted_once_with_gcsfuse_fetched_where_it_is_missing(host):
    host.tool("mountpoint", "exit 1")
    host.tool(
        "sudo",
        'case $1 in tee) cat >/dev/null;; apt-get) [ "$2" = update ] ||'
        ' { printf "#!/bin/sh\\n" >"$STAGE/bin/gcsfuse"; chmod +x "$STAGE/bin/gcsfuse"; };; esac',
    )
    host.tool("curl")
    host.tool("id", "echo 1000")
    host.tool("lsb_release", "echo jammy")
    assert host.run("on_host.sh", "mount", "mine").returncode == 0
    fetched = ["-o", "DPkg::Lock::Timeout=300", "install", "-qq", "-y", "gcsfuse"]
    assert ["sudo", "apt-get", *fetched] in host.calls("sudo")
    assert host.calls("sudo")[-2:] == [
        ["sudo", "mkdir", "-p", "/mnt/mine"],
        ["sudo", "chown", "1000:1000", "/mnt/mine"],
    ]
    host.tool("gcsfuse")
    before = len(host.calls("sudo"))
    assert host.run("on_host.sh", "mount", "mine").returncode == 0
    (call,) = host.calls("gcsfuse")
    # Without it, gcsfuse renames no folder of a bucket with a flat namespace.
    assert call[:3] == ["gcsfuse", "--implicit-dirs", "--rename-dir-limit=200000"]
    assert call[-2:] == ["mine", "/mnt/mine"]
    assert len(host.calls("sudo")) == before + 2
    host.tool("mountpoint", "exit 0")
    assert host.run("on_host.sh", "mount", "mine").returncode == 0
    assert len(host.calls("gcsfuse")) == 1


@pytest.mark.parametrize("arguments", [[], ["begin"], ["run"], ["start"]])
def test_a_host_refuses_unknown_arguments(host, arguments):
    assert host.run("on_host.sh", *arguments).returncode == 2


def test_a_run_whose_log_cannot_be_written_does_not_begin(host):
    state = host.folder / "seeupo_jax_run"
    (state / "log").mkdir(parents=True)
    assert host.run("on_host.sh", "start", "touch", str(host.folder / "begun")).returncode != 0
    assert not (state / "pid").exists() and not (host.folder / "begun").exists()


def test_a_run_that_ends_while_it_is_asked_for_its_end_is_not_lost(host):
    state = host.folder / "seeupo_jax_run"
    state.mkdir()
    with subprocess.Popen(["true"]) as ended:
        pass
    (state / "pid").write_text(f"{ended.pid}\n")
    assert host.run("on_host.sh", "code").stdout == "lost\n"
    # It writes its exit code and ends between two looks: just when its process is asked for.
    host.tool("cat", f'case $1 in *pid) echo 0 >"{state}/code" ;; esac; exec /bin/cat "$@"')
    assert host.run("on_host.sh", "code").stdout == "0\n"
