"""The record of a run."""

import json
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard_cases import events_of

from seeupo_jax.telemetry.metrics import MetricsWriter, read_metrics


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
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_last_line_without_its_line_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}')
    writer = MetricsWriter(tmp_path)
    writer.resume_from(3)
    writer.write(3, {})
    writer.close()
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2, 3]


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


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n{"iter\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match="line 2: got text that is not JSON"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="line 1: got .* 'iteration'"):
        read_metrics(tmp_path)


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


def test_importing_telemetry_loads_no_heavy_package(tmp_path):
    code = """if True:
        import sys
        from seeupo_jax.telemetry import metrics, progress, report, statistics
        heavy = {"matplotlib", "tensorboardX", "rich", "jax"} & set(sys.modules)
        assert not heavy, heavy
        report.learning_curve(sys.argv[1])
        assert "matplotlib.pyplot" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
