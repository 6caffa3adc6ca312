"""The command as its user runs it: with the policy of the run, or with that of a server."""

import collections
import functools
import json
import math
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import loaded_python
import numpy as np
import openai_cases as cases
import pytest
from places import CONFIGS
from process_cases import environment

from seeupo_jax import envs
from seeupo_jax.agents.openai_server import OpenAIServer
from seeupo_jax.configuration.schema import Chat
from seeupo_jax.envs.bfcl.result_files import export_results
from seeupo_jax.envs.pool import EnvPool
from seeupo_jax.evaluate import main
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.weights import read_tokenizer
from seeupo_jax.policy.network import split_model

CONFIG = CONFIGS / "quickstart.py"
LENGTH = 128  # tokens a conversation may reach
GREEDY = (
    "--config.rollout.tasks=2",
    "--config.rollout.group_size=4",
    "--config.rollout.top_k=1",
    "--config.evaluation.tasks=8",
    "--config.rollout.max_turns=4",  # some cases need more
    "--k=2",
)
SHORT = ("--config.evaluation.tasks=1", "--k=1")
MODULE = [sys.executable, "-m", "seeupo_jax.evaluate"]
pytestmark = pytest.mark.usefixtures("one_device")
AVG, PASS = "eval/avg@2", "eval/pass@2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as a run leaves it."""
    place = tmp_path_factory.mktemp("evaluate") / "policy"
    model, tokenizer = from_pretrained("package:order_desk", dtype="float32")
    save_pretrained(model, place, tokenizer)
    return place


@pytest.fixture(scope="module")
def logits(folder):
    """What a server that holds this folder computes."""
    model, _ = from_pretrained(str(folder), dtype="float32")
    return cases.logits_of(*split_model(model), LENGTH)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def serve(logits):
    """Makes a server of the folder's policy; further settings are the server's."""
    return lambda **settings: cases.PolicyServer(
        **({"logits": logits, "max_model_len": LENGTH} | settings)
    )


def arguments(folder, *more, workdir):
    paths = [f"--config={CONFIG}", f"--workdir={workdir}", f"--config.model.path={folder}"]
    served = any(each.startswith("--server=") for each in more)
    whose = [] if served else ["--untrained"]
    return [*paths, f"--json={Path(workdir) / 'out.json'}", *whose, *GREEDY, *more]


def play(folder, *more, workdir=None):
    """The JSON of an evaluation in this process, without the path of the episodes."""
    workdir = tempfile.mkdtemp(dir=folder.parent) if workdir is None else workdir
    main(["evaluate", *arguments(folder, *more, workdir=workdir)])
    result = json.loads((Path(workdir) / "out.json").read_text())
    assert Path(result.pop("episodes")).parent == Path(workdir) / "evaluation"
    return result


def episodes(workdir):
    """The lines of the only file of episodes, without its settings."""
    (file,) = (workdir / "evaluation").glob("*.jsonl")  # a lock lies beside it while it is played
    return file.read_text().splitlines()[1:]


