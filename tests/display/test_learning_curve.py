"""The learning curve as a reader sees it."""

import numpy as np
import pytest
from PIL import Image

from seeupo_jax.display.learning_curve import learning_curve
from seeupo_jax.metrics.metrics_log import MetricsWriter

BLUE, RED, GRID = (0x4C, 0x78, 0xA8), (0xE4, 0x57, 0x56), (0xDD, 0xDD, 0xDD)


def _estimate(value, half):
    return {"eval/avg@4": value, "eval/avg@4_low": value - half, "eval/avg@4_high": value + half}


def _write(workdir, success=(), evaluations=None):
    with MetricsWriter(workdir) as writer:
        for i, value in enumerate(success, 1):
            writer.write(i, {"rollout/success_rate": value})
        for i, metrics in ({} if evaluations is None else evaluations).items():
            writer.write(i, metrics)


def _rows_of(path, color):
    """Which pixel rows below the legend hold the colour."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"))[80:]
    return np.flatnonzero((pixels == np.array(color)).all(axis=-1).any(axis=1))


def test_the_curve_is_a_png_that_shows_training_and_evaluation(tmp_path):
    _write(
        tmp_path, np.linspace(0.3, 0.8, 30), {0: _estimate(0.52, 0.06), 30: _estimate(0.8, 0.05)}
    )
    path = learning_curve(tmp_path)
    assert path == tmp_path / "learning_curve.png"
    assert _rows_of(path, BLUE).size > 100 and _rows_of(path, RED).size > 100
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "learning_curve.png",
        "metrics.jsonl",
    ]


def test_better_training_is_drawn_higher(tmp_path):
    for name, level in (("low", 0.2), ("high", 0.9)):
        _write(tmp_path / name, [level] * 5)
    low, high = (_rows_of(learning_curve(tmp_path / name), BLUE) for name in ("low", "high"))
    assert high.max() < low.min()


def test_a_wider_interval_is_drawn_longer(tmp_path):
    for name, half in (("narrow", 0.05), ("wide", 0.3)):
        _write(tmp_path / name, (), {0: _estimate(0.5, half)})
    spans = [np.ptp(_rows_of(learning_curve(tmp_path / n), RED)) for n in ("narrow", "wide")]
    assert spans[1] == pytest.approx(6 * spans[0], rel=0.15)


def test_runs_with_little_or_nothing_measured_still_give_a_curve(tmp_path):
    _write(tmp_path / "none")
    _write(tmp_path / "gaps", [0.5, float("nan"), 0.6], {2: {"eval/avg@4": float("nan")}})
    _write(tmp_path / "one", [0.5], {0: {"eval/avg@4": 0.5}})
    for name in ("none", "gaps", "one"):
        assert learning_curve(tmp_path / name).stat().st_size > 1000


def _tenths(path):
    """The pixel rows of the success rates 0.0, 0.1, ..., 1.0, by their grid lines."""
    rows = _rows_of(path, GRID)
    starts = rows[np.diff(rows, prepend=-9) > 9]
    assert len(starts) in (10, 11)  # the axis may hide the lowest
    return starts[::-1][-10:] if len(starts) == 11 else starts[::-1]


def test_a_value_lies_at_the_line_of_its_size(tmp_path):
    _write(tmp_path, (), {0: _estimate(0.3, 0.1), 8: _estimate(0.3, 0.1)})
    path = learning_curve(tmp_path)
    red, tenths = _rows_of(path, RED), _tenths(path)
    for row, value in ((red.max(), 0.2), (red.min(), 0.4), (np.mean(red), 0.3)):
        assert row == pytest.approx(tenths[round(10 * value) - 1], abs=3)


def test_the_thick_line_is_the_mean_of_three_rollouts(tmp_path):
    _write(tmp_path, [0.2, 0.8] * 5)
    path = learning_curve(tmp_path)
    tenths = dict(zip(range(1, 11), _tenths(path), strict=True))
    blue = _rows_of(path, BLUE)
    assert set(range(tenths[6] + 9, tenths[4] - 9)) <= set(blue)  # from 0.4 to 0.6 and back
    assert not set(range(tenths[8] + 9, tenths[6] - 9)) & set(blue)  # thin lines are pale
