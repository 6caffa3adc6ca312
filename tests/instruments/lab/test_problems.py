"""Problems: the best policy's value, files, and one-sentence errors."""

import itertools

import numpy as np
import pytest

from seeupo_jax.instruments.lab.problems import PROBLEMS, Problem, load_problem


def best_of_all_policies(mean):
    """Value of the best deterministic policy of two turns: every one of them is tried."""
    count = len(mean)
    answers = itertools.product(range(count), repeat=count)  # second action after each first one
    return max(mean[first, answer[first]] for answer in answers for first in range(count))


def test_the_optimum_is_that_of_the_best_of_all_policies():
    mean = np.random.default_rng(0).normal(size=(3, 3)) + 1
    assert Problem("p", mean, np.ones((3, 3))).optimum == best_of_all_policies(mean)


def test_a_hand_worked_problem():
    problem = Problem("p", np.array([[0.5, 0.5], [0.0, 3.0]]), np.array([[1, 1], [1, 0.25]]))
    assert (problem.turns, problem.actions, problem.optimum) == (2, 2, 3.0)
    assert problem.mean.dtype == problem.probability.dtype == np.float64


def test_the_names_and_what_the_problems_are_worth():
    problems = {name: make() for name, make in PROBLEMS.items()}
    assert list(problems) == [
        *("coordination", "lottery", "deceptive", "delayed", "stochastic", "random", "long"),
        *("rare_turn", "matched_trace"),
    ]
    assert all(name == problem.name for name, problem in problems.items())
    optima = {name: problem.optimum for name, problem in problems.items()}
    assert 0.9 < optima.pop("random") < 1
    assert all(optimum == pytest.approx(1) for optimum in optima.values())
    assert problems["long"].turns >= 8
    for problem in problems.values():  # there is something to learn
        assert problem.mean.mean() < 0.9 * problem.optimum


def test_problems_are_what_their_names_say():
    lottery, deceptive = PROBLEMS["lottery"](), PROBLEMS["deceptive"]()
    assert np.all(lottery.mean[0] == lottery.optimum / 2) and np.all(lottery.probability[0] == 1)
    assert np.all((lottery.mean / lottery.probability)[1:] == 8)
    assert deceptive.mean[0].min() == 0.5 > deceptive.mean[1].mean() == 1 / 8
    assert np.all(PROBLEMS["stochastic"]().probability < 1)
    delayed = PROBLEMS["delayed"]().mean
    assert np.all(delayed == delayed.transpose(0, 2, 3, 4, 1, 5))
    coordination = PROBLEMS["coordination"]().mean
    assert np.count_nonzero(coordination) == 3 and coordination[1, 1, 1, 1] == 0.7


def test_what_turns_pay_is_seen_where_the_outcome_is_not():
    rare, matched = PROBLEMS["rare_turn"](), PROBLEMS["matched_trace"]()
    np.testing.assert_array_equal(rare.turn_mean.sum(axis=0), rare.mean)
    assert [turn for turn, paid in enumerate(rare.turn_mean) if paid.any()] == [3]
    assert rare.mean.mean() == 1 / 8
    assert rare.turns == 8 and rare.noise > rare.optimum
    assert np.count_nonzero(matched.mean) == 1 and matched.noise == 0
    # Every call that is matched pays a share, whatever the others are.
    assert matched.turn_mean[:, *np.argwhere(matched.mean)[0]].sum() == pytest.approx(1)
    for turn_mean in matched.turn_mean:
        assert turn_mean.mean() == pytest.approx(1 / 24)


