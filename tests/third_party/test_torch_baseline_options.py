"""What the PyTorch baseline reads: configurations as we read them, files, and its own command."""

import ast
import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

from seeupo_jax.benchmarks import torch_runner
from seeupo_jax.configuration import loading, schema
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy_io import build

options, objective, optimizer, samples, trajectories, update = map(
    torch_runner.load, ("options", "objective", "optimizer", "samples", "trajectories", "update")
)
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
HERE = set(options.FIELDS) | set(options.FIXED)


def flat(values, group=""):
    """Our configuration's values by full names; what is one value to the baseline stays whole."""
    found = {}
    for key, value in values.items():
        name = group + key
        nested = isinstance(value, dict) and name not in HERE
        found |= flat(value, f"{name}.") if nested else {name: value}
    return found


def assert_same(reference, actual):
    """Options of theirs are what our configuration says."""
    for group in ("algorithm", "optimizer"):
        for name, value in vars(getattr(reference, group)).items():
            assert value == getattr(getattr(actual, group), name), name
    assert reference.temperature == actual.rollout.temperature
    assert (reference.seed, reference.dtype) == (actual.seed, actual.model.dtype)
    assert reference.total_steps == build.total_steps(actual)
    assert reference.iterations == actual.iterations


def test_defaults_are_those_of_our_configuration():
    actual = flat(loading.to_dict(schema.Config()))
    for name, (default, _) in options.FIELDS.items():
        assert default == actual[name], name
    for name, only in options.FIXED.items():
        assert only == actual[name], name
    assert_same(options.Options(), schema.Config())
    assert_same(options.from_flat({}), schema.Config())


def is_here(name):
    """Whether a field is spoken for, or one of a section of that name."""
    return any(f"{each}.".startswith(f"{name}.") for each in HERE)


def test_every_field_of_the_algorithm_and_the_optimizer_is_spoken_for():
    for group, actual in (("algorithm", schema.Algorithm), ("optimizer", schema.Optimizer)):
        for field in dataclasses.fields(actual):
            name = f"{group}.{field.name}"
            assert is_here(name) or field.name in options.UNREAD, field.name
    fields = {field.name for field in dataclasses.fields(schema.Algorithm)}
    assert set(options.UNREAD) <= fields


def test_recipes_are_ours_where_a_turn_is_a_step():
    actual = {
        name: {key: value for key, value in recipe.items() if is_here(f"algorithm.{key}")}
        for name, recipe in RECIPES.items()
        if recipe["turns_per_update"] == 1 and recipe["order"] != "parallel"
    }
    assert options.RECIPES == actual


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.weight_clip=none", "seed=7", "optimizer.kwargs={'b1': 0.8}"],
        ["recipe=seeupo_random", "rollout.temperature=0.5", "iterations=3", "rollout.top_p=1"],
        ["recipe=seeupo_noscale", "algorithm.order=forward", "algorithm.inner_epochs=2"],
        ["algorithm.scale=none", "optimizer.name=adamw", "model.dtype=bfloat16"],
    ],
)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_configuration_files_mean_the_same(path, overrides):
    try:
        actual = loading.load_config(path, overrides)
    except ValueError:  # the file's own recipe does not read what is overridden
        with pytest.raises(ValueError, match="allowed"):
            options.read_options(path, overrides)
        return
    try:
        reference = options.read_options(path, overrides)
    except ValueError as error:
        assert "allowed here" in str(error)
        refused = actual.lora.rank or actual.optimizer.groups or actual.teacher.given
        refused = refused or actual.roles or actual.algorithm.reference
        refused = refused or actual.algorithm.minibatches_per_turn != 1
        assert refused or actual.algorithm.turns_per_update != 1
        return
    assert_same(reference, actual)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [{}, {"warmup_iterations": 3}, {"warmup_steps": 5}])
def test_learning_rates_are_those_of_our_schedules(schedule, warmup):
    fields = {"schedule": schedule, "learning_rate": 0.3} | warmup
    actual, reference = Schedule(schema.Optimizer(**fields), 10), options.Optimizer(**fields)
    at = [(iteration, 2 * iteration) for iteration in range(1, 14)]
    got = [optimizer.learning_rate(reference, step, iteration, 10) for iteration, step in at]
    np.testing.assert_allclose(got, [actual.rate(*each) for each in at], rtol=1e-12, atol=1e-12)


