"""One of several processes, with the flags of the real ones; run as `python -m small_process`.

`--config` names what to do: sum (over all devices), fail (process 1 does), wait (for SIGTERM),
leave (a process behind that holds the output).
"""

import pathlib
import re
import signal
import subprocess
import sys
import time

FLAGS = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])


def number(name: str, default: int) -> int:
    return int(FLAGS.get(name, default))


def total() -> None:
    import jax
    from jax.experimental import multihost_utils

    if "coordinator" in FLAGS:
        jax.distributed.initialize(
            FLAGS["coordinator"], number("num_processes", 1), number("process_id", 0)
        )
    every = multihost_utils.process_allgather(jax.numpy.ones(jax.local_device_count()))
    print(f"devices {jax.local_device_count()} of {jax.device_count()}, sum {int(every.sum())}")
    print(f"workdir {FLAGS['workdir']};", end="", flush=True)  # no end of line


def fail() -> None:
    if number("process_id", 0) == 1:
        sys.exit("process 1 cannot go on")  # exit code 1
    wait()


def wait() -> None:
    """Saves when asked to stop; the workdir says if that is `slow`, or longer than anyone waits."""

    def stop(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1 if "slow" in FLAGS["workdir"] else 0)
        if "/" in FLAGS["workdir"]:
            pathlib.Path(f"{FLAGS['workdir']}.{number('process_id', 0)}").touch()
        print("saved", flush=True)
        if "stubborn" not in FLAGS["workdir"]:
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    assert signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.default_int_handler)
    print("ready", flush=True)
    while True:
        time.sleep(0.05)


def leave() -> None:
    subprocess.Popen(["sleep", "60"])
    print("left", flush=True)


what = re.search(r"(\w+)\.py$", FLAGS["config"])
{"sum": total, "fail": fail, "wait": wait, "leave": leave}[what[1]]()
