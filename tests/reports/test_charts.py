"""Charts are Vega-Lite that Vega-Lite takes, of what they were given."""

import math
import re

import pytest

from seeupo_jax.reports import line_names
from seeupo_jax.reports.blocks import Point, block_size, block_start, thin
from seeupo_jax.reports.charts import (
    HEIGHT,
    heat_map,
    line_chart,
    range_chart,
    share_chart,
    stack_chart,
)


def rows(chart):
    return chart.spec["datasets"]["rows"]


def layers(chart, mark):
    return [layer for layer in chart.spec["layer"] if layer["mark"]["type"] == mark]


def drawn(chart):
    import vl_convert

    return vl_convert.vegalite_to_svg({**chart.spec, "width": 400}, vl_version="6.4")


def test_a_chart_without_data_is_none():
    assert line_chart("T", {}, y="y") is None and line_chart("T", {"a": []}, y="y") is None
    assert line_chart("T", {"a": [Point(1, None)]}, y="y") is None
    assert range_chart("T", {"a": []}, kind="k") is None
    assert heat_map("T", [], value="v") is None
    assert stack_chart("T", [(1, "a", 0.0)], ["a"], y="y") is None
    assert share_chart("T", [], []) is None


def test_lines_keep_values_and_intervals():
    chart = line_chart("T", {"a": [Point(1, 0.5, 0.4, 0.6), Point(2, 0.7)]}, y="rate")
    assert rows(chart) == [
        {"series": "a", "iteration": 1, "value": 0.5, "low": 0.4, "high": 0.6},
        {"series": "a", "iteration": 2, "value": 0.7},
    ]


def with_gaps(last):
    """Iterations 1 to 3, 5 and from 7 on; 4 and 6 are missing."""
    return [Point(i, None) if i in (4, 6) else Point(i, 0.5, 0.4, 0.6) for i in range(1, last + 1)]


def test_lines_and_bands_are_interrupted_where_values_are_missing():
    chart = line_chart("T", {"a": with_gaps(8), "b": [Point(1, 0.1), Point(8, 0.2)]}, y="y")
    assert rows(chart)[3] == {"series": "a", "iteration": 4, "value": None}
    svg = drawn(chart)
    band, line, other = re.findall(
        r'<path aria-label="[^"]*" role[^>]*mark" d="(M[0-9][^"]*)"', svg
    )
    assert [path.count("M") for path in (band, line, other)] == [3, 3, 1] and "NaN" not in svg


@pytest.mark.parametrize("x", ["iteration", "sampled tokens"])
def test_of_many_points_only_one_between_two_gaps_is_drawn(x):
    svg = drawn(line_chart("T", {"a": with_gaps(100)}, y="y", x=x))
    mark = rf'aria-label="{x}: (\d+); y: 0.5; series: a" role="[^"]*"[^>]*d="M([^"]*)"'
    assert [at for at, path in re.findall(mark, svg) if "A" in path] == ["5"]


def test_the_last_value_places_a_lines_name_where_the_end_is_missing():
    chart = line_chart("T", {"a": [Point(1, 0.5), Point(2, None)], "b": [Point(1, 1.0)]}, y="y")
    (names,) = layers(chart, "text")
    places = {r["series"]: r["place"] for r in chart.spec["datasets"][names["data"]["name"]]}
    assert places["a"] == pytest.approx(HEIGHT * (1 - 0.5 / 1.05), abs=0.01)


def test_kinds_are_in_natural_order_whichever_comes_first():
    def kinds(early, late):
        series = {"early": [Point(k, 0.5) for k in early], "late": [Point(k, 0.5) for k in late]}
        encoding = range_chart("T", series, kind="k").spec["layer"][1]["encoding"]
        return encoding["y"]["sort"]

    assert kinds(["2", "4"], ["1", "2", "3", "4", "10"]) == ["1", "2", "3", "4", "10"]
    assert kinds(["refund", "0.5"], ["cancel", "-1", "0.25"]) == [
        *("cancel", "refund"),
        *("-1", "0.25", "0.5"),
    ]


