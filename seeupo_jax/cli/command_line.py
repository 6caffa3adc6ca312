"""Common parts of commands that run a configuration: `--config`, `--workdir`, processes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import absl.logging
import jax

from seeupo_jax.checkpoint import (
    Checkpoints,
    NotWritable,
    check_may_write,
    check_path,
    check_replaceable,
    check_shared,
    check_writable,
    find_directory,
    keep_root_logger,
)
from seeupo_jax.cli.heap import keep_freed_memory
from seeupo_jax.cli.host_settings import host_settings
from seeupo_jax.configuration.fields import is_url
from seeupo_jax.configuration.flags import Flags, Wrong, integer, path
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import expand_home
from seeupo_jax.errors import FileError, file_errors, printable, terminal_line
from seeupo_jax.parallel import cluster
from seeupo_jax.parallel.device_memory import host_memory
from seeupo_jax.parallel.distributed import gather
from seeupo_jax.parallel.program_cache import keep_programs

_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"  # of XLA_FLAGS
# Of a GPU's memory, what JAX reserves where no variable says otherwise, whose own default is 0.75;
# plans are of 0.9. The rest is for CUDA's libraries: cuBLAS, cuDNN, NCCL.
_MEMORY_SHARE, _SHARE_VARIABLE = "0.92", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_MEMORY_VARIABLES = (
    _SHARE_VARIABLE,
    "XLA_CLIENT_MEM_FRACTION",  # jaxlib refuses both
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
_CLUSTER_TIMEOUT_S = 300
# Of Linux: a process's memory maps, and how many it may have.
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def add_config_flags(flags: Flags) -> None:
    """Declares `--config` and `--config.FIELD`."""
    flags.flag("config", "a Python file with get_config(), or package:NAME.", required=True)
    flags.overrides()


def add_run_flags(flags: Flags, *, required: bool = True) -> None:
    """Declares the flags of commands on a run: its configuration and its folder."""
    add_config_flags(flags)
    flags.flag("workdir", "the folder of the run.", _folder, required=required)


_ALLOWED_FOLDER = (
    "a folder, such as a bucket that gcsfuse mounts; checkpoints alone may go to"
    " config.checkpoint.directory=gs://BUCKET/PATH"
)


def _folder(value: str) -> Path:
    if is_url(value):
        raise Wrong(value, _ALLOWED_FOLDER)
    return path(value)


def run_folder(workdir: str | Path) -> Path:
    """The absolute path of a run's folder; ValueError: it is none, empty, or `is_url`."""
    if not isinstance(workdir, str | Path):
        raise ValueError(f"workdir: got {workdir!r}; allowed: {_ALLOWED_FOLDER}.")
    given = os.fspath(workdir)
    if not given.strip() or is_url(given):
        raise ValueError(f"workdir: got {given!r}; allowed: {_ALLOWED_FOLDER}.")
    return expand_home(workdir).absolute()


def add_cluster_flags(flags: Flags) -> None:
    """Declares what makes a process one of several."""
    flags.flag("coordinator", "HOST:PORT of process 0, if the environment does not define it.")
    flags.flag("process_id", "this process, from 0 on.", integer(0))
    flags.flag("num_processes", "how many there are; 1: this process alone.", integer(1))
    flags.flag(
        "cluster_timeout_s",
        "how long to wait for all processes at the start.",
        integer(1),
        default=_CLUSTER_TIMEOUT_S,
    )


@contextlib.contextmanager
def quiet_logs() -> Generator[None]:
    """Around a run from Python: what Orbax logs of every step of every save is left out."""
    absl.logging.set_verbosity(absl.logging.WARNING)
    with keep_root_logger():
        yield


class _StandardError(logging.StreamHandler):
    """Writes the package's warnings as they are, and those of other loggers with their names.

    Control characters, such as those in an environment's text, are escaped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self.setFormatter(logging.Formatter(logging.BASIC_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # of now
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        from_package = record.name.startswith("seeupo_jax.")
        if from_package:
            return terminal_line(record.getMessage())
        return printable(super().format(record))


_STANDARD_ERROR = _StandardError()


def log_to_stderr() -> None:
    """Sends a command's log to its standard error, one sentence per line."""
    absl.logging.set_verbosity(absl.logging.WARNING)
    logging.root.addHandler(_STANDARD_ERROR)


