"""What all commands do before they begin."""

import os
import re
import subprocess
import sys

import pytest
from places import ROOT

from seeupo_jax.configuration.flags import Flags
from seeupo_jax.configuration.schema import Config
from seeupo_jax.runtime import cli

# Page faults of twenty executions of a program whose temporaries take 64 MiB, 16,384 pages.
COUNT = """
import resource, jax, jax.numpy as jnp
from seeupo_jax.runtime.cli import prepare_xla
if {prepared}:
    prepare_xla()
run = jax.jit(lambda x: jnp.outer(x, x) @ jnp.ones((4096, 8)))
x = jnp.ones(4096)
for _ in range(10):
    run(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    run(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(prepared, folder):
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(prepared=prepared)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_bucket_is_no_workdir_and_is_not_taken_for_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = Flags("train", None)
    cli.add_run_flags(flags)
    with pytest.raises(ValueError, match="^--workdir: got 'gs://bucket/run'; allowed: a folder"):
        flags.read(["--config=none.py", "--workdir=gs://bucket/run"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [True, False])
def test_a_file_where_checkpoints_are_to_be_is_refused_before_anything_runs(tmp_path, make):
    (tmp_path / "checkpoints").write_text("")
    sentence = f"--workdir: got {tmp_path / 'checkpoints'} (File exists); allowed: a folder"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        cli.check_places(Config(), tmp_path, make=make)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to keep memory")
def test_memory_that_programs_give_back_is_not_cleared_again(tmp_path):
    every = 20 * 16_384
    assert faults(True, tmp_path) < every / 2 < every <= faults(False, tmp_path)
