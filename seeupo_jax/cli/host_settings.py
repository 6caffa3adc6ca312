"""Settings that all processes of a run must share: versions, configuration, files, code.

Processes that differ would train together and silently be wrong: parameters of another revision on
some of the devices, other tokens of the same conversation, other rewards. What only process 0 uses,
such as trackers, is not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

import seeupo_jax
from seeupo_jax.cli.file_digests import file_digest, file_digests, model_digests
from seeupo_jax.cli.user_sources import code_digests, named_code
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.config_file import PACKAGE, code_of
from seeupo_jax.configuration.loading import to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import expand_home
from seeupo_jax.metrics.run_manifest import PACKAGES, versions
from seeupo_jax.tasks.records import open_records
from seeupo_jax.tasks.task_folders import digest_of, find_folder

# Settings of jax that concern one host alone: logs, dumps, caches, addresses, its own devices.
_OF_ONE_HOST = re.compile(
    "log|traceback|dump|report|explain|warn|verbose|pprint|cache|address|timeout|transfer_guard"
    "|cross_host_transfer_|proxy|visible|default_device|num_cpu_devices|preemption|recoverability"
    "|leaked|distributed_debug|source_file|source_url"
)
# Likewise flags of XLA and libtpu; and how many devices a process has.
_FLAGS_OF_ONE_HOST = re.compile(
    "dump|log|profile|verbos|vmodule|debug|device_count|parallel_codegen|force_compilation_parallel"
)
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_VARIABLES = ("NVIDIA_TF32_OVERRIDE",)  # further ones that change numbers
# Fields of the configuration that name one file; a source of another kind is none.
_FILES = ("chat.template", "rollout.grammar", "agent.tasks", "sft.data", "sft.held_out_data")
# By environment of the package: its option that names a folder of tasks, and its library.
_TASK_FOLDERS = {"bfcl": "data"}
_LIBRARIES = {
    "bfcl": "bfcl-eval",
    "bfcl_worlds": "bfcl-eval",
    "gymnasium_text": "gymnasium",
    "textworld_express": "textworld-express",
    "openenv": "websockets",
}


def host_settings(config: Config, config_file: str | None = None) -> dict[str, str | None]:
    """All of it by name; None: there is no such file or module.

    Args:
      config_file: the value of `--config`; None: the configuration came from Python code.
    """
    values = to_dict(config)
    environments = [*_environments(values["env"])]
    libraries = [_LIBRARIES[name] for name, _ in environments if name in _LIBRARIES]
    found: dict[str, str | None] = {}
    known = versions((*PACKAGES, *libraries))
    found |= {f"version of {name}": x for name, x in known.items() if name != "seeupo_jax"}
    found["seeupo_jax"] = _own_source()
    found |= _jax_settings()
    found |= {f"config.{name}": json.dumps(x, sort_keys=True) for name, x in values.items()}
    found |= _files(values, environments)
    for folder in _harness_folders(config.agent):
        found[f"folder {folder} of config.agent.tasks"] = digest_of(Path(folder))
    code = {} if config_file is None else {"--config": code_of(config_file)}
    for field, name in (code | dict(_codes(values))).items():
        found |= {f"{what}, for {field}": x for what, x in code_digests(name).items()}
    return found


def _harness_folders(agent: Agent) -> list[str]:
    """The folders that the tasks of a harness name, each once; empty if they cannot be read."""
    if agent.harness is None or agent.tasks is None:
        return []
    try:
        records = open_records(agent.tasks, "config.agent.tasks")
        folders = [records[number].get("folder") for number in range(len(records))]
    except ValueError:  # the check of the tasks says what is wrong
        return []
    return sorted({folder for folder in folders if isinstance(folder, str) and folder})


def _own_source() -> str:
    """A hash of the package's source, so that hosts with different copies are detected."""
    root = Path(seeupo_jax.__path__[0])
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return f"source {digest.hexdigest()[:12]}"


