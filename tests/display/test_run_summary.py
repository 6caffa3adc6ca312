"""What a run came to."""

import io
import json
import shlex

import numpy as np
import pytest
from PIL import Image
from places import ROOT

from seeupo_jax.display.run_summary import (
    learning_curve,
    print_summary,
    summary_table,
    summary_text,
)
from seeupo_jax.metrics.metrics_log import MetricsWriter

BLUE, RED = (0x4C, 0x78, 0xA8), (0xE4, 0x57, 0x56)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _estimate(name, value, low, high):
    return {name: value, f"{name}_low": low, f"{name}_high": high}


BEFORE = {**_estimate("eval/avg@4", 0.52, 0.46, 0.58), **_estimate("eval/pass@4", 0.7, 0.6, 0.8)}
AFTER = {
    **_estimate("eval/avg@4", 0.80, 0.75, 0.85),
    **_estimate("eval/pass@4", 0.65, 0.55, 0.75),
    **_estimate("eval_train/avg@4", 0.9, 0.8, 1.0),
}


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
    _write(tmp_path, np.linspace(0.3, 0.8, 30), {0: BEFORE, 30: AFTER})
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
        _write(tmp_path / name, (), {0: _estimate("eval/avg@4", 0.5, 0.5 - half, 0.5 + half)})
    spans = [np.ptp(_rows_of(learning_curve(tmp_path / n), RED)) for n in ("narrow", "wide")]
    assert spans[1] == pytest.approx(6 * spans[0], rel=0.15)


def test_lines_end_where_no_environment_worked(tmp_path):
    """And the mean is over iterations: no rollout before the gap is in one behind it."""
    success = [0.2] * 10 + [float("nan")] * 10 + [0.8] * 10
    evaluations = {i: {"eval/avg@4": v} for i, v in ((9, 0.5), (15, float("nan")), (21, 0.5))}
    _write(tmp_path, success, evaluations)
    with Image.open(learning_curve(tmp_path)) as image:
        plot = np.asarray(image.convert("RGB")).astype(int)[80:-80]
    columns = np.flatnonzero((np.ptp(plot, axis=-1) > 20).any(axis=0))  # that have a colour
    gap = np.diff(columns).max() / np.ptp(columns)
    assert gap == pytest.approx(10 / 29, abs=0.06)  # from 10 to 21, without the points' sizes
    means = _rows_of(tmp_path / "learning_curve.png", BLUE)
    assert np.ptp(means) > 100 and np.diff(means).max() > 0.9 * np.ptp(means)  # two levels


def test_the_thick_line_is_the_mean_of_as_many_iterations_as_the_legend_says(tmp_path):
    """Of 21 iterations 3: one success among failures raises it to 1/3, of an axis up to 1.02."""
    _write(tmp_path, [0.0] * 10 + [1.0] + [0.0] * 10)
    rows = _rows_of(learning_curve(tmp_path), BLUE)
    rise = np.ptp(rows[rows > rows.min() + 20])  # without the point at 1, which is highest
    assert rise == pytest.approx(640 / 1.02 / 3, abs=8)  # pixels; the line is 4 to 5 wide


def test_runs_with_little_or_nothing_measured_still_give_a_curve(tmp_path):
    _write(tmp_path / "none")
    _write(tmp_path / "gaps", [0.5, float("nan"), 0.6], {2: {"eval/avg@4": float("nan")}})
    _write(tmp_path / "one", [0.5], {0: {"eval/avg@4": 0.5}})
    for name in ("none", "gaps", "one"):
        assert learning_curve(tmp_path / name).stat().st_size > 1000


def test_the_plain_summary_by_hand():
    assert summary_text(BEFORE, AFTER, split="dev").splitlines() == [
        "split  metric  before             after              change",
        "dev    avg@4   0.52 [0.46, 0.58]  0.80 [0.75, 0.85]  +0.28",
        "dev    pass@4  0.70 [0.60, 0.80]  0.65 [0.55, 0.75]  -0.05",
        "train  avg@4   -                  0.90 [0.80, 1.00]  -",
    ]


def test_the_table_says_the_same_and_colours_only_what_the_intervals_tell_apart():
    table = summary_table(BEFORE, AFTER, split="dev")
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    cells = [" ".join(row) for row in zip(*columns, strict=True)]
    plain = summary_text(BEFORE, AFTER, split="dev").splitlines()[1:]
    assert cells == [" ".join(line.split()) for line in plain]
    assert [cell.style for cell in table.columns[-1].cells] == ["green", "", ""]
    reverse = summary_table(AFTER, BEFORE)
    assert [cell.style for cell in reverse.columns[-1].cells] == ["red", "", ""]
    # Beyond the interval of before by their values, but not with all of their own.
    for value in (0.6, 0.44):
        near = summary_table(BEFORE, _estimate("eval/avg@4", value, value - 0.05, value + 0.05))
        change, *_ = near.columns[-1].cells
        assert str(change) == f"{value - 0.52:+.2f}" and change.style == ""


