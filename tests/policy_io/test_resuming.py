"""What a run that resumes must not do to the work of the one before it."""

import dataclasses
import json
import re
import shutil

import jax.numpy as jnp
import pytest

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.loading import from_dict, load_config, to_dict
from seeupo_jax.configuration.schema import Chat
from seeupo_jax.evaluation.missing import remaining_splits, selection_notice
from seeupo_jax.metrics.metrics_log import MetricsWriter
from seeupo_jax.metrics.run_manifest import Launch, note_checkpoints, write_run_manifest
from seeupo_jax.policy_io.resuming import (
    check_no_lost_checkpoints,
    check_same_chat,
    check_same_sweep,
    check_same_warm_start,
    warm_start_note,
)

TAUGHT = ("teacher.path=models/teacher",)
FADING = ("optimizer.schedule=linear", "iterations=30")


def as_saved(config):
    return json.loads(json.dumps(to_dict(config)))


@pytest.mark.parametrize(
    ("begun", "resumed", "field"),
    [
        ((), ("algorithm.order=forward",), "algorithm.order: got 'forward'; allowed: 'reverse'"),
        ((), ("recipe=grpo",), "algorithm."),
        ((), ("algorithm.importance.clip=2",), "algorithm.importance: got {"),
        (("optimizer.learning_rate=0.5",), (), "optimizer.learning_rate: got "),
        ((), ("experts.z_coef=0.5",), "experts.z_coef: got 0.5; allowed: 0.0"),
        (FADING, (*FADING, "iterations=60"), "iterations: got 60; allowed: 30"),
        (FADING, FADING, None),
        (TAUGHT, (*TAUGHT, "teacher.coef=0.5"), "teacher.coef: got 0.5; allowed: 1.0"),
        (TAUGHT, (*TAUGHT, "teacher.top_k=8"), "teacher.top_k: got 8; allowed: None"),
        (TAUGHT, ("teacher.path=moved/teacher",), None),  # its files are compared
        ((), ("iterations=90",), None),  # at the same rate
        ((), ("checkpoint.every=1", "evaluation.k=2", "batching.buckets=(256,)"), None),
    ],
)
def test_a_stopped_sweep_ends_by_the_rule_that_it_began_with(begun, resumed, field):
    config, saved = load_config({}, resumed), as_saved(load_config({}, begun))
    if field is None:
        return check_same_sweep(config, 7, saved, "runs/x/stopped")
    with pytest.raises(ValueError, match=f"^config.{re.escape(field)}.* iteration 7.* runs/x/stop"):
        check_same_sweep(config, 7, saved, "runs/x/stopped")


def test_a_sweep_that_a_version_with_other_fields_stopped_is_refused_in_a_sentence():
    saved = as_saved(from_dict({}))
    saved["algorithm"] |= {"step_coef": 1.0, "critic": "none"}
    with pytest.raises(ValueError, match="^stopped: was stopped with config.algorithm.step_coef"):
        check_same_sweep(from_dict({}), 7, saved, "stopped")


def test_a_sweep_that_an_earlier_version_stopped_had_the_default_of_a_field_that_is_new():
    saved = as_saved(from_dict({}))
    del saved["algorithm"]["importance"], saved["experts"]
    check_same_sweep(from_dict({}), 7, saved, "stopped")
    with pytest.raises(ValueError, match="^config.algorithm.importance: got .*; allowed: None"):
        check_same_sweep(from_dict({"algorithm": {"importance": {"clip": 2}}}), 7, saved, "stopped")


def test_conversations_are_made_tokens_of_as_before(tmp_path, monkeypatch):
    """A model folder whose own options list tools by their signatures."""
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, own in ((model, "signatures"), (other, "json")):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "chat.json").write_text(json.dumps({"system": True, "tools": own}))

    def load(path, **chat):
        return from_dict({"model": {"path": str(path)}, "chat": chat})

    def check(config, begun, **noted):
        check_same_chat(config, tmp_path, {"config": as_saved(begun), **noted})

    plain, note = load(model), {"system": True, "tools": "signatures", "template": None}
    for noted in ({}, {"chat": {**note, "template_kwargs": {}}}):  # of earlier versions; of these
        check(plain, plain, **noted)
        check(load(model, tools="signatures"), plain, **noted)
        for changed, field in (
            (load(model, tools="none"), "tools: got 'none'; .*'signatures'"),
            (load(model, tools="signatures", system=False), "system: got False; .*True"),
            (load(model, tools="signatures", template_kwargs={"x": 1}), "template_kwargs: got"),
            (load(model, tools="signatures", template="a.jinja"), "template: got 'a.jinja'"),
        ):
            with pytest.raises(ValueError, match=f"^config.chat.{field}.*another run.$"):
                check(changed, plain, **noted)
    with pytest.raises(ValueError, match="^config.chat.tools: got 'json'; .*'signatures'"):
        check(load(other), plain, chat=note)
    monkeypatch.chdir(tmp_path)
    check(load(model, template="a.jinja"), load(model, template=str(tmp_path / "a.jinja")))


