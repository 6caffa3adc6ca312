"""An async function as an agent: what it may be, what becomes of it, and what it may not stop."""

import asyncio
import queue
import sys
import threading
import time

import numpy as np
import openai
import pytest

from seeupo_jax.agents.calls import Access, AgentFailure, AgentResult, AgentTask
from seeupo_jax.agents.runners.function_agents import FunctionAgents, load_function
from seeupo_jax.configuration.agent_schema import Agent

TASK = AgentTask("t/0", "test", {"question": 1}, seed=3, episode_seed=5, max_turns=4)


ACTS = {}  # what an agent does, by its key


async def play(task, client):
    return await ACTS[client.api_key](task, client)


async def give(value):
    return value


async def fail(error):
    raise error


@pytest.fixture(scope="module")
def agents():
    made = FunctionAgents("module:play", play, max_reward=10.0)
    yield made
    made.close()


def begin(agents, act, ended):
    key = f"key{len(ACTS)}"
    ACTS[key] = act
    return agents.start(TASK, Access("http://127.0.0.1:9/v1", key), ended.put)


def end(agents, act):
    """What an agent comes to that does this."""
    ended = queue.SimpleQueue()
    begin(agents, act, ended)
    return ended.get(timeout=20)


def test_it_is_given_the_task_and_a_client_of_its_episode(agents):
    logged = []

    async def act(task, client):
        logged.extend([task, str(client.base_url), client.max_retries, client.timeout])
        return AgentResult(1, info={"n": np.int32(3)})

    assert end(agents, act) == AgentResult(1.0, 1.0, info={"n": 3}, turn_rewards=())
    assert logged == [TASK, "http://127.0.0.1:9/v1/", 0, None]


@pytest.mark.parametrize(
    "act, result",
    [
        (lambda *_: give(0.5), AgentResult(0.5, 0.5)),
        (lambda *_: give(True), AgentResult(1.0, 1.0)),
        (lambda *_: give(-3), AgentResult(-3.0, 0.0)),
        (
            lambda *_: give(AgentResult(2, 0.5, {"style": 1}, [0, 2])),
            AgentResult(2.0, 0.5, {"style": 1.0}, (0.0, 2.0)),
        ),
        (lambda *_: give({"reward": 2, "score": 1}), AgentResult(2.0, 1.0)),
    ],
)
def test_what_it_returns_is_its_result(agents, act, result):
    assert end(agents, act) == result


@pytest.mark.parametrize(
    "act, cause, says",
    [
        (lambda *_: give(None), "result", "result: reward: got None; allowed: a finite number"),
        (lambda *_: give("good"), "result", "got 'good' (str)"),
        (lambda *_: give(float("nan")), "result", "got nan"),
        (lambda *_: give(11), "result", "of magnitude at most 10"),
        (lambda *_: give(AgentResult(1, 2)), "result", "score: got 2 (int); allowed: a number fr"),
        (lambda *_: give(AgentResult(1, turn_rewards=[2])), "result", "a sum of 2; allowed: the"),
        (lambda *_: give(AgentResult(1, turn_rewards=1)), "result", "turn_rewards: got an int"),
        (lambda *_: give(AgentResult(1, rewards={"env": 1})), "result", "but not 'env'"),
        (lambda *_: give(AgentResult(1, info=[])), "result", "info: got [] (list); allowed: a"),
        (lambda *_: give(AgentResult(1, info={"lineages": 1})), "result", "got the name 'lineage"),
        (lambda *_: give({"rewards": 1}), "result", "got no reward; allowed: reward, and score"),
        (lambda *_: give({"reward": 1, "x": 1}), "result", "got the field x; allowed"),
        (lambda *_: fail(KeyError("no key")), "exception", "KeyError: 'no key'"),
        (lambda *_: fail(SystemExit(3)), "exception", "SystemExit: 3"),
        (lambda *_: fail(asyncio.CancelledError()), "exception", "CancelledError"),
        (lambda _, client: client.models.list(), "exception", "APIConnectionError"),
    ],
)
def test_a_failure_has_its_cause_and_a_sentence(agents, act, cause, says):
    failure = end(agents, act)
    assert isinstance(failure, AgentFailure)
    assert (failure.stop, failure.cause) == ("env_error", cause) and says in failure.reason


def test_what_an_agent_gives_to_a_thread_keeps_no_process_alive(agents):
    async def act(task, client):
        return float(await asyncio.to_thread(lambda: threading.current_thread().daemon))

    assert end(agents, act) == AgentResult(1.0, 1.0)


