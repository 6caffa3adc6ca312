"""What reports say of how far off estimates are: the committed figures, as the page has them."""

import re

import pytest
from places import ROOT

from seeupo_jax.planning.aot import calibration

ROW = r"\| ([^|]+) \| (\w+/\w+) \| [\d.]+ to ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"


def test_the_page_has_every_figure_and_a_report_their_range():
    page = (ROOT / "docs" / "tpu.md").read_text()
    rows = re.findall(ROW, page)
    assert [row[:2] for row in rows] == [
        (row["case"], row["part"]) for row in calibration.measured()["rows"]
    ]
    assert len(rows) >= 10
    times = {}
    for _, part, estimated, measured, over in rows:
        # Both were rounded to hundredths.
        assert float(over) == pytest.approx(float(measured) / float(estimated), rel=0.05)
        times.setdefault(part, []).append(over)
    said = calibration.in_words()
    assert said in page
    for part, each in times.items():
        each.sort(key=float)
        assert f"{part.partition('/')[2]} {each[0]} to {each[-1]}" in said
