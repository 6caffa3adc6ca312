"""Conversations: every kind of request is written, and later turns rest on earlier ones."""

import random

import pytest

from seeupo_jax.instruments.bfcl_worlds.composition import (
    CLASSES,
    REQUESTS,
    choose_classes,
    compose,
    pairs,
)
from seeupo_jax.instruments.bfcl_worlds.draft import Draft, Infeasible
from seeupo_jax.instruments.bfcl_worlds.scenarios import SCENARIOS


def conversations(count, turns):
    for seed in range(count):
        rng = random.Random(seed)
        try:
            yield compose(rng, choose_classes(rng, CLASSES, turns), turns)
        except Infeasible:
            continue


def test_every_kind_of_request_is_written_and_each_simulator_has_many():
    found = {turn.request for talk in conversations(900, 6) for turn in talk.turns}
    assert found == set(REQUESTS)
    for name in CLASSES:
        assert sum(request.classes == (name,) for request in REQUESTS) >= 13
    carrying = {request.classes for request in REQUESTS if len(request.classes) > 1}
    assert len(carrying) == 20 and {name for both in carrying for name in both} == set(CLASSES)


def test_no_request_comes_twice_and_both_simulators_have_a_turn():
    talks = [*conversations(60, 4)]
    assert len(talks) > 45 and len({talk.classes for talk in talks}) > 15
    for talk in talks:
        assert len({turn.request for turn in talk.turns}) == len(talk.turns) == 4
        assert {name for turn in talk.turns for name in turn.request.classes} == set(talk.classes)


def test_a_turn_that_follows_up_comes_after_what_it_is_about():
    following = 0
    for talk in conversations(200, 4):
        following += sum(turn.request.follows is not None for turn in talk.turns)
        assert talk.turns[0].request.follows is None
    assert following > 150


def test_pairs_are_of_two_simulators():
    assert len(pairs(CLASSES)) == 28 and all(a != b for a, b in pairs(CLASSES))
    assert pairs(["TicketAPI", "MathAPI"]) == [("MathAPI", "TicketAPI")]


def draft(name):
    return Draft(random.Random(0), (name,), {name: SCENARIOS[name](random.Random(0))})


def test_a_call_that_fails_or_changes_nothing_or_says_nothing_new_is_no_reference():
    files = draft("GorillaFileSystem")
    files.call("mkdir", dir_name="keepers")
    before = list(files.calls)
    for tool, arguments in (
        ("mkdir", {"dir_name": "keepers"}),  # an error of the simulator
        ("cat", {"path": "x"}),  # one of Python
        ("echo", {"content": "word (ls)"}),  # the official executor would see a call
        ("echo", {"content": "x" * 900}),
    ):
        with pytest.raises(Infeasible):
            files.call(tool, **arguments)
    files.call("pwd")
    with pytest.raises(Infeasible):
        files.call("pwd")
    assert [call.name for call in files.calls] == [*(call.name for call in before), "pwd"]
    posts = draft("TwitterAPI")
    posts.simulator("TwitterAPI").authenticated = True
    known = posts.simulator("TwitterAPI").following_list[0]
    with pytest.raises(Infeasible):
        posts.call("follow_user", username_to_follow=known)


def test_what_is_called_it_is_of_the_last_turn_only():
    here = draft("TicketAPI")
    here.set_fact("file", "a.txt")
    here.set_fact("ticket", 7)
    here.begin_turn()
    assert (here.fact("file"), here.fact("ticket")) == ("a.txt", 7)
    here.begin_turn()
    assert here.fact("ticket") == 7
    with pytest.raises(Infeasible):
        here.fact("file")