def read_config(given: argparse.Namespace) -> Config:
    """The validated configuration of the flags of `add_config_flags`; ValueError: a wrong field."""
    return load_config(given.config, given.override)


def check_places(config: Config, workdir: Path, *, make: bool = True) -> None:
    """ValueError where a run could not write; with `make` its folders are made and written to."""
    for check in _place_checks(config, workdir, make=make):
        check()


def missing_places(config: Config, workdir: Path) -> list[str]:
    """As `check_places` without `make`, for a run on another machine.

    Returns: for each of its folders that cannot be written on this machine the sentence on it.

    Raises:
      ValueError: what would be wrong on any machine.
    """
    missing: dict[str, str] = {}
    for check in _place_checks(config, workdir, make=False):
        try:
            check()
        except NotWritable as error:
            missing.setdefault(error.name, str(error))
    return list(missing.values())


def _place_checks(config: Config, workdir: Path, *, make: bool) -> Iterator[Callable[[], None]]:
    check = check_writable if make else check_may_write
    directory, output = config.checkpoint.directory, config.warm_start.output
    name = "--workdir" if directory is None else "config.checkpoint.directory"
    checkpoints = find_directory(config.checkpoint, workdir)
    yield partial(check_path, checkpoints, name)
    yield partial(check, workdir)
    if config.checkpoint.export:
        yield partial(check_replaceable, workdir / "policy")
    if output is not None:
        yield partial(check_replaceable, output, "config.warm_start.output")
    if directory is None:
        yield partial(check_may_write, checkpoints)
    else:
        yield partial(check, directory, name)


def check_shared_places(config: Config, workdir: Path) -> None:
    """ValueError where not all processes see a folder that they read, be it after hours."""
    if config.checkpoint.directory is None or config.warm_start.stages:
        check_shared(workdir)
    if config.checkpoint.directory is not None:
        check_shared(config.checkpoint.directory, "config.checkpoint.directory")


def run_file_errors(config: Config, workdir: Path) -> contextlib.AbstractContextManager[None]:
    """As `file_errors`, of a run: it says which checkpoint is intact."""
    directory = find_directory(config.checkpoint, workdir)

    def kept(error: FileError) -> str:
        try:
            newest = Checkpoints(directory, 1).finished()
        except OSError:
            return "what is saved cannot be read either"
        if newest is None:
            return "no checkpoint was saved yet"
        if error.file is not None and error.file.startswith(f"{directory}{os.sep}"):
            return (
                f"checkpoint {newest} is the newest: rerun the command, or remove a checkpoint that"
                " stays unreadable to resume from the one before it"
            )
        return f"checkpoint {newest} is intact; rerun the command to resume from it"

    return file_errors(kept, workdir)


