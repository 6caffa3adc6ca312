"""What --explain says is what a run then does; nothing is written for it."""

import dataclasses
import io
import json
import os
import re
import sys
from types import SimpleNamespace

import jax
import loaded_python
import numpy as np
import pytest
import run_cases as cases
from places import ROOT, TINY
from process_cases import PYTHONPATH

from seeupo_jax.checkpoint import Checkpoints
from seeupo_jax.configuration.agent_schema import Agent
from seeupo_jax.configuration.algorithm import Algorithm
from seeupo_jax.configuration.loading import load_config, to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.display.progress import ProgressDisplay
from seeupo_jax.evaluate import main as evaluate
from seeupo_jax.evaluation.evaluation_run import episodes_name, evaluation_settings
from seeupo_jax.learner.credit.advantages import compile_credit, credit_programs
from seeupo_jax.metrics.compilation import Compilations
from seeupo_jax.parallel.compiling import WORKERS
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.parallel.stop_signal import StopRequest
from seeupo_jax.planning.abstract_run import Planned, abstract_run
from seeupo_jax.planning.explain import explain_training as explain_training_module
from seeupo_jax.planning.explain.explain_parts import (
    episode_section,
    plan_run,
    reward_lines,
    share_lines,
)
from seeupo_jax.planning.explain.explain_training import explain_training
from seeupo_jax.planning.explain.explanation import listed, print_explanation
from seeupo_jax.policy.architecture import Moe
from seeupo_jax.policy_io import build
from seeupo_jax.train import main as train
from seeupo_jax.training import build_learner
from seeupo_jax.training.checks import check_config, check_planned
from seeupo_jax.training.run import begin_run
from seeupo_jax.trajectories.episodes import EpisodeFile, EvaluationEpisode

QUICKSTART = ROOT / "configs" / "quickstart.py"
pytestmark = pytest.mark.usefixtures("one_device")
SMOLLM2 = ROOT / "third_party" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cases.save_policy(tmp_path_factory.mktemp("explain") / "model")


def explain(path, workdir, capsys, *overrides):
    """What is printed, on one line."""
    config = load_config(path, overrides)
    print_explanation(explain_training(config, workdir))
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def call(main, *arguments):
    """A command in this process."""
    main(["command", *arguments])


def test_the_quickstart_is_told_before_any_of_it(tmp_path, capsys):
    said = explain(QUICKSTART, tmp_path / "run", capsys)
    for fact in (
        "package:order_desk: 705,600 parameters, all of them train",
        "1 x cpu (cpu): one device",
        "2.692 MiB parameters that train 5.383 MiB optimizer 2.692 MiB reference policy",
        "24 MiB KV cache of a rollout",
        "remat: none (model.remat=auto)",
        "programs 25, compiled before the first iteration",
        "turn 64 128 192 256 320 384 448 512, refresh 512",
        "train: 50,000 test: 2,000, of which 64 are tested validation: 2,000, of which 64 are",
        "recipe seeupo: order=reverse, ratio=geometric",
        "iterations 30, from the start",
        "16 tasks x 8 = 128 trajectories of at most 6 turns, 128 tokens, 16 per action",
        "at most 6 optimizer steps; 30 are left",
        "test: 7, after iterations 0, 5, 10, 15, 20, 25, 30: 64 tasks x k=4, 1,792 episodes",
        "validation: 3, after iterations 10, 20, 30: 64 tasks x k=4, 768 episodes",
        "3, after iterations 10, 20, 30, of at most 8.075 MiB each",
        "metrics.jsonl; run.json; trajectories/",
    ):
        assert fact in said, fact
    assert not list(tmp_path.iterdir())


def test_a_small_policy_on_a_cpu_has_few_shapes_unless_asked(tmp_path, capsys):
    left_open = "batching.microbatch_tokens=none"
    said = explain(QUICKSTART, tmp_path, capsys, left_open)
    assert "programs 11, compiled before the first iteration" in said
    assert (
        "prefill 2x128 16x16, decode 16x8 128x8" in said
        and "score 512, turn 512, refresh 512" in said
    )
    assert "few shapes, since a policy of at most 2,000,000 parameters" in said
    config = load_config(QUICKSTART, [left_open])
    mesh = make_mesh(config.mesh)
    assert build.build_shapes(config, mesh, 1).chunk == 256
    assert build.architecture_of(config, mesh).attention == "all_pairs"
    longer = load_config(QUICKSTART, [left_open, "rollout.max_context=513"])
    assert build.build_shapes(longer, mesh, 1).lengths == (640,)
    assert build.architecture_of(longer, mesh).attention == "xla"  # the bundled policy's loops
    for other in (["batching.microbatch_tokens=1024"], ["model.path=none", "model.width=512"]):
        config = load_config(QUICKSTART, [left_open, *other])
        assert len(build.build_shapes(config, mesh, 1).lengths) == 12
        assert build.architecture_of(config, mesh).attention == "xla"


