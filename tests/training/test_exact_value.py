"""The exact value of a policy against a brute-force twin, and against what it samples."""

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import seeupo_jax
from seeupo_jax import envs, policy
from seeupo_jax.configuration.loading import from_dict
from seeupo_jax.instruments.lab.problems import PROBLEMS
from seeupo_jax.instruments.lab.text_problem import LETTERS
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import training_mesh
from seeupo_jax.policy_io import build
from seeupo_jax.training.build_learner import build_learner
from seeupo_jax.training.checks import check_config
from seeupo_jax.training.exact_value import ExactValue, spellings

MODEL = "package:lab_problem"
TEMPERATURE = 0.8


def settings(problem, **rollout):
    turns = PROBLEMS[problem]().turns
    sampled = {"tasks": 2, "group_size": 4, "max_turns": turns, "max_action_tokens": 2}
    return {
        "env": {"name": "lab_problem", "options": {"problem": problem}},
        "model": {"path": MODEL, "dtype": "float32"},
        "rollout": {**sampled, "max_context": 64, "temperature": TEMPERATURE, **rollout},
        "evaluation": {"exact": True, "tasks": 1, "k": 1, "every": 0},
    }


def shaken(params, size):
    """The parameters with noise, so that no action is as likely as another."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noisy = [x + size * np.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def built(config):
    """A learner and the parameters of a policy that is not uniform."""
    made, params = build.load_policy(config, MODEL, training_mesh(config))
    learner, state, _ = build_learner(config, made, params)
    # Adapters act by products of their factors over the norms of the network.
    size = 0.15 if config.lora.rank == 0 else 0.05
    return SimpleNamespace(policy=made, learner=learner, params=shaken(state.params, size))


def brute_force(problem, model, tokenizer):
    """The value and the probability of leaving: every sequence on its own, probabilities by turn.

    No row has two conversations, no prefix is shared, and expectations are sums over sequences.
    """
    environment, size = envs.make("lab_problem", problem=problem.name), problem.turns
    sequences = [*itertools.product(range(problem.actions), repeat=size)]
    rows, places = [], []
    for actions in sequences:
        conversation = tokenizer.begin(*environment.reset("test/0", 0))
        begins = []
        for action in actions:
            begins.append(len(conversation.tokens))
            step = environment.step(LETTERS[action])
            tokens = tokenizer.action(LETTERS[action])
            last = [*conversation.tokens, *tokens]
            conversation = conversation.extend(tokens, step.observation)
        rows.append(last)
        places.append(begins)
    logits = np.asarray(model(np.array(rows, np.int32)), np.float64) / TEMPERATURE
    logp = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    of_turn = np.array(
        [
            [sum(logp[n, i - 1, row[i]] for i in (begin, begin + 1)) for begin in begins]
            for n, (row, begins) in enumerate(zip(rows, places, strict=True))
        ]
    )
    probability = np.exp(of_turn)
    inside = np.prod(probability, axis=1)
    value = sum(p * problem.mean[actions] for p, actions in zip(inside, sequences, strict=True))
    for turn in range(size):  # episodes that leave in this turn keep what turns before have paid
        for history in itertools.product(range(problem.actions), repeat=turn):
            members = [n for n, actions in enumerate(sequences) if actions[:turn] == history]
            first = {sequences[n][turn]: n for n in reversed(members)}
            reach = np.prod(probability[members[0], :turn])
            leaves = 1 - sum(probability[n, turn] for n in first.values())
            paid = 0.0
            if problem.turn_mean is not None:
                whole = sequences[members[0]]
                paid = sum(problem.turn_mean[(t, *whole)] for t in range(turn))
            value += reach * leaves * paid
    return value, 1 - inside.sum()


@pytest.mark.parametrize("name", ["deceptive", "lottery", "rare_turn"])
@pytest.mark.parametrize("rank", [0, 4])
def test_it_is_that_of_the_brute_force_twin(name, rank, tmp_path):
    config = from_dict(settings(name) | {"lora": {"rank": rank}})
    made = built(config)
    with jax.set_mesh(made.policy.mesh):
        exact = ExactValue(config, made.policy.tokenizer).metrics(made.learner, made.params)
    model = made.policy.network.bind(made.policy.merged(made.params))
    value, outside = brute_force(PROBLEMS[name](), model, made.policy.tokenizer)
    assert 1e-3 < outside < 1 and abs(value - float(PROBLEMS[name]().mean.mean())) > 1e-3
    assert exact["exact/value"] == pytest.approx(value, abs=2e-6)
    assert exact["exact/outside"] == pytest.approx(outside, abs=5e-6)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "matched_trace"])
def test_the_optimum_is_the_laboratorys(name):
    config = from_dict(settings(name))
    tokenizer = policy.from_pretrained(MODEL)[1]
    (tree, trajectories), *others = ExactValue(config, tokenizer)._tasks
    problem = PROBLEMS[name]()
    assert tree.optimum == pytest.approx(problem.optimum, rel=1e-12)
    assert len(trajectories) == problem.mean.size and not others


def test_the_mean_of_what_is_sampled_agrees(tmp_path):
    given = settings("deceptive", tasks=8, group_size=64)
    given |= {"iterations": 1, "optimizer": {"learning_rate": 1e-3}, "lora": {"rank": 4}}
    given |= {"checkpoint": {"every": 0, "export": False}, "telemetry": {"trackers": ()}}
    seeupo_jax.train(given, tmp_path / "run")
    before, after = (
        {name: v for line in read_metrics(tmp_path / "run") if line["iteration"] == i
         for name, v in line.items()}
        for i in (0, 1)
    )  # fmt: skip
    error = 0.5 / math.sqrt(8 * 64)  # no reward of [0, 1] deviates by more
    assert abs(after["rollout/reward_mean"] - before["exact/value"]) < 4 * error
    assert after["exact/value"] > before["exact/value"] > 0.25
    assert before["exact/optimum"] == after["exact/optimum"] == 1.0


def test_the_spellings_of_an_action_are_all_that_the_environment_reads_as_it():
    tokenizer = policy.from_pretrained(MODEL)[1]
    (end,) = tokenizer.end_ids
    assert spellings(tokenizer, "β", 2) == [tuple(tokenizer.action("β"))]
    others = [token for token in range(tokenizer.vocab_size) if token != end]
    found = {
        (*tokens, end)
        for size in (1, 2)
        for tokens in itertools.product(others, repeat=size)
        if tokenizer.text((*tokens, end)) == "β"
    }
    spelt = spellings(tokenizer, "β", 3)
    assert len(spelt) == len(set(spelt)) and set(spelt) == found and len(found) > 4
    assert spellings(tokenizer, "β", 1) == []


def test_what_cannot_be_listed_is_refused_in_a_sentence():
    def refused(given, sentence):
        with pytest.raises(ValueError, match=sentence):
            check_config(from_dict(given))

    given = settings("deceptive")
    exact = "config.evaluation.exact: got True with"
    refused(given | {"env": {"name": "order_desk"}}, f"{exact} env order_desk, which has no action")
    refused(settings("deceptive", top_k=3), f"{exact} top_k")
    none = {**given["evaluation"], "tasks": 0}
    refused(given | {"evaluation": none}, f"{exact} evaluation.tasks=0; allowed: False")
    refused(settings("deceptive", max_turns=3), "max_turns: got 3, after which an episode of")
    refused(settings("deceptive", max_context=8), "max_context: got 8 with an episode of 'test/0'")
    refused(settings("deceptive", max_action_tokens=1), "max_action_tokens: got 1 with the action")
    refused(settings("deceptive", max_action_tokens=3), "more than 4096 episodes")
    refused(settings("deceptive", max_action_tokens=32), "is spelt in more than 4096 ways")
