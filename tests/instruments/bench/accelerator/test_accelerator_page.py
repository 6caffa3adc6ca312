"""The page of the accelerator's figures, from records that were made up."""

from seeupo_jax.benchmarks.comparison import JAX
from seeupo_jax.instruments.bench.accelerator.accelerator_page import page
from seeupo_jax.instruments.bench.accelerator.pieces import PIECES

GIB = 2**30
DEVICE = {
    "device": "NVIDIA H100 80GB HBM3",
    "platform": "gpu",
    "count": 1,
    "cores": 16,
    "memory_gib": 128.0,
    "system": "Linux x86_64",
    "versions": {"python": "3.12.3", "jax": "0.11.2"},
    "free_bytes": 79 * GIB,
    "peak_flops": 989e12,
    "no_torch": None,
}
WORKLOAD = {
    "name": "bfcl",
    "conversations": 32,
    "group_size": 8,
    "tokens": 140_000,
    "prompt": [2000, 3800],
    "turns": [2, 8],
}


def side(seconds, **more):
    return {
        "median_s": seconds,
        "least_s": 0.9 * seconds,
        "most_s": 1.1 * seconds,
        "tokens_per_second": 140_000 / seconds,
        "peak_bytes": 30 * GIB,
        **more,
    }


def done(**values):
    return {"status": "done", "error": None, "notes": [], "checks": [], **values}


def check(name, passed=True, **more):
    differences = {"out": {"difference": 2e-6, "bound": 1e-4}} | more.pop("differences", {})
    return {"name": name, "dtype": "float32", "differences": differences, "passed": passed} | more


def figures(**more):
    return {
        "against": "PyTorch, compile",
        "ratio": 4.0,
        "ratio_least": 3.5,
        "ratio_most": 4.5,
        "model": "0.5b",
        "workload": WORKLOAD,
        "peak_flops": 989e12,
        # Half of a second's peak, and as much again that backward passes compute twice.
        "contenders": {
            JAX: side(2.0, flops=2 * 989e12, flops_again=989e12),
            "PyTorch, compile": side(8.0),
        },
    } | more


def rows_of(text):
    return [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_the_page_says_which_kernels_take_the_devices_time():
    run = {
        "seconds": 2.0,
        "busy_s": 1.5,
        "events": 12_000,
        "programs": [{"program": "jit_decode", "seconds": 1.2, "events": 9_000}],
        "kernels": [{"program": "jit_decode", "kernel": "a|b", "seconds": 0.9, "events": 3_000}],
    }
    figures = {"model": "0.5b", "workload": "bfcl", "runs": {"rollout": run}}
    found = {"device_time_0.5b": done(figures=figures)}
    text = page(PIECES, found, {}, DEVICE, rehearsal=False)
    assert (
        "0.5b, bfcl, a rollout: 2.000 s, the device busy for 75% of it, 12,000 kernels. Programs:"
        " `jit_decode` 1.200 s." in text
    )
    assert ["| `jit_decode`", r"`a\|b`", "0.900", "3,000", "300 |"] in rows_of(text)


def test_the_page_tells_what_was_measured_and_what_was_not():
    worst = {"d_k": {"difference": 3e-4, "bound": 1e-4}}
    found = {
        "trees_bfloat16": done(
            checks=[
                check("trees", shape="2 rows of 1330", kernel_s=0.001, plain_s=0.0042),
                check("others", passed=False, differences=worst),
                check(
                    "odd",
                    passed=False,
                    differences={"d_q": {"difference": float("nan"), "bound": 1}},
                ),
                {"name": "broken", "differences": {}, "passed": False, "error": "X: a | b"},
            ]
        ),
        "update_bfcl_0.5b": done(
            figures=figures(),
            checks=[check("a sweep against PyTorch, compile")],
            notes=["A size was too large."],
        ),
        "rollout_0.5b": {
            "status": "failed",
            "error": "RuntimeError: no",
            "notes": [],
            "checks": [],
        },
        "quickstart": done(
            figures={
                "metric": "eval/avg@4",
                "curve": [[0, 0.42], [5, 0.7], [30, 0.99]],
                "seconds": 61.0,
                "iterations": 30,
                "compile_s": 20.0,
            }
        ),
    }
    text = page(PIECES, found, {"parity": "12 s of the budget were left"}, DEVICE, rehearsal=False)
    assert f"3 of {len(PIECES)} pieces were measured. 2 of 5 comparisons" in text
    cells = {row[0].removeprefix("| "): row for row in rows_of(text)}
    assert cells["trees"][2:] == [
        "2 rows of 1330",
        "2.0e-06 (out)",
        "1.0e-04",
        "pass",
        "1.00",
        "4.20 |",
    ]
    assert cells["others"][3:6] == ["3.0e-04 (d_k)", "1.0e-04", "**FAIL**"]
    assert cells["odd"][3] == "nan (d_q)"
    assert cells["broken"][3:6] == [r"X: a \| b", "-", "**FAIL**"]
    update = cells["**4.00x** (3.50 to 4.50)"]
    assert update[1] == "0.5b" and update[4] == "2.000" and update[8:10] == ["9.89e+14", "50.0%"]
    assert "- `update_bfcl_0.5b`: A size was too large." in text
    assert "PyTorch, compile | 8.000 |" in text and "| yes |" in text
    assert "0.420 after iteration 0, 0.990 after iteration 30; 61 s in total, 20 s" in text
    assert cells["`rollout_0.5b`"][2:] == ["failed", "RuntimeError: no |"]
    assert cells["`parity`"][2:] == ["not begun", "12 s of the budget were left |"]
    assert cells["`sweep`"][2:] == ["not begun", "the command ended before it |"]
    assert "`quickstart`" not in cells  # done


def test_sides_that_differ_are_told_with_what_differs():
    differences = {
        "kl": {"difference": 0.0587, "bound": 0.05},
        "parameters": {"difference": 0.00085, "bound": 0.0019},
    }
    checks = [check("a sweep against PyTorch, compile", False, differences=differences)]
    found = {"update_bfcl_0.5b": done(figures=figures(), checks=checks)}
    text = page(PIECES, found, {}, DEVICE, rehearsal=False)
    assert "| PyTorch, compile | 8.000 |" in text and "| **NO**: kl by 0.059 |" in text


def test_without_pytorch_or_a_known_peak_our_side_stands_alone():
    actual = side(2.0, flops=2e12, flops_again=0.0)
    alone = figures(against=None, peak_flops=None, contenders={JAX: actual})
    found = {"update_bfcl_0.5b": done(figures=alone)}
    unknown = DEVICE | {"peak_flops": None, "free_bytes": None}
    text = page(PIECES, found, {}, unknown, rehearsal=False)
    row = next(row for row in rows_of(text) if JAX in row)
    assert row[0] == "| -" and row[9:] == ["?", "- |"]
    assert "data sheet: not known" in text and "free memory unknown" in text


def test_all_that_is_done_leaves_nothing_to_run():
    found = {piece.name: done() for piece in PIECES}
    assert "Nothing: every piece was measured" in page(PIECES, found, {}, DEVICE, rehearsal=False)


def test_a_rehearsal_s_page_has_no_figure_of_a_measurement():
    found = {"update_bfcl_0.5b": done(figures=figures(), checks=[check("a sweep against PyTorch")])}
    text = page(PIECES, found, {}, DEVICE, rehearsal=True)
    assert "**This page holds no measurements.**" in text
    assert "1 of 1 within bounds" in text
    for figure in ("4.00", "2.000", "9.89", "1e-", "%", "GiB", DEVICE["device"]):
        assert figure not in text
