"""The PyTorch baseline: one iteration from the same weights gives what our sweep gives."""

import dataclasses
import functools
import itertools
import json
import os

import jax
import learner_cases
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from learner_cases import observe, ragged
from twin_policy import tensors_of

from seeupo_jax.benchmarks import torch_runner
from seeupo_jax.configuration import loading
from seeupo_jax.learner.compiled_programs import Learner
from seeupo_jax.learner.optimization.optimizer import make_optimizer
from seeupo_jax.learner.optimization.schedule import Schedule
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy_io import build
from seeupo_jax.types import learnable

options, sweep, trajectories, update = map(
    torch_runner.load, ("options", "sweep", "trajectories", "update")
)
ARCHITECTURES = {
    "qwen3": dataclasses.replace(learner_cases.ARCH, layers=2, kv_heads=1, qk_norm=True),
    "qwen2": dataclasses.replace(
        learner_cases.ARCH, layers=2, qk_norm=False, qkv_bias=True, tied=True
    ),
}
# Ragged turns, a failed one, a context rewritten between turns, and one that is alone in its group.
TRAJECTORIES = [*ragged(), dataclasses.replace(ragged()[0], group=9)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other at every tiny operation take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def network(family):
    """The network, and parameters on the host in which every part matters."""
    made, params = split_model(Transformer(ARCHITECTURES[family], nnx.Rngs(0)))
    return made, learner_cases.jittered(params, 0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes, once a family, a model folder."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            net, params = network(family)
            save_pretrained(net.bind(jax.device_put(params)), made[family])
        return made[family]

    return make


def line(trajectory):
    """A trajectory of ours as a line of the file."""
    parts = {
        "tokens": [s.tokens_L.tolist() for s in trajectory.segments],
        "turn": [s.turn_L.tolist() for s in trajectory.segments],
        "logp": [s.logp_L.tolist() for s in trajectory.segments],
    }
    if len(trajectory.segments) == 1:
        parts = {name: part[0] for name, part in parts.items()}
    rest = {name: getattr(trajectory, name) for name in ("reward", "group", "stop")}
    return json.dumps(parts | rest)


THEIRS = [trajectories.parse(line(t), f"line {n}") for n, t in enumerate(TRAJECTORIES)]


def their_sweep(folder, values, given=THEIRS, **own):
    """The baseline's sweep, and the weights after it by their names in files."""
    model = update.load(folder)
    parsed = options.from_flat({"seed": 5, "rollout.max_turns": 4} | values, **own)
    result = sweep.Sweep(model, parsed).run(given, iteration=3)
    tensors = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return result, tensors


def our_sweep(family, values):
    """Our sweep under the same choices: what its steps did, and the weights they used."""
    by_group = {"algorithm": {}, "optimizer": {}, "rollout": {}}
    for name, value in values.items():
        group, _, leaf = name.partition(".")
        by_group[group][leaf] = value
    by_group["rollout"]["max_turns"] = 4
    config = loading.from_dict(by_group)
    optimizer = optax.chain(
        learner_cases._kept_gradients(),
        make_optimizer(config.optimizer, total_steps=build.total_steps(config)),
    )
    net, params = network(family)
    learner = Learner(
        net,
        optimizer,
        config.algorithm,
        learner_cases.SHAPES,
        config.rollout.temperature,
        seed=5,
        schedule=Schedule(config.optimizer, config.iterations),
    )
    observed = observe(
        learner,
        TRAJECTORIES,
        state=learner_cases.new_state(optimizer, params),
        ref_params=jax.device_put(params),
    )
    return learner, observed


SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.02, "optimizer.max_grad_norm": None}
# Between them every value of every choice; eps keeps Adam from dividing rounding by rounding.
CASES = {
    "defaults": ("qwen3", SGD),
    "product, bounds off, no KL, forward": (
        "qwen2",
        {
            "algorithm.order": "forward",
            "algorithm.ratio": "product",
            "algorithm.weight_clip": None,
            "algorithm.clip_low": None,
            "algorithm.kl_coef": 0.0,
            "algorithm.scale": "none",
            "algorithm.normalize_by": "active",
            "optimizer.name": "adam",
            "optimizer.learning_rate": 3e-3,
            "optimizer.schedule": "linear",
            "optimizer.kwargs": {"b1": 0.8, "eps": 1e-3},
        },
    ),
    "token, old policy of the turn, random": (
        "qwen3",
        {
            "algorithm.order": "random",
            "algorithm.ratio": "token",
            "algorithm.old_policy": "turn",
            "algorithm.inner_epochs": 2,
            "algorithm.clip_low": 0.1,
            "algorithm.clip_high": None,
            "algorithm.scale": "group",
            "rollout.temperature": 1.3,
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 5e-3,
            "optimizer.max_grad_norm": 0.5,
            "optimizer.kwargs": {"eps": 1e-3, "weight_decay": 0.1, "b2": 0.9},
        },
    ),
    "unweighted, momentum, warm-up": (
        "qwen2",
        {
            "algorithm.cumulative_ratio": False,
            "algorithm.inner_epochs": 2,
            "algorithm.advantage_clip": 0.6,
            "algorithm.kl_coef": 0.3,
            "algorithm.clip_high": 0.05,
            "rollout.temperature": 0.7,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.02,
            "optimizer.schedule": "cosine",
            "optimizer.warmup_steps": 3,
            "optimizer.max_grad_norm": 1.5,
            "optimizer.kwargs": {"momentum": 0.8, "nesterov": True},
        },
    ),
    "old policy of the turn, reverse": (
        "qwen3",
        SGD | {"algorithm.old_policy": "turn", "algorithm.advantage_clip": None},
    ),
}


@functools.cache
def ours_of(case):
    family, values = CASES[case]
    return our_sweep(family, values)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_one_iteration_is_that_of_our_sweep(case, folder):
    family, values = CASES[case]
    result, tensors = their_sweep(folder(family), values)
    learner, observed = ours_of(case)
    kept = learnable(TRAJECTORIES)
    metrics = [step for update in observed.updates for step in update.metrics]
    assert len(result.steps) == len(metrics) == observed.state.step > 0
    for name in ("loss", "grad_norm"):
        close([vars(step)[name] for step in result.steps], [m[name] for m in metrics])
    close([s.clip_fraction for s in result.steps], [m["clipped"] / m["actions"] for m in metrics])
    close([s.kl for s in result.steps], [m["kl"] / m["actions"] for m in metrics])
    assert any(m["clipped"] > 0 for m in metrics) or "turn" in case
    assert max(m["kl"] for m in metrics) > 1e-3

    advantage_N = np.full(len(TRAJECTORIES), np.nan)
    owner_S = [i for i in np.flatnonzero(kept) for _ in TRAJECTORIES[i].segments]
    for i, credit_L in zip(owner_S, observed.advantage, strict=True):
        advantage_N[i] = credit_L[0]  # all of a trajectory's tokens have the same
    close(result.advantages[kept], advantage_N[kept])
    before_N, steps = np.ones(len(TRAJECTORIES)), iter(result.steps)
    for update in observed.updates:
        ratio_N = update.cumulative_ratio_N if learner.fused else before_N
        for _, step in zip(update.metrics, steps, strict=False):
            assert (step.turn,) == update.turns
            close(step.weights[kept], (advantage_N * ratio_N)[kept])
        before_N = update.cumulative_ratio_N
    for numbers in (result.advantages, *(step.weights for step in result.steps)):
        assert np.isnan(numbers).tolist() == (~kept).tolist()

    actual = tensors_of(observed.state.params, ARCHITECTURES[family])
    assert actual.keys() == tensors.keys()
    start = tensors_of(network(family)[1], ARCHITECTURES[family])
    for name, tensor in tensors.items():
        close(tensor, actual[name])
        assert np.abs(tensor - start[name]).max() > 4e-4, name


@pytest.fixture(scope="module")
def plain(folder):
    """The sweep that options are held against."""
    return their_sweep(folder("qwen3"), SGD)


def assert_same_numbers(one, other, atol):
    for mine, yours in zip(one[0].steps, other[0].steps, strict=True):
        assert mine.turn == yours.turn
        for name in ("loss", "kl", "grad_norm", "clip_fraction", "weights"):
            wanted = vars(yours)[name]
            np.testing.assert_allclose(vars(mine)[name], wanted, rtol=atol, atol=atol)
    for name, tensor in one[1].items():
        np.testing.assert_allclose(tensor, other[1][name], atol=atol)


def test_null_turns_cost_tokens_and_change_no_number(folder, plain):
    padded = their_sweep(folder("qwen3"), SGD, null_turns=True)
    assert_same_numbers(padded, plain, 2e-6)
    everything, needed = padded[0].tokens, plain[0].tokens
    lasts = {0: 20, 1: 11, 2: 13, 3: 10, 5: 15, 6: 10, 7: 16}  # to the end of the last turn
    turns = {0: 4, 1: 2, 2: 4, 3: 1, 5: 3, 6: 3, 7: 3}
    extra = sum(lasts[i] * (4 - turns[i]) for i in lasts)
    for phase in ("old", "reference", "train"):
        assert everything[phase] - needed[phase] == extra


def test_tokens_are_counted_by_hand(plain):
    by_turn = {  # to the end of each turn of each trajectory
        0: (7, 6, 6, 10, 5, 5, 3),
        1: (10, 11, 11, 12, 9, 8),
        2: (17, 8, 15, 10, 16),
        3: (20, 13),
    }
    each = {turn: sum(lengths) for turn, lengths in by_turn.items()}
    tokens, positions = plain[0].tokens, plain[0].positions
    total = sum(each.values())
    assert tokens == {
        "old": total,
        "reference": total,
        "train": total,
        "refresh": total - each[0],  # nobody reads what the last step does to the weights
    }
    assert positions["train"] == sum(len(own) * max(own) for own in by_turn.values())
    assert set(plain[0].seconds) == set(tokens) and min(plain[0].seconds.values()) > 0


def test_microbatches_change_rounding_only_and_save_padding(folder, plain):
    alone = their_sweep(folder("qwen3"), SGD, microbatch_tokens=1)
    assert_same_numbers(alone, plain, 5e-6)
    assert alone[0].positions == alone[0].tokens == plain[0].tokens
    several = their_sweep(folder("qwen3"), SGD, microbatch_tokens=35)
    assert_same_numbers(several, plain, 5e-6)
    between = several[0].positions["train"]
    assert alone[0].positions["train"] < between < plain[0].positions["train"]


@functools.cache
def begun_alike():
    """Trajectories whose segments begin with their group's prompt; two of a group are equal."""
    rng = np.random.default_rng(1)
    prompt = {group: rng.integers(0, 16, 5 + group) for group in range(10)}

    def longer(trajectory):
        own = prompt[trajectory.group]
        return dataclasses.replace(
            trajectory,
            segments=tuple(
                trajectories.Segment(
                    np.concatenate([own, segment.tokens]),
                    np.concatenate([np.full(len(own), trajectories.CONTEXT), segment.turn]),
                )
                for segment in trajectory.segments
            ),
        )

    made = [longer(trajectory) for trajectory in THEIRS]
    return (*made, dataclasses.replace(made[5], reward=0.1))


def tokens_of_tries(given):
    """Of all turns' contexts, those that the contexts of a group begin with counted once."""
    kept, total = trajectories.learnable(given), 0
    for turn in range(4):
        contexts = {}
        for trajectory in itertools.compress(given, kept):
            for segment in trajectory.segments:
                if (segment.turn == turn).any():
                    end = np.flatnonzero(segment.turn == turn)[-1] + 1
                    own = segment.tokens[:end].tolist()
                    contexts.setdefault(trajectory.group, []).append(own)
        for own in contexts.values():
            total += sum(map(len, own)) - (len(own) - 1) * len(os.path.commonprefix(own))
    return total


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_a_group_begins_with_is_computed_once_and_changes_no_number(family, folder):
    sweep_of = functools.partial(their_sweep, folder(family), SGD, begun_alike())
    alone, together = sweep_of(), sweep_of(share_prefixes=True)
    assert_same_numbers(together, alone, 5e-6)
    assert together[0].tokens["train"] == tokens_of_tries(begun_alike())
    narrow = sweep_of(share_prefixes=True, microbatch_tokens=20)
    assert_same_numbers(narrow, alone, 5e-6)
    counts = [result.tokens["train"] for result, _ in (together, narrow, alone)]
    assert counts == sorted(set(counts))


def test_recomputed_activations_give_the_same_numbers(folder, plain):
    assert_same_numbers(their_sweep(folder("qwen3"), SGD, checkpointing=True), plain, 1e-6)


def test_bfloat16_is_of_activations_only(folder, plain):
    half, tensors = their_sweep(folder("qwen3"), SGD | {"model.dtype": "bfloat16"})
    gap = abs(half.steps[1].loss - plain[0].steps[1].loss)  # the first step's ratios are all 1
    assert 1e-6 < gap < 0.05
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}


