"""What trackers are given: numbers, histograms, conversations; W&B's offline mode for real."""

import builtins
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from places import TINY
from tensorboard_cases import events_of

from seeupo_jax.configuration.loading import load_config
from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.metrics.samples import histograms_of, samples_of
from seeupo_jax.metrics.trackers import Sample, _stored_id, as_code, check_trackers, tag_of
from seeupo_jax.types import Trajectory, TrajectoryStats

HOSTILE = "# title\n<script>alert(1)</script>\n```\n| a |\r\n\x85[x](javascript:1)\u2028**b**"
SAMPLE = Sample("train", {"task": "t\n# t", "reward": "1"}, [{"role": "user", "content": HOSTILE}])


def test_tensorboard_gets_histograms_and_conversations(tmp_path):
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.draw(7, {"sweep/advantage": np.array([-1.0, 0.5, 0.5])}, [SAMPLE])
    values = {v.tag: (e.step, v) for e in events_of(tmp_path) for v in e.summary.value}
    step, histogram = values["sweep/advantage"]
    assert step == 7 and (histogram.histo.num, histogram.histo.max) == (3, 0.5)
    step, text = values["sample/train/0/text_summary"]
    said = text.tensor.string_val[0].decode()
    assert step == 7 and "alert(1)" in said and "[user]" in said
    assert all(line.startswith("    ") for line in said.split("\n"))


@pytest.mark.parametrize(
    "name, tag",
    [
        ("sweep/kl", "sweep/kl"),
        ("sweep/weight/turn=1", "sweep/weight/turn_1"),
        ("eval/avg@4_low/user_turns=3", "eval/avg_4_low/user_turns_3"),
        ("eval_dev/hard/pass@4/env=order_desk", "eval_dev/hard/pass_4/env_order_desk"),
    ],
)
def test_a_name_that_can_be_read_back_from_its_tag_is_told_by_it_alone(name, tag):
    assert tag_of(name) == tag


def test_no_two_labels_of_tasks_share_a_tag_of_tensorboard(tmp_path):
    texts = ["".join(t) for n in range(4) for t in itertools.product("a_3/=", repeat=n)]
    kinds = {f"{label}={value}" for label in texts for value in texts}
    assert len({tag_of(f"eval/avg@4/{kind}") for kind in kinds}) == len(kinds)
    rates = {"amount=<100": 0.75, "amount=>100": 0.25, "lang=c++": 0.5, "lang=c##": 0.0}
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.write(1, {f"rollout/success_rate/{kind}": rate for kind, rate in rates.items()})
        writer.draw(1, {f"rollout/{kind}": np.array([rate]) for kind, rate in rates.items()}, [])
    tags = [v.tag for e in events_of(tmp_path) for v in e.summary.value]
    assert len(tags) == len({*tags}) == 2 * len(rates)


def test_nothing_that_a_model_says_is_markup_in_tensorboard():
    # Whatever splits lines for anyone: none begins without the four spaces of a code block.
    for line in as_code(HOSTILE).splitlines():
        assert line.startswith("    ")


def test_a_long_message_is_cut_and_says_so():
    text = Sample("train", {}, [{"role": "tool", "content": "x" * 5000}]).text
    assert len(text) < 4100 and text.endswith("and 1000 characters more")


def learned(advantage, *weights):
    return TrajectoryStats(advantage, np.array(weights, np.float32), (), ())


def test_histograms_are_of_finite_numbers_by_turn():
    stats = [learned(-1.0, 1.0, math.nan), None, learned(math.nan, -2.0), learned(3.0)]
    assert {name: x.tolist() for name, x in histograms_of(stats).items()} == {
        "sweep/advantage": [-1.0, 3.0],
        "sweep/weight/turn=1": [1.0, -2.0],
    }
    assert histograms_of([None]) == {}


def test_the_best_and_the_worst_conversation_stand_for_all():
    def episode(task, reward, stop="done"):
        info = {"score": reward, "member": 0}
        return Trajectory.of((), reward, 0, task_id=task, stop=stop, info=info)

    every = [episode("a", 0.5), episode("b", 1.0), episode("c", 0.0), episode("d", 9, "timeout")]
    assert [s.about["task"] for s in samples_of(every, "train")] == ["b", "c"]
    later = [*every, episode("e", 1.0), episode("f", 0.0), episode("g", 0.5)]
    assert [s.about["task"] for s in samples_of(later, "train")] == ["b", "c"]
    assert [s.about["success"] for s in samples_of(every, "train")] == ["yes", "no"]
    assert [s.about["task"] for s in samples_of(every[:1], "train")] == ["a"]
    assert samples_of(every[3:], "train") == []


