"""The command as its user runs it: one process, killed and started again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import loaded_python
import numpy as np
import pytest
import run_cases
from metric_names import checked
from places import TINY
from process_cases import environment

from seeupo_jax import read_trajectories
from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.learner.optimization.parameter_groups import split_trained
from seeupo_jax.metrics.checksum import checksum
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.lora import load_adapters
from seeupo_jax.policy.network import split_model
from seeupo_jax.policy_io import build
from seeupo_jax.policy_io.policy_folder import export_policy
from seeupo_jax.training.checks import check_config

CONFIG = TINY
# A shorter warm start; 120 steps on 400 episodes solve no task either.
DEMONSTRATIONS = "{'skill': 0.5, 'episodes': 60}"
STAGE = f"{{'steps': 30, 'learning_rate': 1e-2, 'demonstrations': {DEMONSTRATIONS}}}"

# What is said is rewarded by its length: no task is solved, and without rewards nothing is learned.
REWARDS = "--config.rewards=({'function': 'run_environment:judge'},)"


def command(workdir: Path, *overrides: str) -> list[str]:
    data = f"--config.env.options={{'data_dir': '{workdir.parent / 'data'}'}}"
    module = [sys.executable, "-m", "seeupo_jax.train"]
    stages = f"--config.warm_start.stages=({STAGE},)"
    return [
        *module,
        f"--config={CONFIG}",
        f"--workdir={workdir}",
        data,
        stages,
        REWARDS,
        *overrides,
    ]


def run(workdir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return loaded_python.run(command(workdir, *overrides), env=environment(), timeout=300)


def iterations(workdir: Path) -> list[dict]:
    return [line for line in checked(read_metrics(workdir)) if "rollout/success_rate" in line]


def checksums(workdir: Path) -> list[tuple[int, str]]:
    return [(line["iteration"], line["state/checksum"]) for line in iterations(workdir)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nothing disturbed, and what it printed."""
    workdir = tmp_path_factory.mktemp("train") / "finished"
    done = run(workdir, "--config.profile.steps=2")
    assert done.returncode == 0, done.stderr
    return workdir, done.stdout


def test_a_run_from_nothing_may_be_explained_when_it_has_checkpoints(finished):
    """Its model is that of the checkpoint, though the warm start has made a folder of it."""
    workdir, _ = finished
    done = run(workdir, "--config.profile.steps=2", "--config.iterations=6", "--explain")
    assert done.returncode == 0, done.stderr
    assert "resuming after iteration 4" in done.stdout
    assert "began with" not in done.stdout + done.stderr


def continue_from(finished: Path, name: str) -> Path:
    """A new workdir that has the finished run's warm policy, so that only iterations are run."""
    workdir = finished.parent / name
    workdir.mkdir()
    shutil.copytree(finished / "warm_start", workdir / "warm_start")
    return workdir


def test_a_run_leaves_metrics_checkpoints_curve_and_a_summary(finished):
    workdir, printed = finished
    assert [i for i, _ in checksums(workdir)] == [1, 2, 3, 4]
    evaluations = [line for line in read_metrics(workdir) if "eval/avg@2" in line]
    assert [line["iteration"] for line in evaluations] == [0, 2, 4]
    assert (workdir / "learning_curve.png").stat().st_size > 5000
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["2", "3", "4"]
    assert "attention: xla (model.attention=auto on cpu)" in printed
    assert "remat: none (model.remat=auto): about " in printed
    # 1 layer x (key, value) x 1 head x 16 numbers of 4 bytes are 128 a token.
    assert "KV cache: 16 slots for 16 conversations, 256 KiB in 128 pages of 16 tokens" in printed
    plan = "(128 B per token, 16 KiB per conversation of 128 tokens; 16 of them fit at once)"
    assert plan in printed
    assert "iteration 4/4" in printed and "avg@2" in printed and "Where to look next" in printed
    note = json.loads((workdir / "warm_start" / "warm_start.json").read_text())
    assert note["warm_start.batch_size"] == 16 and note["model.width"] == 32


def test_a_trace_of_the_chosen_iteration_names_the_parts_of_the_run(finished):
    workdir, printed = finished
    assert f"wrote the trace {workdir / 'profile' / 'iteration2'}" in printed
    (trace,) = (workdir / "profile").rglob("*.xplane.pb")
    assert trace.is_relative_to(workdir / "profile" / "iteration2")
    data = trace.read_bytes()
    for scope in (b"rollout/decode", b"rollout/prefill", b"sweep/score", b"sweep/turn"):
        assert scope in data


