"""Imports point down, the product imports no instrument, environments start without jax, no
function grows too long, and docstrings name the parameters that there are."""

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import seeupo_jax

ROOT = Path(seeupo_jax.__path__[0])
# The package from the ground up; a room imports itself and rooms of the rows above it.
LEVELS = (
    ("types", "errors", "metric_table", "options"),
    ("algorithms",),
    ("configuration",),
    ("tasks",),
    ("durable_files", "envs", "parallel"),
    ("policy", "checkpoint", "trajectories", "rewards"),
    ("learner", "rollout", "metrics"),
    ("agents", "display", "policy_io", "cli"),
    ("evaluation", "reports", "train_service"),
    ("training",),
    ("supervised",),
    ("planning", "comparison"),
    ("benchmarks",),
    ("instruments",),
    (
        *("init", "train", "evaluate", "sft", "update", "export", "report", "serve"),
        "train_server",
        *("aot", "bench", "compare", "lab", "telemetry"),
    ),
)
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(ROOT.rglob("*.py"))
    if file != ROOT / "__init__.py"
}
INSTRUMENT_COMMANDS = {"aot", "bench", "compare", "lab"}  # the only modules that import instruments
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def imports(file):
    """Full names that a file imports, wherever in it; a module's name before that of its part."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports name the package"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_imports(file):
    """Modules of the package that a file imports, without the package's name."""
    names = {n.removeprefix("seeupo_jax.") for n in imports(file) if n.startswith("seeupo_jax.")}
    return {n if n in MODULES else n.rpartition(".")[0] for n in names}


def unit(module):
    return module.partition(".")[0]


def test_no_import_goes_in_a_circle():
    graph = {module: own_imports(file) & set(MODULES) for module, file in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_file_belongs_to_a_level():
    assert {unit(module) for module in MODULES} == set(LEVEL)


def test_imports_point_down():
    assert not [
        (module, other)
        for module, file in MODULES.items()
        for other in own_imports(file)
        if unit(other) != unit(module) and LEVEL[unit(other)] >= LEVEL[unit(module)]
    ]


def test_the_product_imports_no_instrument():
    importers = {
        module
        for module, file in MODULES.items()
        if "instruments" in {unit(other) for other in own_imports(file)}
    }
    assert {each for each in importers if unit(each) != "instruments"} == INSTRUMENT_COMMANDS


def commands():
    """Modules that are run: those with `if __name__ == "__main__"`."""
    return {
        module for module, file in MODULES.items() if '__name__ == "__main__"' in file.read_text()
    }


def test_no_command_is_imported_by_another_module():
    found = commands()
    wanted = {"train", "evaluate", "sft", "report", "export", "update", "serve", "bench"}
    assert wanted <= found
    imported = {(module, other) for module in MODULES for other in own_imports(MODULES[module])}
    assert not [pair for pair in imported if pair[1] in found]


def test_the_search_sees_imports_of_every_kind(tmp_path):
    file = tmp_path / "probe.py"
    file.write_text(
        "import seeupo_jax.policy.files.weights\n"
        "from seeupo_jax import algorithms, envs\n"
        "from seeupo_jax.types import Segment\n"
        "def f():\n    from seeupo_jax.envs import order_desk as desk, make\n"
    )
    wanted = {"policy.files.weights", "algorithms", "envs", "types", "envs.order_desk"}
    assert own_imports(file) == wanted


def test_the_policy_and_the_learner_know_of_environments_only_what_messages_are():
    calls = {"envs.thoughts", "envs.tool_calls"}  # how a message writes them
    calls |= {module for module in MODULES if module.startswith("envs.tool_formats.")}
    for module, file in MODULES.items():
        known = {other for other in own_imports(file) if unit(other) == "envs"}
        if unit(module) == "learner":
            assert known <= {"envs.base"}
        if unit(module) == "policy":
            assert known <= {"envs.base", *calls}


def of_environments(module):
    return unit(module) in ("envs", "tasks") or module.startswith("instruments.bfcl_worlds")


def test_algorithms_stand_alone():
    for module, file in MODULES.items():
        if unit(module) == "algorithms":
            assert {unit(other) for other in own_imports(file)} <= {"algorithms", "options"}, module
            roots = {unit(name) for name in imports(file)} - set(sys.stdlib_module_names)
            assert roots <= {"chex", "jax", "seeupo_jax"}, module


def test_environments_stand_alone():
    for module, file in MODULES.items():
        if of_environments(module):
            # Imports of a user's `module:attribute`: by the standard library alone.
            others = own_imports(file) - {"configuration.user_code"}
            if unit(module) == "tasks":  # also an error that ends a run, where a file has changed
                others -= {"errors"}
            assert all(of_environments(other) for other in others), module
            roots = {unit(name) for name in imports(file)}
            heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorflow"}
            assert not roots & heavy, module


ENVIRONMENTS = [f"seeupo_jax.{module}" for module in MODULES if of_environments(module)]


@pytest.mark.parametrize(
    "modules, without",
    [
        (ENVIRONMENTS, ("jax", "flax", "tensorflow")),
        (["seeupo_jax.train"], ("torch", "tensorflow")),  # transformers imports torch where it is
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(modules, without):
    program = (
        f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\n"
        f"print([m for m in {without} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_partition_specs_are_made_in_the_one_table():
    makers = {
        module
        for module, file in MODULES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if "PartitionSpec" in {getattr(node, key, None) for key in ("id", "attr", "name")}
    }
    assert makers == {"parallel.mesh"}


def depth(node, inside=0):
    """How deep blocks lie in each other; an `elif` is as deep as its `if`."""
    deepest = inside
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deeper = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, depth(child, inside + deeper))
    return deepest


def test_functions_and_nesting_stay_small():
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, FUNCTIONS):
                assert node.end_lineno - node.lineno < 70, (module, node.name)
                assert depth(node) <= 3, (module, node.name)


def test_depth_counts_blocks_and_not_branches():
    source = "def f():\n for a in b:\n  if a:\n   pass\n  elif b:\n   with c:\n    pass\n"
    assert depth(ast.parse(source)) == 3


def documented(docstring):
    """Names under "Args:": before a colon, at the start of an entry or of a sentence in it."""
    _, _, arguments = inspect.cleandoc(docstring).partition("\nArgs:\n")
    entries, _, _ = arguments.partition("\n\n")
    found = re.findall(r"(?:^  |\. )\*{0,2}(\w+(?:, \w+)*):\s", entries, re.MULTILINE)
    return {name for names in found for name in names.split(", ")} - {"None"}


def parameters(node):
    """Names of a function's parameters; of a class those of `__init__`, and its fields."""
    if isinstance(node, FUNCTIONS):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    fields = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    made = [part for part in node.body if isinstance(part, FUNCTIONS) and part.name == "__init__"]
    return fields.union(*map(parameters, made))


def test_docstrings_name_no_parameter_that_there_is_not():
    wrong = [
        (module, node.name, name)
        for module, file in MODULES.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
        for name in documented(ast.get_docstring(node) or "") - parameters(node)
    ]
    assert not wrong


def test_the_search_sees_every_name_under_args():
    docstring = (
        "One.\n\n  Args:\n    a, b_NL: c\n      d: e. f: [N]; None: g.\n\n  Returns:\n    h: i."
    )
    assert documented(docstring) == {"a", "b_NL", "f"}
