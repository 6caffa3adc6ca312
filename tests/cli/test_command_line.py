"""What all commands do before they begin."""

import importlib
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from loaded_python import run
from places import SUPPORT, TINY
from process_cases import environment

import seeupo_jax
from seeupo_jax.cli import command_line as cli
from seeupo_jax.configuration.flags import Flags
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.planning.remat import SHARE
from seeupo_jax.trajectories.reader import read_trajectories


def faults(prepared, folder):
    """Page faults of twenty executions whose temporaries take 64 MiB, 16,384 pages."""
    about = {"JAX_COMPILATION_CACHE_DIR": str(folder), "XLA_FLAGS": "", "LD_PRELOAD": ""}
    called = [sys.executable, SUPPORT / "page_faults.py", str(prepared)]
    done = run(called, env=environment() | about)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_bucket_is_no_workdir_and_is_not_taken_for_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = Flags("train", None)
    cli.add_run_flags(flags)
    for bucket in ("gs://bucket/run", "gs:/bucket/run", "s3://bucket/run", "file:///run"):
        with pytest.raises(ValueError, match=f"^--workdir: got '{bucket}'; allowed: a folder"):
            flags.read(["--config=none.py", f"--workdir={bucket}"])
        with pytest.raises(ValueError, match=f"^workdir: got '{bucket}'; allowed: a folder"):
            cli.run_folder(bucket)
    assert cli.run_folder("run:1/x") == tmp_path / "run:1" / "x"
    assert not list(tmp_path.iterdir())


def test_a_path_may_begin_at_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = Flags("train", None)
    cli.add_run_flags(flags)
    assert flags.read(["--config=a.py", "--workdir=~/runs/x"]).workdir == tmp_path / "runs/x"
    assert cli.run_folder("~/runs/x") == cli.run_folder(Path("~/runs/x")) == tmp_path / "runs/x"
    (tmp_path / "a.py").write_text("get_config = lambda text='1': {'iterations': int(text)}")
    found = [load_config(file).iterations for file in ("~/a.py", Path("~/a.py"), "~/a.py:3")]
    assert found == [1, 1, 3]
    assert list(read_trajectories("~")) == []  # a folder without any


def test_an_empty_workdir_is_refused_and_not_the_working_directory():
    with pytest.raises(ValueError, match="^workdir: got ''; allowed: a folder"):
        cli.run_folder("")


def said_of(config, monkeypatch):
    """What a process of two says of itself to the other one."""
    said = []
    monkeypatch.setattr(cli.cluster, "join", lambda place, about, timeout_s: said.append(about))
    cli.join_cluster(config, coordinator="host:1", process_id=1, num_processes=2)
    (about,) = said
    return about


def test_processes_of_different_configurations_or_sources_do_not_meet(tmp_path, monkeypatch):
    usual = from_dict({})
    values, source = to_dict(usual), tmp_path / "x.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(seeupo_jax, "__path__", [str(tmp_path)])
    about = said_of(usual, monkeypatch)
    assert {name: json.loads(about[f"config.{name}"]) for name in values} == json.loads(
        json.dumps(values)
    )
    assert about["version of jax"] == jax.__version__
    assert about["version of python"] == sys.version.split()[0]

    def differing(other):
        now = said_of(other, monkeypatch)
        return {name for name in about | now if about.get(name) != now.get(name)}

    assert not differing(usual)
    assert differing(from_dict({"seed": 1, "env": {"options": {"x": 1}}})) == {
        "config.seed",
        "config.env",
    }
    source.write_text("x = 2\n")
    assert differing(usual) == {"seeupo_jax"}
    source.write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("no source")
    assert not differing(usual)
    source.rename(tmp_path / "y.py")
    assert differing(usual) == {"seeupo_jax"}


@pytest.mark.parametrize("make", [True, False])
def test_a_file_where_checkpoints_are_to_be_is_refused_before_anything_runs(tmp_path, make):
    (tmp_path / "checkpoints").write_text("")
    sentence = f"--workdir: got {tmp_path / 'checkpoints'} (File exists); allowed: a folder"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        cli.check_places(Config(), tmp_path, make=make)