def refusal(folder, capsys, *more):
    """The sentence with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        play(folder, *more)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def own(folder):
    """What our own engine plays."""
    return play(folder)


def test_our_own_engine_plays_what_the_run_starts_from(own):
    assert own["iteration"] == 0
    assert 0 < own[AVG] == own[PASS] < 1  # greedy: every member of a group plays alike


@pytest.mark.parametrize("more", [(), ("--explain",)])
def test_a_workdir_without_a_checkpoint_is_refused_and_not_made(tmp_path, capsys, more):
    (tmp_path / "empty").mkdir()
    for name, lacks in (("typo", "is not there"), ("empty", "has no checkpoint")):
        with pytest.raises(SystemExit) as ended:
            main(["", f"--config={CONFIG}", f"--workdir={tmp_path / name}", *more])
        assert ended.value.code == 2
        assert capsys.readouterr().err == (
            f"error: --workdir: got {tmp_path / name}, which {lacks}; allowed: the folder of a run,"
            " or --untrained (in Python untrained=True) to evaluate the policy that the"
            " configuration starts from.\n"
        )
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"] and not list(tmp_path.rglob("*/*"))


@pytest.mark.parametrize("more", [(), ("--server=http://nobody.invalid:1",)])
def test_a_split_that_is_not_there_is_refused_before_anything_is_loaded(
    folder, tmp_path, capsys, more
):
    with pytest.raises(SystemExit):
        play(folder, "--split=dev", *more, workdir=tmp_path)
    logged = capsys.readouterr().err
    assert logged == "error: order_desk split: got 'dev'; allowed: train, validation, test.\n"
    assert not list(tmp_path.iterdir())


def test_a_server_has_its_own_policy(folder, capsys):
    logged = refusal(folder, capsys, "--server=http://nobody.invalid:1", "--untrained")
    assert logged.startswith("error: --untrained: got True; allowed: without --server")


@pytest.mark.parametrize("owner, path", [("vllm", "/v1/completions"), ("sglang", "/generate")])
def test_a_servers_greedy_policy_scores_as_our_engines(folder, serve, own, capsys, owner, path):
    with serve(owned_by=owner) as server:
        metrics = play(folder, f"--server={server.url}")
    about = {"server": server.url, "model": cases.MODEL}
    assert metrics == about | {name: own[name] for name in own if name != "iteration"}
    assert {asked[0] for asked in server.asked} == {path}
    printed = capsys.readouterr()
    row = printed.out.splitlines()[1].split()
    assert row[:4] == ["all", "8", "0", f"{own[AVG]:.2f}"] and not printed.err


def test_the_command_needs_no_accelerator_and_ends(folder, serve, tmp_path):
    with serve() as server:
        done = loaded_python.run(
            [*MODULE, *arguments(folder, *SHORT, f"--server={server.url}", workdir=tmp_path)],
            env=environment() | {"JAX_PLATFORMS": "rocm"},  # that of the server, say: not there
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["tasks", "failed", "avg@1", "pass@1"]


def bodies(server):
    return [body for _, _, body in server.asked[1:]]  # without the one that tries it


def test_sampling_is_the_configs(folder, serve):
    choices = ("--config.evaluation.temperature=0.5", "--config.rollout.top_k=3")
    with serve() as server:
        play(folder, *SHORT, f"--server={server.url}", *choices)
    _, tokenizer = from_pretrained(str(folder))
    for body in bodies(server):
        assert (body["temperature"], body["top_k"], body["top_p"]) == (0.5, 3, 1.0)
        assert (body["max_tokens"], body["stop_token_ids"]) == (16, list(tokenizer.end_ids))
    assert len({body["seed"] for body in bodies(server)}) == len(server.asked) - 1


def test_the_chat_is_the_configs(folder, serve, logits):
    choices = ("--config.chat.system=True", "--config.chat.tools=none")
    one_turn = ("--config.rollout.max_turns=1", "--config.rollout.max_action_tokens=4")
    tokenizer = read_tokenizer(str(folder), Chat(system=True, tools="none"))
    prompt = list(tokenizer.begin(*envs.make("order_desk").reset("test/0", 0)).tokens)
    more = ("--config.rollout.max_context=1024", "--config.batching.buckets=()")
    with serve(max_model_len=1024) as server:
        short = {"prompt": [1]}  # what it answers does not matter
        server.routes["/v1/completions"] = lambda body: cases.completions(
            body | short, True, logits
        )
        play(folder, *SHORT, *choices, *one_turn, *more, f"--server={server.url}")
    assert [body["prompt"] for body in bodies(server)] == [prompt]


def test_seeds_can_be_left_to_the_server(folder, serve):
    with serve() as server:
        play(folder, *SHORT, f"--server={server.url}", "--server_seeded=False")
    assert not any("seed" in body for body in bodies(server))


def test_the_dialect_can_be_said(folder, serve):
    with serve(owned_by="someone") as server:
        play(folder, *SHORT, f"--server={server.url}", "--server_dialect=sglang")
    assert {path for path, *_ in server.asked} == {"/generate"}


@pytest.mark.parametrize("concurrency, most", [("2", 2), ("none", 8)])
def test_so_many_conversations_are_open_as_the_config_says(folder, serve, concurrency, most):
    together, counts = threading.Condition(), collections.Counter()

    def slow(reply):
        with together:
            counts["now"] += 1
            counts["most"] = max(counts["most"], counts["now"])
            together.notify_all()
            together.wait_for(lambda: counts["most"] >= most, 5)  # however slowly they come
        time.sleep(0.1)  # for one more than are allowed
        with together:
            counts["now"] -= 1
        return cases.right(reply)

    with serve() as server:
        server.usual = slow
        one_turn = ("--config.rollout.max_turns=1", f"--config.rollout.concurrency={concurrency}")
        play(folder, "--k=2", *one_turn, f"--server={server.url}")
    assert counts["most"] == most


def test_a_server_of_several_models_is_asked_for_the_one_that_is_named(folder, serve, capsys):
    with serve(others=("other",)) as server:
        logged = refusal(folder, capsys, f"--server={server.url}")
        named = (f"--server={server.url}", f"--server_model={cases.MODEL}")
        assert play(folder, *SHORT, *named)["model"] == cases.MODEL
    assert logged.startswith("error: model: got ") and logged.endswith(
        f"; allowed at {server.url}: {cases.MODEL}, other.\n"
    )


def test_the_api_key_is_the_environments(folder, serve, capsys, monkeypatch):
    with serve(key="secret") as server:
        logged = refusal(folder, capsys, f"--server={server.url}")
        assert logged.startswith(f"error: {server.url}: /v1/models answered 401: no such key")
        assert "(the key is that of the environment variable OPENAI_API_KEY)" in logged
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert play(folder, *SHORT, f"--server={server.url}/v1")["model"] == cases.MODEL


def test_what_the_server_cost_is_told(folder, serve, capsys):
    with serve() as server:
        no = cases.status(503, "no")
        server.script.extend([cases.right, no, no, cases.right, no, no, no])
        quick = ("--config.rollout.concurrency=1", "--config.env.retry_wait_s=0.01")
        metrics = play(folder, *SHORT, *quick, "--k=2", f"--server={server.url}")
    assert not math.isnan(metrics[AVG])
    assert capsys.readouterr().err == (
        "1 environments failed, 1 of them so: /v1/completions answered 503: no\n"
        f"{server.url}: requests repeated: 4; given up: 1, whose episodes do not count.\n"
    )


def test_a_request_is_given_up_when_its_time_is_over(folder, serve, capsys):
    released = threading.Event()
    with serve() as server:
        server.script.extend([cases.right, lambda reply: released.wait(20) and cases.right(reply)])
        play(folder, *SHORT, f"--server={server.url}", "--server_timeout_s=1")
        released.set()
    assert "requests repeated: 1; given up: 0" in capsys.readouterr().err


def test_what_is_open_is_closed_after_an_error_too(folder, serve, capsys, monkeypatch):
    closed = []
    for kind in (OpenAIServer, EnvPool):

        def close(self, kind=kind, end=kind.close):
            return (closed.append(kind), end(self))

        monkeypatch.setattr(kind, "close", close)
    with serve() as server:
        play(folder, *SHORT, f"--server={server.url}")
        once = [EnvPool, EnvPool, OpenAIServer]  # the first one begins a first task
        assert closed == once
        server.script.extend([cases.right, cases.status(400, "too long")])
        logged = refusal(folder, capsys, f"--server={server.url}")
    assert logged == f"error: {server.url}: /v1/completions answered 400: too long\n"
    assert closed == once * 2


REFUSED = [
    (
        ["--config.rollout.max_context=256", "--config.batching.buckets=()"],
        "max_context: got 256; allowed: at most the 128 that",
    ),
    (["--server_dialect=tgi"], "dialect: got 'tgi'; allowed: auto, vllm, sglang, chat."),
    (
        ["--config.rollout.grammar=tool_calls"],
        "config.rollout.grammar: got 'tool_calls'; allowed with --server: none",
    ),
    (
        ["--config.agent.constraints=True"],
        "config.agent.constraints: got True; allowed with --server: False",
    ),
]


@pytest.mark.parametrize("more, logged", REFUSED)
def test_a_wrong_setting_is_a_sentence(folder, serve, capsys, more, logged):
    with serve() as server:
        assert refusal(folder, capsys, f"--server={server.url}", *more).startswith(
            f"error: {logged}"
        )


def test_a_server_that_is_not_there_is_a_sentence(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    logged = refusal(folder, capsys, f"--server={url}", "--config.env.retries=0")
    assert logged.startswith(f"error: {url}: /v1/models: ")
    assert logged.endswith("refused; allowed: a server that answers.\n")


def test_what_is_said_of_a_server_needs_one(folder, capsys):
    logged = refusal(folder, capsys, f"--server_model={cases.MODEL}")
    assert logged == "error: --server_model: got a value; allowed: none without --server.\n"


def test_a_folder_without_the_served_models_tokenizer_is_told(folder, serve, capsys, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with serve() as server:
        other = f"--config.model.path={tmp_path}"
        logged = refusal(folder, capsys, f"--server={server.url}", other)
    assert logged == f"error: {tmp_path}: got no tokenizer; allowed: that of the model served.\n"


# 12 episodes, two at a time.
CHANCE = (
    "--config.rollout.top_k=none",
    "--config.rollout.concurrency=2",
    "--config.evaluation.tasks=4",
    "--k=3",
)


def test_an_evaluation_that_was_killed_goes_on_to_the_same_numbers(folder, serve, tmp_path):
    def slow(reply):
        time.sleep(0.2)
        return cases.right(reply)

    with serve() as server:
        choices = (f"--server={server.url}", *CHANCE)
        whole = play(folder, *choices)
        asked = len(server.asked)
        server.usual = slow
        command = [*MODULE, *arguments(folder, *choices, workdir=tmp_path)]
        killed = loaded_python.LoadedPython(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        place = tmp_path / "evaluation"
        deadline = time.monotonic() + 300
        while not (any(place.glob("*.jsonl")) and len(episodes(tmp_path)) >= 4):
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        (file,) = place.glob("*.jsonl")
        file.write_bytes(file.read_bytes().rpartition(b"\n")[0] + b'\n{"task_id": "te')
        kept = episodes(tmp_path)[:-1]
        assert 4 <= len(kept) < 12
        server.usual = cases.right
        server.asked.clear()
        assert play(folder, *choices, workdir=tmp_path) == whole
        left = sum(json.loads(line)["turns"] for line in episodes(tmp_path)[len(kept) :])
        assert len(server.asked) == left + 1 < asked  # and one that tries the server
        server.asked.clear()
        assert play(folder, *choices, workdir=tmp_path) == whole
        assert len(server.asked) == 1
        first, *lines = file.read_bytes().splitlines(True)
        file.write_bytes(first + b"".join(lines[:4]))  # of two processes, of which one is rerun
        other = file.with_name(f"{file.stem}-process1.jsonl")
        other.write_bytes(first + b"".join(lines[4:]))
        server.asked.clear()
        assert play(folder, *choices, workdir=tmp_path) == whole
        assert len(server.asked) == 1
        other.unlink()
    assert episodes(tmp_path)[: len(kept)] == kept
    found = [json.loads(line) for line in episodes(tmp_path)]
    assert len({(e["task_id"], e["member"]) for e in found}) == len(found) == 12


def test_more_tasks_later_are_added_to_those_that_were_played(folder, own, tmp_path):
    play(folder, "--config.evaluation.tasks=3", workdir=tmp_path)
    first = episodes(tmp_path)
    assert len(first) == 6
    assert play(folder, workdir=tmp_path) == own
    assert episodes(tmp_path)[:6] == first and len(episodes(tmp_path)) == 16


def test_every_episode_is_kept_with_its_messages_and_labels(folder, tmp_path):
    metrics = play(folder, workdir=tmp_path)
    found = [json.loads(line) for line in episodes(tmp_path)]
    desk = envs.make("order_desk")
    for episode in found:
        assert episode["labels"] == desk.labels(episode["task_id"])
        opening, _ = desk.reset(episode["task_id"], 0)
        assert episode["messages"][: len(opening)] == list(opening)
        said = [m["content"] for m in episode["messages"] if m["role"] == "assistant"]
        assert len(said) == episode["turns"] > 0
        for text in said:
            desk.step(text)
        assert desk.score() == episode["score"]
        assert episode["info"]["retries"] == 0
    for request in ("cancel", "status"):
        scores = [e["score"] for e in found if e["labels"] == {"request": request}]
        assert metrics[f"{AVG}/request={request}"] == sum(scores) / len(scores)


FLAKY = """
from pathlib import Path
from seeupo_jax.envs.order_desk.environment import OrderDesk

