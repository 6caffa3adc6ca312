"""Supervised fine-tuning as its user runs it: trained, stopped, killed, resumed, refused."""

import json
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import loaded_python
import numpy as np
import numpy_model
import pytest
import run_cases
import sft_cases as cases
from metric_names import checked
from places import TINY
from process_cases import environment
from twin_policy import tensors_of, twin_arch

from seeupo_jax import Callback, evaluate, load_config, report, sft, train
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.envs.base import Demonstration
from seeupo_jax.errors import DataChanged, NotLearning
from seeupo_jax.evaluate import main as evaluation_main
from seeupo_jax.evaluation.policy_sources import run_policy
from seeupo_jax.learner.imitation.action_segments import to_segments
from seeupo_jax.learner.imitation.imitation_step import Imitation
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.lora import load_adapters
from seeupo_jax.policy.network import split_model
from seeupo_jax.sft import iterate, main
from seeupo_jax.supervised.sft_components import SftState

EVERY = jax.devices()
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return run_cases.save_policy(tmp_path_factory.mktemp("sft") / "model")


@pytest.fixture(scope="module")
def data(model):
    return cases.write_desk(model.parent / "desk.jsonl")


def load(model, *choices):
    return load_config(TINY, (f"model.path={model}", "log_checksum=True", *cases.CHOICES, *choices))


@pytest.fixture(scope="module")
def undisturbed(model, data):
    """16 conversations in batches of 4, three epochs: twelve steps."""
    result = sft(load(model, "sft.epochs=3"), data, model.parent / "undisturbed")
    return result


def of_steps(workdir):
    return [line for line in checked(read_metrics(workdir)) if "sft/loss" in line]


def checksums(workdir):
    return [(line["iteration"], line["state/checksum"]) for line in of_steps(workdir)]


def losses(workdir):
    return {
        line["iteration"]: line["eval/loss"]
        for line in read_metrics(workdir)
        if "eval/loss" in line
    }


def params_of(folder):
    return split_model(from_pretrained(str(folder), dtype="float32")[0])[1]


