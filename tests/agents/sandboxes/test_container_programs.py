"""Episodes in containers of the real programs, podman and docker.

The image is made of this machine's bash, Python and a few other programs: nothing is downloaded.
"""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from sandbox_cases import outcomes, sandboxes_of, start_trainer, wait_for

from seeupo_jax.agents.calls import AgentFailure
from seeupo_jax.agents.sandboxes.sandbox_checks import check_sandboxes
from seeupo_jax.configuration.sandbox_schema import Sandbox
from seeupo_jax.tasks.task_folders import TaskFolders, find_folder

pytestmark = pytest.mark.exhaustive
PYTHON, IMAGE = "/usr/bin/python3", "localhost/seeupo-test:1"
PROGRAMS = "bash sh cat rm ls sed grep sort mkdir chmod cut wc head tr cmp awk mv cp sleep".split()
PACKAGES = ("collections", "encodings", "importlib", "json", "lib-dynload", "re")
TASKS = ("train/fix_sum", "test/find_addresses")
# Of podman: without systemd, and without the rights to choose among cgroups and to raise limits.
PLAIN = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def libraries(program):
    """The shared libraries of a program."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+) \(0x", listed)


def write_root(path):
    """Writes an archive of a small root directory."""
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    answer = subprocess.run([PYTHON, "-I", "-c", code], capture_output=True, text=True, check=True)
    modules = answer.stdout.strip()
    files = {f"/usr/bin/{name}": shutil.which(name, path="/usr/bin:/bin") for name in PROGRAMS}
    files[PYTHON] = PYTHON
    for file in list(files.values()):
        files |= {library: library for library in libraries(file)}
    with tarfile.open(path, "w") as archive:
        archive.dereference = True
        for name, file in files.items():
            archive.add(file, re.sub("^/(bin|sbin|lib|lib64)/", r"/usr/\1/", name))
        for module in Path(modules).iterdir():
            if module.suffix == ".py" or module.name in PACKAGES:
                archive.add(module, str(module), filter=_without_bytecode)
        archive.dereference = False
        for name in ("bin", "sbin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
        for name in ("tmp", "proc", "sys", "dev", "etc", "root"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)


def _without_bytecode(member):
    return None if "__pycache__" in member.name else member


def works(runtime):
    """Why a runtime runs no container here; empty: it does."""
    words = [
        runtime,
        "run",
        "--rm",
        "--network",
        "none",
        "--memory",
        "64m",
        IMAGE,
        "cat",
        "/dev/null",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    return done.stderr.strip()[-300:] if done.returncode else ""


@pytest.fixture(scope="module", params=["podman", "docker"])
def runtime(request, tmp_path_factory):
    """A program that runs containers here, which has the image."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    if shutil.which(name) is None or not Path(PYTHON).exists():
        pytest.skip(f"{name} or {PYTHON} is not installed")
    write_root(folder / "root.tar")
    with pytest.MonkeyPatch.context() as patch:
        made = subprocess.run([name, "import", folder / "root.tar", IMAGE], capture_output=True)
        if made.returncode:
            pytest.skip(f"{name} imports no image here: {made.stderr.decode().strip()[-300:]}")
        if name == "podman" and works(name):
            (folder / "containers.conf").write_text(PLAIN)
            patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        reason = works(name)
        if not reason:
            yield name
        subprocess.run([name, "rmi", "--force", IMAGE], capture_output=True)
    if reason:
        pytest.skip(f"{name} runs no container here: {reason}")


@pytest.fixture
def tasks(runtime, tmp_path):
    """Two of the bundled tasks, whose images are made of the small one and removed."""
    for name in TASKS:
        shutil.copytree(find_folder("harbor:package:sandboxed_tasks") / name, tmp_path / name)
        file = tmp_path / name / "environment" / "Dockerfile"
        file.write_text(re.sub("^FROM .*", f"FROM {IMAGE}", file.read_text()))
    found = TaskFolders(tmp_path, local=False)
    yield found
    for split, task in (name.split("/") for name in TASKS):
        tag = f"seeupo-{task.replace('_', '-')}:{found.task(task, split).digest[:16]}"
        subprocess.run([runtime, "rmi", "--force", tag], capture_output=True)


def containers(runtime):
    words = [runtime, "ps", "--all", "--format", "{{.Names}}"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return {name for name in listed if name.startswith("seeupo-")}


def test_solutions_solve_tasks_in_containers_and_nothing_is_left(runtime, tasks):
    before, sandbox = containers(runtime), Sandbox(runtime=runtime, solution=True)
    check_sandboxes(sandboxes_of(tasks, "sh", sandbox))
    solved = outcomes(tasks, "bash /solution/solve.sh", sandbox)
    assert [getattr(result, "reward", result) for result in solved.values()] == [1.0, 1.0]
    looks = "ls /solution /tests; cat /proc/net/dev; (setsid sleep 1000 &); exit 3"
    failed = outcomes(tasks, f"bash -c '{looks}'", Sandbox(runtime=runtime))
    for failure in failed.values():
        assert isinstance(failure, AgentFailure) and failure.answered.reward == 0.0, failure
        assert "exit code 3" in failure.reason and "lo:" in failure.reason
        assert "eth0" not in failure.reason and "solve.sh" not in failure.reason
    assert containers(runtime) == before


def test_limits_of_time_and_memory_end_an_agent_in_a_container(runtime, tasks, tmp_path):
    before = containers(runtime)
    for name in TASKS:
        file = tmp_path / name / "task.toml"
        file.write_text(file.read_text().replace("timeout_sec = 120.0", "timeout_sec = 3.0"))
    slow = outcomes(TaskFolders(tmp_path, local=False), "sleep 1000", Sandbox(runtime=runtime))
    assert {failure.cause for failure in slow.values()} == {"limit"}
    program = """bash -c 'x=$(head -c 200000000 /dev/zero | tr "\\0" x); echo survived'"""
    large = outcomes(tasks, program, Sandbox(runtime=runtime, memory_mib=64))
    assert {failure.cause for failure in large.values()} == {"exit"}
    assert not any("survived" in failure.reason for failure in large.values())
    assert containers(runtime) == before


def test_the_processes_of_a_container_end_with_a_killed_trainer(runtime, tasks, tmp_path):
    before = containers(runtime)
    trainer = start_trainer(tmp_path, "fix_sum", "sleep 1000", Sandbox(runtime=runtime))
    wait_for(lambda: containers(runtime) - before)
    (name,) = containers(runtime) - before
    wait_for(lambda: b"1000" in subprocess.run([runtime, "top", name], capture_output=True).stdout)
    words = [runtime, "inspect", "--format", "{{.State.Pid}}", name]
    first = int(subprocess.run(words, capture_output=True, check=True).stdout)
    assert Path(f"/proc/{first}").exists()
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not Path(f"/proc/{first}").exists())  # and with it its namespace
    if runtime == "podman":  # no daemon is left that would remove its record
        subprocess.run([runtime, "rm", "--force", name], capture_output=True, check=True)
    wait_for(lambda: containers(runtime) == before)
