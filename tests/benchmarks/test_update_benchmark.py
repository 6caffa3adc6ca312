"""The benchmarks from end to end: what is the same on both sides, and what they say of it."""

import dataclasses
import json

import pytest
from bench_cases import SETTINGS, small  # noqa: F401

from seeupo_jax import bench as command
from seeupo_jax.benchmarks import benchmark_report, comparison, machine, rollout
from seeupo_jax.benchmarks import update_benchmark as update
from seeupo_jax.benchmarks.comparison import JAX, torch_name
from seeupo_jax.benchmarks.jax_runner import JaxSweeps
from seeupo_jax.benchmarks.workloads import prepared
from seeupo_jax.instruments.bench import suites

RUNS = {
    "update": lambda **more: update.run(
        dataclasses.replace(SETTINGS, without=("truncation",)), **more
    ),
    "rollout": lambda **more: rollout.run_rollout(dataclasses.replace(SETTINGS, repeats=1), **more),
    "iteration": lambda: rollout.run_iteration(
        dataclasses.replace(SETTINGS, repeats=1, torch=("eager", "packed"))
    ),
}
EAGER = torch_name("eager")
FIGURES = {"benchmark": "update"} | dict.fromkeys(benchmark_report._NEEDED)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The figures of a run of each benchmark, as files of a folder."""
    return tmp_path_factory.mktemp("results")


def keep(results, name, figures):
    (results / f"{name}.json").write_text(json.dumps(figures))


def assert_alone(first, found):
    """Our side's figures came once before the others ran, and are of the same kind."""
    (alone,) = first
    assert alone.keys() == found.keys() - {"ratio", "ratio_least", "ratio_most"}
    assert alone["against"] is None and alone["contenders"].keys() == {JAX}
    assert alone["contenders"][JAX].keys() == found["contenders"][JAX].keys()


def test_both_sides_are_the_same_before_they_are_timed(results, capsys):
    first = []
    found = RUNS["update"](alone=first.append)
    assert_alone(first, found)
    keep(results, "update", found)
    assert found["verified"]["differences"].keys() == {
        EAGER,
        torch_name("recipe"),
        torch_name("packed"),
        *(update.without_name(name) for name in found["without"]),
    }
    assert all(max(d.values()) < 1e-4 for d in found["verified"]["differences"].values())
    moved = found["verified"]["moved"]
    assert min(moved["weights"], moved["parameters"]) > 1e-3  # or nothing would be shown
    assert found["verified"]["bounds"].keys() == moved.keys() | {"grad_norm"}
    for one in found["contenders"].values():
        assert len(one["each_s"]) == 2 and one["peak_bytes"] >= one["state_bytes"] > 0
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{found['ratio']:.2f}x") and EAGER in first
    assert second.startswith(f"{found['over_recipe']['ratio']:.2f}x the reference's recipe")
    assert third.startswith(f"{found['over_packed']['ratio']:.2f}x the baseline with the common")


def test_mfu_is_a_share_of_what_the_peak_would_do_in_a_sweeps_seconds(monkeypatch):
    monkeypatch.setattr(machine, "matmul_peak", lambda dtype: 1e9)
    with prepared(SETTINGS, "float32") as inputs:
        contenders = update.Contenders(inputs, "tpu", True)
        contenders.add(JAX, JaxSweeps(inputs))
    found = contenders.figures({})
    side = found["contenders"][JAX]
    once = side["flops"] - side["flops_again"]
    assert found["mfu"] == pytest.approx(once / (1e9 * side["median_s"]))


def test_nothing_is_timed_where_one_sides_numbers_are_others(monkeypatch):
    same = update.torch_sweeps

    def changed(inputs):
        fields = inputs.fields | {"algorithm.scale": "none"}
        return same(dataclasses.replace(inputs, fields=fields))

    monkeypatch.setattr(update, "torch_sweeps", changed)
    monkeypatch.setattr(comparison, "alternate", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=f"seeupo_jax and {EAGER} differ: .*weights by"):
        update.run(SETTINGS)


