"""Settings of every test: CPU with eight devices, and no silent rank promotion."""

import ctypes
import gc
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
from places import ROOT
from process_cases import QUICK_XLA
from tiers import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_deselected,
    pytest_ignore_collect,
    pytest_terminal_summary,
    pytest_testnodedown,
)

os.environ["JAX_PLATFORMS"] = "cpu"
# Threads of PyTorch and BLAS that wait for each other spin: where workers share the cores, tests of
# a network in PyTorch cost two to five times the CPU time.
os.environ["OMP_NUM_THREADS"] = "1"
# Most of the tests' time is spent on compiling, and half of that on optimizations.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK_XLA]
)
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no test reaches the hub: a closed port
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As in the background of a shell; what tests start would ignore it too, and could not help it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
LIBTPU = ROOT / "third_party" / "libtpu" / "lib" / "libtpu" / "libtpu.so"
if LIBTPU.exists():
    os.environ.setdefault("TPU_LIBRARY_PATH", str(LIBTPU))

import jax  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

MAPS = Path("/proc/self/maps")  # Linux's list of a process's memory maps; it allows 65,530 of them
MANY = 20_000
PAGES = Path("/proc/self/statm")  # how many pages a process has: in all, and in memory
LARGE = 1_500 * 2**20  # bytes that a worker holds between files before it forgets programs
LARGEST = 2**31  # whatever is left: a file's own programs come on top

# Tracing makes objects by the million and hardly any garbage: by Python's own thresholds looking
# for it takes a tenth of the tests' time.
gc.set_threshold(50_000, 10, 10)


def pytest_collection_finish():
    gc.freeze()  # what was imported stays: to look at it again each time takes half a second


@pytest.fixture
def optimized():
    """Compiles as users do: for tests that look at the compiled programs themselves."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def one_device():
    """Runs in this process take one of the eight devices: their programs compile sooner."""
    with pytest.MonkeyPatch.context() as patch:
        one = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: one)
        yield


@pytest.fixture(autouse=True, scope="module")
def cache_as_before():
    """Commands that tests call turn the cache of compiled programs on; other files' have none."""
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    if before != {name: getattr(jax.config, name) for name in names}:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # else the folder of before stays in use


@pytest.fixture(autouse=True, scope="module")
def variables_as_before():
    """Commands that tests call set variables; processes that other files start would inherit them.

    With NPROC=1 of a study their sums are other ones.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def in_memory() -> int:
    """Bytes of this process."""
    return int(PAGES.read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(autouse=True, scope="module")
def threads_as_before():
    """A benchmark takes every core for PyTorch; its threads would spin in all files that follow."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bounds_of_workers() -> dict[str, int]:
    """What `few_programs` goes by."""
    return {"maps": MANY, "bytes": LARGE}


@pytest.fixture(autouse=True, scope="module")
def few_programs(bounds_of_workers):
    """Forgets compiled programs where there are many, or where they fill the memory.

    Out of maps for more, XLA crashes.
    """
    yield
    if not MAPS.exists():
        return
    large = in_memory() > bounds_of_workers["bytes"]
    if large or MAPS.read_bytes().count(b"\n") > bounds_of_workers["maps"]:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    if large:  # what is left is not worth another try before it has grown
        bounds_of_workers["bytes"] = min(LARGEST, in_memory() + 2**29)