@pytest.mark.parametrize(
    ("given", "selects_on", "notes", "wanted"),
    [
        ((), "test", {}, None),
        ((), "validation", {}, ("split 'validation'", "split 'test'")),
        (("evaluation.k=4",), "dev", {"selected_on": "dev"}, ("k 4", "k 2")),
        (("evaluation.temperature=0.9",), "test", {}, None),  # that of training
        (
            ("evaluation.tasks=9", "evaluation.temperature=0.5"),
            *("test", {}, ("tasks 9, temperature 0.5", "tasks 64, temperature 0.9")),
        ),
        (("evaluation.k=4",), None, {}, None),
        (("evaluation.k=4",), "dev", {"selected_on": None}, None),
    ],
)
def test_a_line_says_where_scores_are_measured_otherwise(given, selects_on, notes, wanted):
    begun = ("rollout.temperature=0.9", "evaluation.k=2")
    notes = {"config": as_saved(load_config({}, begun)), **notes}
    line = selection_notice(load_config({}, (*begun, *given)), selects_on, notes)
    if wanted is None:
        assert line is None
    else:
        after, before = wanted
        assert f" with {after} from now on, and were with {before}: scores before and" in line


@pytest.mark.parametrize(
    ("given", "selects_on", "notes", "score", "wanted"),
    [
        ((), "validation", {}, None, ["train", "validation"]),
        ((), "validation", {}, 0.5, ["train"]),
        ((), "test", {}, None, ["test", "train"]),  # else the last checkpoint had no score
        ((), "test", {}, 0.5, ["train"]),
        ((), None, {}, None, ["train"]),
        (("evaluation.k=9",), "validation", {}, 0.5, ["train", "validation"]),
        ((), "validation", {"evaluated": False}, None, ["test", "train", "validation"]),
        (("iterations=3",), "validation", {}, 0.5, []),
        (("iterations=4",), "validation", {"evaluated": False}, None, ["test", "validation"]),
    ],
)
def test_a_run_that_is_shortened_to_a_checkpoint_lacks_what_an_end_is_evaluated_on(
    given, selects_on, notes, score, wanted
):
    """It was evaluated on `test` after the second of four iterations."""
    begun = ("evaluation.every=2", "evaluation.extra_splits=train", "checkpoint.every=2")
    config = as_saved(load_config({}, (*begun, "iterations=4")))
    notes = {"config": config, "selected_on": selects_on, **notes}
    now = load_config({}, (*begun, "iterations=2", *given))
    assert remaining_splits(now, selects_on, 2, notes, score) == wanted


STAGES = "warm_start.stages=[{'steps': 2, 'demonstrations': {'skill': 1.0}}]"


def made(workdir, *choices):
    """The configuration of a workdir in which a warm start has ended."""
    folder, config = workdir / "warm_start", load_config({}, [STAGES, *choices])
    folder.mkdir()
    (folder / "warm_start.json").write_text(json.dumps(warm_start_note(config)))
    check_same_warm_start(config, workdir)
    return config


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("model.width=64", "model.width: got 64; .*: 128"),
        ("model.path=package:order_desk", "model.path: got 'package:order_desk'; .*: None"),
        ("seed=3", "seed: got 3; .*: 0"),
        ("warm_start.batch_size=4", "warm_start.batch_size: got 4; .*: 64"),
        (STAGES.replace("2", "3"), r"warm_start.stages: got \[{'steps': 3, .*: \[{'steps': 2, "),
        ("env.options={'level': 2}", "env.options: got {'level': 2}; .*: {}"),
        ("chat.tools=json", "chat.tools: got 'json'; .*: 'none'"),
        (("model.dtype=bfloat16", "model.remat=full", "model.scan_layers=True"), None),
        (("warm_start.output=x", "iterations=9", "env.workers=3", "rollout.tasks=9"), None),
    ],
)
def test_a_policy_of_another_warm_start_is_not_taken(tmp_path, caplog, changed, sentence):
    made(tmp_path, "chat.tools=none")
    changed = [changed] if isinstance(changed, str) else changed
    config = load_config({}, [STAGES, *changed])
    if sentence is None:
        check_same_warm_start(config, tmp_path)
    else:
        with pytest.raises(ValueError, match=f"^config.{sentence}.* new workdir for another run.$"):
            check_same_warm_start(config, tmp_path)
    assert not caplog.records


