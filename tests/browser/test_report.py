"""The report in a real browser without network: every chart is drawn, and no text of a run runs."""

import json

import pytest
import report_cases
from PIL import Image, ImageStat
from report_cases import report_of

from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.trajectories.reader import TrajectoryFile, pack_shard, write_shard

HOSTILE = "</script><img src=x onerror=alert(1)><script>window.ran = true</script>{{7*7}}<!--"


def opened(page, file):
    """The page once all of its charts were tried."""
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-drawn=all]", timeout=120_000)
    assert page.locator(".failed").count() == 0
    assert page.locator(".chart").count() == page.locator(".chart svg.marks").count()
    return page


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """The folders of two runs, the second of them half way."""
    folder = tmp_path_factory.mktemp("runs")
    first = report_cases.write_run(folder / "first", iterations=30)
    more = {"planned": 30, "gain": 0.8, "learning_rate": 1e-3}
    return first, report_cases.write_run(folder / "second", iterations=20, **more)


@pytest.fixture(scope="module")
def report(workdirs, new_shared_page):
    """The report of one run, opened."""
    return opened(new_shared_page(height=1400), report_of(workdirs[0]))


@pytest.fixture(scope="module")
def compared(workdirs, new_shared_page):
    """The report of two runs, opened."""
    file = report_of(workdirs[1], compare=workdirs[:1])
    return opened(new_shared_page(height=1400), file)


def test_every_chart_of_a_run_is_drawn(report, screenshot):
    assert report.locator(".chart").count() >= 20
    heights = report.locator(".chart svg.marks").evaluate_all("s => s.map(e => e.clientHeight)")
    assert min(heights) > 60
    screenshot(report, "report")


def test_runs_lie_over_each_other_with_their_names_at_their_lines(compared, screenshot):
    chart = compared.locator("#curves .chart").first
    for name in ("first", "second"):
        label = chart.locator("g.mark-text.role-mark text")
        assert label.get_by_text(name, exact=True).count() == 1
    lines = chart.locator("g.mark-line path")
    assert len({line.get_attribute("stroke-dasharray") for line in lines.all()}) == 2
    screenshot(compared, "report_compare")


def test_a_phone_shows_all_within_its_width(new_page, compared, workdirs, screenshot):
    page = opened(new_page(width=390, height=1600), workdirs[1] / "report.html")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.locator(".chart svg.marks").evaluate_all(
        "s => s.map(e => e.getBoundingClientRect().right)"
    )
    assert max(widths) <= 390
    page.locator("#curves").scroll_into_view_if_needed()
    screenshot(page, "report_phone")


@pytest.mark.parametrize("width, columns", [(1280, 2), (390, 1)])
def test_no_chart_stands_beside_a_blank(new_page, workdirs, width, columns):
    page = opened(new_page(width=width, height=1200), report_of(workdirs[0]))
    grids = page.locator(".charts").evaluate_all(
        "gs => gs.map(g => [g.getBoundingClientRect().right, [...g.children].map(e => {"
        " const b = e.getBoundingClientRect(); return [b.top, b.left, b.right]; })])"
    )
    odd = 0
    for right, figures in grids:
        last = max(top for top, _, _ in figures)
        assert max(end for top, _, end in figures if top == last) == pytest.approx(right, abs=1)
        odd += len(figures) % 2
    assert odd > 1  # else nothing could stand alone
    assert len({left for _, figures in grids for _, left, _ in figures}) == columns
    edges = page.locator(".chart").evaluate_all(
        "cs => cs.map(c => [c.querySelector('svg').getBoundingClientRect().right,"
        " ...[...c.querySelectorAll('.role-legend-label text')].map("
        "e => e.getBoundingClientRect().right)])"
    )
    assert all(max(edge) <= edge[0] for edge in edges)  # no legend is cut
    assert page.title().startswith("first") and page.locator("h1").inner_text() == "first"


def test_dark_and_light_follow_the_reader(report, screenshot):
    brightness = {}
    for scheme in ("dark", "light"):
        report.emulate_media(color_scheme=scheme)
        text = report.locator(".chart svg.marks .role-axis-label text").first
        ink = text.evaluate("e => getComputedStyle(e).fill")
        assert ink == report.evaluate("getComputedStyle(document.body).color")
        with Image.open(screenshot(report, f"report_{scheme}")) as image:
            brightness[scheme] = ImageStat.Stat(image.convert("L")).mean[0]
    assert brightness["light"] > 200 and brightness["dark"] < 60


