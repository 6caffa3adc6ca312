"""The PyTorch side: sweeps of the baseline, one after the other on one model."""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seeupo_jax.bench.runners import torch_imports
from seeupo_jax.bench.runners.same_update import Outcome
from seeupo_jax.bench.settings import RECIPE, Settings


def use_every_core(cores: int) -> None:
    """Lets PyTorch run on as many threads as JAX does."""
    torch_imports.torch().set_num_threads(cores)


# By PyTorch's name of the device. On two CPU cores (tiny, `bfcl --groups=2`, eager) a sweep took
# 21.0 s with 8,192, 15.8 s with these, 16.7 s with 2,048, 17.3 s with 1,024. No GPU was measured.
MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 8192}


class TorchSweeps:
    """Sweeps that go on from each other's weights.

    Args:
      folder: of the model. path: of the trajectories.
      values: fields of the configuration, by `choices.values`.
      way: one of `settings.CONTENDERS`.
    """

    def __init__(
        self,
        folder: Path,
        path: Path,
        values: Mapping[str, Any],
        settings: Settings,
        *,
        device: str,
        way: str,
    ) -> None:
        modules = {name: torch_imports.load(name) for name in ("options", "sweep", "trajectories")}
        self._update, self._device = torch_imports.load("update"), device
        self.model = self._update.load(folder, device)
        self._parse = modules["trajectories"].parse
        self._sampler = _sampler(self.model, values["model.dtype"])
        self._trajectories = modules["trajectories"].read(path)
        tokens = settings.torch_tokens
        options = modules["options"].from_flat(
            values,
            compile=way == "compile",
            null_turns=way == RECIPE,
            microbatch_tokens=MICROBATCH_TOKENS[device] if tokens is None else tokens,
        )
        self._sweep = modules["sweep"].Sweep(self.model, options)
        self._last: Any = None

    def run(self, records: Sequence[str] | None = None) -> float:
        """One sweep; the seconds it took.

        Args:
          records: lines of a trajectory file, to sweep over instead.
        """
        trajectories = self._trajectories
        if records is not None:
            places = (f"line {number}" for number in range(1, len(records) + 1))
            trajectories = list(map(self._parse, records, places))
        self._wait()
        began = time.perf_counter()
        self._last = self._sweep.run(trajectories)
        self._wait()
        return time.perf_counter() - began

    def outcome(self) -> Outcome:
        """What the last sweep did, and the weights as they are now."""
        steps = self._update.as_json(self._last)["steps"]
        return Outcome(steps, self.tensors())

    def tensors(self) -> dict[str, np.ndarray]:
        """A copy of the weights, by their names in files."""
        named = self.model.named_parameters()
        return {name: p.detach().float().cpu().numpy().copy() for name, p in named}

    @property
    def positions(self) -> int:
        """That went through the network in the last sweep, padding included."""
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
        torch = torch_imports.torch()
        self._wait()
        began = time.perf_counter()
        with torch.no_grad():
            pairs = zip(self._sampler.parameters(), self.model.parameters(), strict=True)
            for own, trained in pairs:
                own.copy_(trained)
        self._wait()
        return self._sampler, time.perf_counter() - began

    def _wait(self) -> None:
        if self._device == "cuda":
            torch_imports.torch().cuda.synchronize()


def _sampler(model: Any, dtype: str) -> Any:
    """The same model to sample with, whose layers are not compiled for whole rows.

    In the type of the activations: in bfloat16 it is a copy, else its weights are the model's own.
    """
    torch, transformers = torch_imports.torch(), importlib.import_module("transformers")
    kind = getattr(torch, dtype)
    shared = {id(p): p for p in model.parameters()} if kind == model.dtype else {}
    own = copy.deepcopy(model, shared).to(kind).eval()
    # An end token or a top-k of the folder's would change the work.
    own.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return own