def test_a_gpu_has_larger_microbatches_unless_asked():
    """None is here: of its mesh only the platform and the shape are looked at."""
    mesh = make_mesh(load_config(QUICKSTART, []).mesh)
    gpu = SimpleNamespace(
        shape=mesh.shape, devices=np.full(mesh.devices.shape, SimpleNamespace(platform="gpu"))
    )
    for tokens, longest in (("none", 8192), ("1024", 1024)):
        config = load_config(QUICKSTART, [f"batching.microbatch_tokens={tokens}"])
        lengths = build.build_shapes(config, gpu, 1).lengths
        assert lengths[-1] == longest and len(lengths) == 12  # as many programs either way


def test_rewards_are_told_with_their_weights_where_there_are_any():
    function = "docs.examples.own_rewards:brevity"
    rewards = [{"function": function, "weight": 0.5, "timeout_s": 9}, {"name": "env", "weight": 2}]
    assert reward_lines(load_config(QUICKSTART, [f"rewards={json.dumps(rewards)}"])) == [
        "2 x env: what the environment pays",
        f"0.5 x brevity: {function}, 8 at a time, a call at most 9 s",
    ]
    named = load_config(QUICKSTART, ['rewards=[{"name":"polite","weight":-1}]'])
    assert reward_lines(named)[1] == "-1 x polite: named by the environment"
    assert reward_lines(load_config(QUICKSTART)) == []
    (judged,) = reward_lines(load_config(QUICKSTART, ["recipe=slate"]))
    assert judged.startswith("judge of each turn's candidates: of the environment, 8 at a time")


def test_the_environments_of_a_mixture_and_how_tasks_are_drawn_are_told():
    environments = [{"name": "order_desk", "weight": 3}, {"name": "order_desk", "label": "other"}]
    options = f"env.options.environments={json.dumps(environments)}"
    mixed = load_config(QUICKSTART, ["env.name=mixture", options, "curriculum.by=band"])
    title, lines = episode_section(mixed)
    assert title == "environment" and lines[0].startswith("mixture; 8 threads, a call at most 60 s")
    assert lines[1:] == ["order_desk, weight 3: order_desk", "other, weight 1: order_desk"]
    groups, drawn = share_lines(mixed)
    assert groups == (
        "groups of every iteration: 12 of order_desk (50,000 tasks), 4 of other (50,000 tasks)"
    )
    assert drawn.startswith(
        "drawn by success: a task's weight is 1 where 0.2 <= p <= 0.8, at least"
    )
    one = load_config(QUICKSTART, ["env.name=mixture", options, "rollout.tasks=1"])
    with pytest.raises(
        ValueError, match="rollout.tasks: got 1, of which none is of other with the"
    ):
        check_config(one)
    assert share_lines(load_config(QUICKSTART)) == []


def test_no_parameter_is_allocated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "load_policy", None)
    monkeypatch.setattr(build_learner, "make_state", None)
    before = len(jax.live_arrays())
    explain(QUICKSTART, tmp_path, capsys)
    assert len(jax.live_arrays()) == before


def test_fewer_tasks_than_an_iteration_takes_are_told(model, tmp_path, capsys):
    choices = [text.removeprefix("--config.") for text in cases.CHOICES]
    choices += [f"model.path={model}", "rollout.tasks=16"]
    said = explain(TINY, tmp_path, capsys, *choices)
    assert "config.rollout.tasks: got 16, and there are 12 training tasks" in said


def test_experts_that_are_replayed_take_memory(tmp_path, capsys):
    folder = cases.save_policy(tmp_path / "model", moe=Moe(4, 2, 16, normalize=True))
    choices = [text.removeprefix("--config.") for text in cases.CHOICES]
    choices += [f"model.path={folder}", "algorithm.router_replay=rollout"]
    said = explain(TINY, tmp_path, capsys, *choices)
    # Of 8 rows of 128 tokens, with room for 3 x 128 to refresh, 2 bytes each.
    assert " 8 KiB experts that a step's routers are given" in said
    assert "at most 2 KiB for the experts of an iteration's tokens, 2 B each, 2 KiB a shard" in said