def test_the_summary_compares_first_with_last_and_names_only_what_is_there(tmp_path):
    middle = _estimate("eval/avg@4", 0.1, 0.0, 0.2)
    _write(tmp_path, (), {0: BEFORE, 5: middle, 10: AFTER})
    (tmp_path / "tensorboard").mkdir()
    stream = io.StringIO()
    print_summary(tmp_path, stream=stream)
    text = stream.getvalue()
    assert "test   avg@4   0.52 [0.46, 0.58]  0.80 [0.75, 0.85]  +0.28" in text
    assert "train  avg@4   -                  0.90 [0.80, 1.00]  -" in text
    assert f"tensorboard --logdir={tmp_path / 'tensorboard'}" in text
    assert str(tmp_path / "metrics.jsonl") in text
    assert "checkpoints" not in text and "learning_curve" not in text


def iterations(count, **metrics):
    """Lines of rollouts; a metric is a number, or a function of the iteration."""
    names = {
        "success_rate": "rollout/",
        "reward_mean": "rollout/",
        "no_signal_fraction": "rollout/",
    }
    return [
        {"iteration": i}
        | {
            names.get(name, "sweep/") + name: value(i) if callable(value) else value
            for name, value in metrics.items()
        }
        for i in range(1, count + 1)
    ]


def last_words(workdir, lines, **more):
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_summary(workdir, stream=(stream := io.StringIO()), **more)
    return stream.getvalue()


LEARNS = {"success_rate": 0.5, "turns": 4, "updates": 4, "no_signal_fraction": 0.5}
NOTHING = {
    "the rewards of every group were equal": {"reward_mean": 0.5, "no_signal_fraction": 1},
    "no optimizer step changed a parameter": {"reward_mean": lambda i: i, "updates": 0},
    "no episode had a score of 1": {"reward_mean": lambda i: i, "success_rate": 0.0},
    # The first two have the mean 1.5, the last two 1: each mean has the standard error 0.5 or 1.
    "1.5 over the first 2 iterations and 1 over the last 2, a difference of -0.5 with a standard"
    " error of 1.1.": {"reward_mean": lambda i: {1: 1, 2: 2, 9: 0, 10: 2}.get(i, 9)},
}


@pytest.mark.parametrize("sentence", NOTHING)
def test_a_run_that_learned_nothing_says_what_its_figures_mean(tmp_path, sentence):
    text = last_words(tmp_path, iterations(10, **LEARNS | NOTHING[sentence]))
    assert sentence in text and text.count("docs/debugging.md#the-last-words-of-a-run") == 1
    page = (ROOT / "docs" / "debugging.md").read_text()
    assert "## The last words of a run" in page


@pytest.mark.parametrize(
    "metrics",
    [
        {"reward_mean": lambda i: i / 10},
        {"reward_mean": 1.0, "success_rate": 1.0},  # there was nothing left to learn
        {"reward_mean": lambda i: i / 10, "no_signal_fraction": 1, "teacher_kl": 0.1},
        {},
    ],
)
def test_a_run_that_learned_says_nothing_of_the_kind(tmp_path, metrics):
    text = last_words(tmp_path, iterations(10, **LEARNS | metrics))
    assert "this run learned" not in text and "Where to look next" in text


def test_the_last_words_are_commands_that_a_shell_takes_as_they_are(tmp_path):
    workdir = tmp_path / "my run"
    workdir.mkdir()
    settings = ("--config=my configs/a.py", "--config.env.options={'level': 2}")
    text = last_words(workdir, (), settings=settings)
    commands = [shlex.split(line) for line in text.splitlines() if " -m seeupo_jax." in line]
    module = ["python", "-m"]
    place = f"--workdir={workdir}"
    assert commands == [
        [*module, "seeupo_jax.report", place],
        [*module, "seeupo_jax.evaluate", *settings, place],
        [*module, "seeupo_jax.serve", *settings, place],
    ]


def test_a_run_that_patience_ended_names_its_best_checkpoint(tmp_path):
    ended = {"iteration": 40, "reason": "patience", "best": 20}
    (tmp_path / "run.json").write_text(json.dumps({"ended": ended}))
    text = last_words(tmp_path, (), settings=("--config=a.py",))
    assert "Ended by evaluation.patience after iteration 40; the best checkpoint is 20" in text
    assert text.count("--step=best") == 2


