"""Whatever a policy writes: no exception, no hang, nothing outside the simulators is touched."""

import importlib
import random
import sys
import threading
import time

import pytest

from seeupo_jax.envs.bfcl.benchmark_files import CATEGORIES, load_tasks, read_docs
from seeupo_jax.envs.bfcl.environment import Bfcl
from seeupo_jax.envs.bfcl.formats import FORMATS
from seeupo_jax.envs.tool_calls import ToolCall, render_python

# What Python reports of the process: files and folders, sockets, processes, modules, and `exec`,
# which is reported of `eval` too.
FORBIDDEN = ("open", "os.", "socket.", "subprocess.", "shutil.", "import", "exec", "urllib.")
PIECES = ["'", '"', "\\", "\n", "\0", "[", "]", "(", ")", "{", "}", ",", "=", "..", "/etc/passwd"]
PIECES += ["<tool_call>", "</tool_call>", "<think>", "9" * 500, "None", "1e308", "\U0001f600"]
PIECES += ["__import__('os').system('touch x')", "open('x', 'w')", "http://127.0.0.1:9/"]
VALUES = [0, -1, 10**9, 10**900, 1e308, -0.5, "", "x" * 999, "\ud800", "..", "nan", "1e999999999"]
VALUES += [None, True, [], {}, [1, "a"], {"a": 1}, [[[]]], "9" * 5000, "/", ".", "2024-13-45"]
_watching: list[int] = []
_seen: list[str] = []


def _watch(event, arguments):
    if threading.get_ident() in _watching and event.startswith(FORBIDDEN):
        _seen.append(f"{event} {arguments}")


sys.addaudithook(_watch)
# What is imported when it is first needed: by datetime, by a regular expression, by a verdict.
for lazily in (
    "_strptime",
    "tokenize",
    "encodings.utf_32_le",
    "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker",
):
    importlib.import_module(lazily)


class Watched:
    """Episodes whose every step is timed and watched, each in a fresh world now and then."""

    def __init__(self, category, form, rng):
        self.rng, self.ids = rng, [*load_tasks(category)]
        self.env = Bfcl(
            category, format=form, max_calls=100, max_calls_per_user_turn=100, reward="shaped"
        )
        self.begin()

    def begin(self):
        self.task = load_tasks(self.env.category)[self.rng.choice(self.ids)]
        self.env.reset(self.task.task_id, seed=0)
        self.left = 20

    def step(self, text):
        if self.left == 0:
            self.begin()
        self.left -= 1
        _seen.clear()
        _watching.append(threading.get_ident())
        start = time.thread_time()
        try:
            result = self.env.step(text)
        finally:
            _watching.clear()
        assert time.thread_time() - start < 1, text
        assert _seen == [], text
        assert isinstance(result.reward, float)
        for message in result.observation:
            message["content"].encode("utf-8")
        self.left *= not result.done


def mutated(text, rng):
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(text) + 1)
        stop = start + rng.choice([0, 0, 1, 5, 30])
        text = text[:start] + rng.choice([*PIECES, text[start : start + 20]]) + text[stop:]
    return text


def random_call(task, rng):
    """A call of one of the task's tools, with values that its docs do not foresee."""
    docs = [doc for name in task.classes for doc in read_docs(name)]
    doc = rng.choice(docs)
    return ToolCall(doc["name"], {n: rng.choice(VALUES) for n in doc["parameters"]["properties"]})


def test_the_watch_detects_what_it_forbids(tmp_path):
    _watching.append(threading.get_ident())
    try:
        _seen.clear()
        (tmp_path / "x").write_text("x")
        eval("1 + 1")
    finally:
        _watching.clear()
    assert [event.split()[0] for event in _seen] == ["open", "exec"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_thousand_random_byte_strings_do_no_harm(form):
    rng = random.Random(0)
    watched = Watched("multi_turn_base", form, rng)
    frames = ("{}", "<tool_call>{}</tool_call>", "[ls({})]", "<think>{}</think>")
    for _ in range(1000):
        noise = rng.randbytes(rng.randrange(300)).decode("utf-8", "replace")
        watched.step(rng.choice(frames).replace("{}", noise))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("category", CATEGORIES)
def test_a_thousand_mutated_calls_do_no_harm(category, form):
    rng = random.Random(1)
    watched = Watched(category, form, rng)
    for _ in range(250):
        oracle = watched.env.play(watched.task.task_id, rng.choice(["turn", "one"]))
        watched.step(mutated(rng.choice([m for turn in oracle for m in turn]), rng))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("category", CATEGORIES)
def test_a_thousand_calls_with_wild_values_do_no_harm(category, form):
    rng = random.Random(2)
    watched = Watched(category, form, rng)
    render = render_python if form == "python" else FORMATS[form].render
    for _ in range(250):
        watched.step(render([random_call(watched.task, rng)]))
