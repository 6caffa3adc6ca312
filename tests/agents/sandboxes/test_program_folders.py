"""Which paths of the machine a sandbox has for the sake of a program."""

import os
import sys

from sandbox_cases import write_programs

from seeupo_jax.agents.sandboxes.program_folders import program_folders


def test_a_programs_folder_is_seen_and_a_home_folder_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("bin/tool", ".local/bin/tool", "project/.venv/bin/tool", "project/agent.sh")
    write_programs(tmp_path, **dict.fromkeys(names, "#!/bin/sh\n"))
    base = [] if sys.base_prefix.startswith("/usr") else [sys.base_prefix]
    home = str(tmp_path)
    assert program_folders([f"{home}/bin/tool"]) == [*base, f"{home}/bin"]
    assert program_folders([f"{home}/.local/bin/tool"]) == [*base, f"{home}/.local/bin"]
    assert program_folders([f"{home}/project/.venv/bin/tool", f"{home}/project/agent.sh"]) == [
        *base,
        f"{home}/project/.venv",
        f"{home}/project/agent.sh",
    ]
    assert program_folders(["bash", "/solution/solve.sh"]) == base


def test_the_interpreter_of_a_script_is_seen_wherever_it_is(tmp_path, monkeypatch):
    """As of tools that uv or npm have installed: a link to a script of another program."""
    home = str(tmp_path)
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("PATH", f"{home}/node/bin:{os.environ['PATH']}")
    write_programs(
        tmp_path,
        **{"python/bin/python3": "", "node/bin/node": "", "own": f"#!{home}/own\n"},
        **{"tools/one/bin/one": f"#!{home}/tools/one/bin/python\n"},
        **{"modules/two/cli.js": "#!/usr/bin/env -S node --no-warnings\n"},
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/one").symlink_to(f"{home}/tools/one/bin/one")
    (tmp_path / "bin/two").symlink_to("../modules/two/cli.js")
    (tmp_path / "tools/one/bin/python").symlink_to(f"{home}/python/bin/python3")
    base = [] if sys.base_prefix.startswith("/usr") else [sys.base_prefix]
    assert program_folders([f"{home}/bin/one"]) == [
        *base,
        f"{home}/bin",
        f"{home}/tools/one",
        f"{home}/python",
    ]
    assert program_folders([f"{home}/bin/two"]) == [
        *base,
        f"{home}/bin",
        f"{home}/modules/two/cli.js",
        f"{home}/node",
    ]
    assert program_folders([f"{home}/own"]) == [*base, f"{home}/own"]
