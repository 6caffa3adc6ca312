"""Whatever is wrong with a configuration file or an override, it is one sentence, and soon."""

import dataclasses
import json
import subprocess
import sys

import pytest
from ml_collections import ConfigDict
from ml_collections.config_dict import required_placeholder
from places import CONFIGS, ROOT
from refusals import refusal

from seeupo_jax.configuration import config_file
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.config_file import find_config
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.configuration.optimizer_schema import Optimizer
from seeupo_jax.configuration.reward import Reward
from seeupo_jax.configuration.schema import Config, Rollout
from seeupo_jax.policy.files.weights import resolve_path

RETURN = "def get_config():\n    return {}\n"


@pytest.mark.parametrize(
    "source, line, why",
    [
        ("x = 1\ny = 1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("def get_config():\n    return {'a': no_such}\n", 2, "NameError: name 'no_such'"),
        ("def helper():\n    {}['k']\n\ndef get_config():\n    helper()\n", 2, "KeyError: 'k'"),
        ("\nimport no_such_module_here\n", 2, "ModuleNotFoundError: No module named 'no_such"),
        ("import json\n\nfrom json import no_such\n", 3, "ImportError: cannot import name"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit('enough')\n", 2, "SystemExit: enough"),
        ("def get_config():\n    return get_config()\n", 2, "RecursionError: maximum recursion"),
        ("raise RuntimeError('first\\nsecond')\n", 1, "RuntimeError: first second"),
        ("raise BaseException\n", 1, "BaseException"),
        ("def get_config(:\n", 1, "SyntaxError: "),
        ("x = (\n\n", 1, "SyntaxError: '(' was never closed"),
        ("def get_config():\nreturn 1\n", 2, "IndentationError: expected an indented block"),
        ("def get_config(kind):\n    return {}\n", None, "TypeError: get_config() missing 1"),
        (
            "class E(Exception):\n    def __str__(self):\n        raise self\nraise E\n",
            4,
            "E: a E whose text cannot be read",
        ),
    ],
)
def test_a_configuration_file_that_fails_is_named_with_line_and_reason(tmp_path, source, line, why):
    file = tmp_path / "bad.py"
    file.write_text(source)
    text = refusal(lambda: load_config(file))
    where = f"--config: {file}" if line is None else f"--config: {file}, line {line}:"
    assert text.startswith(where) and why in text


def test_the_line_of_a_broken_module_that_a_configuration_imports_is_told(tmp_path, monkeypatch):
    (tmp_path / "broken_part.py").write_text("\nx = = 1\n")
    (tmp_path / "whole.py").write_text("import broken_part\n" + RETURN)
    monkeypatch.syspath_prepend(tmp_path)
    text = refusal(lambda: load_config(tmp_path / "whole.py"))
    assert f"{tmp_path / 'broken_part.py'}, line 2: SyntaxError" in text


@pytest.mark.parametrize("content", [b"x = 1\0", b"# \xff\xfe\n", b"\x89PNG\r\n\x1a\n\0\0"])
def test_a_configuration_file_of_bytes_that_are_no_python_is_refused(tmp_path, content):
    (tmp_path / "bytes.py").write_bytes(content)
    assert f"{tmp_path / 'bytes.py'}" in refusal(lambda: load_config(tmp_path / "bytes.py"))


@pytest.mark.parametrize(
    "returned, got",
    [
        ("None", "None (NoneType)"),
        ("[('seed', 1)]", "[('seed', 1)] (list)"),
        ("'grpo'", "'grpo' (str)"),
        ("3", "3 (int)"),
        ("{1: 2}", "no such field"),
        ("get_config", "(function)"),
    ],
)
def test_what_get_config_returns_is_checked(tmp_path, returned, got):
    (tmp_path / "other.py").write_text(f"def get_config():\n    return {returned}\n")
    text = refusal(lambda: load_config(tmp_path / "other.py"))
    assert got in text and "allowed: " in text


def test_get_config_must_be_a_function(tmp_path):
    (tmp_path / "value.py").write_text("get_config = {}\n")
    text = refusal(lambda: load_config(tmp_path / "value.py"))
    assert text.endswith("value.py has no function get_config().")


def test_a_required_value_of_a_config_dict_that_is_missing_is_arefusal(tmp_path):
    (tmp_path / "holes.py").write_text(
        "import ml_collections\n"
        "def get_config():\n"
        "    config = ml_collections.ConfigDict()\n"
        "    config.seed = ml_collections.config_dict.required_placeholder(int)\n"
        "    return config\n"
    )
    text = refusal(lambda: load_config(tmp_path / "holes.py"))
    assert text.startswith(f"--config: {tmp_path / 'holes.py'}: RequiredValueError: ")
    hole = ConfigDict({"seed": required_placeholder(int)})
    for given in (hole, {"optimizer": hole}):
        text = refusal(lambda given=given: load_config(given))
        assert text.startswith("config: got values that cannot be read: RequiredValueError: ")


def test_overrides_do_not_change_the_dict_that_a_function_returns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "VALUES = {'rollout': {'tasks': 4}}\ndef make():\n    return VALUES\n"
    (tmp_path / "kept_values.py").write_text(source)
    for overrides, tasks in ((["rollout.tasks=2"], 2), ([], 4)):
        assert load_config("kept_values:make", overrides).rollout.tasks == tasks


def test_a_function_that_exits_is_arefusal(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exiting.py").write_text("import sys\ndef make():\n    sys.exit('no data')\n")
    text = refusal(lambda: load_config("exiting:make"))
    assert text == "--config: exiting:make failed: SystemExit: no data."


def test_a_configuration_object_is_taken_as_it_is(tmp_path):
    (tmp_path / "made.py").write_text(
        "from seeupo_jax.configuration.schema import Config\n"
        "def get_config():\n    return Config(recipe='grpo', seed=3)\n"
    )
    assert load_config(tmp_path / "made.py") == Config(recipe="grpo", seed=3)
    changed = load_config(tmp_path / "made.py", ["algorithm.clip_high=0.28"])
    assert changed == from_dict({"recipe": "grpo", "seed": 3, "algorithm": {"clip_high": 0.28}})


def test_a_file_may_define_dataclasses(tmp_path):
    (tmp_path / "classes.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Part:\n    learning_rate: float = 0.25\n"
        "def get_config():\n    return {'optimizer': Part()}\n"
    )
    assert load_config(tmp_path / "classes.py").optimizer.learning_rate == 0.25


def test_groups_of_every_kind_lie_anywhere_in_values():
    reward = {"function": "a:b"}
    for group in (reward, ConfigDict(reward), Reward(**reward)):
        for rewards in ([group], (group,)):
            config = load_config(ConfigDict({"rewards": rewards}))
            assert config.rewards == (Reward(function="a:b"),)
    for group in (ConfigDict({"seed": 3}), Optimizer(learning_rate=0.25)):
        assert "\n" not in refusal(lambda group=group: load_config({"seed": group}))
    for group in (ConfigDict({"learning_rate": 0.25}), Optimizer(learning_rate=0.25)):
        made = load_config({"optimizer": group}, ["optimizer.name=sgd"]).optimizer
        assert (made.learning_rate, made.name) == (0.25, "sgd")


def test_an_algorithm_object_takes_overrides_and_agrees_with_its_recipe():
    made = Config(recipe="grpo").algorithm
    given = {"recipe": "grpo", "algorithm": made}
    changed = load_config(given, ["algorithm.clip_high=0.28"])
    assert changed.algorithm == dataclasses.replace(made, clip_high=0.28)
    for overrides in ([], ["algorithm.clip_high=0.28"]):
        with pytest.raises(ValueError, match="config.recipe: got 'grpo' with an algorithm"):
            load_config(given | {"algorithm": Algorithm()}, overrides)


def test_values_nested_without_end_are_refused_from_a_dict_too():
    own = {}
    own["own"], own["again"] = own, [own]  # never ends
    for options in (own, _deep(dict), _deep(list)):
        assert "at most 32" in refusal(
            lambda x=options: load_config({"env": {"options": {"a": x}}})
        )


@pytest.mark.parametrize(
    "wrong, why",
    [
        (Config(iterations=-5), "config.iterations: got -5; allowed: a number >= 0"),
        (Config(iterations="3"), "config.iterations: got '3' (str); allowed: a whole number"),
        (Config(rollout=Rollout(temperature=0.0)), "config.rollout.temperature: got 0.0"),
        (Config(rollout=Rollout(max_action_tokens=999)), "config.rollout.max_action_tokens: got"),
        (Config(rollout={"group_size": 0}), "config.rollout.group_size: got 0"),
        (
            Config(rollout={"group_size": 1}),
            "config.rollout.group_size: got 1 with config.algorithm.advantage=grae, which compares",
        ),
        (Config(algorithm=5), "config.algorithm: got 5"),
    ],
    ids=range(7),
)
def test_a_configuration_object_is_checked(wrong, why):
    assert refusal(lambda: load_config(wrong)).startswith(why)


def test_a_checked_object_is_as_it_was():
    made = Config(recipe="grpo", seed=3)
    for config in (made, dataclasses.replace(made, iterations=2)):
        assert load_config(config) == config
        assert load_config(config)._made_of == "grpo"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--workdir=run"],
        ["evaluate", "--workdir=run"],
        ["sft", "--workdir=run", "--data=c.jsonl"],
        ["compare", "--workdir=run"],
        ["aot", "--topology=v5p:2x2x1"],
        ["update", "--model=m", "--trajectories=f", "--output=o"],
        ["export", "--workdir=run", "--output=o"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_ends_with_2_and_therefusal(tmp_path, monkeypatch, capsys, arguments):
    (tmp_path / "bad.py").write_text("x = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    command, *flags = arguments
    name = f"seeupo_jax.{command}"
    module = pytest.importorskip(name)
    if not hasattr(module, "main"):
        module = pytest.importorskip(f"{name}.__main__")
    with pytest.raises(SystemExit) as end:
        module.main([command, f"--config={tmp_path / 'bad.py'}", *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: --config: {tmp_path / 'bad.py'}, line 1: ZeroDivisionError")
    assert not (tmp_path / "run").exists()


DIGITS = 10**400
DEEP = "[" * 100_000 + "]" * 100_000


def _deep(kind):
    value = 1
    for _ in range(100_000):
        value = {"a": value} if kind is dict else [value]
    return value


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [400, 5000])
@pytest.mark.parametrize(
    "key", ["iterations", "seed", "optimizer.learning_rate", "recipe", "batching.buckets", "env"]
)
def test_numbers_of_hundreds_of_digits_are_arefusal(key, size, sign, tmp_path):
    (tmp_path / "any.py").write_text(RETURN)
    value = sign * 10**size
    group, _, leaf = key.rpartition(".")
    values = {group: {leaf: value}} if group else {leaf: value}
    assert refusal(lambda: from_dict(values)).startswith(f"config.{key}")
    text = "-" * (sign < 0) + "1" + "0" * size
    override = f"{key}={text}"
    assert refusal(lambda: load_config(tmp_path / "any.py", [override])).startswith("config.")


def test_a_number_that_json_readers_cannot_hold_is_refused_in_a_free_field():
    text = refusal(lambda: from_dict({"env": {"options": {"n": [DIGITS]}}}))
    assert text.startswith("config.env.options.n[0]: got 1000")


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("key", ["iterations", "recipe", "algorithm", "env", "warm_start"])
def test_values_nested_without_end_are_arefusal(key, kind):
    assert refusal(lambda: from_dict({key: _deep(kind)})).startswith("config.")


@pytest.mark.parametrize("kind", [dict, list])
def test_free_fields_nested_without_end_are_arefusal(kind):
    text = refusal(lambda: from_dict({"env": {"options": {"a": _deep(kind)}}}))
    assert "at most 32 levels" in text
    own = {}
    own["own"] = own  # never ends
    assert "at most 32 levels" in refusal(lambda: from_dict({"env": {"options": own}}))


@pytest.mark.parametrize(
    "override",
    [
        f"iterations={DEEP}",
        f"env.options.x={DEEP}",
        "env.options.x=" + "[" * 150 + "]" * 150,
        "env.options.x=" + "-" * 100_000 + "1",
        "iterations=" + "{1:" * 100_000,
        "env.options." + "a." * 100_000 + "a=1",
        "seed." + "a." * 100_000 + "a=1",
        "x" * 100_000 + "=1",
    ],
    ids=range(8),
)
def test_overrides_nested_without_end_are_arefusal(override, tmp_path):
    (tmp_path / "any.py").write_text(RETURN)
    assert "config." in refusal(lambda: load_config(tmp_path / "any.py", [override]))


def test_a_text_of_brackets_that_is_no_nesting_stays_a_text(tmp_path):
    (tmp_path / "any.py").write_text(RETURN)
    config = load_config(tmp_path / "any.py", ["env.options.x=[[a", "env.options.y=[1, [2]]"])
    assert config.env.options == {"x": "[[a", "y": [1, [2]]}


def test_what_was_deep_enough_before_is_so_still():
    value = 1
    for _ in range(31):
        value = [value]
    config = from_dict({"env": {"options": {"a": value}}})
    assert from_dict(to_dict(config)) == config


def test_a_deep_value_leaves_the_interpreter_alive(tmp_path):
    """No crash of the C stack either: the compiler of Python has one of its own."""
    (tmp_path / "deep.py").write_text(f"def get_config():\n    return {{'seed': {DEEP}}}\n")
    program = (
        "import sys; from seeupo_jax.configuration.loading import load_config as l; l(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "deep.py")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "ValueError: --config: " in done.stderr


def test_a_shipped_configuration_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in CONFIGS.glob("*.py"):
        assert load_config(f"package:{file.stem}") == load_config(file)
    assert find_config("package:quickstart") == CONFIGS / "quickstart.py"
    changed = load_config("package:quickstart", ["iterations=3", "recipe=grpo"])
    assert (changed.iterations, changed.recipe) == (3, "grpo")


@pytest.mark.parametrize("name", ["quickstat", "", "shared/paper_14b", "../configs/quickstart"])
def test_an_unknown_name_of_a_shipped_configuration_lists_the_names(name):
    text = refusal(lambda: load_config(f"package:{name}"))
    names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.py")))
    assert text == (
        f"--config: got 'package:{name}'; allowed: a file, or package:NAME with one of {names}."
    )


@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_slice_lays_out_a_configuration_that_takes_one(kind):
    name = "qwen3_14b_appworld"
    given = str(CONFIGS / f"{name}.py") if kind == "file" else f"package:{name}"
    layouts = config_file.read_layouts(CONFIGS / "layouts" / f"{name}.json")
    plain = load_config(given)
    for slice, fields in layouts.items():
        overrides = [f"{field}={value!r}" for field, value in fields.items()]
        assert load_config(f"{given}:{slice}") == load_config(given, overrides) != plain
    text = refusal(lambda: load_config(f"{given}:v9:2x2"))
    assert f"got 'v9:2x2'; allowed: {''.join(f'{known}, ' for known in layouts)}and what" in text


def test_a_layout_replaces_whole_fields(tmp_path):
    file = tmp_path / "layouts.json"
    layout = {"mesh": {"fsdp": 4}, "rollout.concurrency": 8, "offload.optimizer": True}
    file.write_text(json.dumps({"v5e:2x2": layout}))
    config = ConfigDict({"mesh": {"data": 1, "tensor": 4}, "rollout": {"tasks": 2}})
    found = config_file.lay_out(config, file, "v5e:2x2").to_dict()
    assert found == {
        "mesh": {"fsdp": 4},
        "rollout": {"tasks": 2, "concurrency": 8},
        "offload": {"optimizer": True},
    }


def test_an_argument_that_a_configuration_does_not_take_is_told():
    text = refusal(lambda: load_config("package:quickstart:v5p:4x4x4"))
    assert "get_config() takes 0 positional arguments but 1 was given" in text


@pytest.mark.parametrize("text", ["[]", '{"v5e:2x2": 1}', "{"])
def test_a_file_of_something_else_than_layouts_is_told(tmp_path, text):
    (tmp_path / "layouts.json").write_text(text)
    assert "layouts.json" in refusal(lambda: config_file.read_layouts(tmp_path / "layouts.json"))


def test_what_a_script_of_the_repository_fetches_is_sought_below_the_folder_elsewhere(
    tmp_path, monkeypatch
):
    assert config_file.third_party("models/x.gguf") == str(ROOT / "third_party/models/x.gguf")
    monkeypatch.setattr(config_file, "_CHECKOUT", tmp_path / "third_party")
    assert config_file.third_party("models/x.gguf") == "third_party/models/x.gguf"
    with pytest.raises(ValueError, match="sh third_party/models/setup.sh.* of the repository"):
        resolve_path("third_party/models/x.gguf")
