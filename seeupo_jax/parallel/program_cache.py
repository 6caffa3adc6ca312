"""Compiled programs on disk; one that was not written to its end is compiled and written again."""

from __future__ import annotations

import contextlib
import logging

import jax
from jax._src import compilation_cache  # the class that keeps programs has no public name
from jax._src.lru_cache import LRUCache

_LOGGER = logging.getLogger(__name__)


class ProgramCache(LRUCache):
    """JAX's folder of compiled programs, without those that a killed process wrote in part.

    JAX writes a program in place and never again: what a kill or a full disk cut short would be a
    warning and a compilation in every process from then on.
    """

    def get(self, key: str) -> bytes | None:
        """The program kept under a key; None where there is none that can be read."""
        program = super().get(key)
        if program is None:
            return None
        try:
            compilation_cache.decompress_executable(program)
        except Exception as error:  # of zlib, zstandard or Python's own zstd
            file = self.path / f"{key}-cache"
            _LOGGER.warning("%s is incomplete (%s): it is compiled again.", file, error)
            with contextlib.suppress(OSError):  # a folder to read only: compiled, not kept
                file.unlink()
            return None
        return program


def keep_programs(folder: str | None) -> None:
    """Keeps what is compiled from now on in a folder; None: nowhere."""
    compilation_cache.LRUCache = ProgramCache
    jax.config.update("jax_compilation_cache_dir", folder)


def keep_no_programs() -> None:
    """Neither keeps what is compiled from now on nor loads what was kept.

    For programs of a slice, which cannot be loaded where its chips are not.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # a process that has used a cache does not read the flag again
