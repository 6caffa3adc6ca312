"""The PyTorch side: the baseline of third_party, with successive sweeps on one set of weights."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from seeupo_jax.benchmarks.comparison import SweepOutcome, torch_name
from seeupo_jax.benchmarks.settings import PACKED, RECIPE
from seeupo_jax.benchmarks.workloads import Inputs
from seeupo_jax.parallel.host_cores import usable_cores

FOLDER = Path(__file__).parents[2] / "third_party" / "torch_baseline"
# By PyTorch's name of the device. On two CPU cores (tiny, `bfcl --groups=2`, eager) a sweep took
# 21.0 s with 8,192, 15.8 s with these, 16.7 s with 2,048, 17.3 s with 1,024. No GPU was measured.
MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 8192}


def load(name: str) -> ModuleType:
    """A module of the baseline.

    Raises:
      ValueError: PyTorch, `transformers` or the folder is missing.
    """
    if not (FOLDER / "torch_baseline").is_dir():
        raise ValueError(
            f"bench: no folder {FOLDER}; allowed: a checkout of the repository, which has it."
        )
    torch()
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(f"torch_baseline.{name}")


def torch() -> ModuleType:
    """PyTorch.

    Raises:
      ValueError: it is missing, or `transformers` is.
    """
    try:
        importlib.import_module("transformers")
        return importlib.import_module("torch")
    except ImportError as error:
        raise ValueError(
            f"bench: {error}; allowed: both installed, by pip install torch==2.13.0 transformers."
        ) from None


def no_torch(platform: str) -> str | None:
    """Why the baseline cannot run together with JAX on a platform; None if it can."""
    if platform == "tpu":
        return "the PyTorch baseline does not run on TPU"
    try:
        load("generate")
        version, has_gpu = torch().__version__, torch().cuda.is_available()
    except ValueError as error:  # a sentence already
        return str(error).removeprefix("bench: ").rstrip(".")
    except Exception as error:  # a broken CUDA library raises whatever it likes
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None if platform == "cpu" or has_gpu else f"PyTorch {version} sees no GPU"


def torch_device() -> str:
    """PyTorch's name of the device that JAX uses."""
    return "cuda" if jax.devices()[0].platform in ("gpu", "cuda") else "cpu"


def release_memory() -> None:
    """Frees the GPU memory that PyTorch caches."""
    gc.collect()
    torch().cuda.empty_cache()  # does nothing before CUDA was used


def use_every_core() -> None:
    """Lets PyTorch run on as many threads as JAX does."""
    torch().set_num_threads(usable_cores())


def torch_sweeps(inputs: Inputs) -> dict[str, TorchSweeps]:
    """The baseline's contenders, by name."""
    ways = inputs.settings.torch
    if ways:
        use_every_core()
    return {torch_name(way): TorchSweeps(inputs, way) for way in ways}


class TorchSweeps:
    """Sweeps of the baseline in one of the ways of `settings.CONTENDERS`."""

    def __init__(self, inputs: Inputs, way: str) -> None:
        modules = {name: load(name) for name in ("options", "sweep", "trajectories")}
        self._update, self._device = load("update"), torch_device()
        self.model = self._update.load(inputs.model, self._device)
        self._sampler = _sampler(self.model, inputs.arch.dtype)
        self._read = modules["trajectories"].read
        self._trajectories = self._read(inputs.lines)
        tokens = inputs.settings.torch_tokens
        options = modules["options"].from_flat(
            inputs.fields,
            compile=way == "compile",
            null_turns=way == RECIPE,
            share_prefixes=way == PACKED,
            microbatch_tokens=MICROBATCH_TOKENS[self._device] if tokens is None else tokens,
        )
        self._sweep = modules["sweep"].Sweep(self.model, options)
        self._last: Any = None

    def run(self, lines: Path | None = None) -> float:
        """Runs one sweep; the seconds it took.

        Args:
          lines: a file of trajectories to sweep over instead.
        """
        trajectories = self._trajectories if lines is None else self._read(lines)
        self._wait()
        began = time.perf_counter()
        self._last = self._sweep.run(trajectories)
        self._wait()
        return time.perf_counter() - began

    def set_residual_type(self, dtype: str) -> None:
        """The residual stream in this type: sublayers' results, in that of autocast, are added."""
        to = getattr(torch(), dtype)
        for model in filter(None, (self.model, self._sweep.reference)):
            embedding = model.get_input_embeddings()
            embedding.register_forward_hook(lambda _, __, vectors: vectors.to(to))

    def outcome(self) -> SweepOutcome:
        """The outcome of the last sweep, and the current weights."""
        named = self.model.named_parameters()
        tensors = {name: p.detach().float().cpu().numpy().copy() for name, p in named}
        return SweepOutcome(self._update.as_json(self._last)["steps"], tensors)

    @property
    def positions(self) -> int:
        """Positions that went through the network in the last sweep, padding included."""
        return sum(self._last.positions.values())

    @property
    def state_bytes(self) -> int:
        """Weights, the reference policy's, and the optimizer's state."""
        reference = self._sweep.reference
        held = [*self.model.parameters(), *(() if reference is None else reference.parameters())]
        moments = self._sweep.stepper._optimizer.state.values()
        held += [part for state in moments for part in state.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def sampler(self) -> tuple[Any, float]:
        """The model for `generate`, and the seconds that it takes to bring it up to date."""
        if self._sampler.dtype == self.model.dtype:
            return self._sampler, 0.0  # has these very weights
        self._wait()
        began = time.perf_counter()
        with torch().no_grad():
            pairs = zip(self._sampler.parameters(), self.model.parameters(), strict=True)
            for copied, trained in pairs:
                copied.copy_(trained)
        self._wait()
        return self._sampler, time.perf_counter() - began

    def _wait(self) -> None:
        if self._device == "cuda":
            torch().cuda.synchronize()


def _sampler(model: Any, dtype: str) -> Any:
    """The same model to sample with, whose layers are not compiled for whole rows.

    In the type of the activations: in bfloat16 it is a copy, else its weights are the model's own.
    """
    kind, transformers = getattr(torch(), dtype), importlib.import_module("transformers")
    shared = {id(p): p for p in model.parameters()} if kind == model.dtype else {}
    sampler = copy.deepcopy(model, shared).to(kind).eval()
    # An end token or a top-k of the folder's would change the work.
    sampler.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return sampler