def test_the_likeliest_tokens_of_a_teacher_take_memory(model, tmp_path, capsys):
    choices = [text.removeprefix("--config.") for text in cases.CHOICES]
    choices += [f"model.path={model}", f"teacher.path={model}", "teacher.coef=0.5"]
    said = explain(TINY, tmp_path, capsys, *choices, "teacher.top_k=8")
    # Of 8 rows of 128 tokens, 8 ids and 9 log-probabilities each.
    assert " 68 KiB likeliest tokens of teachers that a step reads" in said
    assert "the loss gets 0.5 x KL(teacher || policy) of each token, over the teacher's 8" in said
    assert "advantages of tokens get" not in said
    plain = explain(TINY, tmp_path, capsys, *choices)
    assert "likeliest tokens" not in plain
    assert "advantages of tokens get 0.5 x log(teacher / policy)" in plain


def test_a_policy_that_is_made_from_nothing_has_a_warm_start(tmp_path, capsys):
    said = explain(ROOT / "configs" / "bfcl_tiny.py", tmp_path, capsys)
    assert "randomly initialised: 836,864 parameters" in said
    assert "a warm start first, 320 steps on demonstrations" in said
    assert "train: 100, of which 100 are tested test: 100, of which 100 are tested" in said
    assert "evaluations test: 2, after iterations 0, 10" in said and "warm_start/" in said
    assert "train: 2, after iterations 0, 10: 100 tasks" in said
    (tmp_path / "warm_start").mkdir()
    (tmp_path / "warm_start" / "warm_start.json").write_text('{"seed": 7}')
    with pytest.raises(ValueError, match="^config.seed: got 0; allowed .* warm start was made"):
        explain(ROOT / "configs" / "bfcl_tiny.py", tmp_path, capsys)


def test_adapters_are_told_apart(tmp_path, capsys):
    said = explain(QUICKSTART, tmp_path, capsys, "lora.rank=4", "recipe=grpo", "iterations=0")
    found = re.search(r"([\d,]+) parameters, ([\d,]+) of them train, in adapters of rank 4", said)
    every, trained = (int(each.replace(",", "")) for each in found.groups())
    assert every - trained == 705_600 and trained > 0
    assert "recipe grpo: " in said and "ratio=token" in said
    assert "programs at most 11, as they are needed" in said and "checkpoints none" in said


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="third_party/models/setup.sh smollm2 fetches it")
def test_a_published_model_is_told_from_its_header(tmp_path, capsys):
    said = explain(ROOT / "configs" / "smollm2_order_desk.py", tmp_path, capsys)
    assert "134,515,008 parameters" in said and "layers scanned" in said
    assert "activations of a microbatch, remat full" in said and "model.remat=auto" not in said


class Looks(StopRequest):
    """Is never asked to stop, and counts the programs compiled before each look at it."""

    def __init__(self):
        super().__init__()
        self.compilations, self.looks = Compilations(), []

    @property
    def asked(self):
        self.looks.append(self.compilations.programs)
        return False

    @asked.setter
    def asked(self, value):
        self.looks = []


