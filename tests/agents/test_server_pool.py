"""Several servers as one engine: each is given every version of the policy."""

import contextlib
import time

import pytest
from update_cases import ACTION, CONTEXT, KEY, PROMPT, same_logp, tokenizer, updated_server

from seeupo_jax.agents import server_pool
from seeupo_jax.agents.action_client import ActionClient, ServerRequests
from seeupo_jax.agents.server_pool import PublishedFolder, ServerPool
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling

SAMPLING = Sampling(1.0, None, None, 12, tokenizer().end_ids)
NAMES = ("first", "second")


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Two servers; only the first one has the folder of the second policy."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            (tmp_path / name / "first").mkdir(parents=True)
            made.append(stack.enter_context(updated_server(tmp_path / name)))
        (tmp_path / "a" / "second").mkdir()
        monkeypatch.setenv("KEY", KEY)
        yield made


@contextlib.contextmanager
def pool_of(servers, said, dialect="sglang", sampling=SAMPLING):
    requests = ServerRequests(600, 0, 0, key_variable="KEY", dialect=dialect, prompt=PROMPT)

    def connect(url):
        return ActionClient(
            url, None, requests, connections=8, sampling=sampling, max_context=CONTEXT
        )

    def publish(params, version):
        return PublishedFolder(NAMES[version % 2], f"{version}-abc")

    pool = ServerPool(
        [server.url for server in servers],
        connect,
        publish,
        said.append,
        concurrency=8,
        sampling=sampling,
        max_context=CONTEXT,
    )
    with contextlib.closing(pool):
        yield pool


def play(pool, turns):
    """The actions of turns, by key."""
    actions = {}
    for turn in turns:
        pool.submit(turn)
    while pool.busy:
        actions |= {action.key: action for action in pool.step(True)}
    return actions


def turns(count=8, groups=4):
    return [
        Turn(key, PROMPT, key % groups, task=7, member=key, turn=0, iteration=1)
        for key in range(count)
    ]


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_server_without_the_weights_is_left_out_until_it_has_them(servers, dialect):
    said = []
    with pool_of(servers, said, dialect) as pool:
        pool.begin(None, seed=3, version=0)
        first = play(pool, turns())
        for action in first.values():
            assert action.version_L == [0] * len(action.tokens) and not action.failure
            same_logp(PROMPT, action.tokens, action.logp, 0)
        answered = [server.counts["answered"] for server in servers]
        assert [count - 1 for count in answered] == [4, 4]  # beside the trial
        assert said == []

        pool.begin(None, seed=3, version=1)
        second = play(pool, turns())
        for action in second.values():
            assert action.version_L == [1] * len(action.tokens)
            same_logp(PROMPT, action.tokens, action.logp, 1)
        assert servers[1].counts["answered"] == answered[1]
        assert pool.left_out == 1
        (sentence,) = said
        assert sentence.startswith(
            f"{servers[1].url} is left out until an update works: its update"
        )

        (servers[1].root / "second").mkdir()
        pool.begin(None, seed=3, version=3)
        play(pool, turns())
        assert servers[1].counts["answered"] == answered[1] + 4
        assert said[1:] == [f"{servers[1].url} serves 3-abc and takes part again"]
        assert pool.left_out == 0


def test_actions_do_not_depend_on_who_answers(servers):
    with pool_of(servers, []) as both, pool_of(servers[:1], []) as one:
        both.begin(None, seed=3, version=0)
        some = play(both, turns())
        one.begin(None, seed=3, version=0)
        same = play(one, turns())
    assert {key: action.tokens for key, action in some.items()} == {
        key: action.tokens for key, action in same.items()
    }


def test_a_policy_that_is_kept_is_pushed_once_and_others_each_time(servers):
    with pool_of(servers, []) as pool:
        with pool.one_policy():
            pool.begin(None, seed=3, version=0)
            pool.begin(None, seed=4, version=1)
            assert {server.get("/weight_info")["weight_version"] for server in servers} == {"0-abc"}
        pool.begin(None, seed=5, version=2)
        assert {server.get("/weight_info")["weight_version"] for server in servers} == {"2-abc"}


