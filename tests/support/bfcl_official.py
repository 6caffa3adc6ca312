"""The official scorer on a folder of results: `bfcl_official.py ROOT MODEL CATEGORY`.

All of it is the official package's own; what it imports only to ask models or to draw tables, and
what is not installed, is an empty shell. Prints the ids that failed, each with the official reason.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

ROOT, MODEL, CATEGORY = sys.argv[1:]
os.environ["BFCL_PROJECT_ROOT"] = ROOT


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

place = Path(ROOT) / "result" / MODEL.replace("/", "_")
(file,) = place.rglob("BFCL_v4_*_result.json")
assert eval_runner.extract_test_category(file) == CATEGORY
eval_runner.evaluate_task(
    CATEGORY,
    Path(ROOT) / "result",
    Path(ROOT) / "score",
    eval_runner.load_file(file, sort_by_id=True),
    place.name,
    eval_runner.get_handler(MODEL),
    {},
    allow_missing=True,
)
(scores,) = (Path(ROOT) / "score").rglob("*_score.json")
head, *failures = map(json.loads, scores.read_text().splitlines())
print(json.dumps({"head": head, "failed": {f["id"]: f["error"]["error_type"] for f in failures}}))