def test_pointing_at_a_line_tells_its_numbers(report):
    box = report.locator("#curves .chart svg.marks").first.bounding_box()
    report.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.5)
    report.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5)
    tip = report.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "iteration" in tip.inner_text() and " to " in tip.inner_text()


def test_a_name_in_a_legend_shows_its_line_alone(compared):
    chart = compared.locator("#curves .chart").first
    assert chart.locator('g.mark-line path[opacity="1"]').count() == 2
    chart.locator("g.role-legend-label text").first.click()
    compared.wait_for_timeout(300)
    assert chart.locator('g.mark-line path[opacity="1"]').count() == 1


def test_a_charts_numbers_are_a_table(report):
    numbers = report.locator("#curves .numbers").first
    assert numbers.locator("table").count() == 0  # made when they are asked for
    numbers.locator("summary").click()
    rows = numbers.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 30 + 7
    assert numbers.locator("thead th").all_inner_texts()[:3] == ["series", "iteration", "value"]


def test_the_configuration_can_be_searched(compared):
    shown = compared.locator(".configuration tbody tr:visible")
    assert shown.all_inner_texts() == ["optimizer.learning_rate ≠\t0.001\t0.0002"]
    compared.locator("#differing").uncheck()
    everything = shown.count()
    assert everything > 5
    compared.locator("#search").fill("ROLLOUT.")
    assert shown.count() == 2
    assert compared.locator("#found").inner_text() == f"2 of {everything} fields"


def test_no_text_of_a_run_is_markup_or_code(new_page, tmp_path, screenshot):
    name = HOSTILE.replace("/", "⁄")  # a folder's name has no slash
    workdir = tmp_path / name
    report_cases.write_run(workdir, iterations=6, notes=HOSTILE, **{HOSTILE: HOSTILE})
    with MetricsWriter(workdir) as writer:
        hostile = {
            f"rollout/failed/cause={HOSTILE}": 3,
            "rollout/failed": 3,
            f"rollout/success_rate/{HOSTILE}={HOSTILE}": 0.5,
            f"eval_{HOSTILE.replace('/', '')}/avg@4": 0.5,
            "rollout/success_rate": 0.5,
        }
        writer.write(6, hostile)
    other = report_cases.write_run(tmp_path / "other", iterations=6)
    page = opened(new_page(), report_of(workdir, compare=[other]))
    assert page.evaluate("window.ran") is None
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator("#failures td, #failures th[scope=row]").all_inner_texts()
    assert page.locator("h2").first.inner_text() == name
    assert page.locator(f"#settings td:text-is({json.dumps(HOSTILE)})").count() == 2
    marks = page.locator("#curves .chart svg.marks").first
    for x in (150, 160):  # which scrolls to it
        marks.hover(position={"x": x, "y": 150}, force=True)
    page.locator("#vg-tooltip-element.visible").wait_for()
    assert page.locator("#vg-tooltip-element img").count() == 0
    page.locator(".numbers summary").first.click()
    assert page.evaluate("window.ran") is None
    screenshot(page, "report_hostile")


def test_an_injected_script_would_not_run(report):
    report.evaluate(
        "() => { const s = document.createElement('script'); s.text = 'window.ran = 1';"
        " document.body.append(s); }"
    )
    assert report.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in report.wrong)
    report.wrong.clear()


def test_a_long_run_is_drawn_too(new_page, tmp_path):
    workdir = report_cases.write_run(tmp_path / "long", iterations=1500)
    page = opened(new_page(), report_of(workdir))
    assert "Each cell is the mean of 13 iterations." in page.locator("#turns").inner_text()


def test_an_empty_folder_is_a_page_with_a_sentence(new_page, tmp_path, screenshot):
    page = opened(new_page(), report_of(tmp_path))
    assert page.locator(".empty").first.inner_text().startswith("Nothing has been recorded yet")
    screenshot(page, "report_empty")


def test_the_link_to_trajectories_goes_to_their_page(new_page, tmp_path):
    write_shard(tmp_path, TrajectoryFile(1, "train", False), pack_shard([]))
    (tmp_path / "trajectories" / "index.html").write_text("<title>trajectories</title>")
    page = opened(new_page(), report_of(tmp_path))
    page.get_by_role("link", name="Trajectories").click()
    assert page.title() == "trajectories"


def test_on_paper_charts_stay_and_controls_go(report):
    report.emulate_media(media="print")
    assert report.locator(".chart svg.marks:visible").count() >= 20
    for control in ("nav", ".numbers", ".vega-embed > details"):
        assert report.locator(f"{control}:visible").count() == 0
    report.emulate_media(media="screen")
