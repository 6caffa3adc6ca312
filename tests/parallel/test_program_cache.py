"""Compiled programs are read from disk; a file cut short is compiled and written again."""

import jax
import numpy as np
import pytest
from jax._src.compilation_cache import decompress_executable
from jax.experimental.compilation_cache import compilation_cache

from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.program_cache import ProgramCache, keep_programs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of programs that is in use, with every program kept."""
    monkeypatch.setattr("jax._src.compilation_cache.LRUCache", None)  # as before, after the test
    compilation_cache.reset_cache()
    keep_programs(str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def called():
    """The result of a program of a process that begins, and how many it compiled."""
    jax.clear_caches()
    compilations = Compilations()
    result = float(jax.jit(lambda x: 3 * x + 1)(np.float32(2)))
    compilations.close()
    return result, compilations.programs


@pytest.mark.parametrize("left", [0, 0.5, 0.99])
def test_a_program_cut_short_on_disk_is_compiled_and_written_again(folder, caplog, left):
    assert called() == (7, 1)
    (file,) = folder.glob("*-cache")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(left * len(whole))])
    assert called()[0] == 7
    assert f"{file} is incomplete" in caplog.text
    caplog.clear()
    assert called()[0] == 7 and not caplog.text
    assert decompress_executable(file.read_bytes())


def test_in_a_folder_that_can_only_be_read_it_stays_and_is_compiled(tmp_path, caplog, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    cache = ProgramCache(str(tmp_path), max_size=-1)
    cache.put("program", b"cut short")
    monkeypatch.setattr(type(cache.path), "unlink", refuse)
    assert cache.get("program") is None and "program-cache is incomplete" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["program-cache"]
    assert cache.get("another") is None