def test_lines_differ_in_more_than_colour_and_carry_their_names():
    chart = line_chart("T", {n: [Point(1, i), Point(2, i)] for i, n in enumerate("abc")}, y="y")
    encoding = layers(chart, "line")[0]["encoding"]
    for channel in ("color", "strokeDash"):
        ranges = encoding[channel]["scale"]["range"]
        assert len({str(entry) for entry in ranges}) == 3
    shapes = layers(chart, "point")[0]["encoding"]["shape"]["scale"]["range"]
    assert len(set(shapes)) == 3
    (names,) = layers(chart, "text")
    places = chart.spec["datasets"][names["data"]["name"]]
    labels = {row["series"]: row["label"] for row in places}
    assert labels == {"a": "a", "b": "b", "c": "c"}
    assert names["encoding"]["color"] == encoding["color"]


def test_lines_of_the_same_colour_differ_in_dash_and_shape():
    names = [f"line {i}" for i in range(30)]
    chart = line_chart("T", {n: [Point(1, 0), Point(2, 1)] for n in names}, y="y")
    line, point = layers(chart, "line")[0]["encoding"], layers(chart, "point")[0]["encoding"]
    colors = line["color"]["scale"]["range"]
    for channel in (line["strokeDash"], point["shape"]):
        pairs = zip(colors, channel["scale"]["range"], strict=True)
        assert len({str(pair) for pair in pairs}) == 30


def test_one_line_needs_no_name_and_no_legend():
    chart = line_chart("T", {"a": [Point(1, 2.0)]}, y="y")
    assert not layers(chart, "text")
    assert layers(chart, "line")[0]["encoding"]["color"]["legend"] is None


def test_an_axis_holds_zero_and_every_value():
    def domain(*values):
        chart = line_chart("T", {"a": [Point(i, v) for i, v in enumerate(values)]}, y="y")
        return layers(chart, "line")[0]["encoding"]["y"]["scale"]["domain"]

    assert domain(1.0, 4.0) == [0.0, pytest.approx(4.2)]
    assert domain(-2.0, -1.0) == [pytest.approx(-2.1), 0.0]
    assert domain(0.0) == [0.0, 1.0]


def test_names_at_the_ends_of_lines_do_not_cover_each_other():
    ends = {"a": 0.5, "b": 0.5, "c": 0.51, "low": 0.0, "lowest": 0.0}
    places = line_names.end_labels(ends, 0.0, 1.0, HEIGHT)
    heights = sorted(places.values())
    assert all(b - a >= 13 for a, b in zip(heights, heights[1:], strict=False))
    assert heights[-1] <= HEIGHT
    assert places["c"] == pytest.approx(0.49 * HEIGHT)
    assert places["lowest"] == HEIGHT


def test_a_long_name_keeps_its_beginning_and_its_end():
    short = line_names.shortened("seeupo_on_the_order_desk_seed_1")
    assert short.startswith("seeupo") and short.endswith("_seed_1")
    assert len(short) == line_names.LABEL_CHARACTERS and line_names.shortened("grpo") == "grpo"


@pytest.mark.parametrize(
    "names, short",
    [
        (["grpo", "seeupo"], ["grpo", "seeupo"]),
        (["the_desk/lr=1e-4/seed=1_again", "the_desk/lr=1e-3/seed=1_again"], ["1e-4", "1e-3"]),
        (["a" * 20 + "b" + "a" * 20, "a" * 41], ["a" * 20 + "b" + "a" * 20, "a" * 41]),
        (["in_a_folder_of_a_folder", "in_a_folder_in_a_folder"], ["of", "in"]),
    ],
)
def test_no_two_lines_have_the_same_name_however_long(names, short):
    assert line_names.short_names(names) == dict(zip(names, short, strict=True))