def test_an_answer_of_weights_that_were_not_pushed_is_asked_of_another(servers):
    said = []
    with pool_of(servers, said) as pool:
        pool.begin(None, seed=3, version=0)
        servers[0].post("/update_weight_version", {"new_version": "stranger"})
        actions = play(pool, turns())
    assert len(actions) == 8 and all(a.version_L == [0] * len(a.tokens) for a in actions.values())
    sentence = said[0]  # a second one says that it is back
    assert sentence.startswith(f"{servers[0].url} is left out") and "'stranger'" in sentence


def test_where_no_server_takes_the_weights_one_sentence_names_them_all(servers):
    with pool_of(servers[1:], []) as pool, pytest.raises(ValueError) as caught:
        pool.begin(None, seed=3, version=1)
    assert f"config.rollout.servers: got none that samples ({servers[1].url}: " in str(caught.value)


def test_a_server_that_is_left_out_is_given_the_newest_weights_while_others_play(
    servers, monkeypatch
):
    monkeypatch.setattr(server_pool, "RETRY_S", 0.1)
    said = []
    with pool_of(servers, said) as pool:
        pool.begin(None, seed=3, version=0)
        servers[0].post("/update_weight_version", {"new_version": "of a restarted server"})
        play(pool, turns())
        assert said[0].startswith(f"{servers[0].url} is left out")
        end = time.monotonic() + 300
        while pool.left_out and time.monotonic() < end:
            pool.step(True)
        assert said[1:] == [f"{servers[0].url} serves 0-abc and takes part again"]
        answered = servers[0].counts["answered"]
        play(pool, [Turn(9, PROMPT, 9, task=7, member=9, turn=0, iteration=1)])
        # The other one has more groups, or as many.
        assert servers[0].counts["answered"] == answered + 1


def test_a_new_group_goes_to_the_server_with_the_fewest_open_conversations(servers):
    with pool_of(servers, []) as pool:
        pool.begin(None, seed=3, version=0)
        play(pool, turns(2, 2))
        pool.release(1)
        before = servers[1].counts["answered"]
        play(pool, [Turn(2, PROMPT, 2, task=7, member=2, turn=0, iteration=1)])
        assert servers[1].counts["answered"] == before + 1


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_requests_under_way_at_a_server_whose_update_fails_are_asked_of_another(
    servers, dialect, monkeypatch
):
    monkeypatch.setattr(server_pool, "RETRY_S", 1000)  # a retry would pause it again
    said, sampling = [], SAMPLING._replace(max_tokens=ACTION)
    with pool_of(servers, said, dialect, sampling) as pool:
        pool.begin(None, seed=3, version=0)
        for turn in turns(2, 2):
            pool.submit(turn)
        while servers[1].open_calls == 0:
            pool.step(True)
        # Its request is under way until its update, however long that of the other server takes.
        servers[1].post("/pause?mode=keep")
        pool.swap(None, 1)
        actions = play(pool, [])
        assert servers[1].get("/is_paused") == {"is_paused": False}
    assert pool.left_out == 1 and f"{servers[1].url} is left out" in said[0]
    moved = actions[1]
    assert moved.version_L == [1] * len(moved.tokens) and len(actions) == 2
    same_logp(PROMPT, moved.tokens, moved.logp, 1)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_swap_reaches_requests_that_are_under_way(servers, dialect):
    sampling = SAMPLING._replace(max_tokens=ACTION)
    with pool_of(servers[:1], [], dialect, sampling) as pool:
        pool.begin(None, seed=3, version=0)
        (turn,) = turns(1, 1)
        pool.submit(turn)
        while servers[0].open_calls == 0:
            pool.step(True)
        pool.swap(None, 1)
        (action,) = play(pool, []).values()
    swapped = action.version_L.index(1)
    assert action.version_L == [0] * swapped + [1] * (len(action.tokens) - swapped)
    same_logp(PROMPT, action.tokens, action.logp, 0, last=swapped)