def test_turn_rewards_come_back_from_their_file(tmp_path):
    made = PROBLEMS["rare_turn"]()
    np.savez(tmp_path / "mine.npz", mean=made.mean, turn_mean=made.turn_mean, noise=made.noise)
    read = load_problem(tmp_path / "mine.npz")
    np.testing.assert_array_equal(read.turn_mean, made.turn_mean)
    assert read.noise == made.noise


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ({"turn_mean": np.ones((1, 2, 2))}, r"turn_mean of shape \(1, 2, 2\); allowed: .*2, 2, 2"),
        ({"turn_mean": np.full((2, 2, 2), np.inf)}, "got inf in turn_mean; allowed: finite"),
        ({"turn_mean": np.stack([np.eye(2)] * 2)}, "turn_mean of turn 0 that depends on later"),
        ({"turn_mean": np.ones((2, 2, 2)), "noise": -1.0}, "got a noise of -1.0; allowed: a numb"),
        ({"noise": 1.0}, "got a noise of 1.0; allowed: .* 0 without turn_mean"),
    ],
)
def test_wrong_rewards_of_turns_are_one_sentence(turns, words):
    with pytest.raises(ValueError, match=f"^mine: .*{words}"):
        Problem("mine", np.eye(2), np.ones((2, 2)), **turns)


def test_a_problem_comes_back_from_its_file(tmp_path):
    made = PROBLEMS["stochastic"]()
    np.savez(tmp_path / "mine.npz", mean=made.mean, probability=made.probability)
    read = load_problem(tmp_path / "mine.npz")
    assert read.name == "mine"
    np.testing.assert_array_equal(read.mean, made.mean)
    np.testing.assert_array_equal(read.probability, made.probability)


def test_a_file_without_probabilities_has_no_noise(tmp_path):
    np.savez(tmp_path / "mine.npz", mean=np.eye(2, dtype=np.int64))
    np.testing.assert_array_equal(load_problem(tmp_path / "mine.npz").probability, np.ones((2, 2)))


ONES = np.ones((2, 2))


@pytest.mark.parametrize(
    ("mean", "probability", "words"),
    [
        (np.ones(()), np.ones(()), r"mean of shape \(\); allowed: one axis per turn"),
        (np.ones(1), np.ones(1), r"mean of shape \(1,\); allowed: .* at least 2"),
        (np.ones((2, 3)), np.ones((2, 3)), r"\(2, 3\); allowed: .*all of the same length"),
        (ONES, np.ones(2), r"probability of shape \(2,\); allowed: that of mean, \(2, 2\)"),
        (ONES, 0 * ONES, r"a probability of 0; allowed: \(0, 1\]"),
        (ONES, 1.5 * ONES, r"a probability of 1\.5; allowed: \(0, 1\]"),
        (ONES * np.nan, ONES, "nan in mean; allowed: finite numbers"),
        (ONES, ONES * np.inf, "inf in probability; allowed: finite numbers"),
        (-ONES, ONES, "no mean above -1; allowed: an optimum > 0"),
        (np.full((2, 2), "a"), ONES, "mean of <U1; allowed: numbers"),
    ],
)
def test_a_wrong_array_is_reported_in_one_sentence(mean, probability, words):
    with pytest.raises(ValueError, match=f"^p: got .*{words}[^.]*\\.$"):
        Problem("p", mean, probability)


def test_a_wrong_file_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="no.npz, which is no file; allowed: an .npz file"):
        load_problem(tmp_path / "no.npz")
    (tmp_path / "text.npz").write_text("mean")
    with pytest.raises(ValueError, match="text.npz, which is not in the .npz format"):
        load_problem(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", average=ONES)
    with pytest.raises(ValueError, match="other.npz with average; allowed: mean"):
        load_problem(tmp_path / "other.npz")
    np.savez(tmp_path / "objects.npz", mean=np.array([[None, 1]]))
    with pytest.raises(ValueError, match="objects.npz, which numpy cannot read"):
        load_problem(tmp_path / "objects.npz")
    np.savez_compressed(tmp_path / "torn.npz", mean=np.random.default_rng(0).random((9, 9)))
    data = bytearray((tmp_path / "torn.npz").read_bytes())
    compressed = data.index(b"mean.npy") + 60
    data[compressed : compressed + 40] = b"\xff" * 40
    (tmp_path / "torn.npz").write_bytes(data)
    with pytest.raises(ValueError, match="torn.npz, which numpy cannot read: Error -3 while deco"):
        load_problem(tmp_path / "torn.npz")
    np.savez(tmp_path / "flat.npz", mean=np.ones((2, 3)))
    with pytest.raises(ValueError, match="flat: got mean of shape"):
        load_problem(tmp_path / "flat.npz")
