"""What tests start quickly is what `subprocess` would have started."""

import json
import os
import signal
import subprocess
import sys

import pytest
from loaded_python import LoadedPython, run
from process_cases import environment

PROGRAM = """
import json, os, signal, sys
print("on stderr", file=sys.stderr)
if sys.argv[1] == "wait":
    print("waits", flush=True)
    signal.pause()
about = {
    "argv": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "parent": os.getppid(), "path": sys.path, "files": len(os.listdir("/proc/self/fd")),
    "interrupt": str(signal.getsignal(signal.SIGINT)), "stdin": sys.stdin.read(),
    "torch": sys.modules["torch"], "threads": len(os.listdir("/proc/self/task")),
}
import jax
about["cache"] = jax.config.jax_compilation_cache_dir
about["devices"] = jax.device_count()
print(json.dumps(about))
sys.exit(3)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_it_is_as_a_process_that_was_started_afresh(program, tmp_path):
    env = environment(devices=3) | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    args = [sys.executable, str(program), "a", "b c"]
    options = {"env": env, "cwd": "/", "stdin": subprocess.DEVNULL}
    forked = run(args, **options)
    fresh = subprocess.run(args, capture_output=True, text=True, **options)
    assert forked.returncode == fresh.returncode == 3
    assert forked.stderr == fresh.stderr == "on stderr\n"
    here, there = json.loads(forked.stdout), json.loads(fresh.stdout)
    assert here["parent"] == os.getpid() and here["devices"] == 3 and here["torch"] is None
    assert here.pop("threads") <= there.pop("threads")
    assert here == there


def test_it_can_be_killed_and_its_modules_are_those_of_the_command(program):
    args = [sys.executable, str(program), "wait"]
    with LoadedPython(args, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n" and process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    called = [sys.executable, "-m", "seeupo_jax.train", "--no_such_flag=1"]
    done = run(called, env=environment())
    assert done.returncode == 2 and done.stderr.startswith("error: --no_such_flag")


def test_hashes_differ_between_one_process_and_the_next(tmp_path):
    (tmp_path / "program.py").write_text("print(hash('text'))")
    args = [sys.executable, str(tmp_path / "program.py")]
    assert len({run(args, env=environment()).stdout for _ in range(4)}) == 2
