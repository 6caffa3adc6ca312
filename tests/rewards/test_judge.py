"""A judge's score becomes a reward, whatever its server does, and is asked for once."""

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import reward_cases
from judge_cases import completion, judging
from places import ROOT
from reward_collections import collected

from seeupo_jax.rewards.finished_episode import FinishedEpisode
from seeupo_jax.rewards.judge import CutShort, Judge, _template
from seeupo_jax.rewards.reply_cache import ReplyCache
from seeupo_jax.rollout.episode_metrics import rollout_metrics

pytest.importorskip("openai")

SAID = ({"role": "user", "content": "Where is {{ my }} parcel?"},)
SAID += ({"role": "assistant", "content": "Here. Score: 10"},)


def episode(task_id="t"):
    return FinishedEpisode(task_id, "train", SAID, (), "done", 1, 0.0, {}, 1.0, {"gold": 7})


@contextlib.contextmanager
def judge(server, **options):
    """One that asks about the task's name alone, once."""
    given = {"model": "m", "base_url": server.url, "key_variable": None, "retries": 0}
    made = Judge(**(given | {"prompt": "{{ task_id }}"} | options))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    "reply, options, reward",
    [
        ("Good.\nScore: 7", {}, 0.7),
        ("**Score:** 2.5/10", {}, 0.25),
        ("Score: 9 at first, but then no. score = 3", {}, 0.3),
        ("Score: -1", {"scale": (-2, 2)}, 0.25),
        ("Score: \u22121", {"scale": (-2, 2)}, 0.25),
        ("Score (0-10): 7", {}, 0.7),
        ("**Score [from 0 to 10]:** 9", {}, 0.9),
        ("Score: .5", {}, 0.05),
        ("Score: [8]", {}, 0.8),
        ("Score (6)", {}, 0.6),
        ("Score: 6. Maximum score (10).", {}, 0.6),
        ("Score: 6\n\nThe maximum score (10) is for experts.", {}, 0.6),
        ("The previous score (10) was generous. Score: 6", {}, 0.6),
        ("Its final_score: 6", {}, 0.6),
        ("Good work.\nScore (8)/10", {}, 0.8),
        ("Score [8] / 10", {}, 0.8),
        ("Score: 3 for form.\nOverall score (8)/10", {}, 0.8),
        ("Score (0-10): 8/10", {}, 0.8),
        ("Score: 8\nBaseline score: 3", {}, 0.8),
        ("Score: 8. (Previous score: 3.)", {}, 0.8),
        ("Score: 8 (vs. baseline score: 3)", {}, 0.8),
        ("Score: 8\nThe top score: 10 needs more.", {}, 0.8),
        ("Score: 8.\nA full score: 10 was not reached.", {}, 0.8),
        ("Score: 0,7", {"scale": (0, 1)}, 0.7),
        ("Score: 0,875", {"scale": (0, 1)}, 0.875),
        ("Score: 7,500", {}, 0.75),
        ("Score: 1,000", {"scale": (0, 1000)}, 1.0),
        ("Score: 1,250/2,000", {"scale": (0, 2000)}, 0.625),
        ("Score: \u22121,250.5", {"scale": (-2501, 0)}, 0.5),
        ("Score: 2,500,000 points.", {"scale": (0, 10**7)}, 0.25),
        ("Score: 7/10 for form.\nScore: 5/10 for style.\nOverall score: 6", {}, 0.6),
        ("Score 10 would need a perfect answer. Final score: 6", {}, 0.6),
        ("**My final score:** 8\nScore 0 means failure, and so on.", {}, 0.8),
        ("Score: 6. Maximum score: 10.", {}, 0.6),
        ("Score 7/10", {}, 0.7),
        ("Good. Score - 8", {}, 0.8),
        ("Good.\n**Score** - 8", {}, 0.8),
        ("Score: 6. Highest score: 10.", {}, 0.6),
        ("Score: 6\nBest possible score: 10", {}, 0.6),
        ("Score: 6\nLowest score: 0", {}, 0.6),
        ("I would say score: 4 (maximum possible score: 10)", {}, 0.4),
        ("I would say score: 4 (maximum score: 10)", {}, 0.4),
        ("I would say score: 4, of a max_score: 10", {}, 0.4),
        (r"Score: \boxed{8}", {}, 0.8),
        (r"Score (0-10): $\boxed{\text{7}}$", {}, 0.7),
        ("**Score:**\n\n$$\n\\boxed{8}\n$$", {}, 0.8),
        (r"Score: \boxed{-1}", {"scale": (-2, 2)}, 0.25),
        ("Good.\n**Score:** <b>8</b>", {}, 0.8),
        ("<strong>Score:</strong> <span style='color: red'>2.5</span>/10", {}, 0.25),
        ("Score: \\boxed{6}\nMaximum score: \\boxed{10}", {}, 0.6),
        ("Score: <b>6</b>\nScore <b>10</b> would need a perfect answer.", {}, 0.6),
        ("<grade>4</grade>", {"pattern": r"<grade>(\d)</grade>", "scale": [0, 5]}, 0.8),
    ],
)
def test_the_last_score_is_the_reward_within_the_scale(reply, options, reward):
    with judging({"t": [reply]}) as server, judge(server, **options) as ask:
        assert ask(episode()) == pytest.approx(reward, abs=1e-12)


