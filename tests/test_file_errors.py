"""What the system says of a file ends a command with one sentence; what it advises can be done."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import learner_cases
import pytest
import run_cases
import sft_cases
import stored_cases
from fault_fs import FaultFs
from places import SUPPORT, TINY
from process_cases import environment

from seeupo_jax.errors import (
    WriteError,
    file_errors,
    name_file,
    reason,
    sentence_errors,
    terminal_line,
)
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.report import main as report


def arguments_of(folder, place):
    """Of each command, and the folder below `place` that it begins with and writes to."""
    train = run_cases.command(
        folder / "model",
        place / "train",
        "--config.iterations=2",
        "--config.evaluation.tasks=1",
        "--config.evaluation.every=0",
        "--config.rollout.tasks=2",
        "--config.telemetry.trackers=()",
    )[3:]
    update = [
        f"--config={TINY}",
        f"--model={folder / 'model'}",
        f"--trajectories={folder / 'stored.jsonl'}",
        f"--output={place / 'update' / 'policy'}",
        f"--json={place / 'update' / 'result.json'}",
        "--config.batching.buckets=(32,)",
        "--config.rollout.max_context=32",
        "--config.rollout.max_action_tokens=8",
    ]
    of_run = {name: [*train, f"--workdir={place / name}"] for name in ("train", "evaluate")}
    return {
        "train": of_run["train"],
        "sft": sft_cases.arguments(
            folder / "model", folder / "desk.jsonl", place / "sft", "sft.steps=2"
        ),
        "evaluate": [*of_run["evaluate"], f"--json={place / 'evaluate' / 'result.json'}"],
        "update": update,
        "export": [*train, f"--workdir={folder / 'run'}", f"--output={place / 'export/policy'}"],
        "report": [f"--workdir={place / 'report'}"],
    }


class Commands:
    """A process that runs commands whose calls that change files can fail.

    kinds: of these calls, in their order, where nothing fails, by command. wanted: what the command
    leaves then.
    """

    def __init__(self, folder, process, faults, output):
        self.kinds, self.wanted = {}, {}
        self.faults, self._folder, self._process, self._output = faults, folder, process, output
        self.place = faults.root
        self._arguments = arguments_of(folder, self.place)

    def begin(self, name):
        """Makes the folder that a command writes to as it is before it runs."""
        shutil.rmtree(self.place / name, ignore_errors=True)
        if name in ("evaluate", "report"):
            shutil.copytree(self._folder / "run", self.place / name)

    def run(self, name):
        """A command's exit code and what it printed."""
        begin = self._output.stat().st_size
        self._process.stdin.write(json.dumps([name, *map(str, self._arguments[name])]) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        return code, self._output.read_bytes()[begin:].decode()

    def try_without_faults(self, name):
        """Runs it for `kinds` and `wanted`, where it has not run yet."""
        if name in self.wanted:
            return
        if name in ("evaluate", "export", "report"):
            self.try_without_faults("train")
        self.begin(name)
        self.faults.count()
        code, printed = self.run(name)
        assert code == 0, printed
        calls = self.faults.calls()[-self.faults.counted :]
        self.kinds[name] = [call.kind for call in calls]
        self.wanted[name] = self.left(name)
        if name == "train":
            shutil.copytree(self.place / name, self._folder / "run")

    def left(self, name):
        """What a command has left, without what differs from run to run."""
        folder = self.place / name
        lines = read_metrics(folder) if name in ("train", "sft") else []
        figures = ("iteration", "state/checksum", "sft/loss", "heldout/loss", "eval/avg@2")
        result = folder / "result.json"
        return {
            "lines": [[line.get(figure) for figure in figures] for line in lines],
            "policy": {file.name: file.read_bytes() for file in folder.glob("policy/*")},
            "result": json.loads(result.read_text()) if result.exists() else None,
            "pages": sorted(file.name for file in folder.rglob("*.html")),
        }


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("file_errors")
    run_cases.save_policy(folder / "model")
    sft_cases.write_desk(folder / "desk.jsonl")
    stored_cases.write(folder / "stored.jsonl", learner_cases.ragged())
    (folder / "place").mkdir()
    faults = FaultFs(folder / "faults", folder / "place")
    programs = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    output = folder / "output"
    with (
        output.open("w") as file,
        subprocess.Popen(
            [sys.executable, SUPPORT / "commands_process.py"],
            env=environment() | faults.environment | programs,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        yield Commands(folder, process, faults, output)
        process.kill()


class Fault(NamedTuple):
    """A call that fails, and what the command says: `file`, below its folder, and what is left.

    call: a kind, of which the last call fails; a share of all calls, after which each one fails, as
      from the first call of +KIND on.
    """

    command: str
    call: str | float
    error: int
    file: str
    left: str


SAVED = r"(checkpoint \d|no (other|checkpoint)) .*"  # threads write in any order
RESUME = "rerun the command to resume from it"
KEPT = "what is finished is kept: {} and rerun the command"
PRINTED = "its text is on the standard output instead"
UNWRITTEN = "{}/policy was not written: rerun the command once it can be"
WHOLE = "{}/policy holds the policy: keep it, or remove it and rerun the command"
FAULTS = (
    Fault("train", 0.5, errno.EIO, ".*", SAVED),
    Fault("train", "rename", errno.EACCES, "learning_curve.png", f"checkpoint 2 is .*; {RESUME}"),
    Fault("sft", 0.3, errno.EROFS, ".*", SAVED),
    Fault("evaluate", 0.7, errno.EIO, "evaluation/.*", KEPT.format("mend that")),
    Fault("evaluate", "rename", errno.ESTALE, "result.json", PRINTED),
    Fault("update", "+truncate", errno.EROFS, ".policy.lock", UNWRITTEN),  # it is not held
    Fault("update", 0.6, errno.EIO, "policy", UNWRITTEN),
    Fault("update", "rename", errno.ENOSPC, "result.json", PRINTED),
    Fault("export", "sync", errno.EIO, "policy", WHOLE),
    Fault("export", 0.5, errno.EDQUOT, "policy", UNWRITTEN),
    Fault("report", "rename", errno.ESTALE, "report.html", KEPT.format("mend that")),
    Fault("report", 0.3, errno.ENOSPC, "report.html", KEPT.format("make room")),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.command}-{f.call}-{f.error}")
def test_a_command_that_a_disk_fails_says_so_and_can_be_run_again(fault, commands):
    name, folder = fault.command, commands.place / fault.command
    commands.try_without_faults(name)
    kinds = commands.kinds[name]
    commands.begin(name)
    if isinstance(fault.call, float):
        commands.faults.fail(int(len(kinds) * fault.call), fault.error, sticky=True)
    elif fault.call[0] == "+":
        commands.faults.fail(kinds.index(fault.call[1:]) + 1, fault.error, sticky=True)
    else:
        commands.faults.fail(kinds.count(fault.call), fault.error, kinds=[fault.call])
    code, printed = commands.run(name)
    commands.faults.count()
    full = fault.error in (errno.ENOSPC, errno.EDQUOT)
    assert code == (2 if full else 1), printed
    assert "Traceback" not in printed
    (sentence,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    tried = r"could not be (read or )?written( to \S*)?"
    left = fault.left.format(folder)
    why = os.strerror(fault.error)
    assert re.fullmatch(
        rf"error: (checkpoint \d {tried}|{folder}/{fault.file} {tried}): {why}; {left}\.", sentence
    ), sentence
    if "standard output" in sentence:
        text = printed[printed.index("\n{\n") :]
        assert json.JSONDecoder().raw_decode(text.strip())[0] == commands.wanted[name]["result"]
        assert commands.left(name)["policy"] == commands.wanted[name]["policy"]
        return
    if "remove it" in sentence:
        assert commands.left(name) == commands.wanted[name]
        shutil.rmtree(folder / "policy")
    code, printed = commands.run(name)
    assert code == 0, printed
    assert commands.left(name) == commands.wanted[name]


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file of Linux")
def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/proc/self/mem")  # its first page cannot be read
    with pytest.raises(SystemExit) as end:
        report(["report", f"--workdir={tmp_path}"])
    assert end.value.code == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'metrics.jsonl'} could not be read or written: Input/output error;"
        " what is finished is kept: mend that and rerun the command.\n"
    )


TENSORSTORE = ValueError(
    'UNAVAILABLE: Error writing "/x/state/d/0": Failed writing: "/x/state/d/0.__lock": Stale file'
    " handle [os_error_code='116'] [source locations='...']"
)


@pytest.mark.parametrize(
    "error, sentence, code",
    [
        (
            OSError(errno.EIO, "?", "/x/a", None, "/x/b"),
            "/x/b could not be read or written: Inp",
            1,
        ),
        (OSError(errno.EDQUOT, "?", b"/x/a"), "/x/a could not be written: Disk quota exceeded", 2),
        (OSError(errno.EROFS, "?"), "/a/run could not be written: Read-only file system", 1),
        (
            PermissionError(errno.EACCES, "?", "/x"),
            "/x could not be read or written: Permission",
            1,
        ),
        (TENSORSTORE, "/x/state/d/0 could not be read or written: Stale file handle", 1),
        (Exception("I/O error: Input/output error (os error 5)"), "/a/run could not be read or", 1),
        (
            RuntimeError("[Errno 28] No space left on device: '/x/a'"),
            "/x/a could not be written",
            2,
        ),
    ],
)
def test_what_the_system_says_is_a_sentence_whoever_quotes_it(error, sentence, code):
    with pytest.raises(WriteError) as raised, file_errors(lambda _: "all is kept", "/a/run"):
        with sentence_errors():  # a library's ValueError is no sentence
            raise error
    assert str(raised.value).startswith(sentence)
    assert str(raised.value).endswith("; all is kept.")
    assert raised.value.exit_code == code and raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        KeyError("/x could not be read"),
        FileNotFoundError(errno.ENOENT, "?", "/x"),
        IsADirectoryError(errno.EISDIR, "?", "/x"),
        PermissionError(errno.EACCES, "of a socket"),
        ConnectionRefusedError(errno.ECONNREFUSED, "?"),
        TimeoutError("nobody answered"),
        OSError("<urlopen error [Errno 111] Connection refused>"),
        ValueError("--workdir: got /x ([Errno 5] Input/output error); allowed: another."),
        RuntimeError("(os error 2)"),
    ],
)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as raised, file_errors():
        raise error
    assert raised.value is error


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(OSError) as raised, name_file(tmp_path / "a"):
        raise PermissionError(errno.EACCES, "?", str(tmp_path / "a.1234.tmp"))
    assert raised.value.filename == str(tmp_path / "a") and type(raised.value) is PermissionError
    for error in (FileNotFoundError(errno.ENOENT, "?", "b"), KeyError("b")):
        with pytest.raises(type(error)) as raised, name_file(tmp_path / "a"):
            raise error
        assert raised.value is error
    assert reason(TENSORSTORE) == "Stale file handle"


def test_a_sentence_is_one_line(capsys):
    text = "--x: got a\r\nb\u2028\n\n  c\x1b[2J\x85d; allowed: e."
    assert terminal_line(text) == "--x: got a b c\\x1b[2J d; allowed: e."
    with pytest.raises(SystemExit), sentence_errors():
        raise ValueError(text)
    assert capsys.readouterr().err == "error: --x: got a b c\\x1b[2J d; allowed: e.\n"
