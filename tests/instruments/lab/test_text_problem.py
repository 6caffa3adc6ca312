"""The laboratory's problems in text: the same rewards, the same optimum, and a uniform policy."""

import itertools
from collections import Counter

import numpy as np
import pytest

from seeupo_jax import envs, policy
from seeupo_jax.envs.validation import check_reset, check_step
from seeupo_jax.instruments.lab.problems import PROBLEMS
from seeupo_jax.instruments.lab.text_problem import LETTERS
from seeupo_jax.policy.files.weights import resolve_path

PLAYABLE = [name for name in PROBLEMS if name != "matched_trace"]


def play(environment, actions, episode_seed=0):
    """The rewards of the turns of an episode, and its score."""
    check_reset(environment.reset("train/0", 0, episode_seed=episode_seed))
    rewards = []
    for turn, action in enumerate(actions):
        step = check_step(environment.step(LETTERS[action]), turn=turn)
        rewards.append(step.reward)
        assert step.done == (turn == len(actions) - 1) == (not step.observation)
    return rewards, environment.score()


@pytest.mark.parametrize("name", PLAYABLE)
def test_expected_rewards_and_scores_are_the_problems(name):
    problem, environment = PROBLEMS[name](), envs.make("lab_problem", problem=name)
    assert environment.action_texts() == tuple(LETTERS[: problem.actions])
    for actions in itertools.product(range(problem.actions), repeat=problem.turns):
        texts = [LETTERS[action] for action in actions]
        assert environment.expected_reward("test/0", texts) == pytest.approx(problem.mean[actions])
        share = problem.mean[actions] / problem.optimum
        assert play(environment, actions)[1] == pytest.approx(share)


@pytest.mark.parametrize("name", [name for name in PLAYABLE if name != "rare_turn"])
def test_the_last_turn_pays_a_jackpot_as_often_as_the_problem_says(name):
    problem, environment = PROBLEMS[name](), envs.make("lab_problem", problem=name)
    best = np.unravel_index(np.argmax(problem.mean), problem.mean.shape)
    rewards = [play(environment, best, seed)[0] for seed in range(1000)]
    assert not np.any(np.array(rewards)[:, :-1])
    paid, probability = np.array(rewards)[:, -1], problem.probability[best]
    assert set(paid) <= {0.0, problem.mean[best] / probability}
    error = np.sqrt(probability * (1 - probability) / 1000)
    assert abs(np.mean(paid > 0) - probability) <= 4 * error


def test_turns_of_rare_turn_pay_coins_and_the_fourth_its_own_reward():
    environment = envs.make("lab_problem", problem="rare_turn")
    rewards = np.array([play(environment, (1,) * 8, seed)[0] for seed in range(400)])
    assert set(np.delete(rewards, 3, axis=1).ravel()) == {-2.0, 2.0}
    assert set(rewards[:, 3]) == {-1.0, 3.0}
    assert abs(rewards.sum(axis=1).mean() - 1) < 4 * 2 * np.sqrt(8 / 400)
    earlier = [environment.expected_reward("train/0", "β" * turns) for turns in range(9)]
    assert earlier == [0, 0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("text", ["", "γ", "a", "αα", " α", "α\n"])
def test_any_other_text_ends_the_episode_without_a_reward(text):
    environment = envs.make("lab_problem", problem="deceptive")
    environment.reset("train/0", 0)
    environment.step("α")
    step = environment.step(text)
    assert step.done and step.reward == 0 and environment.score() == 0


def test_the_same_episode_seed_draws_the_same_rewards():
    environment = envs.make("lab_problem", problem="lottery")
    drawn = [[play(environment, (1, 0, 0), seed) for seed in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1] and len({tuple(rewards) for rewards, _ in drawn[0]}) == 2


def test_other_options_are_refused():
    with pytest.raises(ValueError, match="problem: got 'matched_trace'; allowed: coordination, lo"):
        envs.make("lab_problem", problem="matched_trace")
    with pytest.raises(ValueError, match="lab_problem tasks: got 0; allowed: a whole number"):
        envs.make("lab_problem", tasks=0)
    with pytest.raises(ValueError, match="repeat: got 2; allowed: a number from 0 to 1"):
        envs.make("lab_problem").demonstrations("train", repeat=2)


def test_demonstrations_are_of_all_sizes_and_repeat_as_often_as_asked():
    environment = envs.make("lab_problem")
    for repeat in (0.0, 1.0):
        shown = environment.demonstrations("train", episodes=3000, repeat=repeat)
        sizes = Counter(len(each.messages[0]["content"]) - 1 for each in shown)
        assert sorted(sizes) == [2, 3, 4] and min(sizes.values()) > 850
        assert {len(each.messages) // 2 for each in shown} == set(range(1, 9))
        same = [
            first["content"] == second["content"]
            for each in shown
            if len(each.messages[0]["content"]) == 3
            for first, second in itertools.pairwise(each.messages[1::2])
        ]
        assert abs(np.mean(same) - max(repeat, 0.5)) < 0.05


@pytest.mark.parametrize("actions", [2, 3, 4])
def test_the_bundled_policy_is_near_uniform_in_every_context(actions):
    """Of up to four turns: each action of the first four in every history."""
    folder = resolve_path("package:lab_problem")
    model, tokenizer = policy.from_pretrained(folder, dtype="float32")
    name = {2: "deceptive", 3: "coordination", 4: "random"}[actions]
    environment = envs.make("lab_problem", problem=name)
    letters = [tokenizer.action(letter)[0] for letter in LETTERS[:actions]]
    worst = 0.0
    for turn in range(PROBLEMS[name]().turns):
        contexts = []
        for history in itertools.product(LETTERS[:actions], repeat=turn):
            conversation = tokenizer.begin(*environment.reset("train/0", 0))
            for letter in history:
                step = environment.step(letter)
                conversation = conversation.extend(tokenizer.action(letter), step.observation)
            contexts.append(conversation.tokens)
        logits = np.asarray(model(np.array(contexts, np.int32)), np.float64)[:, -1]
        probability = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probability /= probability.sum(axis=-1, keepdims=True)
        worst = max(worst, np.abs(actions * probability[:, letters] - 1).max())
    assert worst < 0.1  # of 1: no action is a tenth likelier than another