def test_every_promised_metric_is_written(finished):
    workdir, _ = finished
    promised = (
        "rollout/success_rate rollout/reward_mean rollout/turns_mean rollout/tokens_per_second"
        " sweep/tokens_per_second sweep/turns sweep/clip_fraction sweep/kl sweep/weight_max"
        " logp/sampler_trainer_gap time/rollout_s time/sweep_s time/compile_s state/checksum"
    ).split()
    for line in iterations(workdir):
        assert not [name for name in promised if line.get(name) is None]


def test_sampler_and_trainer_agree_in_every_iteration(finished):
    gaps = [line["logp/sampler_trainer_gap"] for line in iterations(finished[0])]
    assert 0 < max(gaps) < 1e-4


def test_the_sweep_compiles_nothing_after_the_third_iteration(finished):
    compiled = [line["sweep/programs_compiled"] for line in iterations(finished[0])]
    assert compiled[0] > 0 and compiled[3:] == [0] and sum(compiled) <= 12


def test_killed_and_restarted_gives_the_same_numbers(finished):
    workdir = continue_from(finished[0], "killed")
    run_cases.killed_after(2, workdir, command(workdir))
    done = run(workdir, "--config.env.isolation=process")  # where environments run changes nothing
    assert done.returncode == 0, done.stderr
    assert checksums(workdir) == checksums(finished[0])
    assert shards(workdir) == shards(finished[0])
    record = json.loads((workdir / "run.json").read_text())
    (resumed,) = record["resumed"]
    assert resumed["at"] >= record["began"] and resumed["after"] == 2 and not resumed["in_sweep"]
    isolation = {"before": "thread", "after": "process"}
    assert resumed["changes"] == {"config.env.isolation": isolation}
    assert "settings changed after 2: config.env.isolation: thread -> process" in done.stdout
    assert "Settings changed on resuming\n  after 2: config.env.isolation" in done.stdout


def test_a_run_in_another_dtype_is_refused_and_its_record_stays(finished):
    workdir = continue_from(finished[0], "other_dtype")
    workdir, _ = finished
    record = (workdir / "run.json").read_bytes()
    done = run(workdir, "--config.model.dtype=bfloat16", "--config.iterations=5")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: config.model.dtype: got 'bfloat16'; allowed for this workdir, whose checkpoint has"
        " it: 'float32'. Choose a new workdir for another run."
    )
    assert (workdir / "run.json").read_bytes() == record


def shards(workdir: Path) -> dict[str, bytes]:
    """The files of trajectories."""
    return {file.name: file.read_bytes() for file in (workdir / "trajectories").iterdir()}


def test_every_trajectory_is_kept_with_what_was_learned_of_it(finished):
    workdir, _ = finished
    names = {
        "eval_test": (0, 2, 4),
        "eval_validation": (2, 4),  # what a checkpoint is selected by
        "train": (1, 2, 3, 4),
    }
    assert sorted(shards(workdir)) == [
        f"{name}_00000{i}.jsonl.gz" for name, at in names.items() for i in at
    ]
    lines = {line["iteration"]: line for line in iterations(workdir)}
    for iteration, line in lines.items():
        records = [*read_trajectories(workdir, split="train", iterations=[iteration])]
        assert [(r["group"], r["member"]) for r in records] == [
            (group, member) for group in range(4) for member in range(4)
        ]
        assert np.mean([r["success"] for r in records]) == line["rollout/success_rate"]
        weights = [w for r in records for w in r["weights"] if w is not None]
        assert max(map(abs, weights)) == pytest.approx(line["sweep/weight_max"], abs=1e-4)
        # Eq. 8: the last turn is updated first, when there is no ratio yet.
        last = [(r["weights"][r["turns"] - 1], r["advantage"]) for r in records]
        np.testing.assert_allclose(*zip(*last, strict=True), atol=1e-5)
        assert np.ptp([advantage for _, advantage in last]) > 1
        acted = [
            (logp, trainer, entropy)
            for r in records
            for s in r["segments"]
            for turn, logp, trainer, entropy in zip(
                s["turn"], s["logp"], s["trainer_logp"], s["entropy"], strict=True
            )
            if turn >= 0
        ]
        logp, trainer, entropy = np.array(acted, float).T
        assert len(logp) == line["rollout/action_tokens"]
        gap = np.abs(logp - trainer).max()
        assert gap == pytest.approx(line["logp/sampler_trainer_gap"], abs=2e-5)
        assert entropy.mean() == pytest.approx(line["rollout/entropy"], abs=1e-5)
    for record in read_trajectories(workdir, split="test"):
        assert record["weights"] == [] and record["advantage"] is None
        assert record["segments"] and record["turns"] > 0


