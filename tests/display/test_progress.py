"""What a run shows while it works."""

import contextlib
import dataclasses
import fcntl
import io
import logging
import math
import os
import re
import struct
import sys
import termios
import threading
import time

import jax
import pytest

from seeupo_jax.display import progress as progress_module
from seeupo_jax.display.live_display import LiveDisplay
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.display.terminal import SafeStream, format_duration
from seeupo_jax.display.view import SUCCESS, DisplayRow
from seeupo_jax.rollout.watch import Activity

METRICS = {
    "rollout/success_rate": 0.714,
    "rollout/reward_mean": 0.71,
    "rollout/turns_mean": 4.58,
    "rollout/tokens_per_second": 5123.0,
    "sweep/tokens_per_second": 3040.0,
    "sweep/kl": 0.00213,
}
AVG = ("eval/avg@4", "eval/avg@4_low", "eval/avg@4_high")


class _Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def _plain(total=60, **kwargs):
    stream, clock = io.StringIO(), _Clock()
    return ProgressDisplay(total, stream=stream, clock=clock, **kwargs), stream, clock


def _iterate(progress, clock, i, seconds, metrics=METRICS):
    progress.phase("rollout")
    clock.now += seconds / 2
    progress.phase("sweep")
    clock.now += seconds / 2
    progress.iteration(i, metrics)


@pytest.mark.parametrize("display", ["auto", "plain"])
def test_without_a_terminal_an_iteration_is_one_line(display):
    progress, stream, clock = _plain(display=display)
    with progress:
        progress.resumed(11)
        _iterate(progress, clock, 12, 2.4)
    assert stream.getvalue() == (
        "iteration 12/60  success 0.71  reward 0.71  turns 4.6  rollout 5.1k tok/s"
        "  sweep 3.0k tok/s  kl 0.0021  2.4 s/it  left 1m55s\n"
    )


def test_what_environments_could_not_do_is_shown_where_there_was_any():
    progress, stream, clock = _plain(total=2)
    trouble = {"rollout/retries": 12, "rollout/failed": 3, "rollout/groups_dropped": 1}
    with progress:
        _iterate(progress, clock, 1, 2.0, dict.fromkeys(trouble, 0))
        _iterate(progress, clock, 2, 2.0, trouble | {"sweep/kl": 0.1})
    first, second = stream.getvalue().splitlines()
    assert first == "iteration 1/2  2.0 s/it  left 2s"
    assert second == "iteration 2/2  kl 0.1  retries 12  failed 3  groups dropped 1  2.0 s/it"


def test_missing_and_odd_metrics_are_not_shown():
    progress, stream, clock = _plain(total=1)
    odd = {"rollout/success_rate": math.nan, "sweep/kl": None, "rollout/turns_mean": "many"}
    with progress:
        _iterate(progress, clock, 1, 2.0, odd)
    assert stream.getvalue() == "iteration 1/1  2.0 s/it\n"


def test_time_left_counts_evaluations_and_not_the_first_compile():
    progress, stream, clock = _plain(total=12)
    with progress:
        _iterate(progress, clock, 1, 100.0)
        clock.now += 3.0
        _iterate(progress, clock, 2, 2.0)
    # From the end of iteration 1 to that of iteration 2 took 5 s; 10 are left.
    assert stream.getvalue().splitlines()[-1].endswith("2.0 s/it  left 50s")


def test_time_left_is_judged_by_the_last_twenty_iterations():
    progress, stream, clock = _plain(total=45)
    with progress:
        for i in range(1, 26):
            _iterate(progress, clock, i, 100.0 if i <= 5 else 2.0)
    # After 24 the last 20 took 100 s and 19 times 2 s, and 21 are left; after 25 20 times 2 s.
    before, last = stream.getvalue().splitlines()[-2:]
    assert before.endswith("left 2m25s") and last.endswith("left 40s")


def _compiles(clock, seconds, look=lambda: None):
    """As JAX reports a program that compiles for so long; `look` is called at its end."""
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.record_scalar(event, clock.now)
    clock.now += seconds
    look()
    jax.monitoring.record_event_duration_secs(event, seconds)


