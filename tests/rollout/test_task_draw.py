"""Tasks of iterations: every one in its turn, in an order of the seed."""

import itertools

import grain
import pytest

from seeupo_jax.rollout.task_draw import TrainingTasks, too_few

TASKS = [f"train/{number}" for number in range(10)]


def test_iterations_go_through_all_tasks_in_a_new_order_every_epoch():
    tasks = TrainingTasks(TASKS, count=4, seed=3)
    played = [task_id for iteration in range(1, 6) for task_id in tasks.of(iteration)]
    first, second = played[:10], played[10:]
    assert sorted(first) == sorted(second) == TASKS
    assert first != second and first != TASKS
    assert tasks.of(2) == TrainingTasks(TASKS, count=4, seed=3).of(2)
    assert tasks.of(1) != TrainingTasks(TASKS, count=4, seed=4).of(1)


def plain_order(tasks, count, seed):
    """Epochs one after the other, each in its own order, cut into iterations anyhow."""
    order = grain.MapDataset.source(tasks).shuffle(seed=seed).repeat()
    return lambda iteration: [order[i] for i in range((iteration - 1) * count, iteration * count)]


@pytest.mark.exhaustive
def test_no_iteration_of_bfcls_100_tasks_holds_one_twice():
    names = [f"multi_turn_base_{number}" for number in range(100)]
    tasks = TrainingTasks(names, count=32, seed=0)
    played = [tasks.of(iteration) for iteration in range(1, 151)]
    assert not [own for own in played if len(set(own)) < 32]  # 36 of these would have repeats
    flat = sum(played, [])
    for first in range(0, 4800, 100):
        assert sorted(flat[first : first + 100]) == sorted(names)
    again = TrainingTasks(names, count=32, seed=0)
    assert [again.of(i) for i in (148, 23)] == [played[147], played[22]]  # of nothing before it


@pytest.mark.parametrize("size, count", [(2000, 300), (500, 300)])
def test_only_tasks_that_would_come_twice_change_places(size, count):
    names = [str(number) for number in range(size)]
    plain, tasks = plain_order(names, count, 4), TrainingTasks(names, count=count, seed=4)
    clashes = moved = 0
    for iteration in range(1, 21):
        shuffled, own = plain(iteration), tasks.of(iteration)
        clashes += count - len(set(shuffled))
        moved += sum(a != b for a, b in zip(shuffled, own, strict=True))
        assert len(set(own)) == count
    assert 0 < moved <= 2 * clashes
    if size == 2000:
        assert moved == 2 * clashes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "size, count", [(1, 2), (2, 3), (7, 8), (8, 7), (9, 8), (9, 5), (12, 18), (10, 17), (5, 23)]
)
def test_a_task_comes_again_in_an_iteration_only_after_all_others(size, count):
    names = [str(number) for number in range(size)]
    tasks = TrainingTasks(names, count=count, seed=1)
    played = [tasks.of(iteration) for iteration in range(1, 5)]
    for own in played:
        often = [own.count(name) for name in names]
        assert max(often) - min(often) <= 1 and len(own) == count
    flat = sum(played, [])
    for first in range(0, len(flat) - size + 1, size):
        assert sorted(flat[first : first + size]) == sorted(names)
    assert TrainingTasks(names, count=count, seed=1).of(4) == played[3]


def test_iterations_that_end_with_an_epoch_keep_their_order():
    names = [str(number) for number in range(12)]
    plain, tasks = plain_order(names, 4, 5), TrainingTasks(names, count=4, seed=5)
    assert [tasks.of(i) for i in range(1, 20)] == [plain(i) for i in range(1, 20)]


@pytest.mark.parametrize("count, wanted", [(3, None), (4, None), (5, "got 5"), (9, "got 9")])
def test_fewer_tasks_than_an_iteration_takes_are_said(count, wanted):
    said = too_few(4, count)
    assert (said is None) == (wanted is None) and (wanted is None or wanted in said)


@pytest.mark.parametrize("count", [4, 9, 10, 13])
def test_a_replacement_is_a_new_task_while_there_are_any_left(count):
    tasks = TrainingTasks(TASKS, count=count, seed=3)
    first = set(tasks.of(2))
    others = [*itertools.islice(tasks.others(2), 10 - len(first) + 20)]
    new, again = others[:-20], others[-20:]
    assert sorted(new) == sorted(set(TASKS) - first)
    assert sorted(again[:10]) == sorted(again[10:]) == TASKS


def test_replacements_are_of_the_seed_and_the_iteration_and_of_nothing_before():
    def others(seed, iteration):
        # All tasks are the iteration's own, so that none is missing here.
        tasks = TrainingTasks(TASKS, count=10, seed=seed)
        return tuple(itertools.islice(tasks.others(iteration), 10))

    orders = [others(seed, iteration) for seed in (3, 4) for iteration in (1, 2, 11)]
    assert len({*orders, tuple(TASKS)}) == 7
    tasks = TrainingTasks(TASKS, count=10, seed=3)
    for iteration in (1, 2):
        next(tasks.others(iteration))
    assert tuple(itertools.islice(tasks.others(2), 10)) == orders[1]
