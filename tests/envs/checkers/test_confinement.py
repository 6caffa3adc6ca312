"""The seccomp filter, interpreted by a twin, and the guards on this kernel."""

import errno
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seeupo_jax.envs.checkers import confinement
from seeupo_jax.envs.checkers.confinement import filter_program

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PID = 4321
# Of the kernel's tables: name, number on x86-64, on aarch64, arguments, the error or 0.
CALLS = [
    ("read", 0, 63, (), 0),
    ("execve", 59, 221, (), 0),
    ("mmap", 9, 222, (), 0),
    ("openat", 257, 56, (0, 0, 0o2000000), 0),  # O_CLOEXEC
    ("openat", 257, 56, (0, 0, 1), errno.EPERM),
    ("openat", 257, 56, (0, 0, 0o100), errno.EPERM),  # O_CREAT
    ("clone", 56, 220, (0x3D0F00,), 0),  # a thread
    ("clone", 56, 220, (0x11,), errno.EPERM),
    ("clone3", 435, 435, (), errno.ENOSYS),
    ("kill", 62, 129, (PID, 9), 0),
    ("kill", 62, 129, (PID + 1, 9), errno.EPERM),
    ("kill", 62, 129, (0, 9), errno.EPERM),
    ("kill", 62, 129, (2**32 - 1, 9), errno.EPERM),
    ("tgkill", 234, 131, (1, 1, 9), errno.EPERM),
    ("prlimit64", 302, 261, (0,), 0),
    ("prlimit64", 302, 261, (1,), errno.EPERM),
    ("socket", 41, 198, (2,), errno.EPERM),
    ("socketpair", 53, 199, (1,), 0),
    ("socketpair", 53, 199, (2,), errno.EPERM),
    ("fcntl", 72, 25, (0, 3), 0),
    ("fcntl", 72, 25, (0, 8), errno.EPERM),
    ("ioctl", 16, 29, (0, 0x5401), 0),
    ("ioctl", 16, 29, (0, 0x5412), errno.EPERM),
    ("ptrace", 101, 117, (), errno.EPERM),
    ("unlinkat", 263, 35, (), errno.EPERM),
    ("memfd_create", 319, 279, (), errno.ENOSYS),
]


def interpret(program, number, arch, arguments):
    """Runs classic BPF as Linux's networking/filter documentation defines it."""
    words = {0: number, 4: arch}
    words |= {16 + 8 * at: value for at, value in enumerate(arguments)}
    accumulator = counter = 0
    while True:
        code, if_true, if_false, constant = program[counter]
        counter += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            accumulator = words.get(constant, 0)
            continue
        compare = {0x15: lambda a, k: a == k, 0x35: lambda a, k: a >= k, 0x45: lambda a, k: a & k}
        counter += if_true if compare[code](accumulator, constant) else if_false


@pytest.mark.parametrize("machine", ARCH)
def test_the_filter_refuses_calls_by_number_and_argument(machine):
    program = filter_program(machine, PID)
    assert len(program) < 4096 and all(0 <= part < 256 for p in program for part in p[1:3])
    for name, intel, arm, arguments, error in CALLS:
        number = intel if machine == "x86_64" else arm
        wanted = ERRNO | error if error else ALLOW
        assert interpret(program, number, ARCH[machine], arguments) == wanted, (name, arguments)
    other = ARCH["aarch64" if machine == "x86_64" else "x86_64"]
    assert interpret(program, 0, other, ()) == KILL
    x32 = interpret(filter_program("x86_64", PID), 0x40000000 + 41, ARCH["x86_64"], ())
    assert x32 == ERRNO | errno.ENOSYS


HEADERS = (
    ("**/asm/unistd_64.h", r"#define __NR_(\w+)\s+(\d+)", 0),
    ("asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+)\s+(\d+)", 1),
)


@pytest.mark.parametrize("header, pattern, column", HEADERS)
def test_numbers_of_calls_are_those_of_the_kernels_headers(header, pattern, column):
    files = [*Path("/usr/include").glob(header)]
    if not files or platform.machine() != "x86_64":
        pytest.skip("without the kernel's headers")
    numbers = dict(re.findall(pattern, files[0].read_text()))
    for name, pair in confinement._CALLS.items():
        if name in numbers:  # older headers lack new calls
            assert pair[column] == int(numbers[name]), name


TRIES = """
import os, json
def error(call):
    try:
        call()
    except OSError as failure:
        return type(failure).__name__
    return "done"
print(json.dumps([error(lambda: open(path).read()) for path in %r] + [
    error(lambda: open(%r, "a")), error(lambda: os.unlink(%r)), error(os.fork)]))
"""


@pytest.mark.parametrize("is_hidden", [True, False])
def test_without_landlock_files_are_readable_and_still_not_writable(tmp_path, is_hidden):
    secret = tmp_path / "secret"
    secret.write_text("42")
    options = {"readable": [sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]}
    options |= {"memory_bytes": 2**30, "cpu_s": 10, "is_hidden": is_hidden}
    run = "import sys; sys.path.insert(0, sys.argv.pop(1)); import confinement as c; c.main()"
    tries = TRIES % ([str(secret), "/etc/hostname"], str(secret), str(secret))
    python = str(Path(sys.executable).resolve())
    command = [python, "-I", "-S", "-c", run, str(Path(confinement.__file__).parent)]
    command += [json.dumps(options), python, "-I", "-S", "-c", tries]
    done = subprocess.run(command, capture_output=True, text=True)
    reads = "PermissionError" if is_hidden else "done"
    assert json.loads(done.stdout or "[]") == [reads, reads, *["PermissionError"] * 3], done.stderr
    assert done.stderr.startswith("\0") and secret.read_text() == "42"