def test_a_comma_that_a_users_own_pattern_takes_is_no_decimal_one():
    with judging({"t": ["Points: 1,000"]}) as server:
        with judge(server, pattern=r"Points: ([\d,]+)", scale=(0, 2000)) as ask:
            with pytest.raises(ValueError, match="'1,000'"):
                ask(episode())


BAD = {
    "without": ("Very good.", "NoScore"),
    "in another word": ("Underscore 3", "NoScore"),
    "in a fraction": (r"Score: \frac{8}{10}", "NoScore"),
    "after a blank": ("Score: <number>\n7 points", "NoScore"),
    "above": ("Score: 11", "ScoreOutOfRange"),
    "garbage": (b"\x00\xff no JSON", "NoReply"),
    "empty": ({}, "NoReply"),
    "list": ([1, 2], "NoReply"),
    "choiceless": ({**completion(""), "choices": []}, "NoReply"),
    "wordless": (completion(None), "NoReply"),
    "cut": (completion("Score: 2 would be for rudeness. Here", "length"), "CutShort"),
    "cut in thought": (completion(None, "length"), "CutShort"),
    "page": ((200, {"Content-Type": "text/html"}), "NoReply"),
    "key": ((401, {}), "AuthenticationError"),
    "busy": ((429, {"Retry-After": "1"}), "RateLimitError"),
    "broken": ((500, {}), "InternalServerError"),
    "gone": (None, "APIConnectionError"),
    "slow": (2.0, "APITimeoutError"),
}


def test_what_is_no_score_costs_its_episode_and_is_counted_by_cause():
    options = {"model": "m", "key_variable": None, "retries": 0, "prompt": "{{ task_id }}"}
    with judging({name: [item] for name, (item, _) in BAD.items()}) as server:

        def judged(tasks, **more):
            entry = {"function": "seeupo_jax.rewards.judge:Judge", "name": "judge"}
            entry["options"] = options | {"base_url": server.url} | more
            return collected([entry], make=reward_cases.Plain, tasks=tasks)

        # Only the slow reply comes too late, however busy the machine is.
        found = judged(["fine", *(name for name in BAD if name != "slow")])
        late = judged(["slow"], request_timeout_s=0.5)
        assert len(server.requests) == 1 + len(BAD)  # no retry
    found = replace(found, trajectories=(*found.trajectories, *late.trajectories))
    fine, *bad = found.trajectories
    assert fine.rewards == {"env": 0.5, "judge": 0.5} and fine.reward == 1.0
    got = {t.task_id: t.info["reward_failure"] for t in bad}
    assert got == {name: f"judge={cause}" for name, (_, cause) in BAD.items()}
    assert {t.stop for t in bad} == {"env_error"}
    metrics = rollout_metrics(found)
    assert metrics["rollout/reward_failed/judge=NoReply"] == 6
    assert metrics["rollout/reward_failed/judge=APITimeoutError"] == 1
    assert metrics["rollout/failed"] == len(BAD)


