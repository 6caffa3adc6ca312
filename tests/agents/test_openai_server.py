"""The engine on a server: its actions are the policy's own, and what fails costs what it must."""

import collections
import contextlib
import dataclasses
import math
import socket
import threading
import time

import numpy as np
import openai_cases as cases
import pytest
from rollout_cases import NumberTokenizer, make_worker

from seeupo_jax.agents import request_engine
from seeupo_jax.agents.action_client import request_seed
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.agents.server_dialects import DIALECTS
from seeupo_jax.envs.base import StepResult
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.rollout.collect import collect, group_requests
from seeupo_jax.rollout.engine.protocol import Turn
from seeupo_jax.rollout.engine.sampling import Sampling, task_number
from seeupo_jax.rollout.player import CollectionOptions

END_IDS = (3, 7, 11)
SAMPLING = Sampling(temperature=0.7, top_k=None, top_p=None, max_tokens=6, end_ids=END_IDS)
SETTINGS = {
    "concurrency": 4,
    "sampling": SAMPLING,
    "max_context": 40,
    "timeout_s": 20.0,
    "retries": 2,
    "retry_wait_s": 0.01,
}


@pytest.fixture
def server():
    with cases.PolicyServer() as made:
        yield made


@contextlib.contextmanager
def connect(server, **settings):
    made = OpenAIServer(server.url, cases.MODEL, **(SETTINGS | settings))
    made.begin(None, seed=1)
    try:
        yield made
    finally:
        made.close()


def turn_of(key, *, member=0, turn=0):
    rng = np.random.default_rng((key, member, turn))
    context = rng.integers(0, 29, rng.integers(2, 20)).tolist()
    return Turn(key, context, key, key, member, turn, iteration=2)


def play(engine, turns, count=None):
    """The actions of turns, by key; `count`: with those that were asked for before."""
    for turn in turns:
        engine.submit(turn)
    actions = []
    while (come := engine.step(False)) is not None:
        actions += come
    assert len(actions) == (len(turns) if count is None else count) and not engine.busy
    return {action.key: action for action in actions}


def play_one(engine, turn=None):
    return play(engine, [turn_of(0) if turn is None else turn])[0]


def sampled(turn, *, seed=1, **changes):
    """What the policy samples in this turn without a server."""
    settings = {"temperature": 0.7, "top_k": -1, "top_p": 1.0, "max_tokens": 6} | changes
    number = request_seed(seed, turn.iteration, turn.task, turn.member, turn.turn)
    return cases.sample(turn.context, seed=number, stop_token_ids=END_IDS, **settings)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_actions_are_the_policys_own_each_under_its_key(server, dialect):
    turns = [turn_of(key, member=key % 3) for key in range(24)]
    with connect(server, dialect=dialect) as engine:
        actions = play(engine, turns)
    assert {path for path, *_ in server.asked} == {DIALECTS[dialect].path}
    for turn in turns:
        action = actions[turn.key]
        assert (action.tokens, action.logp) == sampled(turn) and action.failure == ""
    ended = [actions[turn.key].tokens[-1] in END_IDS for turn in turns]
    assert any(ended) and not all(ended)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_log_probabilities_are_the_networks_of_the_whole_sequence(server, dialect):
    with connect(server, dialect=dialect) as engine:
        for key, action in play(engine, [turn_of(key) for key in range(6)]).items():
            context = turn_of(key).context
            logits_LV = cases.logits_LV(context + action.tokens) / 0.7
            logp_LV = logits_LV - np.logaddexp.reduce(logits_LV, axis=1, keepdims=True)
            wanted = logp_LV[len(context) - 1 : -1][np.arange(len(action.tokens)), action.tokens]
            np.testing.assert_allclose(action.logp, wanted, atol=1e-5)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_top_k_of_one_is_greedy(server, dialect):
    with connect(server, dialect=dialect, sampling=SAMPLING._replace(top_k=1)) as engine:
        action = play_one(engine)
    context = turn_of(0).context
    best_L = cases.logits_LV(context + action.tokens).argmax(axis=1)
    assert action.tokens == best_L[len(context) - 1 : -1].tolist()
    assert action.logp == [0.0] * len(action.tokens)