@pytest.fixture
def begin(model, tmp_path):
    """A run of one layer, compiled as it is; its configuration, the run and its state."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    chosen = [text.removeprefix("--config.") for text in cases.CHOICES]

    def begin(*overrides, request=None):
        request = StopRequest() if request is None else request
        every = [*chosen, f"model.path={model}", *overrides]
        config = load_config(TINY, every)
        progress = ProgressDisplay(config.iterations, "plain", stream=io.StringIO())
        policy, params = build.load_policy(config, str(model))
        return config, *begin_run(config, tmp_path, progress, request, policy, params)

    yield begin
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("recipe=ppo",),
        ("algorithm.old_policy=turn", "algorithm.inner_epochs=2", "rollout.slots=4"),
        ("lora.rank=2", "lora.per_turn=3"),
    ],
    ids=["seeupo", "ppo", "epochs", "adapters per turn"],
)
def test_as_many_programs_are_compiled_as_were_told(begin, model, overrides):
    request = Looks()
    config, run, state = begin(*overrides, request=request)
    found, _ = plan_run(config, str(model))
    with run, jax.set_mesh(run.parts.policy.mesh):
        jax.clear_caches()
        request.looks = []
        run.compile(state)
        request.compilations.close()
        spent = dict(run.parts.log.spent)
    # Whether to stop is looked at after each of them, while others are compiled beside it, and a
    # critic's two of crediting together.
    assert max(np.diff([*request.looks, request.compilations.programs])) <= WORKERS + 1
    assert len(request.looks) >= len(found.rollout_programs() + found.sweep_programs()) - 4
    assert len(found.rollout_programs()) == spent["rollout/programs_compiled"]
    assert len(found.sweep_programs()) == spent["sweep/programs_compiled"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"advantage": "gigpo"},
        {"advantage": "hgpo"},
        {"advantage": "gdpo"},
        {"advantage": "returns"},
        {"advantage": "returns", "scale": "none"},
        {"advantage": "gae", "critic": {"kind": "head"}},
        {"advantage": "istar"},
        {"advantage": "spa", "critic": {"kind": "head"}},
    ],
)
def test_crediting_compiles_what_is_named(model, choices):
    algorithm = Algorithm(**choices)
    config = load_config(QUICKSTART)
    shapes = build.build_shapes(config, make_mesh(config.mesh), 4)
    jax.clear_caches()
    compilations = Compilations()
    compile_credit(algorithm, shapes, 4)
    compilations.close()
    assert compilations.programs == len(credit_programs(algorithm))


def test_a_run_that_goes_on_is_told_from_where(begin, tmp_path, capsys):
    config, run, state = begin("evaluation.every=2")
    with run, jax.set_mesh(run.parts.policy.mesh):
        run.checkpoints.save(state._replace(done=2))  # not evaluated yet
        run.checkpoints.wait()
        run.checkpoints._stopped.save(5, state.train.params, {})  # beyond the last iteration
    files = sorted(tmp_path.rglob("*"))
    print_explanation(explain_training(config, tmp_path))
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"iterations 4, resuming after iteration 2, from {tmp_path}/checkpoints" in said
    assert "2 are left" in said
    assert "evaluations test: 2, after iterations 2, 4" in said
    assert "checkpoints 3, after iterations 2, 3, 4" in said  # the first one with a score
    shorter = dataclasses.replace(config.evaluation, extra_splits=("train",))
    shorter = dataclasses.replace(config, iterations=2, evaluation=shorter)
    print_explanation(explain_training(shorter, tmp_path))
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "evaluations test: 1, after iterations 2" in said
    assert "train: 1, after iterations 2" in said and "checkpoints 1, after iterations 2" in said
    assert sorted(tmp_path.rglob("*")) == files
    other = dataclasses.replace(config, seed=5)
    with pytest.raises(ValueError, match="config.seed: got 5; allowed for this workdir"):
        explain_training(other, tmp_path)
    wider = dataclasses.replace(config.optimizer, name="lion")
    with pytest.raises(ValueError, match="checkpoint 2 is of another model or optimizer"):
        explain_training(dataclasses.replace(config, optimizer=wider), tmp_path)
    stopped = Checkpoints(tmp_path / "checkpoints" / "stopped", 1, 0)
    stopped.save(3, {"x": jax.numpy.zeros(1)}, {"config": to_dict(config)})
    stopped.close()
    faster = dataclasses.replace(config.optimizer, learning_rate=0.5)
    with pytest.raises(ValueError, match="config.optimizer.learning_rate: got 0.5; allowed: "):
        explain_training(dataclasses.replace(config, optimizer=faster), tmp_path)
    (notes,) = tmp_path.glob("checkpoints/stopped/3/state/_CHECKPOINT_METADATA")
    notes.unlink()
    print_explanation(explain_training(config, tmp_path))
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "checkpoint 3 lacks its file state/_CHECKPOINT_METADATA; it is skipped." in said
    assert "the stopped sweep of iteration 3 starts again " in said
    assert "iterations 4, resuming after iteration 2, from" in said
    next(tmp_path.glob("checkpoints/2/state/_CHECKPOINT_METADATA")).write_text("")
    with pytest.raises(ValueError, match="all checkpoints are damaged: checkpoint 2 has 0 bytes"):
        explain_training(config, tmp_path)


def test_a_workdir_that_is_closed_to_this_user_is_planned_from_the_start(tmp_path, monkeypatch):
    def closed(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(explain_training_module, "check_no_lost_checkpoints", closed)
    run = SimpleNamespace(state={})
    begins = explain_training_module._start(run, Config(), tmp_path, "validation")
    lacks = f"from the start: {tmp_path}/checkpoints has no checkpoint"
    assert begins == (0, ["test"], [lacks])


def test_the_page_of_optimizers_shows_what_is_printed(tmp_path, capsys):
    page = (ROOT / "docs" / "optimizers.md").read_text()
    (command,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    (block,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    choices = re.findall(r"--config\.(\S+)", command)
    assert re.sub(r"\s+", " ", block) in explain(QUICKSTART, tmp_path / "run", capsys, *choices)


def test_the_optimizer_is_told_with_its_rates_its_groups_and_every_path(tmp_path, capsys):
    groups = "[{'pattern':'*norm/scale','frozen':True},{'pattern':'layers/[01]/*','name':'lion'}]"
    choices = ("schedule=warmup_stable_decay", "warmup_iterations=4", "decay_iterations=9")
    choices = [f"optimizer.{choice}" for choice in (*choices, f"groups={groups}", "ema=0.9")]
    said = explain(QUICKSTART, tmp_path / "run", capsys, *choices)
    for fact in (
        "705,600 parameters, 704,512 of them train",
        "4.25 KiB parameters that do not train 2.688 MiB average of the parameters",
        "optimizer adam, learning rate 0.0002 (warmup_stable_decay), warm-up over 4 iterations",
        "by iteration: 1: 5e-05, 4: 0.0002, 8: 0.0002, 15: 0.0002, 21: 0.0002, 23: 0.00016, 30:"
        " 2e-05",
        "group 0: pattern=*norm/scale, frozen=True group 1: pattern=layers/[01]/*, name=lion",
        "the average of the parameters over iterations, decay 0.9, is evaluated and exported",
        "embedding (896, 128): 114,688 layers/*/attention_norm/scale 3 x (128,): 384; group 0,"
        " frozen",
        "layers/*/q/kernel 2 x (128, 128): 32,768, of layers 0, 1; group 1 layers/*/q/kernel"
        " (128, 128): 16,384, of layer 2 layers/*/q_norm/scale 3 x (32,): 96; group 0, frozen",
        "refresh 512, average, copy cumulative ratio",
    ):
        assert fact in said, fact
    with pytest.raises(ValueError, match="groups.0..pattern: got 'norms', which matches no param"):
        explain(QUICKSTART, tmp_path, capsys, "optimizer.groups=[{'pattern':'norms'}]")


@pytest.mark.parametrize("main", [train, evaluate], ids=["train", "evaluate"])
@pytest.mark.parametrize(
    "mistake",
    [
        "--config.rollout.tasks=0",
        "--config.model.path=/nowhere/model",
        "--config.optimizer.name=nobody",
        "--config.rollout.cache_gib=1e-9",
        "--workdir={}/file/run",
    ],
)
def test_a_mistake_is_told_in_the_runs_own_words(main, mistake, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [f"--config={QUICKSTART}", f"--workdir={tmp_path}/run", mistake.format(tmp_path)]
    if main == evaluate:
        arguments.append("--untrained")
    logged = []
    for more in ((), ("--explain",)):
        with pytest.raises(SystemExit) as ended:
            call(main, *arguments, *more)
        assert ended.value.code == 2
        logged.append(capsys.readouterr().err)
    assert logged[0] == logged[1] and logged[0].startswith("error: ")


def test_the_commands_flag_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["seeupo_jax.train"], "run_training", None)
    call(train, f"--config={QUICKSTART}", f"--workdir={tmp_path}/run", "--explain")
    assert "Nothing was run and nothing written" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_an_evaluation_tells_what_is_left_to_play(tmp_path, capsys):
    config = load_config(QUICKSTART)
    arguments = [f"--config={QUICKSTART}", f"--workdir={tmp_path}", "--k=2", "--explain"]
    arguments.append("--config.evaluation.tasks=8")

    def said(*more):
        call(evaluate, *arguments, *more)
        return re.sub(r"\s+", " ", capsys.readouterr().out)

    first = said("--untrained")
    for fact in (
        "policy untrained, as package:order_desk has it",
        "tasks test: the first 8 of 2000",
        "8 tasks x k=2: 16; temperature 1",
        "programs at most 11, as they are needed",
        "0 of 16 are in",
    ):
        assert fact in first, fact
    assert not list(tmp_path.iterdir())
    settings = evaluation_settings(config, "test", 2, {"iteration": 0, "policy": "abc"})
    path = tmp_path / "evaluation" / episodes_name(settings)
    task_id = build.envs.make("order_desk").task_ids("test")[0]
    with EpisodeFile(path, settings) as file:
        for member, failed in ((0, False), (1, True)):
            file.add(EvaluationEpisode(task_id, member, 1.0, 1.0, "done", failed, 1, [], {}, {}))
    before = path.read_bytes()
    assert f"1 of 16 are in {path}; 15 are to be played" in said("--untrained")
    assert path.read_bytes() == before
    assert "always the likeliest token" in said("--untrained", "--greedy", "--split=train")
    served = said("--server=http://nobody.invalid:1")
    assert "at http://nobody.invalid:1, which was not contacted" in served
    assert "which file is known once the server has named its model" in served


def test_many_numbers_are_cut_short():
    assert listed(range(1, 5)) == "1, 2, 3, 4"
    assert listed(range(100)).endswith("9, 10, ..., 99")
    assert np.all([len(listed(range(n)).split(",")) <= 13 for n in (5, 50, 500)])


PLANNED = """
import sys
from types import SimpleNamespace
sys.modules["bfcl_eval"] = None  # not installed
from seeupo_jax.train import main
for file in sys.argv[1:]:
    print("CONFIG", file)
    main(["train", f"--config={file}", f"--workdir={__file__}/run", "--explain", "--devices=64",
          "--device_memory=95GiB", "--config.env.options.%s=%s" % (
              ("home", "nowhere") if "appworld" in file else ("max_calls", "10"))])