class Flaky(OrderDesk):
    def step(self, text):
        if Path({mark!r}).exists() and self.task_id.endswith(("1", "2")):
            raise RuntimeError("broken")
        return super().step(text)

    def reset(self, task_id, seed):
        self.task_id = task_id
        return super().reset(task_id, seed)
"""


def test_what_an_environments_failure_cost_is_played_again(
    folder, own, tmp_path, monkeypatch, capsys
):
    mark = tmp_path / "mark"
    mark.touch()
    (tmp_path / "flaky_desk.py").write_text(FLAKY.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    flaky, workdir = "--config.env.name=flaky_desk:Flaky", tmp_path / "run"
    results, command = [], sys.modules["seeupo_jax.evaluate"]
    report = command._report
    monkeypatch.setattr(command, "_report", lambda *a: (results.append(a[-1]), report(*a)))
    broken = play(folder, flaky, workdir=workdir)
    assert (broken["eval/tasks"], broken["eval/failed"]) == (6, 4)
    failed = [e for e in map(json.loads, episodes(workdir)) if e["failed"]]
    (result,) = results  # whose episodes are those that count
    assert len(result.episodes) == 6 * result.k and not any(e.failed for e in result.episodes)
    assert len(failed) == 4 and all("broken" in e["info"]["failure"] for e in failed)
    mark.unlink()
    assert play(folder, flaky, workdir=workdir) == own
    assert len(episodes(workdir)) == 16 + 4


def test_greedy_is_one_episode_a_task_unless_more_are_asked_for(folder, own, tmp_path, capsys):
    choices = ("--config.rollout.top_k=none", "--greedy")
    flag = GREEDY.index("--k=2")
    default = [*GREEDY[:flag], *GREEDY[flag + 1 :], *choices]
    paths = [f"--config={CONFIG}", f"--workdir={tmp_path}", f"--config.model.path={folder}"]
    main(["evaluate", *paths, "--untrained", *default])
    (file,) = (tmp_path / "evaluation").iterdir()
    assert file.name == "test-k1-greedy-iteration0.jsonl" and len(episodes(tmp_path)) == 8
    assert not capsys.readouterr().err
    assert play(folder, *choices) == own
    assert capsys.readouterr().err == (
        "--greedy: the 2 episodes of a task are alike, unless its environment is random.\n"
    )


def test_different_settings_have_different_files_or_are_refused(folder, tmp_path, capsys):
    for more in (
        (),
        ("--split=train",),
        ("--k=1",),
        ("--config.rollout.top_k=3",),
        ("--config.rollout.top_k=none", "--config.evaluation.temperature=0.5"),
    ):
        play(folder, "--config.evaluation.tasks=1", *more, workdir=tmp_path)
    assert sorted(file.name for file in (tmp_path / "evaluation").iterdir()) == [
        "test-k1-greedy-iteration0.jsonl",
        "test-k2-greedy-iteration0.jsonl",
        "test-k2-temperature0.5-iteration0.jsonl",
        "test-k2-temperature1.0-top_k3-iteration0.jsonl",
        "train-k2-greedy-iteration0.jsonl",
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        play(folder, "--config.rollout.max_turns=2", workdir=tmp_path)
    logged = capsys.readouterr().err
    assert logged.startswith("error: config.rollout.max_turns: got 2; allowed: 4, with which the")


def test_another_policy_of_the_same_name_is_refused(folder, tmp_path, capsys):
    play(folder, *SHORT, workdir=tmp_path)
    with pytest.raises(SystemExit):
        play(folder, *SHORT, "--config.lora.rank=1", workdir=tmp_path)
    assert capsys.readouterr().err.startswith("error: policy: got ")


def always(folder, text):
    """Logits of a policy that says a text, whatever it is asked."""
    tokenizer = read_tokenizer(str(folder), None)
    said = tokenizer.action(text)

    def logits(tokens):
        place = len(tokens) - 1 - list(tokens)[::-1].index(header)
        logits_LV = np.full((len(tokens), tokenizer.vocab_size), -50.0)
        logits_LV[-1, said[min(len(tokens) - 1 - place, len(said) - 1)]] = 50.0
        return logits_LV

    header = tokenizer.begin([{"role": "user", "content": "?"}], ()).tokens[-1]
    return logits


def test_another_policy_served_under_the_same_name_is_refused(folder, serve, tmp_path, capsys):
    with serve() as server:
        url = f"--server={server.url}"

        def hold(text):
            ask = functools.partial(cases.completions, logits=always(folder, text))
            server.routes["/v1/completions"] = ask

        hold("Hello")
        play(folder, *SHORT, url, workdir=tmp_path)
        assert "from that file: 0 of 1\n" in capsys.readouterr().out
        play(folder, *SHORT, url, workdir=tmp_path)
        assert "from that file: 1 of 1\n" in capsys.readouterr().out
        hold("I am another")
        with pytest.raises(SystemExit):
            play(folder, *SHORT, url, workdir=tmp_path)
    logged = capsys.readouterr().err
    assert logged.startswith("error: fingerprint: got \"a policy that says 'I am another'")


def test_episodes_of_bfcl_are_exported_for_its_scorer(
    folder, serve, tmp_path, logits, capsys, monkeypatch
):
    out = tmp_path / "results"
    logged = refusal(folder, capsys, f"--bfcl_results={out}")
    assert logged == "error: --bfcl_results: got env 'order_desk'; allowed: config.env.name=bfcl.\n"
    own = ("--config.env.name=bfcl", "--config.env.options.data=own", f"--bfcl_results={out}")
    assert "got env.options.data='own'; allowed: none" in refusal(folder, capsys, *own)
    taken = tmp_path / "taken"
    taken.write_text("a file")
    logged = refusal(folder, capsys, "--config.env.name=bfcl", f"--bfcl_results={taken}")
    assert logged.startswith(f"error: --bfcl_results: got {taken} (File exists); allowed: ")
    length = ("--config.rollout.max_context=60000", "--config.batching.buckets=()")
    choices = ("--config.env.name=bfcl", "--config.evaluation.tasks=2", *length, "--k=1")
    workdir, had_json = tmp_path / "run", []

    def export(*given):
        had_json.append((workdir / "out.json").exists())
        return export_results(*given)

    monkeypatch.setattr(sys.modules[main.__module__], "export_results", export)
    with serve(max_model_len=60_000) as server:
        short = {"prompt": [1]}  # what it answers does not matter
        server.routes["/v1/completions"] = lambda body: cases.completions(
            body | short, True, logits
        )
        given = (f"--server={server.url}", *choices, f"--bfcl_results={out}")
        metrics = play(folder, *given, workdir=workdir)
    assert metrics["eval/tasks"] == 2 and had_json == [True]
    (file,) = out.rglob("*_result.json")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["multi_turn_base_100", "multi_turn_base_101"]
    assert f"BFCL_PROJECT_ROOT={out}/member_0 bfcl evaluate" in capsys.readouterr().out


def chat(content=None, *, reason="stop", name=None, **arguments):
    """A reply of chat completions, with one call where there is a name."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [] if name is None else [{"id": "c", "type": "function", "function": function}]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def play_chat(server, workdir, *more):
    """The JSON of an evaluation by messages alone: there is no model, and no tokenizer."""
    where = [f"--config={CONFIG}", f"--workdir={workdir}", "--config.model.path=/no/model"]
    tries = ("--config.env.retries=1", "--config.env.retry_wait_s=0.01")
    main(["", *where, *tries, f"--server={server.url}", f"--json={workdir}/out.json", *more])
    return json.loads((workdir / "out.json").read_text())


