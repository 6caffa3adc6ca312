"""Programs in answers, run against tests: right ones, wrong ones and hostile ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_cases import PYTHONPATH

from seeupo_jax.envs.checkers import make_checker


def check(program, tests, row=(), language="python", **options):
    answer = f"Here:\n```{language}\n{program}\n```\nDone."
    return make_checker("code", options, "tests").check(answer, {"tests": tests, **dict(row)})


ADD = ["assert f(1) == 2", "assert f(2) == 3", "assert abs(f(3) - 4) < 1e-9", "assert f(4) == 0"]


def test_the_score_is_the_share_of_tests_or_all_of_them():
    program = "def f(x):\n    return x + 1"
    shared = check(program, ADD, score="share")
    assert shared == (0.75, "Your program fails test 4 of 4: it returned a wrong value.")
    assert check(program, ADD).score == 0
    assert check(program, ADD[:3]) == (1.0, "")


def test_the_last_closed_block_of_python_is_run():
    right = "```python\ndef f(x): return 2\n```"
    answer = f"```py\ndef f(x): return 3\n```\n{right}\n```json\n{{}}\n```\n```python\nunclosed"
    checker = make_checker("code", {}, "tests")
    assert checker.check(answer, {"tests": ADD[:1]}).score == 1
    result = checker.check("def f(x): return 2", {"tests": ADD[:1]})
    assert result.message.startswith("Your answer has no closed code block")


HUMANEVAL_0 = {
    "entry_point": "has_close_elements",
    "prompt": "from typing import List\n",
    "tests": """

METADATA = {
    'author': 'jt',
    'dataset': 'test'
}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False
    assert candidate([1.1, 2.2, 3.1, 4.1, 5.1], 0.5) == False

""",
}
SOLUTION_0 = """def has_close_elements(numbers: List[float], threshold: float) -> bool:
    numbers = sorted(numbers)
    return any(b - a < threshold for a, b in zip(numbers, numbers[1:]))
if __name__ == "__main__":
    raise SystemExit(3)
"""


def test_a_solution_of_humaneval_passes_its_check():
    columns = {"entry_point": "entry_point", "setup": "prompt"}
    tests = HUMANEVAL_0["tests"]
    assert check(SOLUTION_0, tests, HUMANEVAL_0, **columns) == (1.0, "")
    wrong = SOLUTION_0.replace("a < threshold", "a < 0.1")
    assert check(wrong, tests, HUMANEVAL_0, score="share", **columns).score == pytest.approx(2 / 3)


def test_values_of_subclasses_and_numpy_count_as_in_python():
    program = """
import collections, enum, numpy
class Level(enum.IntEnum):
    LOW = 1
Pair = collections.namedtuple("Pair", "a b")
def f(x):
    return [collections.Counter("aab"), Level.LOW, Pair(1, 2), numpy.int64(3), numpy.float64(0.5),
            frozenset({1}), True, {(1, 2): "\\ud800"}][x]
"""
    literals = ["{'a': 2, 'b': 1}", "1", "(1, 2)", "3", "0.5", "{1}", "1", "{(1, 2): '\\ud800'}"]
    tests = [f"assert f({number}) == {literal}" for number, literal in enumerate(literals)]
    assert check(program, tests) == (1.0, "")


def test_inputs_and_outputs_are_compared_by_lines_and_numbers():
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint((a + b) / 2)"
    apps = {"inputs": ["1 2\n", "3 5\n"], "outputs": ["3\n1.50\n", "8\n4\n\n"]}
    assert check(program, apps) == (1.0, "")
    apps["outputs"][1] = "8\n5"
    assert check(program, apps, score="share") == (
        0.5,
        "Your program fails test 2 of 2: its output is wrong.",
    )


def test_calls_of_a_method_are_compared_as_json():
    program = "class Solution:\n    def twoSum(self, nums, target):\n        return (0, 1)"
    pair = {"input": "[2, 7]\n9", "output": "[0, 1]", "testtype": "functional"}
    row = {"name": "twoSum"}
    assert check(program, [pair], row, entry_point="name") == (1.0, "")
    apps = {"fn_name": "twoSum", "inputs": [[[2, 7], 9]], "outputs": [[[0, 1]]]}
    assert check(program, apps) == (1.0, "")
    apps["outputs"] = [[1, 0]]
    assert check(program, apps).score == 0


# Each claims success without computing what the tests ask for.
CHEATS = {
    "exits": "import sys\nsys.exit(0)",
    "exits_at_once": "import os\nos._exit(0)",
    "prints_success": "print('passed 1\\n' * 9)\nimport os\nos._exit(0)",
    "equals_everything": """
class Any(int):
    def __eq__(self, other): return True
    __hash__ = None
    def __sub__(self, other): return self
    def __lt__(self, other): return True
    def __abs__(self): return self
    def __repr__(self): return "2"
def f(x): return Any()
""",
    "writes_into_all_descriptors": """
import os
for number in range(1, 64):
    try:
        os.write(number, b"0 0 value 2\\n0 1 value 3\\n")
    except OSError:
        pass
def f(x): return 0
""",
    "replaces_builtins": """