def test_the_sampler_computes_every_token_once_and_resending_does_not(results, capsys):
    first = []
    found = RUNS["rollout"](alone=first.append)
    assert_alone(first, found)
    keep(results, "rollout", found)
    # What is shared is shared by whole pages; the least of all is each token once.
    actual = found["contenders"][JAX]
    assert 1 <= actual["waste"] < 1.1
    assert found["contenders"][rollout.RESENT]["waste"] > 1.5
    assert 0 < actual["prefill_s"] + actual["decode_s"] <= actual["most_s"]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{found['ratio']:.2f}x")
    assert f"{actual['decode_s']:.2f} s decoding" in printed


def test_an_iteration_is_a_rollout_and_a_sweep(results, capsys):
    found = RUNS["iteration"]()
    keep(results, "iteration", found)
    for one in found["contenders"].values():
        assert one["rollout_s"] + one["sweep_s"] == pytest.approx(one["median_s"])
    kept, actual = (found["contenders"][name] for name in (f"{EAGER}, {rollout.CACHE_KEPT}", JAX))
    # Packed rows with the cache kept, which may be faster, have another ratio.
    assert found["against"] in (EAGER, f"{EAGER}, {rollout.CACHE_KEPT}")
    assert found["over_kept"]["ratio"] == pytest.approx(kept["median_s"] / actual["median_s"])
    assert capsys.readouterr().out.startswith(f"{found['ratio']:.2f}x")


def test_the_page_has_the_figures_of_every_run(results, tmp_path, monkeypatch):
    for name, measure in RUNS.items():
        if not (results / f"{name}.json").exists():  # the tests above leave theirs here
            keep(results, name, measure())
    figures = {name: json.loads((results / f"{name}.json").read_text()) for name in RUNS}
    for size in (2, 4):
        keep(results, f"sizes_turns_{size}", figures["update"])
    page = tmp_path / "benchmarks.md"
    command.main(["bench", "report", f"--results={results}", f"--output={page}"])
    text = page.read_text()
    for each in figures.values():
        assert f"**{each['ratio']:.2f}x**" in text and each["command"] in text
    for title in (
        "Machine",
        "Update sweep",
        "What each technique",
        "Rollout",
        "Iteration",
        "sizes",
    ):
        assert title in text
    assert figures["update"]["machine"]["versions"]["jax"] in text
    plot = results / "time_against_turns.svg"
    assert JAX in plot.read_text()
    drawn = plot.read_bytes()
    benchmark_report.run(type("Flags", (), {"results": results, "output": page}))
    assert (page.read_text(), plot.read_bytes()) == (text, drawn)


def test_figures_of_other_pages_are_left_out_and_named(results, tmp_path, capsys):
    keep(tmp_path, "update", FIGURES)
    keep(tmp_path, "prefixes", {"benchmark": "gain"})
    assert list(benchmark_report.read(tmp_path)) == ["update"]
    assert "prefixes.json: left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "figures", "logged"),
    [
        ("x", {"benchmark": "chess"}, "x.json, which is no bench run's"),
        ("x", {n: v for n, v in FIGURES.items() if n != "machine"}, "x.json without machine"),
        ("sizes_turns_two", FIGURES, "sizes_turns_two.json; allowed: sizes_NAME_NUMBER.json"),
        ("sizes_scale_1", FIGURES, "NAME one of turns, prompt, group_size"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, name, figures, logged):
    keep(tmp_path, name, figures)
    with pytest.raises(ValueError, match=logged):
        benchmark_report.read(tmp_path)
    with pytest.raises(SystemExit):  # before anything is measured
        command.main(["bench", "all", f"--results={tmp_path}"])
    assert [*tmp_path.iterdir()] == [tmp_path / f"{name}.json"]


def test_the_list_is_gone_on_with_and_ends_with_the_page(tmp_path, monkeypatch):
    """What has its figures is left out; a failure keeps those of before."""
    ran = []

    def measure(command, file):
        ran.append(file.stem)
        if len(ran) == 3:
            raise ValueError("bench all: broken")
        file.write_text(json.dumps(FIGURES))

    written = []
    monkeypatch.setattr(suites, "measure", measure)
    monkeypatch.setattr(benchmark_report, "run", written.append)
    line = ["bench", "all", f"--results={tmp_path / 'new'}"]
    with pytest.raises(SystemExit):
        command.main(line)
    assert not written
    command.main(line)
    assert ran[3:] == list(suites.CPU)[2:] and len(written) == 1
