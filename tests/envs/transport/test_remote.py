"""A remote environment is the local one, whatever happens to the wire and to the server."""

import functools
import threading
import time

import pytest
from remote_cases import CutWire, Echo, OldServer, Process, answering, remote, served

from seeupo_jax import envs
from seeupo_jax.envs.base import ServerAtCapacity, TaskShare, TransientError
from seeupo_jax.envs.order_desk import orders as world
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.pool import EnvCall, EnvPool, Failure
from seeupo_jax.envs.tasks import list_task_shares, list_tasks, task_labels
from seeupo_jax.envs.tool_calls import render_hermes
from seeupo_jax.envs.transport.isolated import IsolatedEnvironment
from seeupo_jax.envs.transport.remote import Remote, RemoteError
from seeupo_jax.envs.validation import ProtocolError


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / "token"


def played(desk, index):
    """Everything that an environment says in a case of the desk."""
    target = world.make_task("test", index).target.order_id
    texts = ("no call at all", render_hermes("get_order", order_id=target))
    texts += (render_hermes("reply", outcome="refused"),)
    said = [desk.reset(f"test/{index}", seed=0), desk.score()]
    for text in texts:
        said += [desk.step(text), desk.score()]
    return said


def test_many_episodes_at_once_are_what_they_are_locally(token_file):
    with served(OrderDesk, token_file) as server:
        pool = EnvPool(lambda: remote(server.url, token_file), 24, workers=8, timeout_s=20)
        for index in range(24):
            pool.submit(EnvCall(index, lambda env, index=index: played(env, index)))
        results = {}
        while pool.open:
            results |= {call.slot: outcome.result for call, outcome in pool.poll(None)}
        assert server.sessions == 24
        pool.close()
        assert server.sessions == 0
        assert remote(server.url, token_file).task_ids("test") == OrderDesk().task_ids("test")
    assert results == {index: played(OrderDesk(), index) for index in range(24)}
    assert {said[-1] for said in results.values()} == {0.0, 1.0}


def test_reference_answers_come_from_the_server_and_older_ones_have_none(token_file):
    with served(OrderDesk, token_file) as server:
        assert remote(server.url, token_file).reference("train/3") == OrderDesk().reference(
            "train/3"
        )
        with pytest.raises(ValueError, match="order_desk task: got 'nothing'"):
            remote(server.url, token_file).reference("nothing")
    with served(Echo, token_file) as server:
        assert remote(server.url, token_file).reference("train/0") is None
    with served(Echo, token_file, kind=OldServer) as server:
        assert remote(server.url, token_file).reference("train/0") is None


def test_a_mixture_that_is_served_has_its_parts_and_labels(token_file, caplog):
    parts = [{"name": "order_desk", "weight": 3, "label": "desk"}, {"name": "remote_cases:Echo"}]
    mixture = functools.partial(envs.make, "mixture", environments=parts)
    local = mixture()
    with served(mixture, token_file) as server:
        there = remote(server.url, token_file)
        shares = list_task_shares(there, "train")
        assert [(share.name, share.weight) for share in shares] == [("desk", 3), ("Echo", 1)]
        assert shares == list_task_shares(local, "train")
        for task_id in (shares[0].task_ids[5], shares[1].task_ids[0]):
            assert task_labels(there, task_id) == task_labels(local, task_id)
        assert task_labels(there, shares[0].task_ids[5]).keys() > {"env"}
    with served(Echo, token_file) as server:
        assert list_task_shares(remote(server.url, token_file), "train") == [
            TaskShare("", 1.0, ["train/0", "train/1"])
        ]
    assert not caplog.records
    with served(mixture, token_file, kind=OldServer) as server:
        there = remote(server.url, token_file)
        (share,) = list_task_shares(there, "train")
        assert share.task_ids == list_tasks(local, "train")
        assert task_labels(there, share.task_ids[0]) == {}
    (record,) = caplog.records
    assert "its weights have no effect" in record.getMessage()