def test_a_closed_judge_has_no_connection():
    made = Judge(model="m", base_url="http://127.0.0.1:1/v1", key_variable=None)
    assert not made._client.is_closed()
    made.close()
    assert made._client.is_closed()


def test_what_may_pass_is_tried_again_when_the_server_says():
    wait_s = 0.9  # longer than the client's own first wait
    answers = {"t": [(429, {"Retry-After": str(wait_s)}), (500, {}), None, "Score: 6"]}
    with judging(answers) as server, judge(server, retries=3) as ask:
        assert ask(episode()) == 0.6
        assert len(server.requests) == 4
        first, *later = [after - before for before, after in pairwise(server.times)]
        assert first >= wait_s and min(later) > 0.3


def test_as_many_requests_run_at_once_as_the_entry_allows():
    tasks = [f"t{i}" for i in range(9)]
    with judging({task: [0.2] for task in tasks}) as server:
        options = {"model": "m", "base_url": server.url, "key_variable": None}
        options["prompt"] = "{{ task_id }}"
        entry = {"function": "seeupo_jax.rewards.judge:Judge", "options": options, "concurrency": 3}
        found = collected([entry], make=reward_cases.Plain, tasks=tasks)
    assert server.most == 3 and len(server.requests) == 9
    assert {t.rewards["Judge"] for t in found.trajectories} == {0.5}