def test_a_warm_start_begins_with_one_model_whatever_it_is_called(tmp_path, monkeypatch):
    """What sets its sizes is the folder, not the fields of `config.model`."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "chat.json").write_text('{"tools": "json"}')
    (tmp_path / "link").symlink_to("model")
    made(tmp_path, f"model.path={tmp_path / 'model'}")
    monkeypatch.chdir(tmp_path)
    for path in ("model", "link"):
        config = load_config({}, [STAGES, f"model.path={path}", "model.width=64"])
        check_same_warm_start(config, tmp_path)
    check_same_warm_start(dataclasses.replace(config, chat=Chat(tools="json")), tmp_path)
    with pytest.raises(ValueError, match="^config.chat.tools: got 'none'; .*: 'json'"):
        check_same_warm_start(dataclasses.replace(config, chat=Chat(tools="none")), tmp_path)
    with pytest.raises(ValueError, match="^config.model.path: got 'other'; .*/model'. Choose"):
        check_same_warm_start(load_config({}, [STAGES, "model.path=other"]), tmp_path)


def test_a_warm_start_of_a_version_that_left_no_note_is_taken_with_a_warning(tmp_path, caplog):
    config = made(tmp_path)
    check_same_warm_start(load_config({}, ["seed=3", "model.path=other"]), tmp_path)  # none of it
    assert not caplog.records
    for text in ("{", None):
        note = tmp_path / "warm_start" / "warm_start.json"
        note.unlink() if text is None else note.write_text(text)
        check_same_warm_start(config, tmp_path)
        assert "/warm_start does not say what it was made with" in caplog.messages.pop()
        caplog.clear()


def ran(workdir, config, *, iterations):
    """A workdir with the record of a run that was killed before it wrote a checkpoint."""
    with MetricsWriter(workdir) as metrics:
        for iteration in range(iterations + 1):
            metrics.write(iteration, {"x": 1.0})
    parts = {"config": to_dict(config), "devices": {}, "model": {}}
    write_run_manifest(workdir, resumes=None, launch=Launch(), **parts)
    return workdir


def save(folder):
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(5, {"x": jnp.zeros(1)}, {})
    checkpoints.close()


def in_folder(folder):
    return from_dict({"checkpoint": {"directory": str(folder)}})


@pytest.mark.parametrize("iterations", [0, 5])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, iterations):
    workdir, config = ran(tmp_path / "run", from_dict({}), iterations=iterations), from_dict({})
    (workdir / "checkpoints" / "5" / "state").mkdir(parents=True)  # of a save that did not end
    (workdir / "policy").mkdir()
    check_no_lost_checkpoints(config, workdir)
    check_no_lost_checkpoints(in_folder(tmp_path / "another"), workdir)
    check_no_lost_checkpoints(config, tmp_path / "new")


def test_a_run_whose_checkpoints_were_removed_or_moved_is_refused(tmp_path):
    workdir, config = ran(tmp_path / "run", from_dict({}), iterations=5), from_dict({})
    note_checkpoints(workdir, "/far/away")
    wanted = f"got {workdir}, whose metrics.jsonl reaches iteration 5 .* to /far/away; none was"
    with pytest.raises(ValueError, match=f"{wanted} found in {workdir}/checkpoints. Allowed: "):
        check_no_lost_checkpoints(config, workdir)
    ran(workdir, config, iterations=0)  # begun anew: what was noted is forgotten
    check_no_lost_checkpoints(config, workdir)


@pytest.mark.parametrize("place", ["", "stopped"])
def test_another_directory_than_that_of_the_checkpoints_is_refused(tmp_path, place):
    """Also where a version that noted nothing wrote them."""
    kept = tmp_path / "kept"
    workdir = ran(tmp_path / "run", in_folder(kept), iterations=5)
    check_no_lost_checkpoints(from_dict({}), workdir)
    save(kept / place)
    with pytest.raises(ValueError, match=f"checkpoints to {kept}; none was found in {workdir}/ch"):
        check_no_lost_checkpoints(from_dict({}), workdir)
    shutil.rmtree(kept)
    check_no_lost_checkpoints(from_dict({}), workdir)


def test_a_run_that_had_ended_is_refused_without_its_checkpoints(tmp_path):
    """It may be of a version that noted nothing."""
    workdir = ran(tmp_path / "run", from_dict({}), iterations=5)
    (workdir / "policy").mkdir()
    (workdir / "policy" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="Allowed: config.checkpoint.directory as it was"):
        check_no_lost_checkpoints(from_dict({}), workdir)
