"""Tasks made of seeds, commands on the last line, and rewards as a score."""

import pytest

from seeupo_jax.envs.seeded_tasks import (
    FIRST_TEST,
    SeedTasks,
    last_line,
    normalized_score,
    numbered_tasks,
    opening_messages,
)


def test_a_task_is_a_seed_of_its_split():
    tasks = SeedTasks("world", {"train": range(3), "test": range(3, 5)})
    assert tasks.ids("train") == ["train/0", "train/1", "train/2"]
    assert [tasks.seed(task) for split in ("train", "test") for task in tasks.ids(split)] == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("task", ["train/3", "test/2", "dev/0", "train", "train/-1", "train/²", ""])
def test_a_task_that_does_not_exist_is_refused(task):
    tasks = SeedTasks("world", {"train": range(3), "test": range(3, 5)})
    with pytest.raises(ValueError, match="world task: got .* allowed: train/0 to 2, test/0 to 1"):
        tasks.seed(task)
    with pytest.raises(ValueError, match="world split: got 'dev'; allowed: train, test"):
        tasks.ids("dev")


@pytest.mark.parametrize(
    "text, command",
    [
        ("go north", "go north"),
        ("I think.\n\n  go north \n\n", "go north"),
        ("<think>hm</think>\r\nlook", "look"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_the_last_line_that_is_not_empty_is_the_command(text, command):
    assert last_line(text) == command


def test_the_instruction_is_the_system_message():
    user = {"role": "user", "content": "A room."}
    assert opening_messages(None, "A room.") == (user,)
    assert opening_messages("Play.", "A room.") == (
        {"role": "system", "content": "Play."},
        user,
    )


def test_rewards_become_a_score_between_nothing_and_one():
    scores = [normalized_score(total, 20.0) for total in (-200.0, 0.0, 5.0, 20.0, 21.0)]
    assert scores == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert sum([0.1] * 10) < 1 and normalized_score(sum([0.1] * 10), 1.0) == 1.0


def test_no_test_task_is_a_training_task_whatever_their_numbers():
    small, large = (
        numbered_tasks("world", train, test, 1.0, FIRST_TEST)
        for train, test in ((10, 300), (10_000, 5))
    )
    tests = {small.seed(task) for task in small.ids("test")}
    assert [large.seed(task) for task in large.ids("test")] == [
        small.seed(f"test/{index}") for index in range(5)
    ]
    assert not tests & {large.seed(task) for task in large.ids("train")}
    assert 0 < min(tests) and max(tests) < 2**31  # of the smallest integers that servers have
