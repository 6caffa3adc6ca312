"""The PyTorch baseline, which lives in third_party beside the package, as a module of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[3] / "third_party" / "torch_baseline"


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
