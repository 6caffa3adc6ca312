"""`bench accelerator`, rehearsed: every piece on CPU in its smallest size."""

import json
import os

import jax
import pytest
from bench_cases import small  # noqa: F401
from process_cases import QUICK_XLA

from seeupo_jax import bench
from seeupo_jax.instruments.bench.accelerator import accelerator_command as command
from seeupo_jax.instruments.bench.accelerator.pieces import PIECES
from seeupo_jax.instruments.bench.accelerator.runner import Record, read

# Those that are run in this process, which has imported everything and has their programs; and the
# one that the command itself runs, in a process of its own.
SWEEPS = ("sweep", "sweep_long")
HERE = (
    *("trees_float32", "rows", "parity", *SWEEPS),
    *("update_bfcl_0.5b", "rollout_0.5b", "device_time_0.5b"),
)
PROCESS = "trees_bfloat16"
MISSING = ("altair", "ml_collections", "grain", "gguf", "llguidance", "tensorboardX", "vl_convert")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder where all pieces but `PROCESS` are done."""
    folder = tmp_path_factory.mktemp("out") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "prepare_xla", lambda: None)
        for name in HERE:
            piece(name, folder)
    for one in PIECES:  # the others are rehearsed with the same models in the same sizes
        if one.name not in (*HERE, PROCESS):
            Record.begin(folder / f"{one.name}.json", rehearsal=True).put(status="done")
    return folder


def piece(name, folder):
    bench.main(["", "accelerator", f"--piece={name}", f"--out={folder}", "--rehearse"])


@pytest.mark.parametrize("piece", HERE)
def test_every_piece_measures_what_it_is_for(out, piece):
    values = read(out / f"{piece}.json")
    assert values["status"] == "done" and values["notes"] == []
    assert all(check["passed"] for check in values["checks"])
    if piece.startswith(("update", "rollout")):
        figures = values["figures"]
        ways = {name: side["median_s"] for name, side in figures["contenders"].items()}
        ways = {name: median for name, median in ways.items() if name.startswith("generate")}
        assert figures["against"] == min(ways, key=ways.get, default="PyTorch, eager")
        assert values["size"].startswith("nano, ")
    elif piece.startswith("device_time"):
        programs = {name: run["programs"] for name, run in values["figures"]["runs"].items()}
        assert {row["program"] for row in programs["sweep"]} >= {"jit_score", "jit_turn"}
        assert {row["program"] for row in programs["rollout"]} >= {"jit_prefill", "jit_decode"}
    else:
        assert values["checks"]


def test_the_command_goes_on_with_what_is_left_and_writes_the_page(
    out, tmp_path, monkeypatch, capsys
):
    before = {file.name: file.read_bytes() for file in out.glob("*.json")}
    monkeypatch.setenv("XLA_FLAGS", f"{QUICK_XLA} --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    probed(monkeypatch)
    page = tmp_path / "page.md"
    bench.main(["bench", "accelerator", f"--out={out}", "--rehearse", f"--page={page}"])
    output = capsys.readouterr().out
    assert [line.partition(":")[0] for line in output.splitlines() if "begins" in line] == [PROCESS]
    assert {name: (out / name).read_bytes() for name in before} == before
    text = page.read_text()
    assert text == (out / command.PAGE).read_text()
    assert "**This page holds no measurements.**" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{piece.name}`" for piece in PIECES]
    assert {row[2] for row in rows} == {"done"}

    # What went wrong is tried again, said on the page, and the command's exit code.
    values = json.loads(before["rows.json"])
    values["checks"][0]["passed"] = False
    Record(out / "rows.json", values).put()
    with pytest.raises(SystemExit) as ended:
        bench.main(["bench", "accelerator", f"--out={out}", "--rehearse"])
    assert ended.value.code == 1
    assert "1 of 2 within bounds" in (out / command.PAGE).read_text()


def probed(monkeypatch, **changes):
    """Instead of a process that looks at this machine."""
    found = {"platform": "gpu", "device": "NVIDIA H200", "count": 1, "free_bytes": None}
    monkeypatch.setattr(command, "_probe", lambda *_, **__: found | {"no_torch": None} | changes)


def refused(line, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["bench", "accelerator", *line])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_without_an_accelerator_one_sentence_says_what_is_allowed(tmp_path, capsys, monkeypatch):
    """Nor does a process of the pieces need the libraries that only other commands use."""
    for name in MISSING:
        error = f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
        (tmp_path / f"{name}.py").write_text(error)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    out = tmp_path / "new"
    said = refused([f"--out={out}", "--minutes=1"], capsys)
    assert said == (
        "error: bench accelerator: JAX finds no GPU or TPU here; allowed: a machine with one, or"
        " --rehearse, which runs all pieces on CPU in the smallest sizes.\n"
    )
    assert not out.exists()


def test_wrong_flags_and_folders_of_other_figures_are_refused(tmp_path, capsys, monkeypatch):
    probed(monkeypatch)
    out = f"--out={tmp_path}"
    assert "--minutes: got '0'; allowed: a number > 0" in refused([out, "--minutes=0"], capsys)
    assert "--page: got '/dev/null/x'" in refused([out, "--page=/dev/null/x"], capsys)
    assert "allowed: a folder that can be made" in refused([f"--out={__file__}"], capsys)
    assert "--out: got none; allowed: the folder of results" in refused([], capsys)
    with pytest.raises(SystemExit):
        piece("x", tmp_path)
    assert "--piece: got 'x'; allowed: machine, trees_bfloat16" in capsys.readouterr().err
    file = tmp_path / "rows.json"
    Record.begin(file, rehearsal=True)
    assert "rows.json is of a rehearsal; allowed: another" in refused([out], capsys)
    Record.begin(file, rehearsal=False, device="NVIDIA A100")
    assert "is of NVIDIA A100, not of NVIDIA H200" in refused([out], capsys)
    assert "is of measurements" in refused([out, "--rehearse"], capsys)