def _jax_settings() -> dict[str, str | None]:
    settings = {
        name: str(value)
        for name, value in sorted(jax.config.values.items())
        if not _OF_ONE_HOST.search(name)
    }
    for variable in _FLAG_VARIABLES:
        for flag, value in _flags(os.environ.get(variable, "")).items():
            settings[f"{flag} of {variable}"] = value
    return {**settings, **{name: os.environ.get(name) for name in _VARIABLES}}


def _flags(text: str) -> dict[str, str]:
    """Flags by name, the last of each; of a file of flags where the text is a path."""
    if text.strip() and not text.strip().startswith("-") and os.path.isfile(text.strip()):
        text = Path(text.strip()).read_text(encoding="utf-8", errors="replace")
    pairs = (flag.lstrip("-").partition("=") for flag in text.split())
    return {
        name: value if equals else "true"
        for name, equals, value in pairs
        if not _FLAGS_OF_ONE_HOST.search(name)
    }


def _files(
    values: Mapping[str, Any], environments: list[tuple[str, Mapping[str, Any]]]
) -> dict[str, str | None]:
    """Digests of the files that the configuration names, by field and file."""
    found: dict[str, str | None] = {}
    for part in ("model", "lora"):
        path = values[part]["path"]
        for name, digest in ({} if path is None else model_digests(path)).items():
            found[f"file {name} of config.{part}.path={path}"] = digest
    teachers = [values["teacher"]["path"], *values["teacher"]["by_task"].values()]
    for path in (each for each in teachers if each is not None):
        for name, digest in model_digests(path).items():
            found[f"file {name} of config.teacher {path}"] = digest
    for field in _FILES:
        part, _, name = field.partition(".")
        path = values[part][name]
        if path is not None and expand_home(path).is_file():
            found[f"file config.{field}={path}"] = file_digest(expand_home(path))
    for place in _words(values["agent"]["command"] or ""):
        if _is_script(Path(place)):
            found[f"file {place} of config.agent.command"] = file_digest(place)
    if values["tasks"] is not None:
        found[f"folder of config.tasks={values['tasks']}"] = digest_of(find_folder(values["tasks"]))
    for name, options in environments:
        folder = options.get(_TASK_FOLDERS.get(name))
        if isinstance(folder, str):
            place = expand_home(folder)
            files = [file for file in sorted(place.rglob("*.json")) if file.is_file()]
            for file, digest in file_digests(place, files).items():
                found[f"file {file} of env {name} data={folder}"] = digest
    return found


def _words(command: str) -> list[str]:
    """The words of a command line; none of one that cannot be split, which starting it says."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _is_script(file: Path) -> bool:
    """Whether it is a file, and no program of the machine's own."""
    try:
        with file.open("rb") as opened:
            return opened.read(4) != b"\x7fELF"
    except OSError:
        return False


def _environments(env: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names and options of the environment, and of those in a mixture."""
    name, options = env.get("name"), env.get("options", {})
    if not isinstance(name, str) or not isinstance(options, Mapping):
        return  # making it says what is wrong
    yield name, options
    parts = options.get("environments", ()) if name == "mixture" else ()
    for part in parts if isinstance(parts, list | tuple) else ():
        if isinstance(part, Mapping):
            yield from _environments(part)


def _codes(values: Any, field: str = "config") -> Iterator[tuple[str, str]]:
    """Fields whose values name code, and the module or file: also in options and lists."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _codes(value, f"{field}.{name}")
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _codes(value, f"{field}[{number}]")
    elif isinstance(values, str) and values.startswith(PACKAGE):
        return  # a bundled policy, whose files are compared
    elif isinstance(values, str) and (code := named_code(values)) is not None:
        yield field, code
    elif field == "config.agent.command" and isinstance(values, str):
        for number, code in enumerate(_commands_code(values)):
            yield f"{field}[{number}]", code


def _commands_code(command: str) -> Iterator[str]:
    """The Python files and modules that a command line runs."""
    words = _words(command)
    yield from (word for word in words if word.endswith(".py"))
    yield from (word for flag, word in zip(words, words[1:], strict=False) if flag == "-m")