def test_filters_reach_the_server(server):
    server.routes["/v1/completions"] = lambda body: cases.completions(body | {"top_p": 1.0})
    with connect(server, sampling=SAMPLING._replace(top_k=5, top_p=0.8)) as engine:
        play_one(engine)
    asked = [(body["top_k"], body["top_p"]) for _, _, body in server.asked]
    assert asked == [(1, 0.8), (5, 0.8)]  # the trial asks for the likeliest tokens


def test_random_numbers_belong_to_seed_iteration_task_member_and_turn():
    assert request_seed(1, 2, 3, 4, 5) == 0x5B937768
    numbers = [request_seed(*(i == j for j in range(5))) for i in range(6)]
    assert len(set(numbers)) == 6 and all(0 <= n < 2**31 for n in numbers)
    assert request_seed(1, 12, 3, 4, 5) != request_seed(11, 2, 3, 4, 5)


def test_a_collection_samples_from_its_own_seed_and_iteration(server):
    with connect(server) as engine:
        first = play_one(engine)
        assert play_one(engine) == first
        engine.begin(None, seed=5)
        turn = dataclasses.replace(turn_of(0), iteration=2**31 + 7)
        assert play_one(engine, turn).tokens == sampled(turn, seed=5)[0]


def test_an_action_has_the_version_at_its_request(server):
    with connect(server) as engine:
        engine.begin(None, seed=1, version=4)
        engine.submit(turn_of(0))
        engine.swap(None, 5)
        actions = play(engine, [turn_of(1)], count=2)
    for key, version in ((0, 4), (1, 5)):
        tokens, _ = sampled(turn_of(key))
        assert (actions[key].tokens, actions[key].version_L) == (tokens, [version] * len(tokens))