@pytest.mark.parametrize("make", [True, False])
def test_a_backslash_where_checkpoints_are_to_be_is_refused_before_a_folder_is_made(tmp_path, make):
    got = re.escape(f"--workdir: got {tmp_path}/a\\b/checkpoints; allowed")
    with pytest.raises(ValueError, match=f"^{got}"):
        cli.check_places(Config(), tmp_path / "a\\b", make=make)
    with pytest.raises(ValueError, match=f"^{got}"):
        cli.missing_places(Config(), tmp_path / "a\\b")
    elsewhere = from_dict({"checkpoint": {"directory": str(tmp_path / "c\\d")}})
    with pytest.raises(ValueError, match="^config.checkpoint.directory: got .*d; allowed"):
        cli.check_places(elsewhere, tmp_path / "run", make=make)
    assert not list(tmp_path.iterdir())


def test_folders_that_this_machine_lacks_are_listed_once_each(tmp_path):
    file = tmp_path / "file"
    file.touch()
    config = from_dict({"checkpoint": {"directory": str(file / "checkpoints")}})
    why = "(Not a directory); allowed: a folder that can be made and written to."
    assert cli.missing_places(config, file / "run") == [
        f"--workdir: got {file}/run {why}",
        f"config.checkpoint.directory: got {file}/checkpoints {why}",
    ]
    assert cli.missing_places(Config(), tmp_path / "run") == []
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "photo.jpg").touch()
    with pytest.raises(ValueError, match="which a policy cannot replace"):  # on any machine
        cli.missing_places(Config(), tmp_path)


@pytest.mark.parametrize(
    "directory, stages, checked",
    [
        (None, False, ["/run"]),
        ("/shared", False, ["/shared"]),
        ("/shared", True, ["/run", "/shared"]),  # a warm start leaves its policy in the workdir
    ],
)
def test_all_that_processes_read_must_be_shared(directory, stages, checked, monkeypatch):
    stage = {"steps": 2, "learning_rate": 1e-4}
    warm_start = {"stages": [stage] if stages else []}
    config = from_dict({"checkpoint": {"directory": directory}, "warm_start": warm_start})
    seen = []
    monkeypatch.setattr(cli, "check_shared", lambda folder, *_: seen.append(str(folder)))
    cli.check_shared_places(config, cli.Path("/run"))
    assert seen == checked


@pytest.mark.parametrize("make", [True, False])
@pytest.mark.parametrize("name", ["--workdir", "config.warm_start.output"])
def test_a_folder_of_something_else_where_a_policy_is_to_be_is_refused(tmp_path, name, make):
    kept, run = tmp_path / "kept", tmp_path / "run"
    kept.mkdir()
    run.mkdir()
    folder, config = kept, from_dict({"warm_start": {"output": str(kept)}})
    if name == "--workdir":
        folder, config = run / "policy", Config()
        folder.symlink_to(kept)
    cli.check_places(config, run, make=make)  # an empty one
    (kept / "photo.jpg").touch()
    sentence = re.escape(f"{name}: got {folder}, which a policy cannot replace; allowed: a new or")
    with pytest.raises(ValueError, match=sentence):
        cli.check_places(config, run, make=make)
    (kept / "config.json").touch()
    cli.check_places(config, run, make=make)  # a policy's


@pytest.mark.parametrize("name", ["train", "sft"])
def test_a_configuration_that_is_refused_leaves_no_folder(tmp_path, capsys, name):
    module = importlib.import_module(f"seeupo_jax.{name}")
    given = [f"--workdir={tmp_path / 'run'}", "--config.mesh.data=1000", "--config.sft.data=x"]
    with pytest.raises(SystemExit) as ended:
        module.main(["", f"--config={TINY}", *given])
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")
    with pytest.raises(ValueError):
        data = {"data": "x"} if name == "sft" else {}
        config = load_config(TINY, ["mesh.data=1000"])
        vars(module)[name](config, workdir=tmp_path / "run", **data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["train", "sft", "evaluate", "update", "serve", "train_server"])