def test_make_knows_it_by_name(token_file):
    with served(Echo, token_file) as server:
        env = envs.make("remote", url=server.url, token_file=str(token_file))
        assert env.task_ids("train") == ["train/0", "train/1"]
        with pytest.raises(ValueError, match="echo split: got 'test'; allowed: train"):
            env.task_ids("test")
    with pytest.raises(ValueError, match="remote url: got 'localhost'; allowed: http"):
        envs.make("remote", url="localhost", token_file=str(token_file))
    with pytest.raises(ValueError, match="token_file: got .*nowhere.* cannot be read"):
        envs.make("remote", url=server.url, token_file="nowhere")
    with pytest.raises(ValueError, match=r"reset\(\) must come before step"):
        env.step("")
    with pytest.raises(ValueError, match=r"reset\(\) must come before score"):
        env.score()


@pytest.mark.parametrize(
    "text, error, wanted",
    [
        ("key", RemoteError, r"KeyError: 'gone'"),
        ("value", ValueError, "no such thing"),
        ("exit", RemoteError, "SystemExit: 3"),
        ("nan", ProtocolError, r"^step\(\) reward: got nan \(float\); allowed: a finite number"),
    ],
)
def test_an_exception_of_the_environment_arrives_with_its_text(token_file, text, error, wanted):
    with served(Echo, token_file) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 5)
        with pytest.raises(error, match=wanted):
            env.step(text)
        assert env.step("on").info == {"steps": 2}  # the sequence goes on


def test_what_json_cannot_hold_arrives_as_its_text(token_file):
    with served(Echo, token_file) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 5)
        assert env.step("set").info == {"steps": 1, "odd": "{1, 2}"}


OPENING = {"result": {"messages": [], "tools": [], "score": 0, "finish": True}}
STEP = {"observation": [], "reward": 1, "done": True, "info": {}, "score": 0}


@pytest.mark.parametrize(
    "operation, answer, error, wanted",
    [
        ("task_ids", {}, RemoteError, "got the fields none; allowed: result, or error"),
        ("task_ids", {"error": "no"}, RemoteError, "got the fields error; allowed: result"),
        ("task_ids", {"error": {"type": 5}}, RemoteError, "got the fields error; allowed: result"),
        ("task_ids", [1], RemoteError, r"status 200: \[1\]"),
        ("reset", {}, RemoteError, "got the fields none; allowed: result, or error"),
        ("reset", {"result": None}, RemoteError, "got the fields none; allowed: messages, tools"),
        ("reset", {"result": {"score": 1}}, RemoteError, "got the fields score; allowed: messages"),
        ("reset", {"result": OPENING["result"] | {"tools": 5}}, ProtocolError, "tools: got 5"),
        ("reset", {"result": OPENING["result"] | {"score": "1"}}, ProtocolError, "got '1' .str.;"),
        ("step", {"result": {}}, RemoteError, "got the fields none; allowed: observation, reward"),
        ("step", {"result": STEP | {"reward": None}}, ProtocolError, "reward: got None"),
        ("step", {"result": STEP | {"info": None}}, ProtocolError, "info: got None"),
        ("step", {}, RemoteError, "got the fields none; allowed: result, or error"),
        ("step", {"result": []}, RemoteError, "got the fields none; allowed: observation, reward"),
        ("finish", {}, RemoteError, "got the fields none; allowed: result, or error"),
        ("finish", {"result": {}}, RemoteError, "got the fields none; allowed: reward, score"),
        ("finish", {"result": {"reward": [], "score": 0}}, ProtocolError, r"finish\(\): got \[\]"),
        (
            "step",
            {"result": STEP | {"score": 7}},
            ProtocolError,
            r"score\(\): got 7 .int.; allowed",
        ),
    ],
)
def test_what_a_server_answers_is_checked(token_file, operation, answer, error, wanted):
    token_file.write_text("secret-token\n")
    with answering({"reset": OPENING, operation: answer}) as url:
        env = remote(url, token_file)
        ask = {"task_ids": lambda: env.task_ids("train"), "step": lambda: env.step("one")}
        ask["finish"] = lambda: env.finish("max_turns")
        if operation != "reset":
            env.reset("train/0", 5)
        with pytest.raises(error, match=wanted):
            ask.get(operation, lambda: env.reset("train/0", 5))()


