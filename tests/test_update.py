"""One sweep on stored trajectories: it is the sweep, and its JSON says what each step did."""

import contextlib
import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import learner_cases as cases
import loaded_python
import numpy as np
import pytest
import run_cases
import stored_cases as files
import torch
from places import TINY
from stored_fields import with_fields
from transformers import AutoModelForCausalLM

from seeupo_jax import update
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.configuration.recipes import RECIPES
from seeupo_jax.learner.batching import SegmentBatch
from seeupo_jax.learner.sweep import sweep
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy_io import build
from seeupo_jax.training import build_learner, stored_update
from seeupo_jax.types import learnable

CONFIG = TINY
CHOICES = (
    "batching.buckets=(32,)",
    "rollout.max_context=32",
    "rollout.max_action_tokens=8",
    "rollout.max_turns=4",
    "optimizer.name=sgd",
    f"optimizer.learning_rate={cases.RATE}",
    "optimizer.max_grad_norm=none",
)
REVERSE = [(3,), (2,), (1,), (0,)]
LEARNED = learnable(cases.ragged())


EVERY = jax.devices()


def alone(patch):
    """Lets the command see one device, and leave this process's cache as it is."""
    patch.setattr(jax, "devices", lambda *_: EVERY[:1])
    patch.setattr(update, "prepare_xla", lambda **_: None)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    alone(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of `cases.policy`."""
    folder = tmp_path_factory.mktemp("model")
    network, params = cases.policy()
    save_pretrained(network.bind(jax.tree.map(jnp.asarray, params)), folder)
    return folder


@pytest.fixture
def stored(tmp_path):
    """One failed, two of one turn, two whose context was rewritten."""
    return files.write(tmp_path / "stored.jsonl", cases.ragged())


def arguments(model, stored, folder, *choices):
    overrides = [f"--config.{choice}" for choice in (*CHOICES, *choices)]
    paths = [f"--config={CONFIG}", f"--model={model}", f"--trajectories={stored}"]
    return [*paths, *overrides, f"--output={folder / 'out'}", f"--json={folder / 'out.json'}"]


def run(model, stored, folder, *choices):
    """The command in this process: what it wrote, as parameters and as JSON."""
    update.main(["update", *arguments(model, stored, folder, *choices)])
    _, params = split_model(from_pretrained(str(folder / "out"), dtype="float32")[0])
    return params, json.loads((folder / "out.json").read_text())


def of(done, name):
    return [step[name] for step in done["steps"]]


# Choices of the algorithm -> the order of its updates.
TWINS = {
    "default": ({}, REVERSE),
    "old_policy": ({"old_policy": "turn", "weight_clip": None, "kl_coef": 0.0}, REVERSE),
    "order": (
        {"order": "forward", "turns_per_update": 2, "inner_epochs": 2, "kl_coef": 0.5},
        [(0, 1), (2, 3)],
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_weights_and_steps_are_the_twins(model, stored, tmp_path, name):
    choices, order = TWINS[name]
    params, done = run(model, stored, tmp_path, *(f"algorithm.{k}={v}" for k, v in choices.items()))
    wanted = cases.twin_sweep(cases.learner(**choices), cases.ragged(), order)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for key, weight in cases.weights_of(params).items():
        close(weight, wanted.weights[key], err_msg=key)
    assert of(done, "turns") == [list(step.turns) for step in wanted.steps]
    close(of(done, "loss"), [step.loss for step in wanted.steps])
    norms = [np.sqrt(sum((g**2).sum() for g in step.gradients.values())) for step in wanted.steps]
    close(of(done, "grad_norm"), norms)
    # A step weighs by the factors after the one before it.
    factors = [np.ones(8), *(step.cumulative_ratio_N for step in wanted.steps)]
    for weights, cumulative_ratio_N in zip(of(done, "weights"), factors, strict=False):
        assert [weight is not None for weight in weights] == LEARNED.tolist()
        close(np.array(weights, float)[LEARNED], (wanted.advantage_N * cumulative_ratio_N)[LEARNED])
    advantage_N = np.array(done["advantages"], float)
    assert np.isnan(advantage_N).tolist() == (~LEARNED).tolist()
    close(advantage_N[LEARNED], wanted.advantage_N[LEARNED])
    for own, t, advantage in zip(
        done["turn_advantages"], cases.ragged(), done["advantages"], strict=True
    ):
        assert own == (None if t.failed else [advantage] * t.turns)
    # The metrics are the steps' means, over actions where it is actions that are counted.
    metrics, rows = done["metrics"], SegmentBatch.of(cases.ragged())
    assert metrics["sweep/steps"] == len(wanted.steps)
    close(metrics["sweep/loss"], np.mean(of(done, "loss")))
    acted = [[np.isin(turn_L, t).any() for turn_L in rows.turn] for t in of(done, "turns")]
    actions = [len({*rows.trajectory_S[has]}) for has in acted]
    for key in ("kl", "clip_fraction"):
        close(np.average(of(done, key), weights=actions), metrics[f"sweep/{key}"])
    assert max(of(done, "kl")) > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A policy of one layer with a tokenizer, and its folder after a sweep on one device.

    Nobody recorded log-probabilities.
    """
    folder = tmp_path_factory.mktemp("small")
    made = run_cases.save_policy(folder / "model")
    without = files.write(folder / "without.jsonl", cases.ragged(), logp=False)
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        return made, folder / "out", *run(made, without, folder)


def test_the_command_writes_the_same_bits_and_what_transformers_loads(small, stored, tmp_path):
    made, out, _, here = small
    done = loaded_python.run(
        [sys.executable, "-m", "seeupo_jax.update", *arguments(made, stored, tmp_path)],
        env=run_cases.environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {tmp_path / 'out'}: 4 steps on 7 trajectories, loss ")
    assert "1 of 8 trajectories are left out" in done.stderr
    there = json.loads((tmp_path / "out.json").read_text())
    # What was recorded matters to one metric alone.
    gaps = {"logp/sampler_trainer_gap": None, "logp/sampler_trainer_gap_mean": None}
    assert all(there["metrics"][name] > 0 for name in gaps)
    assert here == there | {"metrics": there["metrics"] | gaps}
    names = {file.name for file in out.iterdir()}
    assert names == {file.name for file in made.iterdir()} >= {"tokenizer.model", "chat.json"}
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (out / name).read_bytes()
    actual, _ = from_pretrained(str(out), dtype="float32")
    reference = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = np.array([[5, 9, 3, 7]])
    with torch.inference_mode():
        logits = reference(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(actual(jnp.asarray(tokens)), logits, atol=1e-4)


@pytest.mark.exhaustive
def test_a_mesh_changes_no_number(small, stored, tmp_path, monkeypatch):
    made, _, params, done = small
    monkeypatch.undo()
    monkeypatch.setattr(update, "prepare_xla", lambda **_: None)
    mesh = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    sharded, logged = run(made, stored, tmp_path, *mesh)
    cases.assert_trees_close(sharded, params, 1e-5)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(of(logged, name), of(done, name), rtol=1e-4, atol=1e-6)


def test_adapters_are_written_without_their_model_after_rows_longer_than_a_rollouts(
    small, tmp_path
):
    file, _ = long_file(tmp_path, 40, 12)
    lora = ("lora.rank=2", "lora.targets=('q_proj',)")
    update.main(["update", *arguments(small[0], file, tmp_path, *lora)])
    written = {file.name for file in (tmp_path / "out").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat.json"}
    assert written == {"adapter_config.json", "adapter_model.safetensors"} | tokenizer
    adapters = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert adapters["base_model_name_or_path"] == str(small[0])
    done = json.loads((tmp_path / "out.json").read_text())
    assert of(done, "turns") == [[0]] and of(done, "weights") == [done["advantages"]]
    np.testing.assert_allclose(done["advantages"], [-(0.5**0.5), 0.5**0.5], rtol=1e-6)


def test_a_critic_starts_anew_and_its_advantages_are_means(small, stored, tmp_path):
    _, done = run(small[0], stored, tmp_path, "recipe=ppo")
    (step,) = done["steps"]
    assert step["turns"] == [0, 1, 2, 3] and step["weights"] == done["advantages"]
    assert done["metrics"]["sweep/value_loss"] > 0 == done["metrics"]["sweep/explained_variance"]
    # Of values that are all 0, generalized advantages are rewards, discounted by lambda a token.
    lengths = [[(s.turn_L >= 0).sum() for s in t.segments] for t in cases.ragged()]
    credit = [
        t.reward * 0.95 ** np.arange(sum(each))
        for t, each in zip(cases.ragged(), lengths, strict=True)
    ]
    tokens = np.concatenate([own for own, keep in zip(credit, LEARNED, strict=True) if keep])
    wanted = [np.clip((own - tokens.mean()) / tokens.std(ddof=1), -3, 3).mean() for own in credit]
    stats = np.array(done["advantages"], float)[LEARNED]
    np.testing.assert_allclose(stats, np.array(wanted)[LEARNED], rtol=1e-5, atol=1e-6)


def test_a_process_reward_model_starts_as_the_policy_and_credits_no_turn_yet(
    small, stored, tmp_path
):
    fields = ("recipe=istar", "algorithm.estimator.success_above=0.2")
    _, done = run(small[0], stored, tmp_path, *fields)
    metrics = done["metrics"]
    assert metrics["sweep/pairs"] == 4 and metrics["sweep/pair_accuracy"] == 0.5
    np.testing.assert_allclose(metrics["sweep/pair_loss"], np.log(2), rtol=1e-6)
    assert metrics["sweep/scorer_grad_norm"] > 0
    reward = np.array([t.reward for t in cases.ragged()])
    group = np.array([t.group for t in cases.ragged()])
    wanted = np.full(len(reward), np.nan)
    for i in np.flatnonzero(LEARNED):
        others = (group == group[i]) & LEARNED & (np.arange(len(reward)) != i)
        wanted[i] = reward[i] - reward[others].mean()
    np.testing.assert_allclose(np.array(done["advantages"], float), wanted, rtol=1e-5)


REWARDS = [{"env": 0.1 * i**2, "late": float(i % 3)} for i in range(8)]
LATE = "rewards=[{'name': 'late', 'weight': 0.5}]"


@pytest.fixture
def with_rewards(tmp_path):
    """`cases.ragged` with rewards by name."""
    pairs = zip(cases.ragged(), REWARDS, strict=True)
    lines = [json.dumps(files.to_line(t) | {"rewards": named}) for t, named in pairs]
    file = tmp_path / "with_rewards.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("recipe", ["gdpo", "dvao"])
def test_named_rewards_weigh_what_the_configuration_says(model, with_rewards, tmp_path, recipe):
    _, done = run(model, with_rewards, tmp_path, f"recipe={recipe}", LATE)
    pairs = zip(cases.ragged(), REWARDS, strict=True)
    named = [with_fields(t, rewards=own) for t, own in pairs]
    made = cases.learner(reward_weights={"late": 0.5}, **RECIPES[recipe])
    wanted = cases.twin_sweep(made, named, []).advantage_N
    advantage_N = np.array(done["advantages"], float)
    np.testing.assert_allclose(advantage_N[LEARNED], wanted[LEARNED], rtol=1e-5, atol=1e-6)
    shares = [done["metrics"][f"sweep/reward_share/{name}"] for name in ("env", "late")]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1)


def test_weights_make_the_reward_of_estimators_that_read_one(model, with_rewards, stored):
    logged = []

    def rewards_of(file, *choices):
        config = config_of(model, *choices)
        return [t.reward for t in stored_update.prepare_update(config, str(file), logged.append)[1]]

    as_it_stands = [t.reward for t in cases.ragged()]
    assert rewards_of(with_rewards) == as_it_stands
    assert rewards_of(with_rewards, LATE) == [r["env"] + 0.5 * r["late"] for r in REWARDS]
    assert not [sentence for sentence in logged if "config.rewards" in sentence]
    assert rewards_of(stored, LATE) == as_it_stands
    assert "config.rewards does not count: no trajectory has `rewards`." in logged
    other = LATE.replace("late", "early")
    said = r"config.rewards\[0\].name: got early, which no trajectory has; allowed: env, late\."
    with pytest.raises(ValueError, match=said):
        rewards_of(with_rewards, other)


def test_timeouts_count_as_the_environment_is_configured(model, tmp_path):
    hung = [dataclasses.replace(t, stop="timeout") for t in cases.ragged()[:1]]
    file = files.write(tmp_path / "stored.jsonl", [*hung, *cases.ragged()[1:3]])
    for choice, failed in (("failure", True), ("zero_reward", False)):
        config = config_of(model, f"env.timeout_as={choice}")
        prepared = stored_update.prepare_update(config, str(file), lambda _: None)[1]
        assert [t.failed for t in prepared] == [failed, False, False]


def test_turn_rewards_that_are_read_unweighted_are_told(model, tmp_path):
    turns = [with_fields(t, turn_rewards=(0.5,) * t.turns) for t in cases.ragged()[:2]]
    lines = [json.dumps(files.to_line(t) | {"rewards": {"late": 1.0}}) for t in turns]
    file = tmp_path / "turns.jsonl"
    file.write_text("\n".join(lines))
    for choice, reads in (
        ("recipe=gigpo", True),
        ("recipe=reinforce_plus_plus", True),
        ("recipe=seeupo", False),
        ("recipe=spo_tree", False),
    ):
        logged = []
        stored_update.prepare_update(config_of(model, choice, LATE), str(file), logged.append)
        reported = [
            each for each in logged if each.startswith("config.rewards does not count in the")
        ]
        assert len(reported) == reads, choice
        assert not reported or "turn_rewards of 2 of 2 lines, which advantage=" in reported[0]


def test_what_differs_between_turns_is_told_of_the_turns_of_a_step():
    rows = SegmentBatch.of(cases.ragged())
    advantage = [10.0 * turn_L for turn_L in rows.turn]
    means_N = stored_update._means(rows, advantage, [1])
    # The fourth has no such turn, and the fifth failed.
    assert means_N.tolist()[:4] == [10, 10, 10, 0] and np.isnan(means_N[4])
    assert stored_update._means(rows, advantage, [2, 1]).tolist()[5:] == [7.5 + 5, 15, 15]


def test_turns_have_the_means_of_their_tokens_and_none_without_any():
    trajectories = cases.ragged()
    # Tokens of probability 1 were forced: the fourth one's only turn, and the last turn of others.
    for number, turn in ((3, 0), (5, 2)):
        (own,) = trajectories[number].segments
        own.logp_L[own.turn_L == turn] = 0.0
    rows = SegmentBatch.of(trajectories, truncated=True)
    advantage = [100.0 * turn_L + np.arange(len(turn_L)) % 2 for turn_L in rows.turn]
    first, second, third, fourth, failed, sixth, *_ = stored_update._turn_means(
        rows, advantage, trajectories
    )
    assert first == pytest.approx([1 / 3, 101.0, 200.5, 300.5])
    assert second == pytest.approx([1.0, 100.5])
    assert third == pytest.approx([0.5, 100.5, 200.5, 300 + 1 / 3])  # of two segments
    assert (fourth, failed, sixth[2]) == ([None], None, None) and len(sixth) == 3


def test_turn_rewards_reach_what_reads_rewards_of_turns(small, tmp_path):
    pair = [
        cases.Trajectory.of(
            (cases.segment(np.random.default_rng(i), (0, 3, 2), (1, 2, 1)),), 1.0, 0
        )
        for i in range(2)
    ]
    given = [with_fields(pair[0], turn_rewards=(3.0, 0.0)), pair[1]]
    file = files.write(tmp_path / "stored.jsonl", given)
    _, done = run(small[0], file, tmp_path, "recipe=reinforce_plus_plus", "algorithm.scale=none")
    # To go: 3 and 0 of the turns; 1 and 1 of the second, whose reward is its last turn's.
    np.testing.assert_allclose(done["turn_advantages"], [[3, 0], [1, 1]], atol=1e-6)
    np.testing.assert_allclose(done["advantages"], [2, 1], atol=1e-6)


def test_turn_rewards_of_lines_that_begin_alike_compare_the_turns_that_follow(model, tmp_path):
    bare = [dataclasses.replace(each, parent=None, fork=0) for each in cases.judged_trees()]
    file = files.write(tmp_path / "stored.jsonl", bare)
    params, done = run(model, file, tmp_path, "recipe=slate", "algorithm.kl_coef=0.1")
    # Of each turn the scores of those that begin where it does, its own first; each node once.
    score = {i: each.turn_rewards for i, each in enumerate(bare)}
    siblings = {
        (0, 0): [score[0][0], score[1][0]],
        (0, 1): [score[0][1], score[3][1]],
        (0, 2): [score[0][2], score[5][2]],
        (3, 2): [score[3][2], score[4][2]],
        (3, 3): [score[3][3]],
        (6, 0): [score[6][0], score[7][0]],
        (7, 1): [score[7][1], score[8][1]],
        (9, 2): [score[9][2], score[6][2]],
    }
    for (line, turn), values in siblings.items():
        deviation = np.std(values, ddof=1) + 1e-6 if len(values) > 1 else 1.0
        wanted = (values[0] - np.mean(values)) / deviation
        np.testing.assert_allclose(done["turn_advantages"][line][turn], wanted, atol=1e-5)
    assert done["turn_advantages"][2] is None
    made = cases.learner(**RECIPES["slate"] | {"kl_coef": 0.1})
    actions = [(0,), (1,), (2,), (3,)]
    twin = cases.twin_sweep(made, cases.judged_trees(), [(0, 1, 2, 3)], actions=actions)
    for key, weight in cases.weights_of(params).items():
        np.testing.assert_allclose(weight, twin.weights[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_lines_that_begin_with_the_same_turns_are_a_tree(model, tmp_path):
    trees = [dataclasses.replace(each, parent=None, fork=0) for each in cases.trees()]
    file = files.write(tmp_path / "stored.jsonl", trees)
    choices = ("recipe=spo_tree", "algorithm.kl_coef=0.1", "algorithm.mask_above=0.05")
    params, done = run(model, file, tmp_path, *choices)
    # V of the nodes by hand: the first group's leaves are 1, 0.2, 0.4, -0.5 and 0.9; the second's
    # 0.8, 0.1, 0.5 and 0, of which 0.8 and 0 share two turns, and 0.1 and 0.5 one.
    first, second, middle = np.mean([1, 0.4, -0.5, 0.9]), np.mean([1, 0.9]), np.mean([0.4, -0.5])
    root, whole = 0.4, 0.35
    wanted = [
        [first - root, second - first, 1 - second],
        [0.2 - root] * 2,
        None,
        [first - root, middle - first, 0.4 - middle, 0.4 - middle],
        [first - root, middle - first, -0.5 - middle],
        [first - root, second - first, 0.9 - second],
        [0.4 - whole] * 2 + [0.8 - 0.4],
        [0.3 - whole, 0.1 - 0.3],
        [0.3 - whole] + [0.5 - 0.3] * 2,
        [0.4 - whole] * 2 + [0 - 0.4],
    ]
    assert done["turn_advantages"].pop(2) is wanted.pop(2)
    for got, expected in zip(done["turn_advantages"], wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    made = cases.learner(**RECIPES["spo_tree"] | {"kl_coef": 0.1, "mask_above": 0.05})
    twin = cases.twin_sweep(made, cases.trees(), [(0, 1, 2, 3)])
    for key, weight in cases.weights_of(params).items():
        np.testing.assert_allclose(weight, twin.weights[key], rtol=1e-5, atol=1e-5, err_msg=key)


def config_of(model, *choices):
    overrides = (f"model.path={model}", "warm_start.stages=()", *CHOICES, *choices)
    return load_config(CONFIG, overrides)


def long_file(tmp_path, tokens, action):
    rng = np.random.default_rng(0)
    segments = [cases.segment(rng, (0, tokens - action, action)) for _ in range(2)]
    pair = [cases.Trajectory.of((segment,), float(i), 0) for i, segment in enumerate(segments)]
    return files.write(tmp_path / "long.jsonl", pair), pair


def test_lengths_are_the_files(model, tmp_path):
    _, pair = long_file(tmp_path, 300, 90)

    def shapes(config):
        return build.build_shapes(config, make_mesh(config.mesh), 2)

    fitted = shapes(stored_update.fit_config(config_of(model), pair))
    assert fitted.lengths == (32, 300) and (fitted.action, fitted.longest) == (90, 300)
    budget = ("batching.buckets=()", "batching.microbatch_tokens=200")
    fitted = shapes(stored_update.fit_config(config_of(model, *budget), pair))
    assert fitted.lengths == tuple(48 * i for i in range(1, 9))  # the longest holds a trajectory
    # As short as the file where that is shorter; but for the constant that a mean divides by.
    _, pair = long_file(tmp_path, 12, 3)
    assert shapes(stored_update.fit_config(config_of(model), pair)).action == 3
    constant = config_of(model, "algorithm.loss_aggregation=constant")
    assert shapes(stored_update.fit_config(constant, pair)).action == shapes(constant).action == 8


WRONG = {
    # What is asked for -> what is said. None of it needs the weights.
    "algorithm.importance.clip=2.0": "logp: got none; allowed: a number for each token, which",
    "recipe=a_grae": "reward: got -0.7; allowed with advantage=a_grae: a number from 0 to 1",
    "algorithm.clip=1": "config.algorithm.clip: no such field",
    "optimizer.name=adamww": "optimizer.name",
    'optimizer={"name": "optax:adamw", "kwargs": {"b1": "high"}}': "optax:adamw with kwargs={'b1'",
    "rollout.max_turns=2": "config.rollout.max_turns: got 2; allowed with order=custom: at least",
    "mesh.data=3": "config.mesh",
    "--model=nowhere": "model path: got 'nowhere'; allowed: a folder with a config.json",
    "--trajectories=nowhere": "--trajectories: got nowhere (No such file or directory); allowed",
    "--config=nowhere.py": "--config: no file nowhere.py",
    "--output=.": "--output: got ",
    "--output=/dev/null/out": "--output: got /dev/null (File exists); allowed: a folder that",
    "--json=/": "--json: got '/'; allowed: a file that can be written",
    "--json=/dev/null/out": "--json: got '/dev/null/out'; allowed: a file that can be written",
    f"--json={'x' * 300}": "; allowed: a file that can be written",
    f"--output={'x' * 300}": "(File name too long); allowed: a new or empty",
}


@pytest.mark.parametrize("choice", WRONG)
def test_what_is_wrong_is_told_before_the_model_is_loaded(
    model, tmp_path, capsys, monkeypatch, choice
):
    monkeypatch.setattr(update, "load_policy", lambda *_: pytest.fail("weights were read"))
    stored = files.write(tmp_path / "stored.jsonl", cases.ragged(), logp=False)
    more = ["algorithm.order=custom", "algorithm.custom_order=(0,1)"] * ("max_turns" in choice)
    given = arguments(model, stored, tmp_path, *more)
    given.append(choice if choice.startswith("--") else f"--config.{choice}")
    with pytest.raises(SystemExit) as ended:
        update.main(["update", *given])
    logged = capsys.readouterr().err
    assert ended.value.code == 2 and WRONG[choice] in logged
    assert logged.startswith("error: ") and logged.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.json").exists()


def test_a_folder_that_another_process_has_just_written_is_refused(
    model, stored, tmp_path, capsys, monkeypatch
):
    @contextlib.contextmanager
    def written_meanwhile(folder):
        (folder / "model").mkdir(parents=True)
        yield

    monkeypatch.setattr(update, "exclusive_output", written_meanwhile)
    monkeypatch.setattr(update, "prepare_update", lambda *_: pytest.fail("work began"))
    with pytest.raises(SystemExit) as ended:
        update.main(["update", *arguments(model, stored, tmp_path)])
    assert ended.value.code == 2 and "out, which is there; allowed" in capsys.readouterr().err


def test_cut_trajectories_are_masked_where_others_are_left(small, tmp_path, capsys):
    rng = np.random.default_rng(0)
    group = [cases.Trajectory.of((cases.segment(rng, (0, 4, 2)),), float(i), 0) for i in range(3)]
    cut = [dataclasses.replace(t, stop="max_turns") for t in group]
    file = files.write(tmp_path / "stored.jsonl", [*group[:2], cut[2]])
    _, done = run(small[0], file, tmp_path, "algorithm.truncated=mask", "algorithm.scale=none")
    assert done["advantages"] == of(done, "weights")[0][:2] + [1.0] == [-1.0, 0.0, 1.0]
    assert of(done, "weights")[0][2] is None
    assert "1 of 3 trajectories were cut and are masked" in capsys.readouterr().err
    file = files.write(tmp_path / "stored.jsonl", cut)
    with pytest.raises(SystemExit) as ended:
        run(small[0], file, tmp_path / "again", "algorithm.truncated=mask")
    assert ended.value.code == 2
    assert "config.algorithm.truncated: got 'mask' with" in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["algorithm.mask_above=0.0", "rollout.top_k=5"])
def test_a_sweep_without_a_step_says_why_and_leaves_the_weights(small, tmp_path, capsys, choice):
    pair = cases.ragged()[:2]
    for trajectory in pair:
        trajectory.segments[0].logp_L[:] = 0.0
    file = files.write(tmp_path / "stored.jsonl", pair)
    params, done = run(small[0], file, tmp_path, choice)
    why = "likelier than algorithm.mask_above" if "mask" in choice else "forced: its"
    assert f"no step was taken, since every sampled token was {why}" in capsys.readouterr().out
    assert done["steps"] == [] and done["metrics"]["sweep/turns"] == 0
    before = split_model(from_pretrained(str(small[0]), dtype="float32")[0])[1]
    cases.assert_trees_equal(cases.host(params), cases.host(before))


def test_tokens_and_lengths_that_the_model_has_not_are_told(model, tmp_path, capsys):
    rng = np.random.default_rng(0)
    pair = [cases.Trajectory.of((cases.segment(rng, (0, 4, 2)),), float(i), 0) for i in range(2)]
    pair[1].segments[0].tokens_L[2] = cases.VOCAB
    file = files.write(tmp_path / "stored.jsonl", pair)
    with pytest.raises(SystemExit):
        run(model, file, tmp_path)
    assert f"{file}:2: tokens: got 20; allowed: ids below" in capsys.readouterr().err


def test_the_written_weights_are_those_of_a_sweep(small, stored, tmp_path, monkeypatch):
    made, real = [], build_learner.build_learner
    monkeypatch.setattr(
        stored_update, "build_learner", lambda *given: made.append(real(*given)) or made[0]
    )
    written, done = run(small[0], stored, tmp_path, "optimizer.name=adamw")
    config = stored_update.fit_config(config_of(small[0], "optimizer.name=adamw"), cases.ragged())
    policy, params = build.load_policy(config, config.model.path)
    learner = made[0].learner
    fresh = build_learner.new_state(config, policy, learner.optimizer, params)
    with jax.set_mesh(policy.mesh):
        state, metrics, _, steps = sweep(learner, fresh, params, cases.ragged(), iteration=1)
    # Ratios are copied, and outlive the sweep.
    assert [step.turns for step in steps] == REVERSE
    assert not any(step.cumulative_ratio_N.is_deleted() for step in steps)
    cases.assert_trees_equal(cases.host(written), cases.host(state.params))
    assert done["metrics"] == metrics
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), written, params)
    assert min(jax.tree.leaves(moved)) > 1e-3