"""


@pytest.mark.exhaustive
def test_a_shipped_14b_run_is_told_without_its_devices_model_and_benchmark(tmp_path):
    files = sorted((ROOT / "configs").glob("qwen*_14b_*.py"))
    assert len(files) == 4
    (tmp_path / "planned.py").write_text(PLANNED)
    (tmp_path / "here").mkdir()
    ended = loaded_python.run(
        [sys.executable, tmp_path / "planned.py", *files],
        cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "XLA_FLAGS": ""},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    reported = re.sub(r"\s+", " ", ended.stdout).split("CONFIG ")[1:]
    assert len(reported) == 4
    for file, said in zip(files, reported, strict=True):
        # Figures of the published models: 14.77 billion parameters, 4 bytes each over 64 devices.
        count = int(re.search(r"([\d,]+) parameters, all of them", said)[1].replace(",", ""))
        assert round(count / 1e9, 2) == 14.77
        held = float(re.search(r"([\d.]+) MiB parameters that train", said)[1])
        assert held == pytest.approx(14.77e9 * 4 / 64 / 2**20, rel=1e-3)  # norms lie everywhere
        assert "64 devices of 95 GiB that are not here: fsdp 16 x tensor 4" in said
        assert "a step of the sweep, of 85.5 GiB" in said
        assert "on each of 16 row shards: 16; a group's prompt is prefilled once" in said
        assert "this machine has not: --workdir: got " in said  # it is below a file
        assert "this machine has not: the model's weights and tokenizer; its sizes are" in said
        bench = "which has no .venv" if "appworld" in file.name else "no module 'bfcl_eval'"
        assert "this machine has not: the environment's tasks: " in said and bench in said
        assert "tasks not known here; " in said
        assert said.rstrip().endswith("Nothing was run and nothing written.")
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--devices=8",), "--devices: got 8 without --explain; allowed: with it only."),
        (
            ("--explain", "--device_memory=16GiB"),
            "--device_memory: got 17179869184 without --devices; allowed: with it only.",
        ),
        (("--explain", "--devices=0"), "--devices: got '0'; allowed: a whole number from 1 to"),
        (("--explain", "--devices=8", "--device_memory=95"), "--device_memory: got '95'; allowed:"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(flags, message, tmp_path, capsys):
    arguments = [f"--config={QUICKSTART}", f"--workdir={tmp_path / 'run'}", *flags]
    with pytest.raises(SystemExit) as ended:
        call(train, *arguments)
    error = capsys.readouterr().err
    assert (
        ended.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1
    )


@pytest.mark.parametrize(
    "choices, message",
    [
        (
            ["model.path=models/unheard-of"],
            "config.model.path: got 'models/unheard-of', which is not here; allowed without its"
            " files: a path that ends in one of Qwen2.5-0.5B-Instruct,",
        ),
        (["env.name=bfcl", "env.options.format=x"], "bfcl format: got 'x'; allowed:"),
        (["mesh.tensor=3"], "config.mesh: got "),
    ],
)
def test_a_mistake_is_not_what_is_missing(choices, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_planned(load_config(QUICKSTART, choices))


def test_less_memory_than_a_run_needs_is_told_for_planned_devices(tmp_path):
    config = load_config(QUICKSTART)
    with pytest.raises(
        ValueError, match="cache_gib: got None, which means 24 MiB per device.* free"
    ):
        explain_training(config, tmp_path, Planned(24 * 2**20))
    explain_training(config, tmp_path, Planned(64 * 2**20))


def test_a_rollout_on_planned_devices_has_nine_tenths_and_counts_what_a_gpu_gathers():
    config = load_config(QUICKSTART)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    run = abstract_run(config, mesh, Planned())
    plan, arch = run.engine.plan, run.policy.network.arch
    # 16 tasks x 8; a layer's keys and values of float32, of 128 rows and of 16 prefixes.
    row = plan.row_pages * plan.page_size * 2 * arch.kv_heads * arch.head_dim * 4
    assert plan.gathered_bytes == (128 + 16) * row
    assert abstract_run(config, mesh).engine.plan.gathered_bytes == 0
    needed = sum(run.parts.values()) + plan.gathered_bytes
    abstract_run(config, mesh, Planned(needed * 10 // 9 + 1024))
    with pytest.raises(ValueError, match="that decoding gathers .* that are free"):
        abstract_run(config, mesh, Planned(needed))


def test_an_agent_is_told_with_its_limits_and_where_the_policy_is_served(tmp_path):
    function = load_config(ROOT / "configs" / "agent_order_desk.py")
    assert episode_section(function) == (
        "agent",
        [
            "seeupo_jax.agents.order_desk_agent:play: a function in an event loop of its own",
            "tasks: env order_desk",
            "128 at once, each of at most 6 calls and 128 tokens; one without an open call for"
            " 300 s is ended",
            "the policy is served on 127.0.0.1, a free port, a key for each episode:"
            " /v1/chat/completions, /v1/responses, /v1/messages; a request at most 16,384 KiB,"
            " tool calls as auto, thoughts as auto, other sampling parameters refused",
        ],
    )
    tasks = tmp_path / "tasks.jsonl"
    fields = {"command": "node agent.js", "tasks": str(tasks), "port": 8000, "memory_mib": 2000}
    command = load_config(
        dataclasses.replace(function, agent=Agent(**fields, ignore_sampling=True)),
        ["rollout.concurrency=7"],
    )
    _, (runs, source, at_once, served) = episode_section(command)
    assert runs == (
        "node agent.js: a process group for each episode; memory: 2,000 MiB, output: 16,384 KiB"
    )
    assert source == f"tasks: {tasks}" and at_once.startswith("7 at once, ")
    assert "on 127.0.0.1, 8000, " in served and served.endswith("ignored and counted")
    assert episode_section(load_config(QUICKSTART))[0] == "environment"


def test_sandboxed_tasks_are_told_with_their_number_and_limits():
    config = load_config(ROOT / "configs" / "sandboxed_tasks.py")
    _, (runs, source, sandbox, *_) = episode_section(config)
    assert runs.startswith("python docs/examples/agents/shell_agent.py: a process group")
    assert source == "tasks: harbor:package:sandboxed_tasks"
    assert sandbox == (
        "7 train, 3 test; each episode in a sandbox (local): no network but the policy, the task's"
        " memory, at most 256 processes, the task's time limits x 10"
    )
    others = ["memory_mib=1024", "processes=64", "timeout_scale=2.5", "solution=True"]
    others += ["runtime=podman", 'visible=["/opt/agent"]']
    fields = [f"sandbox.{each}" for each in others] + ["agent.command=none", "agent.harness=codex"]
    _, (runs, _, sandbox, *_, served) = episode_section(load_config(config, fields))
    assert runs.startswith("codex: a process group") and served.endswith("ignored and counted")
    assert sandbox == (
        "7 train, 3 test; each episode in a sandbox (podman): no network but the policy, 1,024 MiB"
        " of memory, at most 64 processes, the task's time limits x 2.5; it sees /opt/agent; it"
        " sees the solution"
    )