def test_a_legend_has_room_for_its_names():
    chart = line_chart("T", {c * 45: [Point(1, 0.0), Point(2, 1.0)] for c in "ab"}, y="y")
    texts = re.findall(r">([ab]+)</text>", drawn(chart))
    assert {"a" * 45, "b" * 45} <= set(texts)


def test_many_points_become_means_of_blocks_and_the_note_says_so():
    points = [Point(i, float(i), i - 1.0, i + 1.0) for i in range(1, 1001)]
    chart = line_chart("T", {"a": points}, y="y")
    block = math.ceil(1000 / 299)
    assert chart.note == f"Each point is the mean of {block} iterations."
    assert len(rows(chart)) == 1000 / block <= 300
    assert rows(chart)[0] == {
        "series": "a",
        "iteration": 2.5,
        "value": 2.5,
        "low": 1.5,
        "high": 3.5,
    }


def test_a_block_without_intervals_has_none():
    assert thin([Point(1, 1.0), Point(2, 3.0)], 2) == [Point(1.5, 2.0)]


def test_a_block_is_missing_where_all_of_it_is():
    values = [1.0, None, None, None]
    points = [Point(i, value) for i, value in enumerate(values, 1)]
    assert thin(points, 2) == [Point(1.5, 1.0), Point(3.5, None)]


def test_blocks_leave_no_more_than_was_asked_for():
    for first, last, most in ((0, 400, 120), (1, 121, 120), (1, 1500, 120), (7, 10_000, 300)):
        block = block_size(range(first, last + 1), most)
        assert len({block_start(i, block) for i in range(first, last + 1)}) <= most
    assert block_size([0, 1000, 2000], 3) == 1  # rare evaluations are left alone


def test_bars_of_a_long_run_begin_at_iteration_0():
    parts = [(0, "evaluation", 30.0), *((i, "sweep", 1.0) for i in range(1, 1501))]
    chart = stack_chart("T", parts, ["sweep", "evaluation"], y="seconds")
    block = math.ceil(1501 / 119)
    bars = [(row["from"], row["to"], row["value"]) for row in rows(chart)]
    assert bars[:2] == [(-0.5, 0.5, 30.0), (0.5, block + 0.5, 1.0)]
    assert chart.spec["encoding"]["x"]["scale"]["domain"][0] == -0.5


def test_a_heat_map_has_a_cell_for_each_turn_and_iteration():
    chart = heat_map("T", [(1, 1, 0.5), (1, 2, 0.25), (2, 1, -1.0)], value="M")
    assert rows(chart) == [
        {"from": 0.5, "to": 1.5, "turn": 1, "value": 0.5},
        {"from": 0.5, "to": 1.5, "turn": 2, "value": 0.25},
        {"from": 1.5, "to": 2.5, "turn": 1, "value": -1.0},
    ]


def test_equal_values_of_a_heat_map_are_as_dark_as_the_least_of_different_ones():
    """Viridis, by its authors' table: from (68, 1, 84) to (253, 231, 37)."""

    def colors(*values):
        svg = drawn(heat_map("T", [(i, 1, v) for i, v in enumerate(values, 1)], value="M"))
        return re.findall(r'M: [^"]*" role[^>]*fill="([^"]*)"', svg)

    dark, light = "rgb(68, 1, 84)", "rgb(253, 231, 37)"
    assert colors(0.0, 3.0) == [dark, light]
    for value in (0.0, 0.25, -2.0, 1e-7):
        assert colors(value, value) == [dark, dark]
        assert colors(value) == [dark]


def test_a_cell_of_many_iterations_is_their_mean_and_as_wide_as_they_are():
    chart = heat_map("T", [(i, 1, i) for i in range(1, 241)], value="M")  # 240 / 119, rounded up
    cells = rows(chart)
    assert len(cells) == 80 and cells[:2] == [
        {"from": 0.5, "to": 3.5, "turn": 1, "value": 2.0},
        {"from": 3.5, "to": 6.5, "turn": 1, "value": 5.0},
    ]
    assert chart.note == "Each cell is the mean of 3 iterations."


