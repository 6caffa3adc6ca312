"""Every command refuses a flag that it does not read, in one sentence, before it does anything."""

import contextlib
import functools
import importlib
import io
import os
import sys
import tomllib

import pytest
from places import ROOT, TINY

from seeupo_jax.configuration.field_reference import describe_fields, describe_groups
from seeupo_jax.configuration.flags import Flags, Wrong, integer, names, output_file, path, positive

RUN = (f"--config={TINY}", "--workdir=DIR")
UPDATE = (f"--config={TINY}", "--model=DIR/m", "--trajectories=DIR/t.jsonl", "--output=DIR/o")
# Command -> its module, and arguments with which it would begin.
COMMANDS = {
    "init": ("init", ("new_project",)),
    "train": ("train", RUN),
    "evaluate": ("evaluate", RUN),
    "sft": ("sft", (*RUN, "--data=DIR/c.jsonl")),
    "report": ("report", ("--workdir=DIR",)),
    "export": ("export", (*RUN, "--output=DIR/o")),
    "compare": ("compare", RUN),
    "update": ("update", UPDATE),
    "serve": ("serve", RUN),
    "train_server": ("train_server", RUN),
    "lab": ("lab", ()),
    "bench update": ("bench", ("update",)),
    "bench rollout": ("bench", ("rollout",)),
    "bench iteration": ("bench", ("iteration",)),
    "bench all": ("bench", ("all",)),
    "bench report": ("bench", ("report",)),
    "aot": ("aot", (f"--config={TINY}", "--topology=v5e:2x2")),
}
EVERY = pytest.mark.parametrize("command", COMMANDS)


def refusal(command, capsys, folder, *more):
    """The sentence with which the command ends, before it has written anything."""
    module, arguments = COMMANDS[command]
    arguments = [argument.replace("DIR", str(folder / "run")) for argument in arguments]
    main = importlib.import_module(f"seeupo_jax.{module}").main
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments, *more])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and not any(folder.iterdir())
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ")


@functools.cache
def flags_of(command):
    """Those that `--help` lists."""
    module, arguments = COMMANDS[command]
    first = arguments[:1] if command.startswith("bench") else ()
    printed = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(printed):
        importlib.import_module(f"seeupo_jax.{module}").main([command, *first, "--help"])
    assert ended.value.code == 0
    lines = printed.getvalue().partition("options:")[2].splitlines()
    heads = (line.strip().replace("=", " ").replace(",", " ") for line in lines)
    return {
        word[2:]
        for head in heads
        if head.startswith("-")
        for word in head.split()[:2]
        if word.startswith("--")
    }


@EVERY
def test_a_flag_that_the_command_does_not_read_is_refused(command, capsys, tmp_path):
    own = flags_of(command)
    assert own - {"help"}
    others = set().union(*(flags_of(each) for each in COMMANDS)) - own
    assert len(others) > 20
    for other in sorted(others):
        reported = refusal(command, capsys, tmp_path, f"--{other}=1")
        assert reported.startswith(f"--{other}: {command} has no such flag;"), reported
        assert all(f"--{name}" in reported for name in own - {"help"})


def test_flags_of_evaluation_and_export_are_not_trainings(capsys, tmp_path):
    for flag in ("--greedy", "--server=http://x", "--step=best", "--bfcl_results=x"):
        assert "train has no such flag" in refusal("train", capsys, tmp_path, flag)


@EVERY
def test_a_misspelt_flag_is_reported_with_the_nearest(command, capsys, tmp_path):
    flag = sorted(flags_of(command) - {"help", "k", "lr"}, key=len)[-1]
    wrong = flag[:-2] + flag[-1]
    reported = refusal(command, capsys, tmp_path, f"--{wrong}=1")
    assert reported.startswith(f"--{wrong}: {command} has no such flag; did you mean --{flag}?")


@EVERY
def test_what_is_no_flag_is_refused(command, capsys, tmp_path):
    reported = refusal(command, capsys, tmp_path, "stray")
    assert reported == f"{command}: got 'stray'; allowed: flags only, as --NAME=VALUE.\n"


@pytest.mark.parametrize("command", ["report", "lab", "bench update"])
def test_a_command_without_a_configuration_refuses_its_fields(command, capsys, tmp_path):
    reported = refusal(command, capsys, tmp_path, "--config.seed=1")
    assert reported.startswith(f"--config.seed: {command} has no such flag;")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("train", "config"),
        ("evaluate", "workdir"),
        ("sft", "workdir"),
        ("report", "workdir"),
        ("export", "output"),
        ("compare", "config"),
        ("update", "trajectories"),
        ("aot", "topology"),
    ],
)
def test_a_flag_that_is_missing_is_named(command, missing, capsys, tmp_path, monkeypatch):
    module, arguments = COMMANDS[command]
    rest = tuple(each for each in arguments if not each.startswith(f"--{missing}="))
    monkeypatch.setitem(COMMANDS, command, (module, rest))
    assert refusal(command, capsys, tmp_path).startswith(f"--{missing}: got none; allowed: ")