def cluster_flags(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `join_cluster` among the values of flags."""
    names = ("coordinator", "process_id", "num_processes", "cluster_timeout_s")
    return {"config_file": given.config, **{name: getattr(given, name) for name in names}}


def fail_all_processes(given: argparse.Namespace, step: Callable[[], _T]) -> _T:
    """Runs a step of this process; if it fails, the others end with its error when they meet.

    Args:
      given: the values of flags, with those of `add_cluster_flags`.

    Raises:
      ValueError: of the step.
    """
    try:
        return step()
    except ValueError as error:
        with contextlib.suppress(ValueError):  # of flags, which matter less than the step's
            place = cluster.find_process_place(
                given.coordinator,
                given.process_id,
                given.num_processes,
                timeout_s=given.cluster_timeout_s,
            )
            if place is not None:
                cluster.report_failure(place, str(error))
        raise


def join_cluster(
    config: Config,
    *,
    config_file: str | None = None,
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    cluster_timeout_s: int = _CLUSTER_TIMEOUT_S,
) -> None:
    """Makes this process one of several, where the flags or the environment say so.

    Processes that have met already, as in Python code, are compared again.

    Args:
      config_file: as of `host_settings`.

    Raises:
      ValueError: they do not all come in time, or differ in what must be the same.
    """
    if jax.distributed.is_initialized():
        return _compare(config)
    timeout_s = cluster_timeout_s
    place = cluster.find_process_place(coordinator, process_id, num_processes, timeout_s=timeout_s)
    if place is None:
        return
    cluster.join(place, host_settings(config, config_file), timeout_s=timeout_s)


def _compare(config: Config) -> None:
    """ValueError where processes that have met differ in what must be the same."""
    if jax.process_count() == 1:
        return
    first, *others = gather(host_settings(config))
    for number, other in enumerate(others, 1):
        problem = cluster.first_difference(first, number, other)
        if problem is not None:
            raise ValueError(problem)


def prepare_xla(*, small: bool = False) -> None:
    """Settings of a process that trains or measures; before the first array is made.

    Compiled programs are kept, in JAX_COMPILATION_CACHE_DIR or the user's cache. Where XLA computes
    on the CPU, so is the memory that its programs free, up to half of the machine's, but for a
    small policy: what compiles side by side would wait for the one heap, twice as long as without.
    On a GPU, matrix products are cuBLAS's unless XLA_FLAGS says otherwise, and 0.92 of its memory
    is reserved unless JAX's variables do. Programs of earlier runs of this process are forgotten
    where they have used up half of its memory maps.

    Args:
      small: the policy is, as of `build.is_small_policy`.

    Raises:
      ValueError: the process computes in 64 bits, which no program here is made for.
    """
    if jax.config.jax_enable_x64:
        raise ValueError(
            "jax_enable_x64: got True; allowed: False, since arrays here are of 32 bits at most:"
            " leave JAX_ENABLE_X64 unset, or train in a process of its own."
        )
    _forget_programs()
    keep_programs(_cache_folder())
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    _set_products_of_gpu()
    _set_memory_of_gpu()
    if _only_cpu() and not small:
        keep_freed_memory(host_memory() // 2)


def _cache_folder() -> str | None:
    """Where compiled programs are kept; None: nowhere."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return os.environ["JAX_COMPILATION_CACHE_DIR"]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        _LOGGER.warning(
            "compiled programs are not kept, since this user has no home folder;"
            " JAX_COMPILATION_CACHE_DIR may name another."
        )
        return None
    return str(cache / "seeupo_jax" / "xla")


def _forget_programs() -> None:
    """Keeps a process that trains run after run from crashing for want of memory maps.

    Linux allows a process 65,530 of them; the programs of one iteration of the quickstart on a CPU
    take 4,800, and another learning rate makes others.
    """
    if not (_MAPS.exists() and _MOST_MAPS.exists()):
        return  # another system
    if 2 * _MAPS.read_bytes().count(b"\n") > int(_MOST_MAPS.read_text()):
        jax.clear_caches()
        gc.collect()


def _set_products_of_gpu() -> None:
    """Keeps XLA from trying Triton's kernels for each matrix product, before its backend starts.

    On an H200 the pass that scores with 135 million parameters compiled in 39 s with them, in 4 s
    without (jax 0.11.2).
    """
    given = os.environ.get("XLA_FLAGS", "")
    if _TRITON_PRODUCTS not in given and _has_cuda():
        os.environ["XLA_FLAGS"] = f"{given} --{_TRITON_PRODUCTS}=false".strip()


def _set_memory_of_gpu() -> None:
    """Lets JAX reserve as much of a GPU as is planned with, before its backend starts."""
    if _has_cuda() and not any(name in os.environ for name in _MEMORY_VARIABLES):
        os.environ[_SHARE_VARIABLE] = _MEMORY_SHARE


def _has_cuda() -> bool:
    return any("cuda" in plugin.name for plugin in metadata.entry_points(group="jax_plugins"))


def _only_cpu() -> bool:
    """Whether XLA will compute on the CPU, without asking for its devices yet."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms == "cpu"
    plugins = metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