def assert_equal(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_run_learns_and_leaves_the_policy_of_the_lowest_held_out_loss(undisturbed):
    workdir, lines = undisturbed.workdir, of_steps(undisturbed.workdir)
    assert undisturbed.stopped is None and undisturbed.policy == workdir / "policy"
    assert [line["iteration"] for line in lines] == list(range(1, 13))
    held_out = losses(workdir)
    assert list(held_out) == [0, 2, 4, 6, 8, 10, 12]
    assert lines[-1]["sft/loss"] < 0.7 * lines[0]["sft/loss"]
    assert held_out[12] < 0.8 * held_out[0]
    best = min(list(held_out)[1:], key=held_out.get)
    assert undisturbed.step == best
    saved = Checkpoints(workdir / "checkpoints", 1)
    exported = params_of(workdir / "policy")
    _, state, notes = saved.restore({"params": exported}, step=best, partial=True)
    assert_equal(state["params"], exported)
    assert notes["data_position"] == best * 4
    about = json.loads((workdir / "run.json").read_text())
    assert about["config"]["iterations"] == 12
    assert lines[-1]["sft/epoch"] == 3 and lines[0]["sft/shared_fraction"] > 0


def test_the_policy_can_be_evaluated_and_reported_and_is_no_training(undisturbed, model, capsys):
    config = load(model, "env.name=run_environment:Echo", "rollout.max_action_tokens=4")
    found = evaluate(config, undisturbed.workdir, k=1, split="test", step=10)
    assert found.policy["iteration"] == 10
    with pytest.raises(ValueError, match=r"step: got 3; allowed: those in .*: 8, 10, 12"):
        evaluate(config, undisturbed.workdir, step=3)
    report.main(["report", f"--workdir={undisturbed.workdir}"])
    page = (undisturbed.workdir / "report.html").read_text()
    assert "held-out loss" in page and "Supervised fine-tuning" in page and "finished" in page
    assert "Learning curves" not in page
    with pytest.raises(ValueError, match="the folder of supervised fine-tuning"):
        train(config, undisturbed.workdir)


def test_the_same_command_again_does_nothing_but_export(undisturbed, model, data, capsys):
    before = (undisturbed.workdir / "metrics.jsonl").read_bytes()
    again = sft(load(model, "sft.epochs=3"), data, undisturbed.workdir)
    assert (undisturbed.workdir / "metrics.jsonl").read_bytes() == before
    assert again.step == undisturbed.step
    sft(load(model, "sft.epochs=3", "optimizer.learning_rate=0.5"), data, undisturbed.workdir)
    said = capsys.readouterr().out
    resumed = json.loads((undisturbed.workdir / "run.json").read_text())["resumed"]
    assert resumed[-2]["after"] == resumed[-1]["after"] == 12 and resumed[-2]["changes"] == {}
    (change,) = resumed[-1]["changes"].items()
    assert change[0] == "config.optimizer.learning_rate" and change[1]["after"] == 0.5
    assert said.count(f"settings changed after 12: {change[0]}: ") == 1


def test_a_run_whose_checkpoints_are_not_found_is_refused(undisturbed, model, data, tmp_path):
    before = (undisturbed.workdir / "metrics.jsonl").read_bytes()
    about = json.loads((undisturbed.workdir / "run.json").read_text())
    assert about["checkpoints"] == str(undisturbed.workdir / "checkpoints")
    config = load(model, "sft.epochs=3", f"checkpoint.directory={tmp_path / 'other'}")
    with pytest.raises(ValueError, match="reaches iteration 12 .* none was found in .*/other"):
        sft(config, data, undisturbed.workdir)
    assert (undisturbed.workdir / "metrics.jsonl").read_bytes() == before


def command(model, data, workdir):
    choices = ("sft.epochs=3", "log_checksum=True")
    module = [sys.executable, "-m", "seeupo_jax.sft"]
    return [*module, *cases.arguments(model, data, workdir, *choices)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_or_killed_resumes_to_the_bit(
    number, undisturbed, model, data, tmp_path
):
    called, workdir = command(model, data, tmp_path / "run"), tmp_path / "run"
    process = loaded_python.LoadedPython(
        called, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (workdir / "checkpoints" / "4" / "manifest.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == (-number if number == signal.SIGKILL else 0), errors
    stopped = read_metrics(workdir)[-1]["iteration"]
    if number == signal.SIGTERM and stopped < 12:
        assert f"stopped after step {stopped}; rerun the command to resume" in printed
    done = loaded_python.run(called, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert checksums(workdir) == checksums(undisturbed.workdir)
    assert losses(workdir) == losses(undisturbed.workdir)
    assert_equal(params_of(workdir / "policy"), params_of(undisturbed.policy))


class Stop(Callback):
    def __init__(self, at):
        self.at, self.events = at, []

    def on_start(self, run, iteration):
        self.events.append(("start", iteration))

    def on_iteration(self, run, iteration, metrics):
        self.events.append(("step", iteration))
        self.metrics = {"iteration": iteration, **metrics}
        if iteration == self.at:
            run.stop("enough")

    def on_evaluation(self, run, iteration, metrics):
        self.events.append(("evaluation", iteration))

    def on_end(self, run, error):
        self.events.append(("end", run.stopping))


def test_a_callback_stops_a_run_between_any_two_steps(undisturbed, model, data, tmp_path):
    config = load(model, "sft.epochs=3")
    stop = Stop(3)
    result = sft(config, data, tmp_path / "run", [stop])
    assert (result.stopped, result.policy, result.step) == ("enough", None, None)
    order = [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3)]
    assert stop.events == [("start", 0), *order, ("end", "enough")]
    assert stop.metrics == of_steps(result.workdir)[-1] and "time/sft_s" in stop.metrics
    shorter = shutil.copytree(tmp_path / "run", tmp_path / "shorter")
    sft(load(model, "sft.steps=3"), data, shorter)  # the last step is measured, as any run's is
    assert list(losses(shorter)) == [0, 2, 3]
    resumed = Stop(None)
    sft(config, data, tmp_path / "run", [resumed])
    assert resumed.events[0] == ("start", 3)
    assert checksums(tmp_path / "run") == checksums(undisturbed.workdir)


def test_a_run_whose_held_out_loss_stops_falling_ends_and_keeps_the_best(
    model, data, tmp_path, capsys
):
    config = load(model, "sft.epochs=9", "sft.patience=2", "optimizer.learning_rate=0.3")
    result = sft(config, data, tmp_path / "run")
    held_out = losses(result.workdir)
    steps = list(held_out)
    assert result.stopped is None and steps[-1] < 36
    assert result.step == steps[-3] == min(steps[1:], key=held_out.get)
    assert read_metrics(result.workdir)[-1]["eval/worse"] == 2
    again = sft(config, data, tmp_path / "run")  # patience is at its end still
    assert list(losses(again.workdir)) == steps and again.step == result.step
    exported = checksum(params_of(result.policy))
    with run_policy(config, result.workdir) as source:  # what is evaluated and served
        assert (source.iteration, checksum(source.params)) == (result.step, exported)
    called = cases.arguments(model, data, result.workdir)
    evaluation_main(["evaluate", *[a for a in called if "--data" not in a], "--explain"])
    assert f"of the checkpoint after iteration {result.step} in" in capsys.readouterr().out
    best = result.workdir / "checkpoints" / str(result.step)
    max(best.rglob("*"), key=lambda file: file.stat().st_size).write_bytes(b"damaged")
    with run_policy(config, result.workdir) as source:
        assert source.iteration == steps[-1]
    shutil.rmtree(best)
    without = sft(config, data, tmp_path / "run")
    assert without.step == steps[-1] and without.policy == result.policy
    with run_policy(config, result.workdir) as source:
        assert source.iteration == steps[-1]
    assert f"after step {result.step}, is gone" in capsys.readouterr().out


def test_steps_in_a_row_without_a_finite_gradient_end_a_run_also_over_a_restart(
    model, data, tmp_path, capsys, monkeypatch
):
    real, skipped = Imitation.step, iter([1, 0, 1, 1])

    def step(self, state, batch):
        state, metrics = real(self, state, batch)
        return state, metrics | {"update_skipped": next(skipped)}

    monkeypatch.setattr(Imitation, "step", step)
    config, workdir = load(model, "sft.epochs=3", "stop_after_idle=2"), tmp_path / "run"
    assert sft(config, data, workdir, [Stop(3)]).stopped == "enough"
    with pytest.raises(NotLearning, match="of 2 steps in a row .* learned after step 2;"):
        sft(config, data, workdir)
    assert [line["sft/updates_skipped"] for line in of_steps(workdir)] == [1, 0, 1, 1]
    output = capsys.readouterr().out
    for number, warned in enumerate([True, False, True, False], start=1):
        assert (f"step {number}: the gradient is not finite" in output) == warned
    assert (workdir / "checkpoints" / "4" / "manifest.json").exists()


@pytest.mark.parametrize("done, saved", [(0, []), (4, [4])])
def test_a_loss_that_was_not_measured_before_the_run_ended_is_saved_with_it(done, saved):
    steps = []
    run = SimpleNamespace(
        parts=SimpleNamespace(steps=done, progress=SimpleNamespace(phase=lambda *_: None)),
        checkpoints=SimpleNamespace(save=lambda state: steps.append(state.done) or state),
        evaluate=lambda state: state._replace(evaluated=True),
        due_to_save=lambda state: state.evaluated,
        finish=lambda state: state.done,
    )
    assert iterate(run, SftState(done, None)) == done and steps == saved


def test_a_run_whose_data_changes_saves_what_it_has():
    done, saved = SftState(4, None, evaluated=True, saved=False), []

    def prepare_step(state):
        raise DataChanged("here")

    run = SimpleNamespace(
        parts=SimpleNamespace(steps=9, progress=SimpleNamespace(phase=lambda *_: None)),
        exhausted=lambda state: False,
        prepare_step=prepare_step,
        stopped=saved.append,
    )
    with pytest.raises(DataChanged, match="^here$") as error:
        iterate(run, done)
    assert saved == [done] and error.value.exit_code == 2


def test_adapters_train_alone_and_are_what_is_left(model, data, tmp_path):
    result = sft(load(model, "lora.rank=2", "sft.steps=2"), data, tmp_path / "run")
    base = from_pretrained(str(model), dtype="float32")[0]
    adapted = load_adapters(base, result.policy)
    assert (adapted.layers[0].mlp.down.lora_b[...] != 0).any()
    assert not (result.policy / "model.safetensors").exists()


def test_devices_and_microbatches_do_not_change_a_run(undisturbed, model, data, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: EVERY[:4])
        choices = ("mesh.data=2", "mesh.tensor=2", "sft.epochs=1")
        result = sft(load(model, *choices), data, tmp_path / "run")
    wanted = of_steps(undisturbed.workdir)
    for line, same in zip(of_steps(result.workdir), wanted, strict=False):
        for name in ("sft/loss", "sft/grad_norm", "sft/trained_tokens"):
            assert line[name] == pytest.approx(same[name], rel=1e-4), name
    assert losses(result.workdir)[4] == pytest.approx(losses(undisturbed.workdir)[4], rel=1e-4)


def test_the_average_is_measured_on_last_messages_and_left_as_of_the_lowest_loss(
    model, data, tmp_path
):
    """At rates so high that the held-out loss is lowest before the end."""
    other = cases.write_desk(tmp_path / "other.jsonl", 5, split="test")
    choices = ("sft.train_on=last", "optimizer.ema=0.5", "optimizer.schedule=cosine")
    choices += (f"sft.held_out_data={other}", "sft.steps=3", "optimizer.learning_rate=0.4")
    result = sft(load(model, *choices), data, tmp_path / "run")
    lines, held_out = of_steps(result.workdir), losses(result.workdir)
    rates = [line["sft/learning_rate"] for line in lines]
    assert rates == pytest.approx([0.4, 0.3, 0.1]) and list(held_out) == [0, 2, 3]
    assert result.step == 2
    _, state, _ = Checkpoints(result.workdir / "checkpoints", 1).restore(
        {"ema": params_of(result.policy), "params": params_of(result.policy)}, step=2, partial=True
    )
    assert_equal(state["ema"], params_of(result.policy))
    with pytest.raises(AssertionError):
        assert_equal(state["params"], state["ema"])
    loss, tokens = by_numpy(result.policy, other)
    assert held_out[2] == pytest.approx(loss, rel=1e-5)
    assert read_metrics(result.workdir)[-1]["eval/tokens"] == tokens
    last = sft(load(model, *choices, "checkpoint.keep_best=0"), data, result.workdir)
    assert last.step == 3
    assert held_out[3] == pytest.approx(by_numpy(last.policy, other)[0], rel=1e-5)


def by_numpy(folder, data):
    """Mean loss of a policy on the last messages of a file's conversations, and their tokens."""
    policy, tokenizer = from_pretrained(str(folder), dtype="float32")
    network, params = split_model(policy)
    arch, weights = twin_arch(network.arch), tensors_of(params, network.arch)
    logps = []
    for line in data.read_text().splitlines():
        shown = json.loads(line)
        (segment,) = to_segments(Demonstration(shown["messages"], shown["tools"]), tokenizer)
        logp_L, _ = numpy_model.token_logps(weights, segment.tokens_L, arch, temperature=1.0)
        logps.extend(logp_L[segment.turn_L == segment.turn_L.max()])
    return -np.mean(logps), len(logps)


USER = {"role": "user", "content": "Where is order 4075?"}
ANSWER = {"role": "assistant", "content": "On its way."}
GOOD, LONG = {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER] * 40}


def refusal(capsys, *given):
    with pytest.raises(SystemExit) as ended:
        main(["sft", *given])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and error.startswith("error: ")
    return error.removeprefix("error: ")


@pytest.mark.parametrize(
    "lines, message",
    [
        ([GOOD, {"messages": [USER]}], "line 2: messages: got the roles user; allowed: at least"),
        ([GOOD, GOOD, LONG], "line 3: got a conversation of"),
        ([GOOD, {"messages": [USER | {"role": "bot"}, ANSWER]}], "line 2: messages[0].role: got"),
        ([], "has no conversation"),
        ([GOOD], "got 1 conversations, of which none is left to train on"),
    ],
)
def test_bad_data_is_one_sentence_before_anything_is_made(
    lines, message, model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("seeupo_jax.policy_io.build.load_policy", None)  # which would be an error
    data = cases.write(tmp_path / "bad.jsonl", lines)
    error = refusal(capsys, *cases.arguments(model, data, tmp_path / "run"))
    assert error.startswith(f"--data: {data}, ") or error.startswith("--data: ")
    assert message in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("options", ["{'skil': 1}", "{'skill': '0.4'}"])
def test_options_that_demonstrations_do_not_have_are_refused(options, model, tmp_path, capsys):
    choices = (f"sft.options={options}", "env.name=order_desk")
    error = refusal(capsys, *cases.arguments(model, "demonstrations", tmp_path / "run", *choices))
    assert error.startswith(f"--data: got the options {options}: ") and "skil" in error


@pytest.mark.parametrize(
    "choice, message",
    [
        ("sft.data=none", "--data: got none"),
        ("model.path=none", "config.model.path: got none; allowed for sft"),
        ("warm_start.stages=({},)", "config.warm_start.stages: got 1; allowed for sft: none"),
        ("profile.steps=2", "config.profile.steps: got (2,); allowed for sft: none"),
        ("sft.held_out=0.0", "config.sft.patience: got 1; allowed: none where"),
        (
            'lora={"rank": 2, "per_turn": 3}',
            "config.lora.per_turn: got 3; allowed for sft: 0 or 1, whose adapters",
        ),
        (
            'optimizer={"name": "optax:adamw", "kwargs": {"b1": "high"}}',  # as a user's own
            "config.optimizer: optax:adamw with kwargs={'b1': 'high'} and schedule=constant cannot",
        ),
        ("optimizer.warmup_iterations=90", "config.optimizer.warmup_iterations: got 90"),
        ("rollout.max_context=40000", "config.rollout.max_context: got 40000"),
        ("sft.held_out_data=none.jsonl", "config.sft.held_out_data: got 'none.jsonl', which"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(
    choice, message, model, data, tmp_path, capsys
):
    given = cases.arguments(model, data, tmp_path / "run", "sft.patience=1")
    given = [each for each in given if not each.startswith(f"--config.{choice.split('=')[0]}=")]
    if choice.startswith("sft.data"):
        given = [each for each in given if not each.startswith("--data")]
    if choice.startswith("rollout.max_context"):
        given.append("--config.batching.buckets=(40000,)")
    assert refusal(capsys, *given, f"--config.{choice}").startswith(message)


def test_long_conversations_are_left_out_or_cut_and_counted(model, tmp_path, capsys):
    data = cases.write(tmp_path / "some.jsonl", [*[GOOD] * 5, LONG])
    choices = ("sft.held_out=0", "sft.steps=1", "checkpoint.export=False")
    for too_long, name in (("skip", "skipped"), ("cut", "cut")):
        config = load(model, *choices, f"sft.too_long={too_long}")
        result = sft(config, data, tmp_path / too_long)
        (line,) = of_steps(result.workdir)
        assert not losses(result.workdir)
        counts = {n: line[f"sft/{n}_conversations"] for n in ("skipped", "cut")}
        assert counts == {"skipped": 0, "cut": 0} | {name: 1}
        said = capsys.readouterr().out
        assert f"1 conversations are {name}: longer than rollout.max_context" in said
        assert f"{5 + (name == 'cut')} conversations to train on" in said
        assert result.policy is None and result.step == 1


@pytest.mark.parametrize(
    "choice, message",
    [
        ("seed=1", "config.seed: got 1; allowed for this workdir, whose checkpoint has it: 0."),
        ("sft.batch_size=2", "config.sft.batch_size: got 2"),
        ("sft.held_out=0.3", "config.sft.held_out: got 0.3; allowed for this workdir"),
        ("model.dtype=bfloat16", "config.model.dtype: got 'bfloat16'; allowed for this workdir"),
        ("sft.train_on=last", "--data: got conversations, or tokens of them, other than"),
    ],
)
def test_another_run_in_a_workdir_is_refused(choice, message, undisturbed, model, data, capsys):
    workdir = undisturbed.workdir
    given = cases.arguments(model, data, workdir, "sft.epochs=3", choice)
    assert refusal(capsys, *given).startswith(message)
    assert refusal(capsys, *given, "--explain").startswith(message)


def test_explain_says_what_would_run_and_writes_nothing(model, data, undisturbed, tmp_path, capsys):
    # On a CPU the layers compute nothing again unless they are scanned: it all counts.
    given = cases.arguments(model, data, tmp_path / "run", "model.remat=full")
    main(["sft", *given, "--explain"])
    said = " ".join(capsys.readouterr().out.split())
    assert "activations of a microbatch, remat none" in said
    assert "16 conversations to train on" in said and "4 held out" in said
    assert "steps 4 of 4 conversations: 1.00 epochs" in said
    assert "from the start" in said and not (tmp_path / "run").exists()
    assert "at the end and at the lowest held-out loss so far" in said
    more = ("sft.epochs=3", "checkpoint.keep_best=0")  # only the newest checkpoints are kept
    main(["sft", *cases.arguments(model, data, undisturbed.workdir, *more), "--explain"])
    said = capsys.readouterr().out
    assert "resuming after step 12 of 12: nothing is left to train" in said
    assert "at the end" in said and "lowest held-out loss so far" not in said
    main(["sft", *cases.arguments(model, data, tmp_path / "all", "sft.held_out=0"), "--explain"])
    assert "lowest held-out loss so far" not in capsys.readouterr().out