def test_the_kl_penalty_of_far_tokens_is_bounded_as_ours():
    difference = np.array([95.0, -95.0, 3.0, -10.5, 0.5], np.float32)
    logp = torch.tensor([-1.0] * 5, requires_grad=True)
    at, row, real = torch.arange(5), torch.zeros(5, dtype=torch.int64), torch.tensor([True])
    of_row = (row, torch.tensor([5.0]), row[:1], real)
    batch = samples.Microbatch(at[None], None, None, at, at, *of_row, length=5)
    algorithm = options.Algorithm(kl_coef=1.0)
    ref_logp = torch.tensor(-1 + difference)
    terms = objective.row_terms(algorithm, batch, logp, logp.detach(), ref_logp, torch.zeros(1))
    terms.loss.sum().backward()

    near = difference[3:]  # the others are beyond k3's bound of 10
    np.testing.assert_allclose(
        terms.loss.item(), (30 + (np.exp(near) - near - 1).sum()) / 5, rtol=1e-6
    )
    np.testing.assert_allclose(logp.grad, np.append(np.zeros(3), 1 - np.exp(near)) / 5, rtol=1e-6)


@pytest.mark.parametrize("name", optimizer.KWARGS)
def test_defaults_of_optimizers_are_those_of_optax(name):
    parameters = inspect.signature(vars(optax)[name]).parameters
    for key, default in optimizer.KWARGS[name].items():
        assert parameters[key].default == default, key


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algorithm.order": "parallel"}, "algorithm.order: got 'parallel'; allowed here: one of"),
        ({"algorithm.advantage": "gae"}, "algorithm.advantage: got 'gae'; allowed here: 'grae'"),
        ({"algorithm.turns_per_update": None}, "turns_per_update: got None; allowed here: 1"),
        ({"algorithm.weight_clip": 0}, "weight_clip: got 0; allowed here: a number > 0, or none"),
        ({"algorithm.kl_coef": float("nan")}, "kl_coef: got nan; allowed here: a number >= 0"),
        ({"algorithm.odrer": "reverse"}, "algorithm.odrer: got 'reverse'; allowed: a field of"),
        ({"optimizer.name": "contrib.muon"}, "one of adam, adamw, sgd"),
        ({"optimizer.max_grad_norm": True}, "max_grad_norm: got True"),
        ({"lora.rank": 8}, "lora.rank: got 8; allowed here: 0"),
        ({"model.dtype": "float16"}, "model.dtype: got 'float16'; allowed here: one of float32"),
        # In a sweep a token that was forced is context.
        ({"rollout.top_k": 5}, "rollout.top_k: got 5; allowed here: None"),
        ({"rollout.top_p": 0.9}, "rollout.top_p: got 0.9; allowed here: none or 1"),
        (
            {"rollout.grammar": "tool_calls"},
            "rollout.grammar: got 'tool_calls'; allowed here: None",
        ),
        ({"env.timeout_as": "zero_reward"}, "got 'zero_reward'; allowed here: 'failure'"),
        ({"rollout.temperature": 0}, "rollout.temperature: got 0; allowed here: a number > 0"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(values, words):
    with pytest.raises(ValueError) as caught:
        options.from_flat(values)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"name": "adam", "kwargs": {"eps_root": 1e-3}},
            "got 'eps_root' for adam; allowed here: b1",
        ),
        ({"warmup_steps": 9}, "warmup_steps: got 9; allowed: fewer than the run's 9"),
        ({"warmup_iterations": 3}, "warmup_iterations: got 3; allowed: fewer than the run's 3"),
    ],
)
def test_optimizers_refuse_what_they_cannot(fields, words):
    with pytest.raises(ValueError, match=words):
        optimizer.Stepper(
            [torch.zeros(2)], options.Optimizer(**fields), iterations=3, total_steps=9
        )