def test_programs_that_are_compiled_ahead_are_a_phase_of_their_own():
    progress, stream, clock = _plain(total=2)
    with progress:
        for total in (25, 5):  # the rollout's and the sweep's
            progress.phase("compiling")
            for done in range(total + 1):
                progress.step(done, total)
                clock.now += 4
        _iterate(progress, clock, 1, 2.0, {})
    assert stream.getvalue().splitlines() == [
        "compiling 3 of 25  12s  left 1m28s",
        "compiling 11 of 25  44s  left 56s",
        "compiling 19 of 25  1m16s  left 24s",
        "compiling 3 of 5  12s  left 8s",
        "iteration 1/2  2.0 s/it  left 2s",
    ]


def test_before_the_number_of_programs_is_known_they_compile_without_one():
    progress, stream, clock = _plain()
    with progress:
        progress.phase("compiling")
        clock.now += 11
        progress.tick()
    assert stream.getvalue() == "compiling  11s\n"


@pytest.mark.parametrize("phase", ["rollout", "sweep", "evaluation", "steps"])
def test_a_program_that_compiles_on_the_way_is_shown_in_place_of_the_phase(phase):
    progress, stream, clock = _plain()
    with progress:
        progress.phase(phase)
        clock.now += 2
        _compiles(clock, 20)
        progress.step(1, 9)  # 22 s after its beginning, of which it waited for 20
        _compiles(clock, 40, progress.tick)
        clock.now += 30
        progress.tick()
    assert stream.getvalue().splitlines() == [
        f"{phase}  1/9  left 16s",
        "compiling program 2  40s",
        f"{phase}  1/9  left 4m16s",
        *([f"{phase} took 32s"] if phase in ("evaluation", "steps") else []),
    ]


def test_programs_that_compile_in_a_moment_are_not_shown():
    progress, stream, clock = _plain()
    with progress:
        progress.phase("sweep")
        clock.now += 30
        _compiles(clock, 0.9, progress.tick)
    assert stream.getvalue() == "sweep  30s\n"


def test_the_time_left_of_a_phase_is_judged_without_what_compiled_in_it():
    progress, stream, clock = _plain()
    with progress:
        for seconds in (60, 0, 0):  # compiling, in the first
            progress.phase("evaluation")
            _compiles(clock, seconds)
            clock.now += 4
        progress.phase("evaluation")
        clock.now += 1
        assert progress._moment(clock.now).phase_left == 3
    assert stream.getvalue() == ""  # none of them took 10 s by itself


def test_of_a_phase_that_is_done_no_time_is_left():
    progress, stream, clock = _plain()
    with progress:
        for seconds in (60, 20):  # the first took longer
            progress.phase("steps")
            clock.now += seconds
            progress.step(10, 10)
    first, again = ["steps  10/10", "steps took 1m00s"], ["steps  10/10", "steps took 20s"]
    assert stream.getvalue().splitlines() == [*first, *again]