@pytest.mark.parametrize(
    ("command", "flag", "allowed"),
    [
        ("evaluate", "--k=0", "--k: got '0'; allowed: a whole number >= 1."),
        ("evaluate", "--k=x", "--k: got 'x'; allowed: a whole number >= 1."),
        ("evaluate", f"--k={'9' * 400}", "--k: got '999"),
        ("evaluate", "--greedy=perhaps", "--greedy: got 'perhaps'; allowed: True or False."),
        ("evaluate", "--split=", "--split: got ''; allowed: a text that is not empty."),
        ("evaluate", "--server_timeout_s=nan", "--server_timeout_s: got 'nan'; allowed: a number"),
        ("train", "--workdir=", "--workdir: got ''; allowed: a path."),
        ("train", "--num_processes=0", "--num_processes: got '0'; allowed: a whole number >= 1."),
        ("compare", "--seeds=0", "--seeds: got '0'; allowed: a whole number >= 1."),
        ("report", "--output=", "--output: got ''; allowed: a path."),
        (
            "export",
            "--output=gs://b/p",
            "--output: got 'gs://b/p'; allowed: a path of this machine",
        ),
        ("evaluate", "--json=/", "--json: got '/'; allowed: a file that can be written."),
        ("compare", "--json=/dev/null/x", "--json: got '/dev/null/x'; allowed: a file that can"),
        ("evaluate", f"--json={'x' * 300}", "--json: got 'xxx"),
        ("evaluate", f"--workdir={'x' * 300}", "--workdir: got /"),
        ("aot", "--json=/dev/null/x", "--json: got '/dev/null/x'; allowed: a file that can"),
    ],
)
def test_a_wrong_value_is_refused(command, flag, allowed, capsys, tmp_path):
    assert refusal(command, capsys, tmp_path, flag).startswith(allowed)


def test_values_are_read_as_they_are_meant(tmp_path, monkeypatch):
    flags = Flags("command", None)
    flags.switch("fast", "")
    flags.switch("safe", "", default=True)
    flags.flag("count", "", integer(0))
    flags.flag("share", "", positive)
    flags.flag("folder", "", path)
    flags.flag("others", "", names)
    flags.overrides()
    monkeypatch.chdir(tmp_path)
    line = "--fast --nosafe --count 3 --share=0.5 --folder=a/b --others=x,y --config.a.b=1"
    given = flags.read(line.split())
    assert (given.fast, given.safe, given.count, given.share) == (True, False, 3, 0.5)
    assert given.folder == tmp_path / "a" / "b" and given.others == ["x", "y"]
    assert given.override == ["a.b=1"]
    assert flags.read(["--fast=False"]).fast is False and flags.read([]).fast is False


def test_a_file_to_write_is_the_target_of_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "x.json")
    (tmp_path / "folder").symlink_to(tmp_path / "missing")
    assert output_file(str(tmp_path / "link")) == tmp_path / "gone" / "x.json"
    assert output_file(str(tmp_path / "folder" / "x")) == tmp_path / "missing" / "x"
    reading, writing = os.pipe()  # as `| jq` makes of /dev/stdout
    assert str(output_file(f"/proc/self/fd/{writing}")) == f"/proc/self/fd/{writing}"
    os.close(reading)
    os.close(writing)
    (tmp_path / "file").write_text("")
    (tmp_path / "there").symlink_to(tmp_path / "file")
    assert output_file(str(tmp_path / "there")) == tmp_path / "there"
    (tmp_path / "below").symlink_to(tmp_path / "file" / "x.json")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for wrong in ("below", "circle"):
        with pytest.raises(Wrong, match="allowed: a file that can be written"):
            output_file(str(tmp_path / wrong))


CONFIGURED = (
    "train",
    "evaluate",
    "sft",
    "export",
    "update",
    "serve",
    "train_server",
    "compare",
    "aot",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_field_with_default_bounds_and_sentence(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    module, arguments = COMMANDS[command]
    first = arguments[:1] if command.startswith("bench") else ()
    with pytest.raises(SystemExit):
        importlib.import_module(f"seeupo_jax.{module}").main([command, *first, "--help"])
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert ", ;" not in " ".join(said.split())  # a list that goes on, cut
    if command not in CONFIGURED:
        assert "  seed=0" not in lines
        return
    words = " ".join(said.split())
    for field in describe_fields():
        assert f"  {field.full_name}={field.default}" in lines
        assert f"{field.sentence} ({field.type}; {field.allowed})" in words
    heads = [line.partition(":")[0] for line in lines if line.partition(":")[0]]
    assert [head for head in heads if head in describe_groups()] == list(describe_groups())[1:]
    assert all(len(line) <= 90 for line in lines if line.startswith("      ") and "=" not in line)


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_console_script_is_its_command_and_is_named_as_it_is_typed(script, capsys, monkeypatch):
    name, _, function = SCRIPTS[script].partition(":")
    main = getattr(importlib.import_module(name), function)
    module = script.removeprefix("seeupo-").replace("-", "_")
    assert name.removesuffix(".__main__") == f"seeupo_jax.{module}"
    assert name.removeprefix("seeupo_jax.") in {module for module, _ in COMMANDS.values()}
    monkeypatch.setattr(sys, "argv", [f"/some/bin/{script}", "--nonsense"])
    with pytest.raises(SystemExit) as ended:
        main(sys.argv)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: ")
    monkeypatch.setattr(sys, "argv", [f"/some/bin/{script}", "--help"])
    with pytest.raises(SystemExit) as ended:
        main(sys.argv)
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"{script} " in said and "python -m" not in said


def test_every_command_has_a_console_script():
    wanted = {COMMANDS[command][0] for command in COMMANDS}
    found = {name.partition(":")[0].removeprefix("seeupo_jax.") for name in SCRIPTS.values()}
    assert found >= wanted
