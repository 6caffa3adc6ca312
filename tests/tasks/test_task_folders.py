"""Task folders in Harbor's form: what is read of them, and what is refused before a run."""

import re

import pytest

from seeupo_jax.tasks.dockerfiles import read_dockerfile
from seeupo_jax.tasks.task_folders import TaskFolders, find_folder

FILES = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Count the lines.\n",
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}
SETTINGS = """
schema_version = "1.1"
[metadata]
difficulty = "easy"
category = "text"
tags = ["lines"]
[agent]
timeout_sec = 12
[verifier]
timeout_sec = 3.5
env = { LEVEL = "2" }
[environment]
cpus = 2
memory = "1.5G"
storage_mb = 100
[environment.env]
NAME = "${SET_HERE}/${NOT_SET_ANYWHERE:-own}"
"""


def write(folder, **changed):
    """A task's files; by name, those that differ, None: it is not there."""
    for name, text in (FILES | changed).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_settings_are_read_and_have_harbors_defaults(tmp_path, monkeypatch):
    monkeypatch.setenv("SET_HERE", "value")
    write(tmp_path / "one", **{"task.toml": SETTINGS})
    write(tmp_path / "two")
    tasks = TaskFolders(tmp_path, local=True)
    one, two = tasks.task("one", "train"), tasks.task("two", "train")
    assert (one.agent_timeout_s, one.verifier_timeout_s, one.cpus) == (12, 3.5, 2)
    assert (one.memory_mib, one.storage_mib) == (1536, 100)
    assert (one.variables, one.verifier_variables) == ({"NAME": "value/own"}, {"LEVEL": "2"})
    assert tasks.labels("one") == {"difficulty": "easy", "category": "text"}
    assert tasks.data("one", "train") == {"instruction": "Count the lines.\n"}
    assert (two.agent_timeout_s, two.verifier_timeout_s, two.build_timeout_s) == (600, 600, 600)
    assert (two.cpus, two.memory_mib, two.storage_mib) == (1, 2048, 10240)
    assert tasks.verifier_timeout_s == 600 and two.container.workdir == "/app"


def test_tasks_are_in_splits_in_the_order_of_their_names(tmp_path):
    for name in ("test/b", "test/a", "validation/c", "d"):
        write(tmp_path / name)
    (tmp_path / "notes").mkdir()
    tasks = TaskFolders(tmp_path, local=True)
    assert tasks.count == {"train": 1, "test": 2, "validation": 1}
    assert tasks.task_ids("test") == ["a", "b"] and tasks.task_ids("train") == ["d"]
    assert TaskFolders(tmp_path / "d", local=True).task_ids("train") == ["d"]
    with pytest.raises(ValueError, match="the split 'dev', .*; allowed: train, test, valid"):
        tasks.task_ids("dev")


def test_the_bundled_tasks_are_listed_and_have_solutions():
    tasks = TaskFolders(find_folder("harbor:package:sandboxed_tasks"), local=True)
    assert tasks.count == {"train": 7, "test": 3} and tasks.without_solution() == []


def test_the_digest_names_the_environments_files(tmp_path):
    def digest(local):
        return TaskFolders(tmp_path, local=local).task("one", "train").digest

    write(tmp_path / "one")
    before = digest(True)
    write(tmp_path / "one", **{"instruction.md": "Another."})
    assert digest(True) == digest(False) == before
    write(tmp_path / "one", **{"environment/Dockerfile": "FROM debian\nWORKDIR /work\n"})
    assert digest(True) != before