def test_a_tracker_that_is_not_installed_is_told_with_what_installs_it(monkeypatch):
    real = importlib.util.find_spec

    def missing(name, *rest):
        return None if name == "wandb" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    check_trackers(["tensorboard"])
    with pytest.raises(ValueError, match=r"got 'wandb', .* pip install 'seeupo_jax\[wandb\]'\.$"):
        check_trackers(["tensorboard", "wandb"])


def test_several_trackers_are_named_with_commas():
    file = TINY
    for text in ("tensorboard,wandb", "('tensorboard', 'wandb')"):
        config = load_config(file, [f"telemetry.trackers={text}"])
        assert config.telemetry.trackers == ("tensorboard", "wandb")
    assert load_config(file, ["telemetry.trackers=wandb"]).telemetry.trackers == ("wandb",)


def test_wandb_is_not_imported_without_being_asked_for(tmp_path, monkeypatch):
    real = builtins.__import__

    def guarded(name, *rest):
        assert name.partition(".")[0] != "wandb"
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", guarded)
    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.write(1, {"a": 1})


WANDB_RUN = """if True:
    import json, sys
    import numpy as np
    from seeupo_jax.metrics.metrics_log import MetricsWriter
    from seeupo_jax.metrics.trackers import Sample
    import wandb
    first = int(sys.argv[2])
    own = wandb.init(project="mine", dir=sys.argv[3]) if sys.argv[3:] else None
    with MetricsWriter(sys.argv[1], ["wandb"]) as writer:
        writer.resume_from(first)
        writer.open()
        sample = Sample("train", {"task": "t"}, [{"role": "user", "content": "<script>"}])
        for iteration in (first, first + 1):
            writer.write(iteration, {"sweep/kl": iteration / 8, "note": "t", "bad": np.nan})
            writer.draw(iteration, {"sweep/advantage": np.arange(3.0)}, [sample])
        print(json.dumps([wandb.run.id, dict(wandb.run.summary)], default=str))
    if own is not None:
        own.log({"mine": 1})  # it raises if the run is over
"""


@pytest.mark.exhaustive
def test_wandb_offline_takes_it_all_and_a_resumed_run_keeps_its_id_beside_another(tmp_path):
    def run(first, *own):
        quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", WANDB_RUN, str(tmp_path), str(first), *own],
            env=os.environ | quiet | {"WANDB_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    number, summary = run(1)
    assert summary["sweep/kl"] == 0.25 and summary["iteration"] == 2
    assert {"histogram/sweep/advantage", "sample/train"} <= summary.keys()
    assert not {"note", "bad"} & summary.keys()
    (tmp_path / "own").mkdir()
    mine, summary = run(2, str(tmp_path / "own"))
    assert not [name for name in summary if name[0] != "_"]
    assert mine != number == (tmp_path / "wandb" / "run-id.txt").read_text().strip()
    folders = [*(tmp_path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2 and all(folder.name.endswith(number) for folder in folders)
    # Their records hold, in protocol buffers, that every metric ("*") is drawn over iterations.
    logs = [*(tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert len(logs) == 2 and all(b'\x12\x01*"\x09iteration' in log.read_bytes() for log in logs)


def test_the_id_of_a_run_is_the_environments_or_the_kept_one_or_new(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    file = tmp_path / "run-id.txt"
    file.write_text("")  # of a machine that stopped as it was written
    number = _stored_id(tmp_path)
    assert number and _stored_id(tmp_path) == number == file.read_text().strip()
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert _stored_id(tmp_path) == "mine"
    assert _stored_id(tmp_path, "mine") not in ("mine", number)  # an application's run has it
    monkeypatch.delenv("WANDB_RUN_ID")
    assert _stored_id(tmp_path) == file.read_text().strip() != "mine"


def test_wandb_without_an_account_is_told_in_a_sentence(tmp_path):
    code = WANDB_RUN
    bare = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    bare |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "1"],
        env=bare,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert "wandb cannot begin" in done.stderr and "WANDB_MODE=offline" in done.stderr