def test_a_collection_may_have_another_temperature(server):
    with connect(server) as engine:
        engine.begin(None, seed=1, temperature=0.2)
        assert play_one(engine).logp == sampled(turn_of(0), temperature=0.2)[1]
        engine.begin(None, seed=1)
        assert play_one(engine).logp == sampled(turn_of(0))[1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_seeds_can_be_left_to_the_server(server, dialect):
    with connect(server, dialect=dialect, seeded=False) as engine:
        assert play_one(engine).tokens
    bodies = [body.get("sampling_params", body) for _, _, body in server.asked]
    assert not any({"seed", "sampling_seed"} & body.keys() for body in bodies)


def test_requests_go_out_side_by_side(server):
    together = threading.Barrier(4, timeout=60)
    with connect(server, retries=0) as engine:
        server.usual = lambda reply: (together.wait() >= 0) and cases.right(reply)
        actions = play(engine, [turn_of(key) for key in range(8)])
    assert not any(action.failure for action in actions.values())


def test_no_more_requests_are_under_way_than_may_be(server):
    under_way, most, lock = 0, 0, threading.Lock()
    pair = threading.Barrier(2)

    def slow(reply):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        pair.wait(60)  # two are under way together
        time.sleep(0.01)  # for a third to come
        with lock:
            under_way -= 1
        return cases.right(reply)

    with connect(server, concurrency=2) as engine:
        server.usual = slow
        play(engine, [turn_of(key) for key in range(12)])
    assert most == 2


FAULTS = {
    "overload": cases.status(503, "come later"),
    "rate limit": cases.status(429, "too many"),
    "malformed JSON": cases.raw('{"choices": ['),
    "no JSON object": cases.raw("[]"),
    "no choice": cases.raw('{"choices": []}'),
    "aborted": cases.changed(lambda r: {"choices": [r["choices"][0] | {"finish_reason": "abort"}]}),
    "a log-probability less": cases.changed(
        lambda r: {
            "choices": [r["choices"][0] | {"logprobs": {"tokens": [], "token_logprobs": []}}]
        }
    ),
    "nothing sampled": cases.changed(
        lambda r: {
            "choices": [
                r["choices"][0]
                | {"token_ids": [], "logprobs": {"token_logprobs": []}, "stop_reason": None}
            ]
        }
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_costs_retries_only(server, fault):
    with connect(server) as engine:
        server.script.extend([FAULTS[fault]] * 2)
        action = play_one(engine)
        assert (action.tokens, action.logp) == sampled(turn_of(0))
        assert engine.usage() == {"server_retries": 2, "server_failures": 0}
        engine.begin(None, seed=1)
        assert sum(engine.usage().values()) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lasting_fault_costs_the_action_and_no_other(server, fault):
    bad, good = turn_of(0), turn_of(1)
    with connect(server) as engine:
        server.script.extend([FAULTS[fault]] * 3)
        engine.submit(bad)
        (failed,) = finish(engine)
        engine.submit(good)
        (whole,) = finish(engine)
        assert engine.usage() == {"server_retries": 2, "server_failures": 1}
    assert failed.key == 0 and failed.tokens == failed.logp == [] and failed.failure
    assert (whole.tokens, whole.logp) == sampled(good)
    assert len(server.asked) == 1 + 3 + 1


def finish(engine):
    actions = []
    while engine.busy:
        actions += engine.step(True)
    return actions


def test_a_failure_says_what_the_server_said(server):
    with connect(server, retries=0) as engine:
        server.script.append(cases.status(503, "come later"))
        assert play_one(engine).failure == "/v1/completions answered 503: come later"


def test_the_wait_doubles_with_each_retry(server):
    moments = []

    def late(reply):
        moments.append(time.monotonic())
        return cases.status(500, "no")(reply)

    with connect(server, retries=2, retry_wait_s=0.1) as engine:
        server.usual = late
        play_one(engine)
    first, second = np.diff(moments)
    assert first >= 0.1 and second >= 0.2


def test_a_server_that_hangs_costs_its_action_and_its_time_only(server):
    released = threading.Event()
    with connect(server) as engine:
        play_one(engine)  # the network is compiled
    with connect(server, timeout_s=1.0, retries=0) as engine:
        server.script.append(lambda reply: released.wait(20) and cases.right(reply))
        began = time.monotonic()
        action = play_one(engine)
        assert time.monotonic() - began < 5
        assert not action.tokens and "timed out" in action.failure
        assert play_one(engine).tokens == sampled(turn_of(0))[0]
        released.set()


def test_a_connection_that_breaks_is_made_again(server):
    def leave(reply):
        raise ConnectionError

    with connect(server) as engine:
        server.script.append(leave)
        assert play_one(engine).tokens == sampled(turn_of(0))[0]
        assert engine.usage()["server_retries"] == 1


def test_a_request_that_is_wrong_ends_the_collection_with_the_servers_words(server):
    with connect(server) as engine:
        server.script.append(cases.status(400, "the prompt is too long"))
        engine.submit(turn_of(0))
        with pytest.raises(ValueError, match="answered 400: the prompt is too long"):
            finish(engine)
    assert len(server.asked) == 2  # a wrong request is not repeated


def test_the_wait_for_an_action_is_short(server):
    released = threading.Event()
    with connect(server) as engine:
        assert engine.step(False) is None and engine.step(True) == [] and not engine.busy
        server.script.append(lambda reply: released.wait(20) and cases.right(reply))
        engine.submit(turn_of(0))
        assert engine.busy
        began = time.monotonic()
        assert engine.step(False) == []
        assert 0.015 < time.monotonic() - began < 10
        released.set()
        assert [action.key for action in finish(engine)] == [0]
        assert engine.step(False) is None


def test_an_action_that_has_come_does_not_wait_for_one_that_has_not(server, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(request_engine, "STEP_S", 10)
    with connect(server) as engine:
        server.script.append(lambda reply: released.wait(20) and cases.right(reply))
        engine.submit(turn_of(0))
        while len(server.asked) < 2:
            time.sleep(0.001)
        engine.submit(turn_of(1))
        began = time.monotonic()
        assert [action.key for action in engine.step(True)] == [1]
        assert time.monotonic() - began < 5
        released.set()
        assert [action.key for action in engine.step(True)] == [0]


def test_a_new_collection_hears_nothing_of_the_last(server):
    released = threading.Event()
    with connect(server, concurrency=1) as engine:
        server.script.append(lambda reply: released.wait(20) and cases.right(reply))
        for turn in (turn_of(0), turn_of(0, turn=1)):
            engine.submit(turn)
        while len(server.asked) < 2:
            time.sleep(0.001)
        engine.begin(None, seed=1)
        assert not engine.busy and engine.step(False) is None
        released.set()
        wanted = turn_of(0, turn=2)
        assert play_one(engine, wanted).tokens == sampled(wanted)[0]
    assert len(server.asked) == 3  # what had not been asked for yet never was


def test_a_context_fits_while_a_full_action_has_room_after_it(server):
    with connect(server, max_context=30) as engine:
        assert engine.fits([0] * 24) and not engine.fits([0] * 25)
        assert engine.concurrency == 4 and engine.shard_owners == (0,)
        assert engine.poll_interval_s is None


def without_ids(reply):
    choice = dict(reply["choices"][0])
    del choice["token_ids"]
    choice["logprobs"] = choice["logprobs"] | {"tokens": ["a"] * len(choice["logprobs"]["tokens"])}
    return {"choices": [choice]}


def without_logp(reply):
    return {"choices": [reply["choices"][0] | {"logprobs": None}]}


def test_the_trial_is_the_likeliest_answer_to_a_prompt(server):
    with connect(server, prompt=[4, 9, 2]) as engine:
        tokens, logp = engine.trial
    best_L = cases.logits_LV([4, 9, 2, *tokens]).argmax(axis=1)
    assert 1 < len(tokens) <= 6 and len(logp) == len(tokens)
    assert tokens == best_L[2:-1].tolist()


@pytest.mark.parametrize("lacking", [without_ids, without_logp])
def test_a_server_without_ids_or_log_probabilities_is_refused_at_once(server, lacking):
    server.usual = cases.changed(lacking)
    with pytest.raises(ValueError, match="allowed: a server as vLLM >= 0.10.2, which returns"):
        connect(server).__enter__()


def test_a_server_that_speaks_of_ids_in_its_log_probabilities_will_do(server):
    server.routes["/v1/completions"] = lambda body: cases.completions(body, ids_field=False)
    with connect(server) as engine:
        action = play_one(engine)
    assert (action.tokens, action.logp) == sampled(turn_of(0))


def cut(reply):
    """As a server answers that leaves the end token out and only names it."""
    choice = reply["choices"][0]
    logp = choice["logprobs"]["token_logprobs"][:-1]
    return {
        "choices": [
            choice | {"token_ids": choice["token_ids"][:-1], "logprobs": {"token_logprobs": logp}}
        ]
    }


def test_an_end_token_that_is_only_named_is_in_the_action_without_log_probability(server):
    turn = next(t for t in map(turn_of, range(99)) if sampled(t)[0][-1] in END_IDS)
    with connect(server) as engine:
        server.script.append(cases.changed(cut))
        engine.submit(turn)
        (action,) = finish(engine)
    tokens, logp = sampled(turn)
    assert action.tokens == tokens and action.logp[:-1] == logp[:-1]
    assert math.isnan(action.logp[-1])


def test_nothing_follows_the_end_token(server):
    def overshoot(reply):
        choice = reply["choices"][0]
        tokens, logp = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        more = {"token_ids": [*tokens, 9, 3], "logprobs": {"token_logprobs": [*logp, -1, -1]}}
        return {"choices": [choice | more]}

    turn = next(t for t in map(turn_of, range(99)) if sampled(t)[0][-1] in END_IDS)
    with connect(server) as engine:
        server.script.append(cases.changed(overshoot))
        engine.submit(turn)
        (action,) = finish(engine)
    assert (action.tokens, action.logp) == sampled(turn)


@pytest.mark.parametrize("owner, path", [("vllm", "/v1/completions"), ("sglang", "/generate")])
def test_who_owns_the_model_says_what_is_spoken(owner, path):
    with cases.PolicyServer(owned_by=owner) as server, connect(server) as engine:
        assert play_one(engine).tokens
        assert collections.Counter(asked[0] for asked in server.asked) == {path: 2}


def test_the_url_may_end_as_those_of_openai_clients_do(server):
    for ending in ("/v1", "/v1/", "/"):
        OpenAIServer(server.url + ending, cases.MODEL, **SETTINGS).close()
    assert [path for path, *_ in server.asked] == ["/v1/completions"] * 3


def test_the_api_key_is_the_environments(server, monkeypatch):
    def sent():
        with connect(server):
            return server.asked[-1][1].get("Authorization")

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert sent() is None
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    assert sent() == "Bearer of-the-environment"


def test_a_server_that_is_not_there_is_said_before_anything_begins():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ValueError, match=f"{url}: /v1/models: .*refused; allowed: a server that"):
        OpenAIServer(url, cases.MODEL, **SETTINGS)


WRONG = [
    ({"model": "other"}, {}, "model: got 'other'; allowed at http://.*: tiny/policy"),
    ({"dialect": "tgi"}, {}, "dialect: got 'tgi'; allowed: auto, vllm, sglang"),
    ({"url": "localhost:8000"}, {}, "url: got 'localhost:8000'; allowed: http://"),
    ({"max_context": 41}, {}, "max_context: got 41; allowed: at most the 40"),
    (
        {},
        {"owned_by": "sglang", "parent": "base"},
        "adapters of 'base'; allowed with sglang: whole",
    ),
]


@pytest.mark.parametrize("settings, card, sentence", WRONG)
def test_a_wrong_setting_is_said_before_anything_begins(settings, card, sentence):
    with cases.PolicyServer(**card) as server, pytest.raises(ValueError, match=sentence):
        where = {"url": server.url, "model": cases.MODEL}
        OpenAIServer(**(where | SETTINGS | settings))


def test_a_server_that_refuses_the_first_token_is_quoted(server):
    server.usual = cases.status(400, "JAX does not support per-request seed.")
    with pytest.raises(ValueError, match="answered 400: JAX does not support per-request seed."):
        connect(server).__enter__()


class Counting:
    """Answers every action with its number; the third ends the episode."""

    def reset(self, task_id, seed):
        self._step = 0
        return ({"role": "user", "content": task_id},), ()

    def step(self, text):
        self._step += 1
        answer = {"role": "tool", "content": str(self._step)}
        return StepResult((answer,), reward=1.0, done=self._step == 3)

    def score(self):
        return 1.0

    def close(self):
        pass


def test_a_collection_plays_on_a_server_what_the_policy_would_play(server):
    pool = EnvPool(Counting, 4, workers=2, timeout_s=20.0)
    requests = group_requests(["5", "6 8", "9"], 2, 6)
    with connect(server, sampling=SAMPLING._replace(max_tokens=3)) as engine:
        server.script.extend([FAULTS["overload"]] * 2)
        worker = make_worker(engine, pool, max_turns=5)
        collected = collect(worker, None, requests, CollectionOptions(seed=4))
    pool.close()
    assert collected.usage == collections.Counter(server_retries=2)
    for request, trajectory in zip(requests, collected.trajectories, strict=True):
        conversation = NumberTokenizer().begin(trajectory.messages[:1], ())
        for number in range(3):
            task = task_number(request.task_id)
            turn = Turn(0, conversation.tokens, 0, task, request.member, number, iteration=6)
            tokens, logp = sampled(turn, seed=4, max_tokens=3)
            (segment,) = trajectory.segments
            assert segment.tokens_L[segment.turn_L == number].tolist() == tokens
            np.testing.assert_allclose(segment.logp_L[segment.turn_L == number], logp, rtol=1e-6)
            answer = {"role": "tool", "content": str(number + 1)}
            conversation = conversation.extend(tokens, [answer])
        assert (trajectory.stop, trajectory.reward, trajectory.turns) == ("done", 3.0, 3)


def test_a_listener_hears_the_whole_action_and_keeps_its_beginning(server):
    received = []

    def listen(tokens):
        received.append((list(tokens), threading.current_thread()))
        return 2

    turn = next(t for t in map(turn_of, range(30)) if len(sampled(t)[0]) > 3)
    with connect(server) as engine:
        engine.submit(dataclasses.replace(turn, listen=listen))
        (action,) = finish(engine)
    tokens, logp = sampled(turn)
    assert (action.tokens, action.logp) == (tokens[:2], logp[:2])
    assert received == [(tokens, threading.current_thread())]


def test_a_cancelled_turn_brings_no_action(server):
    released = threading.Event()
    with connect(server, concurrency=1) as engine:
        server.script.append(lambda reply: released.wait(20) and cases.right(reply))
        for key in range(3):
            engine.submit(turn_of(key))
        while len(server.asked) < 2:  # one when it connected
            engine.step(True)
        engine.cancel(1)  # waits for the only connection
        assert engine.usage()["server_dropped"] == 0
        engine.cancel(0)  # the server is at it
        assert engine.usage()["server_dropped"] == 1
        released.set()
        (action,) = finish(engine)
        assert (action.key, action.tokens) == (2, sampled(turn_of(2))[0])
    assert len(server.asked) == 3
