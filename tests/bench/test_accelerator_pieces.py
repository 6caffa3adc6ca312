"""What pieces are run with: sizes that fit, the other side where it runs, true comparisons."""

import functools
import sys

import jax.numpy as jnp
import pytest

from seeupo_jax.bench.accelerator import command, device, kernels, speed
from seeupo_jax.bench.accelerator.cases import SMALLEST_FORESTS
from seeupo_jax.bench.accelerator.pieces import BY_NAME
from seeupo_jax.bench.accelerator.record import Record, read
from seeupo_jax.bench.settings import Settings

GIB = 2**30
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
    assert device.peak_flops(name) == peak


def test_sizes_are_those_that_fit_into_the_memory_that_is_free():
    piece = BY_NAME["update_bfcl_0.5b"]
    assert piece.fitting(None, alone=False) == ([0, 1, 2], [])
    assert piece.fitting(139 * GIB, alone=False) == ([0, 1, 2], [])
    kept, notes = piece.fitting(20 * GIB, alone=False)
    assert kept == [2] and "0.5b, bfcl, 4 groups of 8 would take about" in notes[0]
    assert notes[0].endswith("of the 20 that are free.")
    large = BY_NAME["update_bfcl_1.5b"]
    assert large.fitting(20 * GIB, alone=False)[0] == []
    # Alone it needs half: beside PyTorch it is the last resort, without PyTorch the first.
    assert large.fitting(60 * GIB, alone=False)[0] == [2]
    assert large.fitting(60 * GIB, alone=True)[0] == [0, 1, 2]
    assert str(large.sizes[2]) == "1.5b, bfcl, 4 groups of 8, without PyTorch"


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

    def __call__(self, settings):
        self.ran.append(settings.torch)
        for way in settings.torch:
            if way in self.errors:
                raise RuntimeError(self.errors[way])
        return {"sides": settings.torch}


def beside(sides, tmp_path, monkeypatch, missing=None):
    monkeypatch.setattr(device, "no_torch", lambda platform: missing)
    record = Record.begin(tmp_path / "x.json")
    try:
        found = speed._beside(
            record,
            Settings(torch=("compile",)),
            "torch",
            sides,
            fallback=("eager",),
            rehearse=False,
        )
    except RuntimeError as error:
        found = str(error)
    return found, read(record.path)


def test_our_side_is_written_down_before_the_other_is_run(tmp_path, monkeypatch):
    sides = Sides()
    found, values = beside(sides, tmp_path, monkeypatch)
    assert sides.ran == [(), ("compile",)] and found == {"sides": ("compile",)}
    assert values["figures"] == {"sides": []} and values["notes"] == []


def test_where_compiling_fails_the_other_side_runs_without(tmp_path, monkeypatch):
    sides = Sides(compile="no compiler")
    found, values = beside(sides, tmp_path, monkeypatch)
    assert sides.ran == [(), ("compile",), ("eager",)] and found == {"sides": ("eager",)}
    assert values["notes"] == ["Not measured against compile: RuntimeError: no compiler"]


def test_out_of_memory_is_for_the_next_smaller_size(tmp_path, monkeypatch):
    sides = Sides(compile="CUDA out of memory.")
    found, values = beside(sides, tmp_path, monkeypatch)
    assert found == "CUDA out of memory." and sides.ran == [(), ("compile",)]
    assert values["figures"] == {"sides": []}  # what was measured stays


def test_why_pytorch_does_not_run_is_a_sentence(monkeypatch):
    assert device.no_torch("cpu") is None
    assert device.no_torch("tpu") == "the PyTorch baseline does not run on TPU"
    assert "sees no GPU" in device.no_torch("gpu")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert device.no_torch("gpu").startswith("import of torch halted; None in sys.modules; allowed")


def test_without_pytorch_only_our_side_runs(tmp_path, monkeypatch):
    sides = Sides()
    found, values = beside(sides, tmp_path, monkeypatch, missing="no torch here")
    assert sides.ran == [()] and found == {"sides": ()}
    assert values["notes"] == ["Only our side was measured: no torch here."]


def test_what_is_wrong_is_told_from_what_is_right(tmp_path):
    """A kernel that looks one position too far fails, and its times are taken too."""
    (forest,) = SMALLEST_FORESTS["bfloat16"]
    tree_mask = forest.tree_mask()
    N, L = tree_mask.order_NL.shape
    arrays, real = kernels._random(N, L, L, forest.heads), jnp.ones((N, L), bool)
    right = functools.partial(kernels._plain_trees, tree_mask=tree_mask, window=None)
    one_more = tree_mask._replace(order_NL=tree_mask.order_NL + 1)
    wrong = functools.partial(kernels._plain_trees, tree_mask=one_more, window=None)
    for dtype in ("float32", "bfloat16"):
        found, times = kernels._compare(right, right, arrays, real, dtype, timed=True)
        assert all(off <= bound for off, bound in found.values())
        assert times["kernel_s"] > 0 and times["plain_s"] > 0
        found, _ = kernels._compare(wrong, right, arrays, real, dtype, timed=False)
        assert all(off > bound for off, bound in found.values())