@pytest.mark.parametrize("answer", [{}, [], None, {"result": {}}, {"result": None}, {"error": {}}])
def test_a_server_without_tasks_is_one_sentence_before_anything_begins(token_file, answer):
    token_file.write_text("secret-token\n")
    with answering({"task_ids": answer}) as url:
        with pytest.raises(ValueError) as error:
            list_tasks(remote(url, token_file), "train")
    assert "\n" not in str(error.value) and "Remote.task_ids('train')" in str(error.value)


def test_an_environment_that_is_still_busy_is_asked_again_and_nothing_is_counted(token_file):
    with served(Echo, token_file) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 5)
        with pytest.raises(TransientError, match="not yet"):
            env.step("busy")
        assert env.step("busy").info == {"steps": 1}


def test_an_action_whose_answer_was_lost_is_carried_out_once(token_file):
    with served(Echo, token_file) as server:
        wire = CutWire(server.url)
        env = remote(wire.url, token_file)
        env.reset("train/0", 5)
        env.step("one")
        wire.lose_next = True
        with pytest.raises(TransientError, match=wire.url):
            env.step("two")
        step = env.step("two")
        assert (step.info, step.observation[0]["content"], env.score()) == (
            {"steps": 2},
            "two",
            0.25,
        )
        wire.close()


def test_after_a_lost_answer_another_episode_begins_cleanly(token_file):
    made = []
    with served(lambda: made.append(Echo()) or made[-1], token_file) as server:
        wire = CutWire(server.url)
        env = remote(wire.url, token_file)
        for lost in ("reset", "step"):
            wire.lose_next = lost == "reset"
            with pytest.raises(TransientError):
                env.reset("train/0", 1)
                wire.lose_next = True
                env.step("one")
            assert env.reset("train/1", 2)[0][0]["content"] == "train/1 2"
            assert env.step("one").info == {"steps": 1}
        assert server.sessions == 1
        assert [one.closed for one in made[1:]] == [1] * (len(made) - 2) + [0]
        wire.close()


def test_a_server_without_an_answer_is_transient_and_a_late_one_is_waited_for(token_file):
    echo = Echo()
    with served(lambda: echo, token_file) as server:
        env = remote(server.url, token_file, timeout_s=0.2)
        env.reset("train/0", 5)
        with pytest.raises(TransientError, match="timed out"):
            env.step("wait")
        echo.go_on.set()
        deadline = time.monotonic() + 60
        while echo.steps == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert env.step("wait").info == {"steps": 1}


def test_more_environments_than_the_server_has_sessions_wait_and_none_is_lost(token_file):
    with served(Echo, token_file, max_sessions=2) as server:
        others = [remote(server.url, token_file) for _ in range(2)]
        for one in others:
            one.reset("train/0", 0)
        pool = EnvPool(
            lambda: remote(server.url, token_file), 2, workers=2, timeout_s=60, retries=0
        )
        for slot in range(2):
            pool.submit(EnvCall(slot, lambda env: env.reset("train/1", 0), fresh=True))
        assert pool.poll(0.7) == []
        for one in others:  # another trainer ends
            one.close()
        outcomes = []
        while pool.open:
            outcomes += [outcome for _, outcome in pool.poll(None)]
        assert [o.result[0][0]["content"] for o in outcomes] == ["train/1 0"] * 2
        assert [o.retries for o in outcomes] == [0, 0]
        pool.close()


def test_only_a_full_server_is_waited_for(token_file):
    token_file.write_text("secret-token\n")
    env = remote("http://127.0.0.1:9", token_file)
    with pytest.raises(ServerAtCapacity, match="9: all 2 connections are open"):
        env._read(503, b'{"refused": "all 2 connections are open."}')
    with pytest.raises(TransientError) as error:  # of a proxy
        env._read(503, b"all 2 connections are open.")
    assert not isinstance(error.value, ServerAtCapacity)