def test_the_summary_names_what_changed_when_the_run_resumed(tmp_path):
    _write(tmp_path, (), {0: BEFORE, 10: AFTER})
    changes = {"config.seed": {"before": "\x1b[2J", "after": 1}}
    resumed = [{"at": "then", "after": 7, "in_sweep": True, "changes": changes}, "2026-01-02"]
    (tmp_path / "run.json").write_text(json.dumps({"resumed": resumed}))
    print_summary(tmp_path, stream=(stream := io.StringIO()))
    lines = stream.getvalue().splitlines()
    at = lines.index("Settings changed on resuming")
    assert lines[at + 1 : at + 3] == ["  in the sweep of 8: config.seed: \\x1b[2J -> 1", ""]


def test_a_plain_display_ends_with_plain_text_on_a_terminal_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    _write(tmp_path, (), {0: BEFORE, 10: AFTER})
    texts = []
    for display in ("plain", "auto", "rich"):
        print_summary(tmp_path, stream=(stream := Terminal()), display=display)
        texts.append(stream.getvalue())
    assert texts[0].startswith(summary_text(BEFORE, AFTER)) and "\x1b" not in texts[0]
    assert texts[1] == texts[2] and "\x1b" in texts[1]


def test_only_iteration_0_is_before_training(tmp_path):
    """Validation is first played when a checkpoint is due."""
    last = {10: {**AFTER, **_estimate("eval_validation/avg@4", 0.6, 0.5, 0.7)}}
    _write(tmp_path / "both", (), {0: BEFORE, 5: _estimate("eval_dev/avg@4", 0.1, 0, 0.2), **last})
    _write(tmp_path / "never_again", (), {0: BEFORE})
    texts = {}
    for workdir in tmp_path.iterdir():
        print_summary(workdir, stream=(stream := io.StringIO()))
        texts[workdir.name] = [line.split() for line in stream.getvalue().splitlines()]
    assert ["validation", "avg@4", "-", "0.60", "[0.50,", "0.70]", "-"] in texts["both"]
    assert ["dev", "avg@4", "-", "0.10", "[0.00,", "0.20]", "-"] in texts["both"]
    assert ["test", "avg@4", "0.52", "[0.46,", "0.58]", "-", "-"] in texts["never_again"]


def test_after_is_the_last_evaluation_alone_and_no_change_is_between_other_measures(tmp_path):
    """Where evaluation.k, or evaluation.tasks, was another before, or no episode counted."""
    nothing = _estimate("eval/avg@4", *[float("nan")] * 3)
    few, many = ({**BEFORE, "eval/tasks": tasks} for tasks in (4, 64))
    k = {0: BEFORE, 10: AFTER, 20: _estimate("eval/avg@8", 0.1, 0.05, 0.2)}
    for name, evaluations in {
        "k": k,
        "tasks": {0: few, 10: many},
        "none": {0: BEFORE, 10: nothing},
    }.items():
        _write(tmp_path / name, (), evaluations)
    tables = {}
    for workdir in tmp_path.iterdir():
        print_summary(workdir, stream=(stream := io.StringIO()))
        tables[workdir.name] = stream.getvalue().partition("\n\n")[0].splitlines()[1:]
    assert tables == {
        "k": [
            "test   avg@4   0.52 [0.46, 0.58]  -                  -",
            "test   pass@4  0.70 [0.60, 0.80]  -                  -",
            "test   avg@8   -                  0.10 [0.05, 0.20]  -",
            "train  avg@4   -                  0.90 [0.80, 1.00]  -",
        ],
        "tasks": [
            "test   avg@4   0.52 [0.46, 0.58]  0.52 [0.46, 0.58]  -",
            "test   pass@4  0.70 [0.60, 0.80]  0.70 [0.60, 0.80]  -",
        ],
        "none": [
            "test   avg@4   0.52 [0.46, 0.58]  -      -",
            "test   pass@4  0.70 [0.60, 0.80]  -      -",
        ],
    }


def test_a_run_without_evaluations_says_so(tmp_path):
    _write(tmp_path, [0.5])
    stream = io.StringIO()
    print_summary(tmp_path, stream=stream)
    assert stream.getvalue().startswith("No evaluation has been recorded.\n")


def test_the_summary_writes_the_curve_out_in_words(tmp_path):
    _write(tmp_path, evaluations={0: BEFORE, 5: BEFORE, 10: AFTER})
    stream = io.StringIO()
    print_summary(tmp_path, stream=stream)
    (line,) = [text for text in stream.getvalue().splitlines() if "by iteration" in text]
    assert line.startswith("test avg@4 by iteration")  # train was measured once: a point, no curve
    assert line.endswith("0: 0.52  5: 0.52  10: 0.80")
