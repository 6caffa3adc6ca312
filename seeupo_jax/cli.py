"""What commands that run a configuration share: `--config` with overrides, and `--workdir`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags, logging

from seeupo_jax.algorithms.recipes import RECIPES
from seeupo_jax.checkpoint import check_writable
from seeupo_jax.config import Config, load_config
from seeupo_jax.errors import sentence_errors

__all__ = ["parse_flags", "read_config", "sentence_errors", "use_compilation_cache"]

_CONFIG = flags.DEFINE_string("config", None, "A Python file with get_config().", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
_OVERRIDES = flags.DEFINE_multi_string(
    "override", [], "FIELD.SUB=VALUE on top of the config; --config.FIELD.SUB=VALUE is the same."
)


def parse_flags(argv: Sequence[str]) -> list[str]:
    """The command line with every `--config.FIELD=VALUE` as `--override=FIELD=VALUE`."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save otherwise
    return [re.sub(r"^--config\.", "--override=", argument) for argument in argv]


def read_config() -> tuple[Config, Path]:
    """The validated configuration and the run's folder, which is made if need be.

    Raises:
      ValueError: a wrong field, or a folder that cannot be written.
    """
    config = load_config(_CONFIG.value, _OVERRIDES.value, recipes=RECIPES)
    check_writable(_WORKDIR.value)
    return config, Path(_WORKDIR.value).absolute()


def use_compilation_cache() -> None:
    """Keeps compiled programs, in JAX_COMPILATION_CACHE_DIR or the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache / "seeupo_jax" / "xla"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