def test_the_run_says_how_it_was_begun(finished):
    record = json.loads((finished[0] / "run.json").read_text())
    assert record["command"][:3] == ["python", "-m", "seeupo_jax.train"]
    assert record["config_file"] == str(CONFIG) and record["config"]["iterations"] == 4
    assert record["devices"] == {"platform": "cpu", "kind": "cpu", "count": 1, "processes": 1}
    assert record["model"]["parameters"] > 10_000 and record["resumed"] == []


def test_times_and_kinds_are_written(finished):
    lines = iterations(finished[0])
    for number, line in enumerate(lines):
        assert line["time/prefill_s"] > 0 and line["time/decode_s"] > 0
        assert line["time/prefill_s"] + line["time/decode_s"] <= line["time/rollout_s"]
        assert ("time/checkpoint_s" in line) == (number > 0)
        counts = [v for name, v in line.items() if name.startswith("rollout/trajectories/turns=")]
        assert sum(counts) == 16
        kinds = [name for name in line if name.startswith("rollout/success_rate/request=")]
        assert kinds and "sweep/weight_mean/turn=1" in line
        assert "rollout/failed/cause" not in " ".join(line)
    evaluations = [line for line in read_metrics(finished[0]) if "eval/avg@2" in line]
    assert min(line["time/evaluation_s"] for line in evaluations) > 0
    assert all(line["time/compile_s"] <= line["time/evaluation_s"] for line in evaluations)
    assert {"evaluation/programs_compiled"} <= set.intersection(*map(set, evaluations))


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(finished):
    workdir = continue_from(finished[0], "damaged")
    shutil.copytree(finished[0] / "checkpoints", workdir / "checkpoints")
    shutil.copy(finished[0] / "metrics.jsonl", workdir)
    newest = workdir / "checkpoints" / "4" / "state"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    done = run(workdir)
    assert done.returncode == 0, done.stderr
    assert "checkpoint 4" in done.stdout and "is skipped" in done.stdout
    assert "resuming after iteration 3" in done.stdout
    assert checksums(workdir) == checksums(finished[0])


def test_the_trained_policy_is_left_as_a_model_folder(finished):
    workdir, _ = finished
    model, tokenizer = from_pretrained(str(workdir / "policy"), dtype="float32")
    _, params = split_model(model)
    found = Checkpoints(workdir / "checkpoints", 2).restore({"params": params}, partial=True)
    step, state, _ = found
    assert step == 4
    jax.tree.map(np.testing.assert_array_equal, params, state["params"])
    before, _ = from_pretrained(str(workdir / "warm_start"), dtype="float32")
    assert (split_model(before)[1]["embedding"] != params["embedding"]).any()
    assert tokenizer.vocab_size <= model.arch.vocab_size


def test_adapters_train_resume_evaluate_and_come_out_in_pefts_format(tmp_path):
    base, workdir = run_cases.save_policy(tmp_path / "model"), tmp_path / "adapters"
    choices = ["--config.lora.rank=2", "--config.model.param_dtype=bfloat16"]
    groups = [{"pattern": "layers/0/v/*", "frozen": True}, {"pattern": "*/lora_b", "name": "lion"}]
    choices += [f"--config.optimizer.groups={groups}", "--config.optimizer.ema=0.5"]
    run_cases.finish(run_cases.start(base, workdir, *choices, "--config.iterations=2"))
    (printed,) = run_cases.finish(run_cases.start(base, workdir, *choices, "--config.iterations=3"))
    assert "resuming after iteration 2" in printed
    assert len({value for _, value in checksums(workdir)}) == 3
    assert max(line["logp/sampler_trainer_gap"] for line in iterations(workdir)) < 1e-4
    model, _ = from_pretrained(str(base), dtype="float32")
    adapted = load_adapters(model, workdir / "policy")
    assert adapted.arch.lora.rank == 2
    assert (adapted.layers[0].mlp.down.lora_b[...] != 0).any()
    assert (adapted.layers[0].v.lora_b[...] == 0).all()  # its group is frozen
    evaluations = [line for line in read_metrics(workdir) if "eval/tasks" in line]
    assert [line["eval/ema"] for line in evaluations] == [1.0] * len(evaluations) != []
    _assert_the_average_was_exported(base, workdir, choices, adapted)
    run_cases.finish(run_cases.start(base, workdir, *choices, "--k=1", module="evaluate"))
    # The checkpoint holds the adapters and their optimizer's state, not the model.
    manifest = json.loads((workdir / "checkpoints" / "3" / "manifest.json").read_text())
    arrays = [name for name, kind in manifest["manifest"]["leaves"].items() if "," in kind]
    assert any(name.startswith("params/") for name in arrays)
    assert all("lora_" in name for name in arrays), arrays


