"""The page of benchmarks, from figures that were made up."""

import json
from pathlib import Path

import pytest

from seeupo_jax.benchmarks import benchmark_report
from seeupo_jax.benchmarks.comparison import JAX

DOCS = Path(__file__).parents[2] / "docs"


def kept(name, **changed):
    """Committed figures of a run, some of them changed."""
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text()) | changed


def rows_of(text, title):
    """Cells of the first table of a section, without its heads."""
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].split("\n### ")[0].splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return table[2:]


@pytest.mark.parametrize("way", ["recipe", "packed"])
def test_a_run_against_the_recipe_or_packed_rows_alone_has_a_row_without_a_ratio(way):
    figures = kept("update_bfcl_tiny", against=None, **{f"over_{way}": {"ratio": 4.0}})
    other = {"recipe": "packed", "packed": "recipe"}[way]
    figures[f"over_{other}"] = None
    sides = figures["contenders"]
    figures["contenders"] = {name: sides[name] for name in (JAX, f"PyTorch, {way}")}
    first, second = rows_of(benchmark_report.page({"update": figures}, {}), "Update sweep")
    assert first[:3] == (["-", "4.00x", "-"] if way == "recipe" else ["-", "-", "4.00x"])
    assert f"PyTorch, {way}" in second


def test_older_rollouts_and_iterations_have_their_ratio_to_the_fastest_side():
    """Their `ratio` is to the first that was measured."""
    for name, title, first in (
        ("rollout_bfcl_tiny", "Rollout", "generate, conversation sent again"),
        ("iteration_bfcl_tiny", "Iteration", "PyTorch, eager"),
    ):
        figures = kept(name)
        assert figures["against"] == first
        seconds = {side: one["median_s"] for side, one in figures["contenders"].items()}
        actual = seconds.pop(JAX)
        row, *_ = rows_of(benchmark_report.page({name: figures}, {}), title)
        assert row[0].startswith(f"**{min(seconds.values()) / actual:.2f}x** (")
        assert row[1] == f"{seconds[first] / actual:.2f}x" and row[1] not in row[0]


@pytest.mark.parametrize("name", ["update_order_desk_135m", "rollout_order_desk_tiny"])
def test_a_plot_says_which_benchmark_workload_and_model_it_is_of(tmp_path, name):
    figures = kept(name)
    points = {f"sizes_turns_{size}": figures for size in (2, 4)}
    text = benchmark_report.page(points, {"turns": "x.svg"}).split("## ")[2]
    assert f"workload `order_desk`, model `{figures['model']}`:\n" in text
    run = {"update": "sweep", "rollout": "rollout"}[figures["benchmark"]]
    assert text.startswith("Time against sizes\n")
    assert f"![seconds per {run} against turns](x.svg)" in text
    benchmark_report.draw({2: figures, 4: figures}, "turns", tmp_path / "plot.svg")
    assert f"seconds per {run}" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize("changed", [{"model": "135m"}, {"workload": {"name": "bfcl"}}, None])
def test_a_plot_of_several_models_workloads_or_benchmarks_is_refused(tmp_path, changed):
    first = kept("update_order_desk_tiny")
    other = kept("rollout_order_desk_tiny") if changed is None else first | changed
    for size, figures in ((2, first), (4, other)):
        (tmp_path / f"sizes_turns_{size}.json").write_text(json.dumps(figures))
    (tmp_path / "sizes_prompt_64.json").write_text(json.dumps(first))  # a plot of its own
    with pytest.raises(ValueError, match="got sizes_turns_. of .* and of .*; allowed"):
        benchmark_report.read(tmp_path)
    (tmp_path / "sizes_turns_4.json").write_text(json.dumps(first))
    assert len(benchmark_report.read(tmp_path)) == 3


def test_the_budget_counts_no_flops_that_backward_passes_compute_again():
    figures = kept("update_bfcl_tiny")
    figures["contenders"][JAX] |= {"flops": 3e12, "flops_again": 1e12, "flops_attention": 6e11}
    figures["budgets"] = {"budget": 4e12, "recipe": 8e12}
    text = benchmark_report.page({"update": figures}, {}).split("### FLOPs")[1]
    cells = "| 3e+12 | 20% | 33% | 4e+12 | 0.50 | 8e+12 |"  # 2 of 4
    assert cells in text


@pytest.mark.parametrize("name", ["benchmarks", "benchmarks_other_cpu"])
def test_a_page_is_what_its_figures_give(name):
    folder = DOCS / name
    plots = {size: f"{name}/time_against_{size}.svg" for size in ("turns", "prompt", "group_size")}
    drawn = {size: path for size, path in plots.items() if (DOCS / path).exists()}
    text = benchmark_report.page(
        benchmark_report.read(folder), drawn, benchmark_report.own_head(folder)
    )
    assert text == (DOCS / f"{name}.md").read_text()


def test_a_head_of_a_folder_stands_for_what_pages_begin_and_end_with(tmp_path):
    results = {"update_bfcl_tiny": kept("update_bfcl_tiny")}
    usual = benchmark_report.page(results, {}, benchmark_report.own_head(tmp_path))
    (tmp_path / "head.md").write_text("# Größen\n", encoding="utf-8")
    text = benchmark_report.page(results, {}, benchmark_report.own_head(tmp_path))
    middle = usual[usual.index("## Machine") : usual.index("## On a GPU or a TPU")]
    assert text == f"# Größen\n\n{middle.strip()}\n"
