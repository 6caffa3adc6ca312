"""Faults in the tasks of an environment's class are reported in one sentence."""

from types import SimpleNamespace

import numpy as np
import pytest

from seeupo_jax.envs.tasks import check_tasks, labels_by_task, list_tasks, task_labels


class Mute(Exception):
    def __str__(self):
        raise KeyError


class Desk:
    """Two tasks a split, of two kinds."""

    def __init__(self, tasks=("a", "b"), kind=None):
        self._tasks, self._kind = tasks, {} if kind is None else kind

    def task_ids(self, split):
        return self._tasks() if callable(self._tasks) else self._tasks

    def labels(self, task_id):
        kind = self._kind.get(task_id, {"kind": task_id})
        return kind() if callable(kind) else kind


def fail(error):
    raise error


@pytest.mark.parametrize(
    "tasks, wanted",
    [
        ((), r"got no task; allowed: at least one\."),
        (None, r"got None; allowed: a list of texts\."),
        (lambda: (name for name in "ab"), r"got <generator .*; allowed: a list of texts\."),
        ({"a", "b"}, r"got \{.*\} \(set\); allowed: a list of texts\."),
        ({"a": 1}, r"got \{'a': 1\} \(dict\); allowed: a list of texts\."),
        ("ab", r"got 'ab' \(str\); allowed: a list of texts\."),
        ([1, 2], r"got a task 1 \(int\); allowed: a list of texts\."),
        (["a", None], r"got a task None; allowed: a list of texts\."),
        (["\udc80"], r"got a task '\\udc80' \(str\); allowed: a list of texts\."),
        (lambda: fail(OSError("no file")), r"raised OSError: no file\."),
        (lambda: fail(SystemExit(1)), r"raised SystemExit: 1\."),
        (lambda: fail(Mute()), r"raised Mute: a Mute whose text cannot be read\."),
        (lambda: fail(ValueError()), r"raised ValueError: \."),
        (lambda: fail(ValueError("only train.")), r"raised ValueError: only train\."),
        # as an environment within another has it
        (lambda: list_tasks(Desk(lambda: fail(KeyError(1))), "dev"), r"raised KeyError: 1\."),
    ],
)
def test_tasks_that_are_no_list_of_texts_are_refused_in_a_sentence(tasks, wanted):
    with pytest.raises(ValueError, match=rf"^Desk\.task_ids\('dev'\):? {wanted}$"):
        check_tasks(Desk(tasks), ["dev"], labelled=2)


def test_tasks_are_texts_in_any_list():
    assert list_tasks(Desk(np.array(["x", "y"])), "train") == ["x", "y"]
    with pytest.raises(ValueError, match="^desk split: got 'dev'; allowed: train.$"):
        list_tasks(Desk(lambda: fail(ValueError("desk split: got 'dev'; allowed: train."))), "")


@pytest.mark.parametrize(
    "labels, wanted",
    [
        (None, r"got None; allowed: a dict of texts\."),
        (["kind"], r"got \['kind'\] \(list\); allowed: a dict of texts\."),
        ({"kind": 3}, r"got \{'kind': 3\} \(dict\); allowed: a dict of texts\."),
        ({4: "kind"}, r"got \{4: 'kind'\} \(dict\); allowed: a dict of texts\."),
        ({"turns": "3"}, r"got the label 'turns'; allowed: any name but turns, the number of .*\."),
        ({"turns=3": "x"}, r"got the label 'turns=3'; allowed: any name but turns, .*\."),
        (lambda: fail(KeyError("b")), r"raised KeyError: 'b'\."),
    ],
)
def test_labels_that_are_no_texts_or_named_turns_are_refused_at_the_start_and_reported_later(
    labels, wanted
):
    desk, logged = Desk(kind={"b": labels}), []
    check_tasks(desk, ["train"], labelled=1)
    with pytest.raises(ValueError, match=rf"^Desk\.labels\('b'\):? {wanted}$"):
        check_tasks(desk, ["train"], labelled=2)
    assert labels_by_task(desk, ["a", "b"], logged.append) == {"a": {"kind": "a"}, "b": {}}
    assert len(logged) == 1 and logged[0].startswith(
        "1 of 2 tasks have no labels: Desk.labels('b')"
    )


def test_an_environment_without_labels_has_none():
    assert task_labels(SimpleNamespace(), "a") == {}