def test_bars_of_many_iterations_are_means_over_the_iterations_that_are_there():
    parts = [(i, name, v) for i in range(1, 242) for name, v in (("a", 1.0), ("b", 2.0))]
    chart = stack_chart("T", parts, ["b", "a"], y="s")
    assert {(r["part"], r["order"], r["value"]) for r in rows(chart)} == {
        ("b", 0, 2.0),
        ("a", 1, 1.0),
    }


def test_a_part_has_its_colour_whichever_others_are_there():
    def color(*present):
        chart = stack_chart("T", [(1, name, 1.0) for name in present], "abc", y="s")
        scale = chart.spec["encoding"]["color"]["scale"]
        return dict(zip(scale["domain"], scale["range"], strict=True))["c"]

    assert color("a", "b", "c") == color("c")


def test_shares_of_a_run_add_up_to_one():
    chart = share_chart("T", [("r", "a", 3.0), ("r", "b", 1.0), ("s", "a", 5.0)], ["a", "b"])
    assert [(r["run"], r["part"], r["share"]) for r in rows(chart)] == [
        ("r", "a", 0.75),
        ("r", "b", 0.25),
        ("s", "a", 1.0),
    ]


@pytest.mark.parametrize("value", [0.0, 0.5, -0.5])
def test_charts_of_equal_values_are_drawn_with_an_axis_that_holds_them(value):
    points = [Point(i, value, value, value) for i in (1, 2)]
    for line in (points, points[:1]):
        svg = drawn(line_chart("T", {"a": line}, y="y"))
        assert "NaN" not in svg and svg.count(f"y: {value:g}".replace("-", "−")) >= 2
        low, high = layers(line_chart("T", {"a": line}, y="y"), "line")[0]["encoding"]["y"][
            "scale"
        ]["domain"]
        assert low <= min(value, 0) and max(value, 0) <= high and low < high
    kinds = [Point(kind, abs(value), abs(value), abs(value)) for kind in "kl"]
    svg = drawn(range_chart("T", {"a": kinds}, kind="k"))
    assert "NaN" not in svg and svg.count(f"success rate: {abs(value):g}; k: ") == 4


@pytest.mark.parametrize(
    ("chart", "marks"),
    [
        (
            line_chart("T", {"a": [Point(1, 0.5, 0.4, 0.6)], "b": [Point(1, 2.0)]}, y="y"),
            {
                "iteration: 1; y: 0.4; high: 0.6; series: a": 1,  # the band
                "iteration: 1; y: 0.5; series: a": 2,  # line and point
                "iteration: 1; y: 2; series: b": 2,
            },
        ),
        (
            range_chart("T", {"a": [Point("k", 0.5, 0.4, 0.6)], "b": [Point("k", 0.1)]}, kind="k"),
            {
                "success rate: 0.4; k: k; high: 0.6; series: a": 1,
                "success rate: 0.5; k: k; series: a": 1,
                "success rate: 0.1; k: k; series: b": 1,
            },
        ),
        (heat_map("T", [(1, 1, 0.5)], value="v"), {"turn: 1; value: 0.5": 1}),
        (stack_chart("T", [(1, "a", 1.0)], ["a"], y="y"), {"y: 1; part: a": 1}),
        (share_chart("T", [("r", "a", 1.0)], ["a"]), {"run: r; part: a": 1}),
    ],
    ids=["line", "range", "heat", "stack", "share"],
)
def test_vega_lite_draws_a_mark_for_each_value(chart, marks):
    svg = drawn(chart)
    assert svg.startswith("<svg") and "NaN" not in svg
    assert {mark: svg.count(mark) for mark in marks} == marks