def _assert_the_average_was_exported(base, workdir, choices, adapted):
    """WORKDIR/policy is checkpoint 3's average, and what `--weights=trained` exports is not."""
    overrides = [text.removeprefix("--config.") for text in (*run_cases.CHOICES, *choices)]
    config = load_config(CONFIG, [*overrides, f"model.path={base}"])
    _, example = build.load_policy(config, str(base))
    checkpoints = Checkpoints(workdir / "checkpoints", 2)
    _, saved, _ = checkpoints.restore({"params": example, "ema": example}, partial=True)
    checkpoints.close()
    assert export_policy(config, workdir, "3", workdir / "trained", "trained") == 3
    trained = load_adapters(from_pretrained(str(base))[0], workdir / "trained")
    for model, wanted in ((adapted, saved["ema"]), (trained, saved["params"])):
        params, _ = split_trained(config.optimizer.groups, *split_model(model))
        jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert checksum(saved["ema"]) != checksum(saved["params"])


def test_evaluate_plays_the_last_checkpoint(finished):
    workdir, _ = finished
    out = workdir.parent / "evaluation.json"
    arguments = command(workdir, "--split=train", "--k=3", f"--json={out}")
    arguments[2] = "seeupo_jax.evaluate"
    done = loaded_python.run(arguments, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["iteration"] == 4
    low, value, high = (result[f"eval_train/avg@3{end}"] for end in ("_low", "", "_high"))
    assert 0 <= low <= value <= high <= 1


@pytest.mark.parametrize(
    "override, logged",
    [
        ("algorithm.ordr=reverse", "config.algorithm.ordr: no such field; did you mean order?"),
        ("iterations=ten", "config.iterations: got 'ten' (str); allowed: a whole number."),
        (
            "algorithm.clip_low=-0.1",
            "config.algorithm.clip_low: got -0.1; allowed: a number from 0",
        ),
        ("algorithm.order=backwards", "config.algorithm.order: got 'backwards'; allowed: one of"),
        ("env.name=chess", "env.name: got 'chess'; allowed: order_desk, bfcl, "),
        ("evaluation.split=dev", "order_desk split: got 'dev'; allowed: train, validation, test."),
        ("optimizer.name=adamm", "config.optimizer.name: got 'adamm'; allowed:"),
        (
            'optimizer={"name": "optax:adamw", "kwargs": {"b1": "high"}}',  # as a user's own
            "optimizer: optax:adamw with kwargs={'b1': 'high'} and schedule=constant cannot take",
        ),
        (
            "mesh.data=3",
            "config.mesh: got {'data': 3, 'fsdp': 1, 'expert': 1, 'context': 1, 'tensor': 1}, a"
            " product of 3",
        ),
        ("model.path=/no/such/folder", "model path: got '/no/such/folder'; allowed:"),
        ("batching.microbatch_tokens=0", "config.batching.microbatch_tokens: got 0; allowed:"),
    ],
)
def test_bad_input_is_told_in_one_sentence_before_any_work(override, logged):
    with pytest.raises(ValueError) as error:
        check_config(load_config(CONFIG, [override]))
    assert logged in str(error.value)


def test_a_mistake_ends_the_command_with_its_sentence_and_no_traceback(tmp_path):
    done = run(tmp_path / "run", "--config.algorithm.ordr=reverse")
    assert done.returncode == 2
    assert done.stderr.startswith("error: config.algorithm.ordr: no such field")
    assert "Traceback" not in done.stderr and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_mistake_in_the_demonstrations_is_a_sentence_too(tmp_path):
    stage = "--config.warm_start.stages=({'steps': 2, 'demonstrations': {'skill': 2.0}},)"
    done = run(tmp_path / "run", stage)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith(
        "error: order_desk skill: got 2.0; allowed: a number from 0 to 1.\n"
    )


def test_a_workdir_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(tmp_path / "file" / "run")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
