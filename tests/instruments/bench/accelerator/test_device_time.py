"""A trace of a run by program and kernel: made up ones, and one of a program on this CPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from seeupo_jax.instruments.bench.accelerator.device_time import (
    KERNELS,
    Event,
    events,
    summary,
    traced,
)


def plane(name, **lines):
    return SimpleNamespace(
        name=name,
        lines=[SimpleNamespace(name=line, events=found) for line, found in lines.items()],
    )


def event(name, start_us, us, **stats):
    return SimpleNamespace(
        name=name, start_ns=1000 * start_us, duration_ns=1000 * us, stats=stats.items()
    )


def test_time_in_which_kernels_overlap_counts_once():
    found = [
        Event("a", "x", 0.0, 2.0),
        Event("b", "y", 1.0, 3.0),  # on another stream
        Event("a", "x", 5.0, 6.0),
        Event("a", "z", 5.25, 5.5),  # within the one before
    ]
    report = summary(found)
    assert report["busy_s"] == 4 and report["events"] == 4
    assert report["programs"] == [
        {"program": "a", "seconds": 3.25, "events": 3},
        {"program": "b", "seconds": 2.0, "events": 1},
    ]
    assert report["kernels"][0] == {"program": "a", "kernel": "x", "seconds": 3.0, "events": 2}
    assert summary([]) == {"busy_s": 0.0, "events": 0, "programs": [], "kernels": []}


def test_kernels_that_take_longest_are_listed():
    found = [Event("a", f"k{i}", 0.0, float(i)) for i in range(2 * KERNELS)]
    listed = [row["kernel"] for row in summary(found)["kernels"]]
    assert listed == [f"k{i}" for i in range(2 * KERNELS - 1, KERNELS - 1, -1)]


def test_the_first_devices_streams_are_read_and_sums_of_them_are_not():
    own = {"hlo_module": "jit_decode", "hlo_op": "fusion.12"}
    planes = [
        plane("/host:CPU", python=[event("call", 0, 9, hlo_op="x")]),
        plane("/device:GPU:1", **{"Stream #7": [event("gemm", 0, 9, **own)]}),
        plane(
            "/device:GPU:0",
            **{
                "Stream #7(Compute)": [
                    event("loop_fusion.12", 1, 2, **own),
                    event("loop_fusion_3", 4, 1, **own),
                    event("while.1", 0, 9, **own),
                    event("MemcpyD2H", 6, 1),
                ],
                "XLA Modules": [event("jit_decode", 0, 9)],
            },
        ),
    ]
    kernels = {
        (row["program"], row["kernel"]): row for row in summary([*events(planes)])["kernels"]
    }
    assert kernels.keys() == {("jit_decode", "loop_fusion"), ("-", "MemcpyD2H")}
    assert kernels["jit_decode", "loop_fusion"]["seconds"] == pytest.approx(3e-6)


def test_a_run_on_this_cpu_has_its_program_and_no_more_time_than_it_took():
    @jax.jit
    def heavy(x):
        return jnp.tanh(x @ x).sum()

    def run():
        heavy(x).block_until_ready()

    x = jnp.ones((300, 300))
    run()
    report = traced(run)
    assert [row["program"] for row in report["programs"]] == ["jit_heavy"]
    assert 0 < report["busy_s"] <= report["seconds"]
    assert report["events"] == sum(row["events"] for row in report["kernels"])


def test_what_libtpu_adds_to_a_trace_is_not_taken_for_the_device():
    host = plane("/host:CPU", XLA=[event("dot.1", 0, 9, hlo_op="dot.1", hlo_module="jit_f")])
    (found,) = events([plane("/device:CUSTOM:Megascale Trace"), host])
    assert (found.program, found.kernel) == ("jit_f", "dot")