import builtins, os
builtins.ascii = builtins.repr = lambda value: "2"
os.write = lambda number, data: len(data)
builtins.exec = lambda *_: None
AssertionError = ValueError
def f(x): return 0
""",
    "exits_in_a_test": "import os\ndef f(x): os._exit(0)",
    "reads_its_input": "import sys\ndef f(x): return len(sys.stdin.read())",
    "never_ends": "while True: pass",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_only_claims_success_fails(cheat):
    result = check(CHEATS[cheat], ADD[:2], timeout_s=2.0 if cheat == "never_ends" else 10.0)
    assert result.score == 0 and result.message.startswith("Your program fails test 1 of 2: it ")


# What a program must not reach, by name; each is tried in one run.
FORBIDDEN = """
import os, signal, resource, socket, subprocess, ctypes, mmap
parent = os.getppid()
home = %r
tries = {
    "fork": os.fork,
    "spawn": lambda: subprocess.run(["/bin/true"]),
    "kill the parent": lambda: os.kill(parent, signal.SIGKILL),
    "kill its group": lambda: os.kill(0, signal.SIGKILL),
    "kill all": lambda: os.kill(-1, signal.SIGKILL),
    "limit the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (0, 0)),
    "connect": lambda: socket.create_connection(("127.0.0.1", %d), 1),
    "unix socket": lambda: socket.socket(socket.AF_UNIX),
    "read a file": lambda: open(home + "/secret").read(),
    "list a folder": lambda: os.listdir(home),
    "read the parent's memory": lambda: open(f"/proc/{parent}/mem", "rb"),
    "read the parent's arguments": lambda: open(f"/proc/{parent}/cmdline").read(),
    "read its own arguments": lambda: open("/proc/self/cmdline").read(),
    "write a file": lambda: open("here", "w"),
    "append": lambda: open(home + "/secret", "a"),
    "truncate": lambda: os.truncate(home + "/secret", 0),
    "delete": lambda: os.unlink(home + "/secret"),
    "rename": lambda: os.rename(home + "/secret", home + "/other"),
    "change rights": lambda: os.chmod(home + "/secret", 0),
    "make a folder": lambda: os.mkdir("folder"),
    "link": lambda: os.symlink("/etc", "etc"),
    "change the root": lambda: os.chroot("/"),
    "leave namespaces": lambda: None if ctypes.CDLL(None).unshare(0x10000000) else "done",
    "raise limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)),
    "more memory": lambda: mmap.mmap(-1, 2**31),
    "large pages of files": lambda: os.memfd_create("x"),
}
def tried(name):
    try:
        return "done" if tries[name]() is not None or name != "leave namespaces" else "refused"
    except (OSError, ValueError):
        return "refused"
def f(x):
    return [name for name in tries if tried(name) != "refused"]
"""


def test_a_program_reaches_no_file_no_process_and_no_network(tmp_path):
    (tmp_path / "secret").write_text("42")
    with __import__("socket").create_server(("127.0.0.1", 0)) as server:
        program = FORBIDDEN % (str(tmp_path), server.getsockname()[1])
        assert check(program, ["assert f(0) == []", "assert len(tries) == 26"]) == (1.0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert (tmp_path / "secret").read_text() == "42"


@pytest.mark.parametrize(
    "program, reason",
    [
        ("while True: print('x' * 1000)", "it wrote too much output"),
        ("x = ' ' * 2**31", "it raised MemoryError"),
        ("def f(x): return [0] * 10**6", "it returned a value that is too long"),
        ("def f(x): return f(x)", "it raised RecursionError: maximum recursion depth exceeded"),
        ("def f(x: return", "it raised SyntaxError: "),
        ("\0", "it raised SyntaxError: "),
        ("x = '\ud800'", "it raised SyntaxError: "),
        ("raise ValueError('a\\nb')", "it raised ValueError: a b"),
        ("def g(x): return 1", "it raised NameError: name 'f' is not defined"),
        ("def f(x):\n    r = []\n    r.append(r)\n    return r", "it raised RecursionError: "),
    ],
)
def test_the_message_says_why_a_program_fails(program, reason):
    result = check(program, ["assert f(1) == 2"], output_mib=16)
    assert result.score == 0
    assert result.message.startswith(f"Your program fails test 1 of 1: {reason}")


def test_a_script_that_ends_with_an_error_or_closes_its_output_fails():
    tests = {"inputs": [""], "outputs": ["1"]}
    failed = check("print(1)\nraise KeyError('a')", tests)
    assert failed.message.endswith("it ended with an error, KeyError: 'a'.")
    hidden = "import os, time\nprint(1, flush=True)\nos.close(1)\nos.close(2)\ntime.sleep(99)"
    assert check(hidden, tests, timeout_s=1.5).message.endswith("it took too long.")


ENDLESS = """
from seeupo_jax.envs.checkers import make_checker
checker = make_checker("code", {"timeout_s": 600}, "t")
checker.check("```\\nimport time\\ntime.sleep(600)\\n```", {"t": ["assert 1"]})
"""


def descendants(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children] + [d for c in children for d in descendants(c)]


def test_programs_end_when_the_trainer_is_killed():
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    trainer = subprocess.Popen([sys.executable, "-c", ENDLESS], env=environment)
    until = time.monotonic() + 60
    found = []
    while not any(b"program.py" in Path(f"/proc/{p}/cmdline").read_bytes() for p in found):
        assert time.monotonic() < until and trainer.poll() is None
        time.sleep(0.05)
        found = [p for p in descendants(trainer.pid) if Path(f"/proc/{p}").exists()]
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    while any(Path(f"/proc/{p}").exists() for p in found):
        assert time.monotonic() < until
        time.sleep(0.05)