@pytest.fixture
def chat_server():
    """A server that speaks chat completions only; its model replies at once."""
    with cases.PolicyServer(owned_by="openai", max_model_len=8) as server:
        path = "/v1/chat/completions"
        server.routes = {path: lambda body: chat(name="reply", outcome="refused")}
        yield server


def test_a_server_of_chat_completions_needs_no_model_here(chat_server, tmp_path, capsys):
    found = play_chat(chat_server, tmp_path, "--config.evaluation.tasks=2", "--k=2")
    trial, *asked = [body for _, _, body in chat_server.asked]
    assert found["usage"] == {"prompt_tokens": 20, "completion_tokens": 8}
    assert "server: 20 prompt_tokens, 8 completion_tokens\n" in capsys.readouterr().out
    assert len(asked) == 4 and len({body["seed"] for body in asked}) == 4
    assert {tool["function"]["name"] for tool in asked[0]["tools"]} >= {"reply", "get_order"}
    lines = [json.loads(line) for line in episodes(tmp_path)]
    assert {(line["stop"], line["turns"], line["score"]) for line in lines} == {("done", 1, 0.0)}


def test_what_fails_at_a_server_of_chat_completions_costs_what_it_must(
    chat_server, tmp_path, capsys
):
    right, busy = cases.right, cases.status(500, "busy")
    full = cases.status(400, "This model's maximum context length is 8 tokens.")
    cut = cases.changed(lambda reply: chat("I", reason="length"))
    chat_server.script.extend([right, busy, busy, full, cut, right])
    sizes = ("--config.evaluation.tasks=3", "--k=1", "--config.rollout.concurrency=1")
    found = play_chat(chat_server, tmp_path, *sizes, "--server_max_tokens=5")
    assert found["eval/failed"] == 1
    by_task = {line["task_id"]: line for line in map(json.loads, episodes(tmp_path))}
    assert [by_task[f"test/{i}"]["stop"] for i in range(3)] == ["env_error", "max_tokens", "done"]
    assert by_task["test/1"]["turns"] == 0 and not by_task["test/1"]["failed"]
    assert by_task["test/2"]["turns"] == 2
    logged = capsys.readouterr().err
    assert "answers cut at the limit of tokens: 1; --server_max_tokens" in logged
    assert "given up: 1" in logged
    assert {body["max_tokens"] for _, _, body in chat_server.asked[1:]} == {5}


