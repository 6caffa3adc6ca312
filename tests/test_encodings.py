"""Files are read and written as UTF-8, whatever the locale says."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import chat_cases
import pytest

import seeupo_jax

ROOT = Path(seeupo_jax.__path__[0])
# These read what the kernel writes, or probe a folder by an empty file.
ASCII_ONLY = {
    *("benchmarks/machine.py", "parallel/device_memory.py", "cli/command_line.py", "cli/heap.py"),
    *("checkpoint/process_sync.py", "checkpoint/storage.py"),
}
# A call -> which of its arguments are the mode and the encoding; the mode of a text is the default.
CALLS = {
    "read_text": (None, 0),
    "write_text": (None, 1),
    "open": (1, 3),
    "os.fdopen": (1, 3),
    "gzip.open": (1, 3),
    ".open": (0, 2),
}
MODES = {"r", "w", "a", "x", "r+", "w+", "a+", "x+", "rt", "wt", "at", "xt"}


def in_the_locales_encoding(source):
    """The lines of calls that read or write a text without an encoding."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _reads_text(call) and not _has_encoding(call)]


def _kind(call):
    name = ast.unparse(call.func)
    if name in CALLS:
        return name
    method = name.rpartition(".")[2]
    is_path = method == "open" and _mode(call, CALLS[".open"][0]) in MODES
    return method if method.endswith("_text") else ".open" if is_path else None


def _mode(call, place):
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    at = dict(enumerate(call.args))
    mode = given.get("mode", at.get(place))
    return mode.value if isinstance(mode, ast.Constant) else None


def _reads_text(call):
    kind = _kind(call)
    if kind not in CALLS:
        return False
    mode = _mode(call, CALLS[kind][0])
    return mode is None or "b" not in mode


def _has_encoding(call):
    place = CALLS[_kind(call)][1]
    return len(call.args) > place or any(k.arg == "encoding" for k in call.keywords)


@pytest.mark.parametrize(
    "line, bare",
    [
        ("path.read_text()", True),
        ("path.read_text(encoding='utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, 'utf-8')", False),
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, 'rb')", False),
        ("path.open('a')", True),
        ("path.open('ab')", False),
        ("path.open('a', encoding='utf-8')", False),
        ("os.fdopen(handle, 'w')", True),
        ("gzip.open(path, 'rt')", True),
        ("os.open(path, flags)", False),
        ("player.open(key, request)", False),
    ],
)
def test_the_search_sees_calls_of_every_kind(line, bare):
    assert bool(in_the_locales_encoding(line)) == bare


def test_no_file_is_read_or_written_in_the_locales_encoding():
    files = sorted(ROOT.rglob("*.py"))
    found = {
        str(file.relative_to(ROOT)): in_the_locales_encoding(file.read_text(encoding="utf-8"))
        for file in files
    }
    assert {name for name, lines in found.items() if lines} == ASCII_ONLY


PROGRAM = """
import json, sys
from pathlib import Path
from seeupo_jax.configuration.schema import Chat
from seeupo_jax.policy.files.huggingface_tokenizer import load
folder, file, saved = map(Path, sys.argv[1:])
own = load(folder, Chat(template=str(file)))
own.save(saved)
asked = [{"role": "user", "content": "?"}]
print(json.dumps([t.begin(asked, ()).tokens for t in (load(folder, None), own, load(saved, None))]))
"""


@pytest.mark.exhaustive
def test_a_model_folder_is_the_same_in_every_locale(tmp_path):
    template = "%s{%% for m in messages %%}{{ m.content }}<|im_end|>{%% endfor %%}"
    library = chat_cases.small_library()
    library.add_tokens("｜Gefäß｜", special_tokens=True)
    library.chat_template = template % "｜Gefäß｜"
    library.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer_config.json").read_bytes()) | {"note": "｜Gefäß｜"}
    text = json.dumps(stored, ensure_ascii=False)
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode())
    file, saved = tmp_path / "own.jinja", tmp_path / "saved"
    file.write_bytes((template % "｜漢字｜").encode())
    saved.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, file, saved],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    wanted = [
        library.encode(f"{begin}?<|im_end|>", add_special_tokens=False)
        for begin in ("｜Gefäß｜", "｜漢字｜", "｜漢字｜")
    ]
    assert json.loads(done.stdout) == wanted
    kept = json.loads((saved / "tokenizer_config.json").read_bytes())
    assert kept["note"] == "｜Gefäß｜"
