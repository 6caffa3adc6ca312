"""Confines this process for good, then executes an untrusted program. Linux only.

Landlock hides all files but Python's own and the program's; it needs Linux 5.13. A seccomp filter
refuses the system calls by which a program changes files, starts processes, opens connections, or
reaches other processes. Both need no rights and work in containers. Resource limits bound the
memory and CPU time. It imports no other module of the package: each program has its own process.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONFINED = b"\0"  # written to stderr when all guards are set up, before the program
_OPEN_FILES = 64

# System calls by name: their numbers on x86-64 and on aarch64; None: there is none.
_CALLS: Mapping[str, tuple[int | None, int | None]] = {
    # Processes. A thread is a clone, too.
    **{"fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272)},
    **{"prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    **{"sched_setaffinity": (203, 122), "sched_setparam": (142, 118)},
    **{"sched_setscheduler": (144, 119), "sched_setattr": (314, 274)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239), "fcntl": (72, 25), "ioctl": (16, 29)},
    # Connections.
    **{"socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425)},
    # Memory that RLIMIT_AS does not count, or that outlives or is shared by processes.
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"shmget": (29, 194), "shmctl": (31, 195), "shmat": (30, 196)},
    **{"semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192)},
    **{"msgget": (68, 186), "msgctl": (71, 187), "msgrcv": (70, 188), "msgsnd": (69, 189)},
    **{"mq_open": (240, 180), "mq_unlink": (241, 181)},
    # Files.
    **{"open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None)},
    **{"truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276)},
    **{"unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None)},
    **{"mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33)},
    **{"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)},
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None)},
    **{"utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"sync": (162, 81), "syncfs": (306, 267)},
    # Rights, and views of files.
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428)},
    **{"open_by_handle_at": (304, 265), "bpf": (321, 280), "perf_event_open": (298, 241)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"userfaultfd": (323, 282)},
}
# Calls that depend on an argument: its position, a test, and the values that are refused, or for
# `own` the only ones that are allowed. All others of _CALLS are refused.
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AF_UNIX, _CLONE_THREAD = 1, 0x10000
_OWNERS = (
    8,
    10,
    15,
    1024,
)  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, which send signals
# ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_RULES: Mapping[str, tuple[int, str, tuple[int, ...]]] = {
    "clone": (0, "needs bits", (_CLONE_THREAD,)),
    "kill": (0, "own", ()),
    "tgkill": (0, "own", ()),
    "prlimit64": (0, "own", (0,)),
    "fcntl": (1, "not", _OWNERS),
    "ioctl": (1, "only", _IOCTLS),
    "socketpair": (0, "only", (_AF_UNIX,)),
    "open": (1, "no bits", (_WRITING,)),
    "openat": (2, "no bits", (_WRITING,)),
}
_EPERM, _ENOSYS = 1, 38
# Python's libraries use another call where these do not exist.
_ABSENT = ("clone3", "openat2", "memfd_create", "io_uring_setup")
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH

# BPF: load a word of `struct seccomp_data`; jumps; return.
_LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def filter_program(machine: str, pid: int) -> list[_Instruction]:
    """The seccomp filter of a process, in BPF.

    Args:
      machine: as of `platform.machine()`, a key of `MACHINES`.
      pid: of the process, the only one that it may signal.
    """
    column, arch = MACHINES[machine]
    program = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":  # numbers of x32, a second table
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE | _ENOSYS)]
    for name, numbers in _CALLS.items():
        if (number := numbers[column]) is not None:
            body = _body(name, pid)
            program += [(_EQUAL, 0, len(body), number), *body]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _body(name: str, pid: int) -> list[_Instruction]:
    """What follows where the call is this one; it always returns."""
    refuse = (_RETURN, 0, 0, _REFUSE | (_ENOSYS if name in _ABSENT else _EPERM))
    if name not in _RULES:
        return [refuse]
    allow = (_RETURN, 0, 0, _ALLOW)
    position, test, values = _RULES[name]
    load = (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * position)
    if test in ("needs bits", "no bits"):
        ends = (allow, refuse) if test == "needs bits" else (refuse, allow)
        return [load, (_BITS, 0, 1, values[0]), *ends]
    listed = (*values, pid) if test == "own" else values
    ends = (allow, refuse) if test != "not" else (refuse, allow)
    return [load, *[part for value in listed for part in ((_EQUAL, 0, 1, value), ends[0])], ends[1]]


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 38, 22, 24
_SECCOMP_MODE_FILTER, _CAPABILITIES = 2, 64
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _PATH_BENEATH, _O_PATH = 1, 1, 0o10000000
_EXECUTE, _READ_FILE, _READ_DIR = 1, 4, 8
# All rights to files and folders that a version of Landlock knows.
_RIGHTS = (13, 14, 15, 15)  # bits, of versions 1 to 4; later ones have 16


def landlock_version() -> int:
    """The version of Landlock of this kernel; 0: it has none, or a container forbids it."""
    return max(0, _LIBC.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION))


def hide_files(readable: Iterable[str]) -> None:
    """Makes all files and folders unreadable but these and those in them. Raises: OSError."""
    version = landlock_version()
    bits = _RIGHTS[version - 1] if version <= len(_RIGHTS) else 16
    handled = struct.pack("Q", (1 << bits) - 1)
    ruleset = _checked(_LIBC.syscall(_LANDLOCK_CREATE, handled, len(handled), 0))
    for path in readable:
        try:
            file = os.open(path, _O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = _EXECUTE | _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        rule = struct.pack("=Qi", rights, file)
        _checked(_LIBC.syscall(_LANDLOCK_ADD, ruleset, _PATH_BENEATH, rule, 0))
        os.close(file)
    _checked(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def refuse_calls() -> None:
    """Installs the seccomp filter. Raises: OSError."""
    program = filter_program(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def confine(*, readable: Sequence[str], memory_bytes: int, cpu_s: int, is_hidden: bool) -> None:
    """Confines this process and its successors.

    Args:
      readable: files and folders that stay readable.
      memory_bytes: limit of the address space. cpu_s: limit of the CPU time, in seconds.
      is_hidden: whether Landlock hides the other files.

    Raises:
      OSError: the kernel refuses.
    """
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    for capability in range(_CAPABILITIES):  # so that no program of root has any
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if is_hidden:
        hide_files(readable)
    refuse_calls()


def main() -> None:
    """Confines this process and executes a command. Arguments: those of `confine`, the words."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    try:
        confine(**options)
    except OSError as error:
        sys.exit(f"the program cannot be confined: {error}")
    os.write(2, CONFINED)
    os.execv(sys.argv[2], sys.argv[2:])