def test_no_call_of_an_agent_waits_for_another(agents):
    count = 101  # more than a client of httpx opens connections by itself

    async def act(task, client):
        together, arrived = asyncio.Event(), []

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            arrived.append(writer)
            if len(arrived) == count:
                together.set()
            await together.wait()
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            calls = [client.with_options(base_url=url).models.list() for _ in range(count)]
            done = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 15)
        return sum(isinstance(error, openai.NotFoundError) for error in done) / count

    assert end(agents, act) == AgentResult(1.0, 1.0)


def test_nobody_is_told_of_one_that_is_stopped_and_the_others_go_on(agents):
    ended, begun, cancelled = queue.SimpleQueue(), threading.Event(), threading.Event()

    async def act(task, client):
        begun.set()
        try:
            await asyncio.sleep(99)
        finally:
            cancelled.set()

    stop = begin(agents, act, ended)
    assert begun.wait(20)
    stop()
    stop()
    assert cancelled.wait(20)
    assert end(agents, lambda *_: give(1)).reward == 1.0 and ended.empty()


def test_an_exit_in_a_task_of_its_own_stops_nobody(agents, caplog):
    async def exits():
        sys.exit("of a task of its own")

    async def act(task, client):
        child = asyncio.create_task(exits())
        await asyncio.wait([child])
        return float(isinstance(child.exception(), SystemExit))

    assert end(agents, act).reward == 1.0
    assert "a task that an agent began raised SystemExit" in caplog.text
    assert end(agents, lambda *_: give(1)).reward == 1.0


def test_more_agents_than_cores_run_synchronous_code_at_once(agents):
    """Those in `asyncio.to_thread` wait for each other here, as they would for the engine."""
    ended, barrier = queue.SimpleQueue(), threading.Barrier(48)
    for _ in range(48):
        begin(agents, lambda *_: asyncio.to_thread(lambda: min(barrier.wait(20), 1)), ended)
    assert sorted(ended.get(timeout=30).reward for _ in range(48)) == [0.0] + [1.0] * 47


def test_one_that_blocks_the_loop_is_named_and_the_next_run_in_another(caplog):
    agents = FunctionAgents("module:play", play, max_reward=10.0, blocked_s=0.4)
    ended, released = queue.SimpleQueue(), threading.Event()

    async def act(task, client):
        return released.wait(30)

    begin(agents, act, ended)
    until = time.monotonic() + 20
    while "has blocked the event loop" not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    (warning,) = [r.getMessage() for r in caplog.records if "blocked" in r.getMessage()]
    line = act.__code__.co_firstlineno + 1
    assert warning.startswith("agent module:play on t/0 has blocked the event loop for ")
    assert f" s at {__file__}, line {line}, so that no other agent can run" in warning
    time.sleep(0.5)
    assert end(agents, lambda *_: give(1)).reward == 1.0 and ended.empty()
    released.set()
    assert ended.get(timeout=20).reward == 1.0
    agents.close()


def test_many_that_each_work_for_a_while_are_no_block(caplog):
    agents = FunctionAgents("module:play", play, max_reward=10.0, blocked_s=0.4)
    ended = queue.SimpleQueue()
    for _ in range(20):
        begin(agents, lambda *_: give(time.sleep(0.08)), ended)
    for _ in range(20):
        ended.get(timeout=20)
    agents.close()
    assert "blocked" not in caplog.text


def loaded(tmp_path, source, **options):
    file = tmp_path / f"agent_{len(source)}.py"
    file.write_text(source)
    return load_function(Agent(name=f"{file}:play", options=options))


@pytest.mark.parametrize(
    "source",
    [
        "async def play(task, client, *, steps=1): return steps",
        "class Player:\n    async def __call__(self, task, client, steps=1): return steps\n"
        "play = Player()",
        "import functools\nasync def act(task, client, extra, steps=1): return steps\n"
        "play = functools.partial(act, extra=2)",
    ],
)
def test_what_is_async_and_takes_task_and_client_is_an_agent(tmp_path, source):
    assert asyncio.run(loaded(tmp_path, source, steps=3)(TASK, None)) == 3


@pytest.mark.parametrize(
    "source, options, says",
    [
        ("def play(task, client): ...", {}, "is no async function; allowed: async def"),
        ("async def play(task): ...", {}, r"play\(task\) cannot be called \(too many positional"),
        ("async def play(task, client): ...", {"n": 1}, "unexpected keyword argument 'n'"),
        ("async def other(task, client): ...", {}, "has no function 'play'; it has other"),
        ("play = 3", {}, "'play'; it has none, since its names are of o"),
        ("import no_such_package", {}, "there is no module 'no_such_package'|cannot be imported"),
    ],
)
def test_what_is_none_is_refused_in_a_sentence(tmp_path, source, options, says):
    with pytest.raises(ValueError, match=f"^config.agent.name: .*{says}") as error:
        loaded(tmp_path, source, **options)
    assert str(error.value).endswith(".")


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="there is no file .*nowhere.py"):
        load_function(Agent(name="nowhere.py:play"))
