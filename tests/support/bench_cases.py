"""What tests of benchmarks run: a network that compiles quickly, on one device."""

import jax
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache

from seeupo_jax.benchmarks import torch_runner
from seeupo_jax.benchmarks.settings import MODELS, BenchSettings

SMALL = {
    "vocab_size": 64,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "mlp_width": 24,
}
SETTINGS = BenchSettings(
    workload="long",
    scale=0.05,
    turns=2,
    groups=1,
    group_size=2,
    repeats=2,
    torch=("eager", "recipe", "packed"),
)


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """One device, one thread of PyTorch's (several wait for each other), a small network.

    Its programs are compiled once for all tests of a module.
    """
    every, threads = jax.devices(), torch.get_num_threads()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: every[:1])
        patch.setitem(MODELS, "tiny", SMALL)
        patch.setattr(torch_runner, "use_every_core", lambda: torch.set_num_threads(1))
        yield
    torch.set_num_threads(threads)
