"""The record of a run."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fault_fs import FaultFs
from process_cases import environment
from tensorboard_cases import events_of

from seeupo_jax.metrics import metrics_log
from seeupo_jax.metrics.metrics_log import MetricsWriter, read_metrics
from seeupo_jax.metrics.trackers import TRACKERS


def _refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def _scalars(workdir):
    return {
        (event.step, value.tag): value.simple_value
        for event in events_of(workdir)
        for value in event.summary.value
    }


def test_every_line_is_strict_json_with_the_iteration_first(tmp_path):
    values = {
        "nan": math.nan,
        "inf": -math.inf,
        "numpy": np.float32(0.5),
        "numpy_nan": np.float64("nan"),
        "jax": jnp.int32(7),
        "bfloat16": jnp.bfloat16(1.5),
        "text": 'a "quoted"\nline',
    }
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, values)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=_refuse_constant)
    assert next(iter(record)) == "iteration"
    assert record == {
        "iteration": 3,
        "nan": None,
        "inf": None,
        "numpy": 0.5,
        "numpy_nan": None,
        "jax": 7,
        "bfloat16": 1.5,
        "text": 'a "quoted"\nline',
    }
    assert isinstance(record["jax"], int)


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"a": 1})
    assert read_metrics(tmp_path) == [{"iteration": 1, "a": 1}]
    writer.close()


def test_resuming_drops_later_iterations_and_a_half_line(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i in range(1, 6):
            writer.write(i, {"a": i / 10})
    path = tmp_path / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)[:3]
    with path.open("a") as file:
        file.write('{"iteration": 2, "a": 0.')
    with MetricsWriter(tmp_path) as writer:
        writer.resume_from(4)
        assert path.read_text() == "".join(kept)
        writer.write(4, {"a": 9})
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["metrics.jsonl", "metrics.jsonl.damaged"]


def test_a_whole_last_line_without_its_line_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}')
    writer = MetricsWriter(tmp_path)
    writer.resume_from(3)
    writer.write(3, {})
    writer.close()
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_link_to_a_file_elsewhere_stays_when_lines_are_forgotten(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "metrics.jsonl").symlink_to("disk/kept.jsonl")
    for _ in range(2):  # the file is not there at first
        with MetricsWriter(tmp_path) as writer:
            writer.resume_from(2)
            writer.write(2, {})
    assert (tmp_path / "metrics.jsonl").readlink() == Path("disk/kept.jsonl")
    assert (tmp_path / "disk/kept.jsonl").read_text() == '{"iteration": 2}\n'
    assert len(list(tmp_path.iterdir())) == 2 and len(list((tmp_path / "disk").iterdir())) == 1


def test_every_cut_of_the_file_can_be_read_and_resumed(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"name": "ü", "a": 1.5})
        writer.write(2, {"name": "ü", "a": 2.5})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        MetricsWriter(tmp_path).resume_from(2)
        assert path.read_bytes() == whole[:first]


def test_a_kill_while_resuming_loses_nothing(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {})
        writer.write(2, {})
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path).resume_from(2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


GOOD = [
    b'{"iteration": 1, "a": 0.5}',
    b'{"iteration": 1, "b": null, "c": "x"}',
    b'{"iteration": 2}',
]
DAMAGED = {
    "cut": b'{"iter',
    "binary": b"\x00\xff\xfe\x80garbage",
    "zeros": bytes(4096),
    "other json": b"[1, 2]",
    "no iteration": b'{"a": 1}',
    "iteration of another type": b'{"iteration": true}',
    "deep": b"[" * 100_000,
    "deep inside": b'{"iteration": 1, "a": ' + b"[" * 200 + b"]" * 200 + b"}",
    "nan": b'{"iteration": 1, "a": NaN}',
    "infinity": b'{"iteration": 1, "a": 1e999}',
    "digits": b'{"iteration": 1, "a": 1' + b"0" * 400 + b"}",
    "utf-16": '{"iteration": 1}'.encode("utf-16"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_lines_are_set_aside_and_the_good_ones_kept(tmp_path, damage):
    lines = [GOOD[0], DAMAGED[damage], GOOD[1], DAMAGED[damage], GOOD[2]]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    good, logged = [json.loads(line) for line in GOOD], []
    count = f"{path}: {2 * (1 + DAMAGED[damage].count(10))} of "
    assert read_metrics(tmp_path, log=logged.append) == good
    assert (
        len(logged) == 1 and logged[0].startswith(count) and "the first of them line 2" in logged[0]
    )
    before = path.read_bytes()
    with MetricsWriter(tmp_path, log=logged.append) as writer:
        writer.resume_from(2)
        writer.write(2, {"a": 7})
    aside = tmp_path / "metrics.jsonl.damaged"
    assert logged[1].startswith(count) and logged[1].endswith(f"they are set aside in {aside}")
    assert aside.read_bytes() == b"".join(2 * [DAMAGED[damage] + b"\n"])
    assert read_metrics(tmp_path, log=logged.append) == [*good[:2], {"iteration": 2, "a": 7}]
    path.write_bytes(before)  # and once more, as after a kill between the two files
    MetricsWriter(tmp_path, log=logged.append).resume_from(2)
    assert aside.read_bytes() == b"".join(4 * [DAMAGED[damage] + b"\n"]) and len(logged) == 3


# A power cut leaves zeros where a file had grown and its bytes were not on the disk yet.
@pytest.mark.parametrize("last", [GOOD[1][:-3], GOOD[1][:-3] + bytes(50), bytes(4096)])
def test_a_last_line_that_is_cut_short_is_told_by_who_resumes_alone(tmp_path, last):
    (tmp_path / "metrics.jsonl").write_bytes(GOOD[0] + b"\n" + last)
    logged = []
    assert read_metrics(tmp_path, log=logged.append) == [json.loads(GOOD[0])] and logged == []
    MetricsWriter(tmp_path, log=logged.append).resume_from(2)
    assert len(logged) == 1 and "1 of 2 lines are damaged, the first of them line 2" in logged[0]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == last + b"\n"
    assert (tmp_path / "metrics.jsonl").read_bytes() == GOOD[0] + b"\n"


def test_a_folder_in_the_place_of_the_file_is_a_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    for use in (read_metrics, lambda folder: MetricsWriter(folder).resume_from(1)):
        with pytest.raises(ValueError, match="metrics.jsonl: got a folder; allowed: a file"):
            use(tmp_path)


def test_a_folder_without_metrics_reads_as_none_and_resumes(tmp_path):
    writer = MetricsWriter(tmp_path / "new" / "run")
    writer.resume_from(5)
    assert read_metrics(tmp_path / "new" / "run") == []


def test_tensorboard_gets_finite_numbers_only(tmp_path):
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.write(4, {"sweep/kl": 0.25, "turns": 3, "bad": math.nan, "checksum": "12"})
    assert _scalars(tmp_path) == {(4, "sweep/kl"): 0.25, (4, "turns"): 3.0}


def test_tensorboard_hides_what_a_resumed_run_writes_again(tmp_path):
    writer = MetricsWriter(tmp_path, ["tensorboard"])
    writer.resume_from(6)
    writer.write(6, {"a": 1.0})
    writer.close()
    starts = [event.step for event in events_of(tmp_path) if event.session_log.status == 1]
    assert starts == [6]


@pytest.mark.parametrize("fails", ["write", "draw", "close"])
def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(tmp_path, monkeypatch, fails):
    class Broken:
        def write(self, *_):
            self.do("write")

        def draw(self, *_):
            self.do("draw")

        def close(self):
            self.do("close")

        def do(self, what):
            if what == fails:
                raise ConnectionResetError("the service is gone")

    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: Broken())
    monkeypatch.setattr(metrics_log, "check_trackers", lambda _: None)
    logged = []
    with MetricsWriter(tmp_path, ["wandb", "tensorboard"], log=logged.append) as writer:
        for iteration in (1, 2):
            writer.write(iteration, {"a": 1.0})
            writer.draw(iteration, {}, [])
    why = "ConnectionResetError: the service is gone"
    assert logged == [f"wandb failed ({why}); nothing more is written to it"]
    assert _scalars(tmp_path) == {(1, "a"): 1.0, (2, "a"): 1.0}
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2]


def test_unknown_trackers_and_values_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got 'mlflow'; allowed: tensorboard, wandb"):
        MetricsWriter(tmp_path, ["mlflow"])
    writer = MetricsWriter(tmp_path)
    for value in ([1.0], None, {"a": 1}, np.zeros(3)):
        with pytest.raises(ValueError, match="got a="):
            writer.write(1, {"a": value})
    with pytest.raises(ValueError, match="named 'iteration'"):
        writer.write(1, {"iteration": 2})
    assert read_metrics(tmp_path) == []


def test_importing_metrics_and_display_loads_no_heavy_package(tmp_path):
    code = """if True:
        import sys
        from seeupo_jax.display import progress, run_summary
        from seeupo_jax.metrics import metrics_log, statistics
        heavy = {"altair", "tensorboardX", "rich", "jax"} & set(sys.modules)
        assert not heavy, heavy
        run_summary.learning_curve(sys.argv[1])
        assert not {"jax", "pandas"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_line_is_on_the_disk_when_it_is_written_or_when_that_is_asked_for(tmp_path):
    faults = FaultFs(tmp_path / "faults", tmp_path / "root")
    faults.root.mkdir()
    program = (
        "import sys\nfrom seeupo_jax.metrics.metrics_log import MetricsWriter\n"
        "with MetricsWriter(sys.argv[1]) as writer:\n"
        "    writer.write(1, {})\n"
        "    writer.write(2, {}, sync=False)\n"
        "    writer.write(3, {}, sync=False)\n"
        "    writer.sync()\n"
    )
    workdir = faults.root / "run"
    command = [sys.executable, "-c", program, workdir]
    subprocess.run(command, env=environment() | faults.environment, check=True)
    path = str(workdir / "metrics.jsonl")
    changed = [(call.kind, call.path) for call in faults.calls()]
    assert changed == [
        ("mkdir", str(workdir)),
        ("sync", str(faults.root)),
        ("open", path),
        ("sync", str(workdir)),
        ("write", path),
        ("sync", path),
        ("write", path),
        ("write", path),
        ("sync", path),
    ]