def test_a_server_that_names_the_limit_otherwise_is_asked_again(chat_server, tmp_path):
    renamed = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    chat_server.script.append(cases.status(400, renamed))
    play_chat(chat_server, tmp_path, *SHORT)
    first, *others = [body for _, _, body in chat_server.asked]
    assert "max_tokens" in first and others
    assert all("max_completion_tokens" in b and "max_tokens" not in b for b in others)


def test_policies_of_one_folder_are_listed_side_by_side(chat_server, tmp_path, capsys):
    sizes = ("--config.evaluation.tasks=2", "--k=2")
    play_chat(chat_server, tmp_path, *sizes)
    assert "Policies evaluated" not in capsys.readouterr().out
    chat_server.cards[0]["id"] = "other"
    chat_server.routes = {"/v1/chat/completions": lambda body: chat("No.")}
    found = play_chat(chat_server, tmp_path, *sizes, "--greedy", "--k=2")
    (other,) = found["others"]
    assert (found["model"], other["model"], other["temperature"]) == ("other", cases.MODEL, 1.0)
    assert other[AVG] == 0 and Path(other["episodes"]).exists()
    out = capsys.readouterr().out
    table = out.split("on these tasks:\n")[1].splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == [
        f"other at {chat_server.url}",
        f"{cases.MODEL} at {chat_server.url}",
    ]
    (tmp_path / "evaluation" / "test-k2-damaged.jsonl").write_text("no JSON\n")
    assert len(play_chat(chat_server, tmp_path, *sizes, "--greedy", "--k=2")["others"]) == 1
    assert "not compared with this evaluation: " in capsys.readouterr().err
    # Fewer tasks, or another k, would be another comparison.
    assert "others" not in play_chat(chat_server, tmp_path, *sizes[:1], "--k=1")
    more = play_chat(chat_server, tmp_path, "--config.evaluation.tasks=3", "--k=2")
    assert "others" not in more


CHAT_REFUSED = {
    "key_variable: got 'NO_SUCH_KEY', which is not set": ("--server_key_variable=NO_SUCH_KEY",),
    "config.rollout.top_k: got 5; allowed with the dialect chat": ("--config.rollout.top_k=5",),
    "model: got 'gpt'; allowed at http://127.0.0.1": ("--server_model=gpt",),
    "max_tokens: got 9 with the dialect vllm; allowed: none": (
        "--server_dialect=vllm",
        "--server_max_tokens=9",
    ),
    "config.agent: got 'true'; allowed with the dialect chat": ("--config.agent.command=true",),
}


@pytest.mark.parametrize("sentence", CHAT_REFUSED)
def test_what_chat_completions_cannot_do_is_a_sentence(chat_server, tmp_path, capsys, sentence):
    with pytest.raises(SystemExit) as ended:
        play_chat(chat_server, tmp_path / "new", *CHAT_REFUSED[sentence])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not (tmp_path / "new").exists() and not chat_server.asked
