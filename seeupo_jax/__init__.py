"""SeeUPO in JAX: sequence-level policy optimisation for multi-turn language-model agents.

`docs/python.md` shows the public names below. Each is imported when it is first used, so that
environments and `--help` do without jax.
"""

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seeupo_jax.configuration.loading import load_config
    from seeupo_jax.configuration.schema import Config
    from seeupo_jax.envs.base import Environment, StepResult
    from seeupo_jax.errors import NotLearning
    from seeupo_jax.evaluate import evaluate
    from seeupo_jax.evaluation.evaluation_run import EvaluationResult
    from seeupo_jax.evaluation.served_policy import Server
    from seeupo_jax.sft import SftResult, sft
    from seeupo_jax.train import TrainResult, train
    from seeupo_jax.training.callbacks import Callback, RunHandle
    from seeupo_jax.trajectories.reader import read_trajectories
    from seeupo_jax.types import Trajectory

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Config",
    "Environment",
    "EvaluationResult",
    "NotLearning",
    "RunHandle",
    "Server",
    "SftResult",
    "StepResult",
    "TrainResult",
    "Trajectory",
    "__version__",
    "evaluate",
    "load_config",
    "read_trajectories",
    "sft",
    "train",
]

_MODULES = {
    "Callback": "training.callbacks",
    "Config": "configuration.schema",
    "Environment": "envs.base",
    "EvaluationResult": "evaluation.evaluation_run",
    "NotLearning": "errors",
    "RunHandle": "training.callbacks",
    "Server": "evaluation.served_policy",
    "SftResult": "sft",
    "StepResult": "envs.base",
    "TrainResult": "train",
    "Trajectory": "types",
    "evaluate": "evaluate",
    "load_config": "configuration.loading",
    "read_trajectories": "trajectories.reader",
    "sft": "sft",
    "train": "train",
}

# Imports and tracing make objects by the million and hardly any garbage: by Python's own threshold
# looking for it takes a sixth of a short run's CPU time. One that was set, or 0 (off), stays.
if gc.get_threshold()[0] in (700, 2000):  # Python's own, by its version
    gc.set_threshold(10_000, 10, 10)

# Of transformers, tokenizers and configs are used: its advice on a missing PyTorch is not.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `train` and its like functions: an import of a module of that name sets it here."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
