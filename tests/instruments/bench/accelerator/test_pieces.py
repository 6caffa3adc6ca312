"""What pieces are run with: sizes that fit, the other side where it runs, true comparisons."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from seeupo_jax.benchmarks import machine, torch_runner
from seeupo_jax.benchmarks.settings import BenchSettings
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.instruments.bench.accelerator import accelerator_command as command
from seeupo_jax.instruments.bench.accelerator import kernels
from seeupo_jax.instruments.bench.accelerator.kernel_comparison import compare, random_arrays
from seeupo_jax.instruments.bench.accelerator.pieces import BY_NAME, beside_torch, quickstart
from seeupo_jax.instruments.bench.accelerator.runner import Record, read
from seeupo_jax.policy.kernels import attention

GIB = 2**30
LONG_SWEEPS = ("sweep_long", "device_time_0.5b")  # of one group, and of four
DEVICE = {"platform": "gpu", "free_bytes": 79 * GIB, "no_torch": None}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peaks_are_known_by_the_names_that_jax_gives_devices(name, peak):
    assert machine.peak_flops(name) == peak


def test_sizes_are_those_that_fit_into_the_memory_that_is_free():
    piece = BY_NAME["update_bfcl_0.5b"]
    assert piece.fitting(None, alone=False) == ([0, 1, 2], [])
    assert piece.fitting(139 * GIB, alone=False) == ([0, 1, 2], [])
    kept, notes = piece.fitting(20 * GIB, alone=False)
    assert kept == [2] and "0.5b, bfcl, 4 groups of 8 would take about" in notes[0]
    assert notes[0].endswith("of the 20 that are free.")
    large = BY_NAME["update_bfcl_1.5b"]
    assert large.fitting(20 * GIB, alone=False)[0] == []
    # Alone it needs much less: beside PyTorch it is the last resort, without PyTorch the first.
    assert large.fitting(79 * GIB, alone=False)[0] == [2]
    assert large.fitting(79 * GIB, alone=True)[0] == [0, 1, 2]
    assert str(large.sizes[2]) == "1.5b, bfcl, 4 groups of 8, without PyTorch"


@pytest.mark.parametrize(("model", "peak_gib"), [("0.5b", 32.6), ("1.5b", 66.1)])
def test_our_side_takes_what_it_took_on_an_h200(model, peak_gib):
    """`peak_bytes` of docs/benchmarks_gpu/update_bfcl_*.json."""
    (largest, *_) = BY_NAME[f"update_bfcl_{model}"].sizes
    _, ours = largest.memory(largest.settings)
    assert ours / GIB == pytest.approx(peak_gib, rel=0.15)


def test_fewer_tokens_than_a_microbatch_takes_need_less():
    """Where a sweep has more of them, their number changes nothing."""
    one, four = ([s.memory(s.settings)[1] for s in BY_NAME[name].sizes] for name in LONG_SWEEPS)
    assert one[2] < one[1] < one[0]
    assert four[1] == four[0]


def test_what_pieces_take_is_known_without_a_device():
    """Which the processes of the pieces are to have."""
    said = "from seeupo_jax.instruments.bench.accelerator.pieces import BY_NAME as p; "
    said += "print(p['update_bfcl_0.5b'].fitting(None, alone=True))"
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    command = [sys.executable, "-c", said]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "([0, 1, 2], [])\n"


def test_what_fits_in_no_size_is_not_run_and_says_so(tmp_path):
    flags = type("Flags", (), {"rehearse": False, "out": tmp_path})
    jobs, too_large = command._jobs(flags, DEVICE | {"free_bytes": 20 * GIB})
    assert "update_bfcl_1.5b" not in [job.name for job in jobs]
    assert "would take about" in too_large["update_bfcl_1.5b"]
    (job,) = [job for job in jobs if job.name == "update_bfcl_0.5b"]
    assert len(job.commands) == 1 and job.commands[0][-1] == "--size=2" and job.notes
    assert job.limit_s < 8 * 60


@pytest.mark.parametrize(
    ("platform", "given", "first"),
    [
        ("gpu", {}, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "3,4"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        (
            "tpu",
            {},
            {
                "TPU_VISIBLE_CHIPS": "0",
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            },
        ),
    ],
)
def test_of_several_devices_pieces_have_the_first(platform, given, first):
    assert command._first_device(platform, given) == first


class Sides:
    """A benchmark that runs as it is told: by its ways, what it raises."""

    def __init__(self, **errors):
        self.errors, self.ran = errors, []

    def __call__(self, settings, alone):
        self.ran.append(settings.torch)
        if alone is not None:
            alone({"sides": ()})
        for way in settings.torch:
            if way in self.errors:
                raise RuntimeError(self.errors[way])
        return {"sides": settings.torch}


def beside(sides, tmp_path, monkeypatch, missing=None):
    monkeypatch.setattr(torch_runner, "no_torch", lambda platform: missing)
    record = Record.begin(tmp_path / "x.json")
    try:
        settings = BenchSettings(torch=("compile",))
        found = beside_torch(record, settings, "torch", sides, ("eager",), rehearse=False)
    except RuntimeError as error:
        found = str(error)
    return found, read(record.path)


def test_our_side_is_written_down_before_the_other_is_run(tmp_path, monkeypatch):
    sides = Sides()
    found, values = beside(sides, tmp_path, monkeypatch)
    assert sides.ran == [("compile",)] and found == {"sides": ("compile",)}
    assert values["figures"] == {"sides": []} and values["notes"] == []


def test_where_compiling_fails_the_other_side_runs_without(tmp_path, monkeypatch):
    sides = Sides(compile="no compiler")
    found, values = beside(sides, tmp_path, monkeypatch)
    assert sides.ran == [("compile",), ("eager",)] and found == {"sides": ("eager",)}
    assert values["notes"] == ["Not measured against compile: RuntimeError: no compiler"]


def test_out_of_memory_is_for_the_next_smaller_size(tmp_path, monkeypatch):
    sides = Sides(compile="CUDA out of memory.")
    found, values = beside(sides, tmp_path, monkeypatch)
    assert found == "CUDA out of memory." and sides.ran == [("compile",)]
    assert values["figures"] == {"sides": []}  # what was measured stays


def test_why_pytorch_does_not_run_is_a_sentence(monkeypatch):
    assert torch_runner.no_torch("cpu") is None
    assert torch_runner.no_torch("tpu") == "the PyTorch baseline does not run on TPU"
    assert "sees no GPU" in torch_runner.no_torch("gpu")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_runner.no_torch("gpu").startswith(
        "import of torch halted; None in sys.modules; allowed"
    )


def test_without_pytorch_only_our_side_runs(tmp_path, monkeypatch):
    sides = Sides()
    found, values = beside(sides, tmp_path, monkeypatch, missing="no torch here")
    assert sides.ran == [()] and found == {"sides": ()}
    assert values["notes"] == ["Only our side was measured: no torch here."]


TRAINING = """#!/bin/sh
for word; do case "$word" in --workdir=*) folder=${{word#*=}};; esac; done
printf '%s\\n' "$@" > {out}
echo '{{"iteration": 0, "eval/avg@4": 0.25}}' > "$folder/metrics.jsonl"
echo '{{"iteration": 1, "eval/avg@4": 0.5, "time/compile_s": 3}}' >> "$folder/metrics.jsonl"
exit {code}
"""


def test_the_quickstart_is_trained_by_its_command(tmp_path, monkeypatch):
    """By a stand-in for the interpreter; the fields of a rehearsal are those of a configuration."""
    program, said = tmp_path / "python", tmp_path / "said"
    monkeypatch.setattr(sys, "executable", str(program))
    for code in (0, 3):
        program.write_text(TRAINING.format(out=said, code=code))
        program.chmod(0o755)
        record = Record.begin(tmp_path / "quickstart.json")
        if code:
            with pytest.raises(RuntimeError, match="training ended with 3"):
                quickstart(record, BenchSettings(), True)
        else:
            quickstart(record, BenchSettings(), True)
            figures = read(record.path)["figures"]
            assert figures["metric"] == "eval/avg@4" and figures["compile_s"] == 3
            assert figures["curve"] == [[0, 0.25], [1, 0.5]]
    module, name, config, _, *fields = said.read_text().splitlines()
    assert (module, name) == ("-m", "seeupo_jax.train") and fields
    overrides = [field.removeprefix("--config.") for field in fields]
    assert load_config(Path(config.removeprefix("--config=")), overrides).iterations == 1


def test_what_is_wrong_is_told_from_what_is_right(tmp_path):
    """A kernel that looks one position too far fails, and its times are taken too."""
    (forest,) = kernels.SMALLEST_FORESTS["bfloat16"]
    tree_mask = forest.tree_mask()
    N, L = tree_mask.order_NL.shape
    arrays, real = random_arrays(N, L, L, forest.heads), jnp.ones((N, L), bool)

    def right(q, k, v, mask):
        return attention.all_pairs(q, k, v, *mask, window=None)[0]

    def wrong(q, k, v, mask):
        return right(q, k, v, mask._replace(order_NL=mask.order_NL + 1))

    for dtype in ("float32", "bfloat16"):
        found, times = compare(right, right, arrays, tree_mask, real, dtype, timed=True)
        assert all(off <= bound for off, bound in found.values())
        assert times["kernel_s"] > 0 and times["plain_s"] > 0
        found, _ = compare(wrong, right, arrays, tree_mask, real, dtype, timed=False)
        assert all(off > bound for off, bound in found.values())