def test_a_gradient_that_is_not_finite_changes_nothing(folder):
    model = update.load(folder("qwen3"))
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parsed = options.from_flat(SGD)
    result = sweep.Sweep(model, parsed).run(THEIRS)
    assert result.skipped == len(result.steps) == 4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(9.0), before[name].nan_to_num(9.0))


def test_without_a_kl_penalty_no_reference_is_computed(folder):
    values = SGD | {"algorithm.kl_coef": 0.0, "algorithm.old_policy": "turn"}
    result, _ = their_sweep(folder("qwen3"), values)
    assert result.tokens["reference"] == 0 and result.tokens["old"] == result.tokens["train"]
    assert all(np.isnan(step.kl) and np.isfinite(step.loss) for step in result.steps)
    assert update.as_json(result)["steps"][0]["kl"] is None


def test_the_optimizer_goes_on_in_the_next_sweep(folder):
    values = {"optimizer.name": "adam", "optimizer.schedule": "linear", "iterations": 2}
    model = update.load(folder("qwen3"))
    twice = sweep.Sweep(model, options.from_flat(values | {"rollout.max_turns": 4}))
    for iteration in (1, 2):
        assert len(twice.run(THEIRS, iteration=iteration).steps) == 4
    assert twice.stepper.steps == 8


def test_nothing_to_learn_from_changes_nothing(folder):
    model = update.load(folder("qwen3"))
    result = sweep.Sweep(model, options.from_flat(SGD)).run(THEIRS[-1:])
    assert result.steps == [] and np.isnan(result.advantages).all()