def test_an_environment_in_a_process_says_that_its_server_has_no_room(token_file):
    with served(Echo, token_file, max_sessions=1) as server:
        remote(server.url, token_file).reset("train/0", 0)
        options = {"url": server.url, "token_file": str(token_file)}
        isolated = IsolatedEnvironment("remote", options)
        with pytest.raises(ServerAtCapacity, match="all 1 sessions are open"):
            isolated.reset("train/0", 0)
        isolated.close()


def in_pool(pool, ask, **options):
    pool.submit(EnvCall(0, ask, **options))
    ((_, outcome),) = pool.poll(20)
    return outcome


def test_a_server_killed_in_mid_episode_costs_that_episode_and_its_successor_serves(token_file):
    with Process(token_file) as first:

        def make():
            return remote(first.url, token_file)

        pool = EnvPool(make, 1, workers=1, timeout_s=20, retries=2, retry_wait_s=0.05)
        start = {"ask": lambda env: env.reset("train/0", 1), "fresh": True}
        assert not isinstance(in_pool(pool, **start).result, Failure)
        assert in_pool(pool, lambda env: env.step("one")).result.info == {"steps": 1}
        first.end(first.process.kill)
        outcome = in_pool(pool, lambda env: env.step("two"))
        assert outcome.retries == 2 and outcome.result.stop == "env_error"
        assert outcome.result.reason.startswith(f"TransientError: {first.url}: ")
        with Process(token_file, port=first.port):
            lost = in_pool(pool, lambda env: env.step("two"))
            assert lost.retries == 0 and lost.result.stop == "env_error"
            assert "the session is over, or the server was restarted" in lost.result.reason
            assert in_pool(pool, **start).result[0][0]["content"] == "train/0 1"
            assert in_pool(pool, lambda env: env.step("one")).result.info == {"steps": 1}
            pool.close()


def test_a_server_that_comes_back_is_found_by_the_retries_of_a_reset(token_file):
    with Process(token_file) as first:
        pass
    pool = EnvPool(
        lambda: remote(first.url, token_file), 1, workers=1, timeout_s=20, retries=5,
        retry_wait_s=0.2,
    )  # fmt: skip
    pool.submit(EnvCall(0, lambda env: env.reset("train/1", 3), fresh=True))
    assert pool.poll(0.3) == []
    with Process(token_file, port=first.port):
        ((_, outcome),) = pool.poll(20)
        assert outcome.result[0][0]["content"] == "train/1 3" and outcome.retries >= 1
        pool.close()


def test_a_request_that_is_too_long_is_not_sent(token_file):
    with served(Echo, token_file) as server:
        env = remote(server.url, token_file)
        env.reset("train/0", 1)
        with pytest.raises(ValueError, match="got a request of .* bytes; allowed: at most 4194304"):
            env.step("x" * 2**22)
        env.reset("train/0", 1)
        assert env.step("x" * 2**21).info == {"steps": 1}


def test_a_wrong_token_is_a_sentence(token_file, tmp_path):
    with served(Echo, token_file) as server:
        (tmp_path / "other").write_text("no\n")
        with pytest.raises(ValueError, match="remote token_file: .* refuses the token in it"):
            Remote(server.url, str(tmp_path / "other")).task_ids("train")


@pytest.mark.parametrize("within", [False, True], ids=["alone", "in a mixture"])
def test_an_abandoned_call_gives_its_session_and_its_thread_back(token_file, within):
    echo = Echo()
    with served(lambda: echo, token_file, max_sessions=1) as server:

        def make():
            options = {"url": server.url, "token_file": str(token_file)}
            part = {"name": "remote", "options": options}
            return envs.make("mixture", environments=[part]) if within else Remote(**options)

        task = "remote:train/0" if within else "train/0"
        start = {"ask": lambda env: env.reset(task, 1), "fresh": True}
        before = set(threading.enumerate())
        pool = EnvPool(make, 1, workers=1, timeout_s=2)
        (first,) = set(threading.enumerate()) - before
        in_pool(pool, **start)
        late = in_pool(pool, lambda env: env.step("wait"))
        assert late.result == Failure("timeout", "no answer in 2 s")
        assert in_pool(pool, **start).result[0][0]["content"] == "train/0 1"
        first.join(10)
        assert not first.is_alive() and server.sessions == 1
        echo.go_on.set()
        pool.close()