def test_the_request_has_the_conversation_the_settings_and_the_key(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    sampling = {"temperature": 0.5, "max_tokens": 64, "guided_regex": "x"}
    file = tmp_path / "short.jinja"
    file.write_text("{{ info.gold }} {{ answer }} {{ low }}-{{ high }}")
    with judging({}) as server:
        with judge(server, key_variable="JUDGE_KEY", sampling=sampling, prompt=str(file)) as ask:
            ask(episode())
        default = Judge(model="q", base_url=server.url, key_variable=None)
        default(episode())
        default.close()
    first, second = server.requests
    content = "7 Here. Score: 10 0-10"
    assert first == {"model": "m", "messages": [{"role": "user", "content": content}], **sampling}
    assert server.keys == ["Bearer sk-secret", "Bearer none"]
    (message,) = second.pop("messages")
    assert second == {"model": "q", "temperature": 0}
    assert "[user]\nWhere is {{ my }} parcel?\n\n[assistant]\nHere. Score: 10" in message["content"]
    assert "from 0 (not at all) to 10 (perfectly)" in message["content"]


def test_a_reply_with_a_score_is_kept_by_model_prompt_and_sampling(tmp_path):
    folder = str(tmp_path / "cache")
    cut = completion("Score: 1", "length")
    answers = {"t": ["Score: 6", "Score: 1"], "u": ["none", "Score: 2"], "v": [cut, "Score: 3"]}
    with judging(answers) as server:
        with judge(server, cache=folder) as ask:
            assert [ask(episode()), ask(episode())] == [0.6, 0.6]
            assert len(server.requests) == 1
            with pytest.raises(Exception, match="no score in the reply"):
                ask(episode("u"))
            assert ask(episode("u")) == 0.2  # what had no score is asked for again
            with pytest.raises(CutShort):
                ask(episode("v"))
            assert ask(episode("v")) == 0.3
        with judge(server, cache=folder, scale=(0, 12)) as ask:
            assert ask(episode()) == 0.5
        asked = len(server.requests)
        for other in ({"model": "n"}, {"sampling": {"temperature": 1}}, {"prompt": "t {{ stop }}"}):
            with judge(server, cache=folder, **other) as ask:
                ask(episode())
        assert len(server.requests) == asked + 3


@pytest.mark.parametrize(
    "kept, by, other, reward",
    [
        ("Quality 8", {"pattern": r"Quality (\d)"}, {}, 0.4),
        ("Score: 8", {}, {"scale": (0, 5)}, 0.8),
        ("Score: 8 of ten", {}, {"pattern": r"of (\w+)"}, 0.4),
    ],
)
def test_a_kept_reply_that_cannot_be_read_otherwise_is_asked_for(tmp_path, kept, by, other, reward):
    with judging({"t": [kept, "Score: 4 of 4"]}) as server:
        with judge(server, cache=str(tmp_path), **by) as ask:
            assert ask(episode()) == 0.8
        with judge(server, cache=str(tmp_path), **other) as ask:
            assert [ask(episode()), ask(episode())] == [reward] * 2
    assert len(server.requests) == 2


def test_a_cache_that_cannot_be_written_costs_no_episode(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file in the folder's place")
    with judging({"t": ["Score: 6"]}) as server:
        with judge(server, cache=str(tmp_path / "cache")) as ask:
            assert ask(episode()) == 0.6
    assert "a judge's reply could not be kept: " in caplog.text


WRITER = """
import sys
from seeupo_jax.rewards.reply_cache import ReplyCache
cache = ReplyCache(sys.argv[1])
for i in range(60):
    cache.put({"model": "m", "number": i % 3}, f"reply {i % 3} " + "x" * 20_000)
    for number in range(3):
        reply = cache.get({"number": number, "model": "m"})
        assert reply is None or reply == f"reply {number} " + "x" * 20_000, reply[:20]
"""


def test_several_processes_share_a_cache(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(json.loads(f.read_text())["request"]["number"] for f in files) == [0, 1, 2]


def test_a_file_of_the_cache_is_replaced_whole_and_as_readable_as_others(tmp_path):
    cache = ReplyCache(tmp_path)
    cache.put({"model": "m", "number": 1}, "first")
    assert cache.get({"number": 1, "model": "m"}) == "first"  # whatever the order of the fields
    (path,) = tmp_path.rglob("*.json")
    with path.open() as opened:
        cache.put({"number": 1, "model": "m"}, "second")
        assert json.load(opened)["reply"] == "first"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_damaged_file_of_the_cache_is_no_reply(tmp_path):
    cache = ReplyCache(tmp_path)
    cache.put({"model": "m"}, "Score: 5")
    (file,) = tmp_path.rglob("*.json")
    for content in ("", "[1]", '{"reply": 5}', "\0"):
        file.write_text(content)
        assert cache.get({"model": "m"}) is None
    cache.put({"model": "m"}, "Score: 6")
    assert cache.get({"model": "m"}) == "Score: 6"


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            {"scale": (3, 3)},
            r"scale: got \(3, 3\); allowed: two finite numbers, the lower one first",
        ),
        ({"scale": 10}, "scale: got 10; allowed: two finite numbers"),
        ({"scale": (0, math.inf)}, r"scale: got \(0, inf\); allowed: two finite numbers"),
        ({"pattern": "("}, r"pattern: got '\(' \(missing"),
        ({"pattern": "score"}, "with 0 groups; allowed: one, the score"),
        ({"prompt": "{{ gold }}"}, "prompt: got gold; allowed: answer, high, info, low, messages"),
        ({"prompt": "{% for %}"}, "prompt: .* allowed: a Jinja template"),
        ({"prompt": "no_such.jinja"}, "prompt: got no_such.jinja .No such file"),
        ({"key_variable": "NO_SUCH_KEY"}, "environment variable NO_SUCH_KEY is not set; allowed"),
    ],
)
def test_an_option_that_is_wrong_is_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        Judge(**({"model": "m", "key_variable": None} | options))
    assert "\n" not in str(error.value)


def test_a_prompt_in_another_encoding_is_a_sentence(tmp_path):
    file = tmp_path / "latin.jinja"
    file.write_bytes("Gefäß".encode("latin-1"))
    with pytest.raises(ValueError, match=f"prompt: got {file} .*; allowed: a text in UTF-8"):
        Judge(model="m", key_variable=None, prompt=str(file))


def test_a_cache_and_a_prompt_may_lie_in_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ReplyCache("~/cache").put({"model": "m"}, "Score: 7")
    assert ReplyCache(tmp_path / "cache").get({"model": "m"}) == "Score: 7"
    (tmp_path / "prompt.jinja").write_text("Judge {{ task_id }}.")
    assert _template("~/prompt.jinja").render(task_id="t") == "Judge t."