def test_what_came_before_the_first_rollout_is_no_iteration_time():
    progress, stream, clock = _plain(total=2)
    with progress:
        progress.phase("warm start")
        clock.now += 2700
        _iterate(progress, clock, 1, 2.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "warm start took 45m00s"
    assert lines[1].endswith("2.0 s/it  left 2s")


def test_long_phases_tell_how_far_they_are_at_most_twice_a_minute():
    progress, stream, clock = _plain()
    with progress:
        progress.phase("warm start")
        for done in range(1, 101):
            clock.now += 1
            progress.step(done, 100, f"loss {1 / done:.2f}")
    assert stream.getvalue().splitlines() == [
        "warm start  10/100  loss 0.10  left 1m30s",
        "warm start  40/100  loss 0.03  left 1m00s",
        "warm start  70/100  loss 0.01  left 30s",
        "warm start  100/100  loss 0.01",
        "warm start took 1m40s",
    ]


def test_a_phase_that_goes_on_later_is_judged_by_its_own_steps():
    progress, stream, clock = _plain()
    with progress:
        for first in (0, 15, 45):  # an evaluation comes between
            progress.phase("steps", first)
            for done in range(first + 1, first + 16):
                clock.now += 10
                progress.step(done, 60)
            progress.phase("evaluation")
    lines = [line for line in stream.getvalue().splitlines() if "/60" in line]
    assert len(lines) == 15
    for line in lines:
        done = int(line.split()[1].split("/")[0])
        left = f"  left {format_duration(10.0 * (60 - done))}" if done < 60 else ""
        assert line == f"steps  {done}/60{left}"


def test_short_phases_and_those_of_an_iteration_get_no_line():
    progress, stream, clock = _plain()
    with progress:
        for name, seconds in (("checkpoint", 9), ("rollout", 300), ("sweep", 300)):
            progress.phase(name)
            clock.now += seconds
    assert stream.getvalue() == ""


def test_a_long_rollout_tells_what_its_environments_do():
    progress, stream, clock = _plain(total=2)
    seen = Activity(128, 41, 12, 87, 3, 0, slowest=("desk/7", 35.0))
    progress.phase("rollout")
    with progress.watch.on(lambda: dataclasses.replace(seen, tokens=int(50 * clock.now))):
        for _ in range(42):
            clock.now += 1
            progress.tick()
    assert stream.getvalue().splitlines() == [
        "rollout  10s  87/128 finished  41 active  3 failed  0 tok/s  12 stepping"
        "  slowest 35s in desk/7  left 5s",
        "rollout  40s  87/128 finished  41 active  3 failed  50 tok/s  12 stepping"
        "  slowest 35s in desk/7  left 19s",
    ]
    progress.phase("sweep")  # nothing is watched any more
    for _ in range(10):
        clock.now += 1
        progress.tick()
    assert stream.getvalue().splitlines()[2:] == ["sweep  10s"]


def test_without_a_terminal_a_thread_looks_every_second(monkeypatch):
    monkeypatch.setattr(progress_module, "_TICK_S", 0.01)
    progress, stream, clock = _plain(total=2)
    with progress:
        progress.phase("rollout")
        clock.now += 11
        deadline = time.monotonic() + 30
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue() == "rollout  11s\n"
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_an_evaluation_is_a_line_with_intervals():
    progress, stream, _ = _plain()
    values = dict(zip(AVG, (0.5, 0.4, 0.6), strict=True))
    of_train = [name.replace("eval/avg", "eval_train/pass") for name in AVG]
    values |= dict(zip(of_train, (0.9, 0.8, 1), strict=True))
    progress.evaluation(20, {"sweep/kl": 0.1, **values})
    progress.evaluation(21, {"sweep/kl": 0.1})
    assert stream.getvalue() == (
        "evaluation 20/60  avg@4 0.50 [0.40, 0.60]  train pass@4 0.90 [0.80, 1.00]\n"
    )


def test_rich_without_a_terminal_says_that_lines_are_plain():
    progress, stream, _ = _plain(display="rich")
    with progress:
        progress.log("hello")
    assert stream.getvalue().splitlines() == [
        "display=rich needs a terminal; plain lines instead",
        "hello",
    ]


def test_what_a_model_says_in_a_line_reaches_no_terminal_as_control_characters():
    """Of ECMA-48: CSI and OSC begin with ESC or one character of C1, BEL ends a title."""
    progress, stream, _ = _plain()
    with progress:
        progress.log("no tool \x1b]0;owned\x07\x1b[2J \x9b2J\r\x7f\tü\n€")
    wanted = "no tool \\x1b]0;owned\\x07\\x1b[2J \\x9b2J \\x7f\tü €\n"
    assert stream.getvalue() == wanted


def test_an_unknown_display_is_refused():
    with pytest.raises(ValueError, match="got 'curses'; allowed: auto, rich, plain"):
        ProgressDisplay(1, "curses")


class _Terminal:
    """A pseudo-terminal of a size, whose other end is written to; all that was drawn is kept."""

    def __init__(self, width, height=24):
        self._master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self.resize(width, height)
        self._chunks = []
        self._reader = threading.Thread(target=self._drain, daemon=True)  # else a failed test hangs
        self._reader.start()

    def resize(self, width, height=24):
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def frames(self):
        """What was drawn, a list of lines for each time."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(self._chunks).decode(errors="ignore"))
        frames = re.split(r"(?:\r|\x1b\[2K|\x1b\[1A)+(?=iteration|phase)", text)
        plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in frames]
        return [[line for line in frame.split("\r\n") if line.strip()] for frame in plain]

    def end(self):
        """Everything that was drawn, as text."""
        self.stream.close()
        self._reader.join(timeout=60)
        os.close(self._master)
        return b"".join(self._chunks).decode()

    def _drain(self):
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(self._master, 4096):
                self._chunks.append(chunk)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    return _Terminal


BUSY = Activity(128, 41, 12, 87, 3, 5000, slowest=("order_desk/train/4711", 35.0))


def test_a_terminal_is_redrawn_in_place(terminal):
    screen, clock = terminal(100), _Clock()
    with ProgressDisplay(2, stream=screen.stream, clock=clock) as progress:
        progress.phase("warm start")
        progress.step(3, 10, "loss 0.41")
        progress.log("[not markup] main.c:100: stays")
        _iterate(progress, clock, 1, 2.0)
        _iterate(progress, clock, 2, 2.0, METRICS | {"rollout/retries": 7})
        progress.evaluation(2, dict(zip(AVG, (0.5, 0.4, 0.6), strict=True)))
    shown = screen.end()
    assert "[not markup] main.c:100: stays" in shown
    assert "reward 0.71  turns 4.6  rollout" not in shown, "no line an iteration"
    assert "\x1b[2K" in shown, "lines are erased and drawn again"
    last = shown[shown.rindex("2/2") :]
    speed = ("rollout 5.1k tok/s", "elapsed 4s", "2.0 s/it")
    tested = "after 2  avg@4 0.50 [0.40, 0.60]"
    for text in ("finished", "0.71", "▆▆", "retries 7", tested, *speed):
        assert text in last
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_terminal_shows_which_program_is_compiled_and_not_the_phase_that_waits(terminal):
    screen, clock = terminal(100), _Clock()

    def shown():
        progress._live._live.refresh()

    with ProgressDisplay(2, stream=screen.stream, clock=clock) as progress:
        progress.phase("compiling")
        progress.step(7, 25)
        clock.now += 376
        shown()
        progress.phase("rollout")
        clock.now += 2
        _compiles(clock, 12, shown)
        shown()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.end())
    phase = r"phase +(compiling \d+ of \d+|compiling program \d+|[a-z]+) [━─ ]* *([0-9ms]+)"
    assert [*dict.fromkeys(re.findall(phase, text))] == [
        ("compiling 7 of 25", "6m16s"),
        ("compiling program 1", "12s"),
        ("rollout", "2s"),
    ]


def test_the_display_is_as_wide_and_high_as_the_terminal_is_at_the_moment(terminal):
    screen, clock = terminal(100), _Clock()
    with ProgressDisplay(60, "rich", stream=screen.stream, clock=clock) as progress:
        for i in range(1, 51):
            _iterate(progress, clock, i, 2.0, METRICS | {SUCCESS: 0.714 if i > 20 else 0.0})
        progress.phase("rollout")
        clock.now += 5
        sizes, ends = [(100, 24), (40, 24), (12, 24), (80, 4), (100, 24)], []
        with progress.watch.on(lambda: BUSY):
            for width, height in sizes:
                screen.resize(width, height)
                seen, deadline = len(screen.frames()), time.monotonic() + 30
                while len(screen.frames()) < seen + 3 and time.monotonic() < deadline:
                    time.sleep(0.05)
                ends.append(screen.frames()[-2])  # the last may be read in part only
    screen.end()
    wide, narrow, tiny, flat, again = ends
    assert [line.split()[0] for line in wide] == [
        "iteration", "phase", "envs", "slowest", "success", "policy", "speed",
    ]  # fmt: skip
    assert "87/128 finished  41 active  3 failed" in wide[2] and "12 stepping" in wide[2]
    assert "35s in order_desk/train/4711" in wide[3] and again == wide
    assert wide[4].split() == ["success", "0.71", "▆" * 30]  # of the last 30
    assert len(narrow) == 7 and "87/128 finished" in narrow[2]
    assert narrow[4].endswith("▆▆▆") and len(flat) == 3
    for lines, width in ((wide, 100), (narrow, 40), (tiny, 12), (flat, 80)):
        assert max(map(len, lines)) < width


def test_lines_that_a_narrower_terminal_has_wrapped_are_erased_too(terminal):
    screen = terminal(100)
    row = DisplayRow("label", ["x" * 80])
    live = LiveDisplay(SafeStream(screen.stream), lambda: [row, row])
    live.start()
    live.line("wide")
    screen.resize(40)
    live.line("narrow")
    live.stop()
    # Each of the two lines of 91 cells is three of 40 now: four more than were drawn.
    between = screen.end().partition("wide")[2].partition("narrow")[0]
    up = "\x1b[2K\x1b[1A"
    assert up * 4 in between and up * 5 not in between


def test_what_is_printed_to_a_file_gets_there(terminal, capsys):
    screen = terminal(80)
    live = LiveDisplay(SafeStream(screen.stream), lambda: [DisplayRow("label", ["x"])])
    live.start()
    print("result")
    print("warning", file=sys.stderr)
    live.stop()
    shown = screen.end()
    assert capsys.readouterr() == ("result\n", "warning\n")
    assert "label" in shown and "result" not in shown and "warning" not in shown


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_what_cannot_be_redrawn_gets_lines(terminal, monkeypatch, term):
    screen, clock = terminal(80), _Clock()
    monkeypatch.setenv("TERM", term)
    style = "plain" if term == "xterm" else "auto"
    with ProgressDisplay(2, style, stream=screen.stream, clock=clock) as progress:
        _iterate(progress, clock, 1, 2.0)
    shown = screen.end()
    assert "\x1b" not in shown and shown.startswith("iteration 1/2  success 0.71")


def test_output_to_a_terminal_that_is_gone_is_lost_and_the_run_goes_on(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    stream = os.fdopen(slave, "w", encoding="utf-8")
    clock = _Clock()
    with ProgressDisplay(3, stream=stream, clock=clock) as progress:
        os.close(master)
        _iterate(progress, clock, 1, 2.0)
        progress.log("nobody reads this")
        with contextlib.suppress(OSError):  # what was written before still waits in its buffer
            stream.close()
        _iterate(progress, clock, 2, 2.0)


@pytest.fixture
def loggers():
    """The loggers of the package and of its runs, with levels as they were in the end."""
    each = [logging.getLogger(name) for name in ("seeupo_jax", "seeupo_jax.run")]
    yield each
    for logger in each:
        logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("which", [0, 1])
def test_an_application_that_takes_the_lines_gets_records_and_no_output(loggers, caplog, which):
    loggers[which].setLevel(logging.INFO)
    stream = io.StringIO()
    with ProgressDisplay(2, "plain", stream=stream) as progress:
        progress.log("compiled")
        progress.iteration(1, {"rollout/success_rate": 0.5})
    assert {record.name for record in caplog.records} == {"seeupo_jax.run"}
    assert caplog.messages[0] == "compiled" and "success 0.50" in caplog.messages[1]
    assert stream.getvalue() == ""


def test_a_higher_level_silences_a_run_and_so_does_another_process(loggers, caplog):
    stream = io.StringIO()
    with ProgressDisplay(2, "plain", stream=stream, shown=False) as progress:
        progress.log("of process 1")
    loggers[0].setLevel(logging.WARNING)
    with ProgressDisplay(2, "rich", stream=stream) as progress:
        progress.log("compiled")
        progress.iteration(1, {})
    assert stream.getvalue() == "" and not caplog.records