GOOD = {"tokens": [3, 4, 5], "turn": [-1, 0, 0], "reward": 1, "group": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turn": [-1, 0]}, "got lengths {'tokens': [3], 'turn': [2]}; allowed: the same"),
        ({"logp": [0.0]}, "the same for each"),
        ({"turn": [-1, 0, -2]}, "turn: got -2; allowed: whole numbers >= -1"),
        ({"turn": [0, 0, 0]}, "the first token is sampled"),
        ({"tokens": [3, 4.5, 5]}, "tokens: got 4.5; allowed: whole numbers >= 0"),
        ({"tokens": [[3, 4], [5, 6]], "turn": [[-1, 0], [-1, 0]]}, "turn 0 is in two segments"),
        ({"reward": "one"}, "reward: got 'one'; allowed: a finite number"),
        ({"group": 1.5}, "group: got 1.5; allowed: a whole number"),
        ({"stop": "tired"}, "stop: got 'tired'; allowed: done"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(change, words, tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD | change)}\n")
    with pytest.raises(ValueError) as caught:
        trajectories.read(path)
    assert f"{path}:3: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ":1: not JSON"),
        ("[]", ":1: got a list"),
        ("{}", ":1: got no 'tokens'"),
        ("", "got no"),
    ],
)
def test_what_is_no_trajectory_is_refused(text, words, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=words):
        trajectories.read(tmp_path / "file")


def test_a_line_ends_where_json_lines_end(tmp_path):
    line = json.dumps(GOOD | {"note": "\u2028 \u2029 \x85"}, ensure_ascii=False)
    (tmp_path / "file").write_text(f"{line}\n{line}\n", encoding="utf-8")
    assert len(trajectories.read(tmp_path / "file")) == 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model folder with a file of its own, a configuration and trajectories."""
    folder = tmp_path_factory.mktemp("inputs")
    sizes = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 24}
    arch = Architecture(vocab_size=20, **sizes)
    save_pretrained(Transformer(arch, nnx.Rngs(0)), folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")
    (folder / "config.py").write_text(
        "def get_config():\n"
        "    return {'env': {'name': 'order_desk'}, 'optimizer': {'learning_rate': 0.01}}\n"
    )
    lines = [GOOD, GOOD | {"tokens": [3, 4, 6], "reward": 0}, GOOD | {"group": 1}]
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "trajectories.jsonl").write_text(text)
    return folder


def command(inputs, output, **changes):
    given = {
        "config": inputs / "config.py",
        "model": inputs / "model",
        "trajectories": inputs / "trajectories.jsonl",
        "output": output,
    } | changes
    return [f"--{name}={value}" for name, value in given.items()]


def test_the_command_writes_weights_numbers_and_what_lay_beside(inputs, tmp_path):
    own = {"json": tmp_path / "numbers.json", "config.algorithm.scale": "none"}
    subprocess.run(
        [sys.executable, "-m", "torch_baseline.update", *command(inputs, tmp_path / "new", **own)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(torch_runner.FOLDER), "OMP_NUM_THREADS": "1"},
    )
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["advantages"] == [0.5, -0.5, None]
    (step,) = numbers["steps"]
    assert step["turns"] == [0] and step["weights"] == [0.5, -0.5, None]
    assert set(step) == {"turns", "weights", "loss", "kl", "grad_norm", "clip_fraction"}
    assert step["kl"] == 0 and step["grad_norm"] > 0
    assert numbers["metrics"]["tokens/train"] == 6
    old, new = (load_file(f / "model.safetensors") for f in (inputs / "model", tmp_path / "new"))
    changed = {name for name in old if (old[name] != new[name]).any()}
    assert old.keys() == new.keys() and changed
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config.algorithm.order": "custom"}, "config.algorithm.order: got 'custom'"),
        ({"config": "nowhere.py"}, "--config: no file nowhere.py"),
        ({"model": "nowhere"}, "--model: got 'nowhere'; allowed: a folder with a config.json"),
        ({"trajectories": "nowhere"}, "--trajectories: no file nowhere"),
    ],
)
def test_the_command_ends_a_wrong_input_with_one_sentence(inputs, tmp_path, capsys, change, words):
    with pytest.raises(SystemExit) as ended:
        update.main(command(inputs, tmp_path / "new", **change))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_token_outside_the_vocabulary_is_refused():
    found = [trajectories.parse(json.dumps(GOOD), "line")]
    update.check_tokens(found, 6)
    with pytest.raises(ValueError, match="trajectory 1 has token 5; allowed: below the model's 5"):
        update.check_tokens(found, 5)


def test_the_baseline_needs_what_its_requirements_name_and_nothing_of_ours():
    roots = set()
    for file in torch_runner.FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add(node.module.partition(".")[0])
    lines = (torch_runner.FOLDER / "requirements.txt").read_text().splitlines()
    named = {line.partition("=")[0].rstrip("><~") for line in lines}
    # Configuration files are written with ml_collections.
    assert roots - set(sys.stdlib_module_names) - {"torch_baseline"} == named - {"ml_collections"}