def test_a_process_of_64_bits_is_refused_before_anything_is_made(tmp_path, capsys, name):
    module, run = importlib.import_module(f"seeupo_jax.{name}"), tmp_path / "run"
    given = [f"--workdir={run}"]
    if name == "update":
        given = ["--model=package:order_desk", "--trajectories=t", f"--output={run}"]
    if name == "train_server":
        given += ["--model=package:order_desk"]
    with jax.enable_x64(True):
        with pytest.raises(SystemExit) as ended:
            module.main(["", f"--config={TINY}", *given])
        with pytest.raises(ValueError, match="^jax_enable_x64: got True; allowed: False"):
            cli.prepare_xla()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: jax_enable_x64: got True")
    assert error.count("\n") == 1 and not run.exists()


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to keep memory")
def test_memory_that_programs_give_back_is_not_cleared_again(tmp_path):
    every = 20 * 16_384
    assert faults(True, tmp_path) < every / 2 < every <= faults(False, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's maps so")
def test_programs_are_forgotten_where_they_have_used_up_half_of_the_maps(tmp_path, monkeypatch):
    def maps():
        return cli._MAPS.read_bytes().count(b"\n")

    most = tmp_path / "max_map_count"
    monkeypatch.setattr(cli, "_MOST_MAPS", most)
    made = [jax.jit(lambda x, i=i: i * x + x.sum()) for i in range(30)]
    for program in made:
        program(jnp.ones(3))
    before = maps()
    for allowed, kept in ((2 * before + 1000, 1), (before, 0)):
        most.write_text(f"{allowed}\n")
        cli._forget_programs()
        assert {program._cache_size() for program in made} == {kept}
    assert maps() < before - 30


@pytest.mark.parametrize("name", ["seeupo_jax.envs", "others"])
def test_what_a_model_says_in_a_warning_moves_no_cursor(name, monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    cli.log_to_stderr()
    logging.getLogger(name).warning("no tool \x1b[2J\x9b1A\x07")
    assert capsys.readouterr().err.endswith("no tool \\x1b[2J\\x9b1A\\x07\n")


def test_a_warning_is_one_line_whatever_it_quotes(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])
    cli.log_to_stderr()
    logging.getLogger("seeupo_jax.envs").warning("the server answered: one\r\n\n  two\u2028three")
    assert capsys.readouterr().err == "the server answered: one two three\n"


def test_compiled_programs_are_kept_in_the_users_cache_or_not_at_all(monkeypatch, caplog):
    def homeless(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for given, cache in (("/cache", "/cache"), ("", "/home/me/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cli._cache_folder() == f"{cache}/seeupo_jax/xla"
    monkeypatch.setattr(cli.Path, "expanduser", homeless)
    assert cli._cache_folder() is None and "compiled programs are not kept" in caplog.text
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/programs")
    assert cli._cache_folder() == "/programs"


@pytest.mark.parametrize(
    "plugin, given, wanted",
    [
        ("xla_cuda13", "", "--xla_gpu_enable_triton_gemm=false"),
        ("xla_cuda13", "--a=1", "--a=1 --xla_gpu_enable_triton_gemm=false"),
        ("xla_cuda13", "--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
        ("another", "--a=1", "--a=1"),
    ],
)
def test_products_of_a_gpu_are_cublas_s_unless_flags_say_otherwise(
    plugin, given, wanted, monkeypatch
):
    found = [SimpleNamespace(name=plugin)]
    monkeypatch.setattr(cli.metadata, "entry_points", lambda group: found)
    monkeypatch.setenv("XLA_FLAGS", given)
    cli._set_products_of_gpu()
    assert cli.os.environ["XLA_FLAGS"] == wanted


# jaxlib's `generate_pjrt_gpu_plugin_options` reads these when the backend starts. Of an H100's 79.2
# GiB the default 0.75 is less than the 0.9 x 80 GiB that `--explain` plans with; 0.92 is more.
@pytest.mark.parametrize(
    "plugin, given, wanted",
    [
        ("xla_cuda13", {}, "0.92"),
        ("xla_cuda13", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "0.5"),
        ("xla_cuda13", {"XLA_CLIENT_MEM_FRACTION": "0.5"}, None),
        ("xla_cuda13", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None),
        ("xla_cuda13", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, None),
        ("another", {}, None),
    ],
)
def test_jax_may_use_of_a_gpu_what_is_planned_with_unless_a_variable_says_otherwise(
    plugin, given, wanted, monkeypatch
):
    found = [SimpleNamespace(name=plugin)]
    monkeypatch.setattr(cli.metadata, "entry_points", lambda group: found)
    monkeypatch.setattr(cli.os, "environ", {**given})
    cli._set_memory_of_gpu()
    assert cli.os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == wanted
    assert float(cli._MEMORY_SHARE) * 79.2 >= SHARE * 80
