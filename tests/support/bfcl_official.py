"""The official scorer on folders of results: `bfcl_official.py MODEL ROOT CATEGORY ...`.

All of it is the official package's own; what it imports only to ask models or to draw tables, and
what is not installed, is an empty shell. Prints, for each folder, a line with the ids that failed,
each with the official reason.
"""

import importlib.abc
import importlib.machinery
import json
import multiprocessing
import os
import sys
import types
from pathlib import Path

MODEL, *PLACES = sys.argv[1:]
os.environ["BFCL_PROJECT_ROOT"] = PLACES[0]


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Shell


class Shell(metaclass=Anything):
    """Any class or decorator; a decorated function stays as it is."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, function, *args, **kwargs):
        return function

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Shell()

    def __or__(self, other):
        return self


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return OWN.get(name, Shell)


ABSENT = (
    "anthropic",
    "boto3",
    "cohere",
    "datamodel_code_generator",
    "dotenv",
    "google.genai",
    "httpx",
    "mistralai",
    "openai",
    "overrides",
    "pandas",
    "qwen_agent",
    "tenacity",
    "tree_sitter",
    "tree_sitter_java",
    "tree_sitter_javascript",
    "writerai",
)
OWN = {"override": lambda f: f, "final": lambda f: f, "EnforceOverrides": object}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if not any(name == own or name.startswith(own + ".") for own in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.append(Finder())  # the last one: only asked for what is not installed
from bfcl_eval.eval_checker import eval_runner  # noqa: E402


def judge(root: Path, category: str) -> None:
    place = root / "result" / MODEL.replace("/", "_")
    (file,) = place.rglob("BFCL_v4_*_result.json")
    assert eval_runner.extract_test_category(file) == category
    eval_runner.evaluate_task(
        category,
        root / "result",
        root / "score",
        eval_runner.load_file(file, sort_by_id=True),
        place.name,
        eval_runner.get_handler(MODEL),
        {},
        allow_missing=True,
    )
    (scores,) = (root / "score").rglob("*_score.json")
    head, *failures = map(json.loads, scores.read_text().splitlines())
    failed = {f["id"]: f["error"]["error_type"] for f in failures}
    print(json.dumps({"head": head, "failed": failed}), flush=True)


for root, category in zip(PLACES[::2], PLACES[1::2], strict=True):
    # Of its own, since it keeps the world of each task that it has seen; to import takes longer.
    child = multiprocessing.get_context("fork").Process(target=judge, args=(Path(root), category))
    child.start()
    child.join()
    assert child.exitcode == 0
