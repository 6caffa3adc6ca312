"""OpenEnv's protocol over a WebSocket, and reset/step over HTTP, each with a real server.

The WebSocket server says what OpenEnv 0.3 says: {"type": "observation", "data": {"observation",
"reward", "done"}} or {"type": "error", "data": {"code", "message"}}; a connection is an episode.
"""

import contextlib
import http.server
import json
import socket
import threading

import pytest
from remote_cases import answering
from serving import running

from seeupo_jax import envs
from seeupo_jax.configuration import loading
from seeupo_jax.envs.base import TransientError
from seeupo_jax.envs.pool import EnvCall, EnvPool, Failure
from seeupo_jax.envs.validation import ProtocolError, check_reset
from seeupo_jax.evaluation.episode_host import check_host

websockets_server = pytest.importorskip("websockets.sync.server")


class Guess:
    """A number to guess; the seed decides."""

    def reset(self, options):
        self.number = str(options["seed"] % 10)
        return {
            "observation": {"text": "guess 0-9", "options": options},
            "reward": None,
            "done": False,
        }

    def step(self, action):
        right = action["message"] == self.number
        return {
            "observation": {"text": "right" if right else "wrong"},
            "reward": 2.0 if right else None,
            "done": right,
        }


def answer_of(game, message):
    """The whole answer to a message, as OpenEnv's server gives it."""
    if message["type"] == "reset":
        return {"type": "observation", "data": game.reset(message["data"])}
    action = message["data"]
    if set(action) != {"message"}:
        errors = [{"loc": ["message"], "msg": "Field required"}]
        data = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": errors}
        return {"type": "error", "data": data}
    if action["message"] == "boom":
        return {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it broke"}}
    return {"type": "observation", "data": game.step(action)}


def session(connection):
    game = Guess()
    for text in connection:
        message = json.loads(text)
        if message["type"] == "close":
            return
        if message == {"type": "step", "data": {"message": "hang up"}}:
            connection.socket.shutdown(socket.SHUT_RDWR)
            return
        if message == {"type": "step", "data": {"message": "silence"}}:
            continue
        connection.send(json.dumps(answer_of(game, message)))


@contextlib.contextmanager
def websocket_server(talk):
    with websockets_server.serve(talk, "127.0.0.1", 0) as server, running(server):
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"


@pytest.fixture
def ws_url():
    with websocket_server(session) as url:
        yield url


class _OneEpisode(http.server.BaseHTTPRequestHandler):
    """What many a hand-made server is: one game behind /reset and /step."""

    game = Guess()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            return self._say(200, self.game.reset(body))
        if set(body["action"]) != {"message"}:
            return self._say(422, {"detail": "message: Field required"})
        if body["action"]["message"] == "boom":
            return self._say(500, {"detail": "it broke"})
        return self._say(200, self.game.step(body["action"]))

    def _say(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def http_server(port=0):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _OneEpisode)
    with server, running(server):
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def http_url():
    with http_server() as url:
        yield url


@pytest.fixture(params=["ws_url", "http_url"])
def url(request):
    return request.getfixturevalue(request.param)


def make(url, **options):
    options = {"action_field": "message", "observation_field": "text"} | options
    return envs.make("openenv", url=url, **options)


def test_an_episode_is_played_to_its_end(url):
    env = make(url, instruction="Guess.", train_tasks=25, full_reward=4.0, test_seed=25)
    messages, tools = env.reset("train/17", seed=0)
    assert messages == (
        {"role": "system", "content": "Guess."},
        {"role": "user", "content": "guess 0-9"},
    )
    assert tools == () and env.score() == 0.0
    step = env.step("Perhaps three?\n3")
    assert (step.observation[0]["content"], step.reward, step.done) == ("wrong", 0.0, False)
    step = env.step("7")
    assert (step.observation[0]["content"], step.reward, step.done) == ("right", 2.0, True)
    assert env.score() == 0.5
    with pytest.raises(ValueError, match=r"reset\(\) must come before step"):
        env.step("7")
    assert env.reset("test/3", seed=0)[0][1]["content"] == "guess 0-9"
    assert env.score() == 0.0 and env.step("8").done  # seed 28
    env.close()


def test_pings_have_no_limit_of_their_own(ws_url):
    env = make(ws_url)  # the limit of a call is the pool's
    env.reset("train/4", seed=0)
    assert env._server._socket.ping_timeout is None and env.timeout_s is None
    env.close()


def test_no_connection_goes_through_the_machines_proxy(url, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    env = make(url)
    env.reset("train/4", seed=0)
    assert env.step("4").done
    env.close()


def test_a_server_of_one_episode_is_not_played_by_two(http_url):
    first, second = make(http_url), make(http_url)
    first.reset("train/4", seed=0)
    second.reset("train/5", seed=0)
    with pytest.raises(RuntimeError, match="another conversation has reset the server's only"):
        first.step("5")
    assert second.step("5").done
    first.reset("train/4", seed=0)
    assert first.step("4").done
    first.close()
    second.close()


OPENENV = {"name": "openenv", "options": {"url": "http://127.0.0.1:9"}}


@pytest.mark.parametrize(
    "env", [OPENENV, {"name": "mixture", "options": {"environments": [OPENENV]}}]
)
def test_several_conversations_with_a_server_of_one_episode_are_refused_at_the_start(env):
    for concurrency in (None, 2):
        config = loading.from_dict({"env": env, "rollout": {"concurrency": concurrency}})
        with pytest.raises(ValueError, match=f"rollout.concurrency: got {concurrency} with env op"):
            check_host(config)
    check_host(loading.from_dict({"env": env, "rollout": {"concurrency": 1}}))
    by_socket = {"name": "openenv", "options": {"url": "ws://127.0.0.1:9"}}
    check_host(loading.from_dict({"env": by_socket}))


def test_whole_observations_and_actions_are_json(url):
    given = {"level": 2, "seed": 9}  # the task's seed decides
    env = make(url, action_field=None, observation_field=None, reset_options=given)
    ((user,), _) = env.reset("train/4", seed=0)
    assert json.loads(user["content"])["options"] == {"level": 2, "seed": 4}
    assert env.step('So:\n{"message": "4"}').done
    env.close()


def test_an_episode_that_is_over_as_it_begins_takes_no_action():
    with answering({"reset": {"observation": {"text": "over"}, "done": True}}) as url:
        env = make(url)
        ((message,), _) = env.reset("train/4", seed=0)
        assert message["content"] == "over"
        with pytest.raises(ValueError, match=r"reset\(\) must come before step"):
            env.step("4")


def test_an_invalid_action_is_answered_and_changes_nothing(url):
    env = make(url, action_field=None)
    env.reset("train/4", seed=0)
    for text in ("no JSON", "[1]", '{"nope": 1}', "[" * 100_000):
        step = env.step(text)
        assert step.observation[0]["content"].startswith("Invalid action: ") and not step.done
    assert "Field required" in env.step('{"nope": 1}').observation[0]["content"]
    assert env.step('{"message": "4"}').done
    env.close()


def test_a_response_may_be_the_action_as_a_whole(url):
    env = make(url, whole_response=True)
    env.reset("train/4", seed=0)
    assert not env.step("so\n4").done
    assert env.step("\n4\n").done
    env.close()


def test_an_exception_of_the_environment_fails_the_step(url):
    env = make(url)
    env.reset("train/4", seed=0)
    with pytest.raises(RuntimeError, match="it broke"):
        env.step("boom")
    env.reset("train/4", seed=0)
    assert env.step("4").done
    env.close()


@pytest.mark.parametrize("text", ["hang up", "silence"])
def test_a_lost_connection_is_a_lost_episode_and_no_other(ws_url, text):
    env = make(ws_url, timeout_s=0.3)
    env.reset("train/4", seed=0)
    with pytest.raises(Exception) as caught:
        env.step(text)
    assert not isinstance(caught.value, TransientError)
    with pytest.raises(ConnectionError, match="the connection is closed, so its episode is lost"):
        env.step("4")
    env.reset("train/5", seed=0)
    assert env.step("5").done
    env.close()


def test_an_abandoned_call_ends_its_connection_and_its_thread(ws_url):
    before = set(threading.enumerate())
    pool = EnvPool(lambda: make(ws_url), 1, workers=1, timeout_s=1)
    (first,) = set(threading.enumerate()) - before
    for ask in (lambda env: env.reset("train/4", 0), lambda env: env.step("silence")):
        pool.submit(EnvCall(0, ask))
        ((_, outcome),) = pool.poll(20)
    assert outcome.result == Failure("timeout", "no answer in 1 s")
    first.join(10)
    assert not first.is_alive()
    pool.close()


def test_half_a_character_and_what_is_no_number_fail_no_episode(url):
    env = make(url, action_field=None)
    env.reset("train/4", seed=0)
    assert env.step(r'{"message": "\ud800"}').observation[0]["content"] == "wrong"
    for number in ("NaN", "1e999"):
        said = env.step(f'{{"message": {number}}}').observation[0]["content"]
        assert said == "Invalid action: the last line must be a JSON object"
    env.close()


@pytest.mark.parametrize("field", [None, "text"])
def test_half_a_character_of_a_server_is_escaped(field):
    answer = OBSERVED | {"observation": {"text": "a\ud800"}}
    with answering({"reset": answer}) as url:
        env = make(url, observation_field=field)
        (message,), _ = check_reset(env.reset("train/4", seed=0))
        assert r"a\ud800" in message["content"]
        env.close()


def test_nothing_more_is_asked_of_an_environment_that_failed(ws_url):
    env = make(ws_url)
    env.reset("train/4", seed=0)
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: it broke"):
        env.step("boom")
    with pytest.raises(ConnectionError, match="the connection is closed"):
        env.step("4")


def test_sessions_do_not_share_a_game(ws_url):
    first, second = make(ws_url), make(ws_url)
    first.reset("train/1", seed=0)
    second.reset("train/2", seed=0)
    assert first.step("1").done and second.step("2").done
    first.close()
    second.close()


def test_a_refused_http_connection_has_had_no_effect_and_is_tried_again():
    with http_server() as url:
        env = make(url)
        env.reset("train/4", seed=0)
    with pytest.raises(TransientError, match=url):
        env.step("4")
    with http_server(int(url.rpartition(":")[2])):
        assert env.step("4").done


OBSERVED = {"observation": {"n": 1}, "reward": 0.0, "done": False}
WRONG = [
    ("reset", {}, "got {}; allowed: a JSON object with observation, done"),
    ("reset", [1], r"got \[1\]; allowed: a JSON object with"),
    ("reset", None, "got null; allowed: a JSON object with"),
    ("step", {}, "got {}; allowed: a JSON object with observation, reward, done"),
    ("step", OBSERVED | {"reward": "much"}, "reward: got 'much' .str.; allowed: a finite number"),
    ("step", OBSERVED | {"reward": []}, r"reward: got \[\] .list.; allowed: a finite number"),
]


def refused(env, operation, wanted):
    with pytest.raises(ProtocolError, match=wanted):
        env.reset("train/4", seed=0)
        assert operation == "step"
        env.step('{"guess": 1}')
    env.close()


@pytest.mark.parametrize("operation, answer, wanted", WRONG)
def test_what_an_http_server_answers_is_checked(operation, answer, wanted):
    with answering({"reset": OBSERVED, operation: answer}) as url:
        refused(envs.make("openenv", url=url), operation, wanted)


@pytest.mark.parametrize("operation, answer, wanted", WRONG)
@pytest.mark.parametrize("whole", [True, False])
def test_what_a_session_answers_is_checked(operation, answer, wanted, whole):
    def say(connection):
        for text in connection:
            kind = json.loads(text)["type"]
            if kind == operation and whole:
                connection.send(json.dumps(answer))
            elif kind in ("reset", "step"):
                data = answer if kind == operation else OBSERVED
                connection.send(json.dumps({"type": "observation", "data": data}))

    with websocket_server(say) as url:
        env = envs.make("openenv", url=url)
        refused(env, operation, "allowed: a JSON object with type, data" if whole else wanted)


@pytest.mark.parametrize("text", ["no json", "[" * 100_000], ids=["text", "deep"])
def test_what_a_session_answers_must_be_json(text):
    def say(connection):
        for _ in connection:
            connection.send(text)

    with websocket_server(say) as url:
        env = envs.make("openenv", url=url)
        refused(env, "reset", "which is not JSON; allowed: a JSON object")


def test_unknown_urls_are_refused():
    with pytest.raises(ValueError, match="openenv url: got 'localhost'; allowed: ws://..., wss"):
        envs.make("openenv", url="localhost")