REFUSED = {
    "no settings": ({"task.toml": None}, "got no task.toml; allowed: a file"),
    "no instruction": ({"instruction.md": None}, "got no instruction.md; allowed: a file"),
    "no verifier": ({"tests/test.sh": None}, "got no tests/test.sh; allowed: a file"),
    "no Dockerfile": ({"environment/Dockerfile": None}, "got no environment/Dockerfile; allowed:"),
    "compose": ({"environment/docker-compose.yaml": ""}, "(several containers); allowed: env"),
    "TOML": ({"task.toml": "x = ["}, "got a file that cannot be read"),
    "time": ({"task.toml": "agent.timeout_sec = 0"}, "agent.timeout_sec: got 0; allowed: a number"),
    "text": ({"task.toml": "verifier.timeout_sec = '9'"}, "verifier.timeout_sec: got '9'; allowed"),
    "group": ({"task.toml": "environment = 3"}, "environment: got 3; allowed: a table"),
    "size": ({"task.toml": "environment.memory = 'much'"}, "got 'much'; allowed: a number with K"),
    "GPU": ({"task.toml": "environment.gpus = 1"}, "environment.gpus: got a GPU; allowed: 0"),
    "env": ({"task.toml": "verifier.env = { A = 1 }"}, "allowed: a table of texts"),
    "unset": (
        {"task.toml": "environment.env = { A = '${NOT_SET_ANYWHERE}' }"},
        "environment.env.A: got '${NOT_SET_ANYWHERE}'; allowed: variables that are set here",
    ),
    "steps": ({"task.toml": "steps = [{ name = 'a' }]"}, "steps: got it; allowed: none"),
    "RUN": (
        {"environment/Dockerfile": "FROM debian\nRUN apt-get install \\\n  git\n"},
        "an instruction that needs an image); allowed with config.sandbox.runtime=local: WORKDIR",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_played_is_refused_with_its_folder(tmp_path, case):
    changed, says = REFUSED[case]
    write(tmp_path / "fine")
    write(tmp_path / "odd", **changed)
    with pytest.raises(ValueError, match=r"^config\.tasks: .*/odd") as error:
        TaskFolders(tmp_path, local=True)
    assert says in str(error.value) and str(error.value).endswith(".")


def test_a_folder_without_tasks_or_with_a_name_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which is no folder; allowed: one"):
        TaskFolders(tmp_path / "none", local=True)
    with pytest.raises(ValueError, match="which has no task; allowed: a folder of TASK/task.toml"):
        TaskFolders(tmp_path, local=True)
    write(tmp_path / "train" / "one")
    write(tmp_path / "test" / "one")
    with pytest.raises(ValueError, match="got two folders of the task 'one'"):
        TaskFolders(tmp_path, local=True)


def test_images_and_all_instructions_are_allowed_in_containers(tmp_path):
    changed = {"environment/Dockerfile": None, "task.toml": "environment.docker_image = 'x:1'"}
    write(tmp_path / "image", **changed)
    write(tmp_path / "runs", **{"environment/Dockerfile": "FROM debian\nRUN true\n"})
    tasks = TaskFolders(tmp_path, local=False)
    assert tasks.task("image", "train").image == "x:1"
    assert tasks.task("runs", "train").image is tasks.task("runs", "train").container is None


DOCKERFILES = {
    "COPY a.txt b.txt ./": [("a.txt", "/app/a.txt"), ("b.txt", "/app/b.txt")],
    "COPY a.txt": "a source and a destination are needed",
    "COPY a.txt c.txt": [("a.txt", "/app/c.txt")],
    'COPY ["a.txt", "/data/"]': [("a.txt", "/data/a.txt")],
    "COPY *.txt /data/": [("a.txt", "/data/a.txt"), ("b.txt", "/data/b.txt")],
    "COPY folder /data": [("folder", "/data")],
    "ADD folder .": [("folder", "/app")],
    "COPY --chown=me a.txt /": "options are not followed",
    "COPY none.txt /": "there is no 'none.txt'",
    "COPY ../outside.txt /": "there is no '../outside.txt'",
    "COPY a.txt /usr/bin/": "/usr/bin belongs to this machine",
    "ENV A=$B": "only NAME=VALUE without other variables",
    "USER me": "an instruction that needs an image",
}


@pytest.mark.parametrize("line", DOCKERFILES)
def test_a_dockerfiles_copies_are_followed(tmp_path, line):
    expected, folder = DOCKERFILES[line], tmp_path / "environment"
    for name in ("a.txt", "b.txt", "folder/c.txt", "../outside.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "Dockerfile").write_text(f"FROM debian\n# files\nWORKDIR /app\n{line}\nCMD x\n")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            read_dockerfile(folder / "Dockerfile")
    else:
        found = read_dockerfile(folder / "Dockerfile").copies
        assert found == tuple((folder / name, target) for name, target in expected)
