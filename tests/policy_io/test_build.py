"""What a configuration is checked for before anything is compiled, and the parts built from it."""

import contextlib
import json

import jax
import numpy as np
import pytest
from places import CONFIGS, TINY
from tpu_cases import needs_libtpu

from seeupo_jax.configuration import schema
from seeupo_jax.configuration.loading import load_config
from seeupo_jax.envs.order_desk.environment import OrderDesk
from seeupo_jax.envs.transport.isolated import ProcessDied
from seeupo_jax.evaluation.episode_host import open_environment
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.planning.chips import parse_topology, topology_devices
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy_io import build
from seeupo_jax.training.checks import check_config

CONFIG = CONFIGS / "quickstart.py"


class DeskWithoutTests(OrderDesk):
    """An environment whose test split has no task."""

    def task_ids(self, split):
        return [] if split == "test" else super().task_ids(split)


def test_an_empty_split_is_told_before_any_compile(monkeypatch):
    monkeypatch.setattr(
        "seeupo_jax.envs.order_desk.environment.OrderDesk", lambda **_: DeskWithoutTests()
    )
    with pytest.raises(ValueError, match=r"DeskWithoutTests.task_ids\('test'\): got no task"):
        check_config(load_config(CONFIG))


class BadDesk(OrderDesk):
    """Its option says which of the class's answers is wrong."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        if wrong == "init":
            raise LookupError("no desk")

    def task_ids(self, split):
        return iter(super().task_ids(split)) if self.wrong == split else super().task_ids(split)

    def labels(self, task_id):
        return None if self.wrong == task_id else super().labels(task_id)


@pytest.mark.parametrize(
    "wrong, logged",
    [
        (
            "init",
            f"env.name: '{__name__}:BadDesk' cannot be made: LookupError: no desk (__init__,"
            " test_build.py:48).",
        ),
        ("test", "BadDesk.task_ids('test'): got <list_iterator"),
        ("train/0", "BadDesk.labels('train/0'): got None; allowed: a dict of texts."),
        ("test/3", "BadDesk.labels('test/3'): got None; allowed: a dict of texts."),
    ],
)
def test_a_class_that_breaks_the_protocol_is_told_before_any_compile(wrong, logged):
    overrides = [f"env.name={__name__}:BadDesk", f"env.options={{'wrong': {wrong!r}}}"]
    with pytest.raises(ValueError) as error:
        check_config(load_config(CONFIG, overrides))
    assert str(error.value).startswith(logged)


def test_an_unknown_option_of_an_environment_is_told():
    with pytest.raises(ValueError, match="env.options: order_desk refused {'colour': 'red'}"):
        check_config(load_config(CONFIG, ["env.options={'colour': 'red'}"]))


def test_a_policy_from_nothing_needs_stages():
    with pytest.raises(ValueError, match="config.model.path: got none; allowed: a model folder"):
        check_config(load_config(CONFIG, ["model.path=none"]))


def test_a_context_that_dynamic_scaling_would_lengthen_is_refused(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    values = {"model_type": "qwen2", "max_position_embeddings": 256, **sizes}
    values |= {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    fields = [f"model.path={tmp_path}", "rollout.max_context=257"]
    told = "at most the 256 positions that the model was made for, since its dynamic rope scaling"
    config = load_config({}, fields)
    with pytest.raises(ValueError, match=told):
        build.check_network(config, make_mesh(config.mesh))


def test_total_steps_count_turns_epochs_and_minibatches():
    overrides = ["iterations=10", "rollout.max_turns=5", "algorithm.turns_per_update=2"]
    overrides += ["algorithm.inner_epochs=3", "algorithm.minibatches_per_turn=2"]
    assert build.total_steps(load_config(CONFIG, overrides)) == 10 * 3 * 3 * 2


@needs_libtpu
@pytest.mark.parametrize("tensor, refused", [(4, False), (8, True)])
def test_the_devices_of_a_row_are_those_of_one_process(tensor, refused, monkeypatch):
    """On a v5e:4x4 each process has 4 of the 16 chips."""
    devices = topology_devices(parse_topology("v5e:4x4"))
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    sizes = ["model.heads=8", "model.kv_heads=8", "rollout.tasks=8"]
    config = load_config(TINY, [*sizes, f"mesh.tensor={tensor}"])
    told = pytest.raises(ValueError, match="got 8, which spreads .* the 4 devices of one")
    with told if refused else contextlib.nullcontext():
        build.check_layout(config, make_mesh(config.mesh))


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (12, 3), (12, 6)])
def test_a_tensor_axis_that_would_cut_a_head_is_told(heads, kv_heads):
    sizes = [f"model.heads={heads}", f"model.kv_heads={kv_heads}"]
    config = load_config(TINY, [*sizes, "mesh.data=2", "mesh.tensor=4"])
    told = f"config.mesh.tensor: got 4; allowed: a divisor of the model's {heads} heads that is a "
    with pytest.raises(ValueError, match=f"{told}divisor or a multiple of its {kv_heads} key-val"):
        check_config(config)


@pytest.mark.parametrize(
    "override, reason",
    [
        ("rollout.max_context=40000", "max_context: got 40000; allowed: at most the 32768 posit"),
        ("model.attention=cudnn", "attention.*cudnn.*cpu"),
        ("model.path=runs/nowhere", "got 'runs/nowhere'; allowed: a folder with a config.json, a"),
        ("lora.path=runs/nowhere", "no file runs/nowhere/adapter_config.json"),
        ("model.param_dtype=bfloat16", "param_dtype: got 'bfloat16'; allowed: 'float32' unless"),
        (
            "algorithm.router_replay=old",
            "router_replay: got 'old' with a model that has no experts",
        ),
        (
            "experts.balance_coef=0.01",
            "config.experts.balance_coef: got 0.01 with a model that has",
        ),
        ("experts.bias_rate=0.001", "config.experts.bias_rate: got 0.001 with a model that has no"),
        ("lora.targets=('lm_head',)", "lora.targets: got .*allowed: projections by"),
        ("chat.template_kwargs={'enable_thinking': False}", "enable_thinking|template_kwargs"),
    ],
)
def test_what_does_not_fit_the_model_is_told_before_it_is_loaded(override, reason):
    with pytest.raises(ValueError, match=reason):
        config = load_config(CONFIG, [override, "batching.buckets=()"])
        check_config(config)


@pytest.mark.parametrize(
    "override, reason",
    [
        # 128 tokens x 3 layers x (key, value) x 1 head a device x 32 numbers: 96 KiB are 9.155e-5.
        ("cache_gib=9.1e-5", "config.rollout.cache_gib: got 9.1e-05; allowed: at least 9.2e-05"),
        ("slots=6", r"config.rollout.slots: got 6; allowed: a multiple of the 4 devices"),
        ("concurrency=10", r"config.rollout.concurrency: got 10; allowed: a multiple of the 4"),
    ],
)
def test_a_cache_that_cannot_be_laid_out_is_told_before_any_work(override, reason):
    mesh = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    with pytest.raises(ValueError, match=reason):
        check_config(load_config(CONFIG, [*mesh, f"rollout.{override}"]))
    check_config(load_config(CONFIG, [*mesh, "rollout.cache_gib=9.16e-5", "rollout.slots=8"]))


def test_a_model_that_cannot_converse_is_told_before_it_is_loaded(tmp_path):
    model, _ = from_pretrained("package:order_desk")
    save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer; allowed: a folder with a"):
        check_config(load_config(CONFIG, [f"model.path={tmp_path}"]))


def test_with_adapters_only_they_are_in_the_training_state():
    config = load_config(CONFIG, ["lora.rank=2", "model.param_dtype=bfloat16"])
    policy, params = build.load_policy(config, "package:order_desk")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(policy.frozen)} == {np.dtype("bfloat16")}
    small, large = (sum(x.size for x in jax.tree.leaves(t)) for t in (params, policy.frozen))
    assert 0 < small < large / 20
    tokens_NL = np.ones((1, 4), np.int32)
    logits = policy.network.bind(policy.merged(params))(tokens_NL)
    assert logits.shape == (1, 4, policy.network.arch.vocab_size)


def test_an_unknown_tracker_is_told_before_any_work():
    with pytest.raises(ValueError, match="config.telemetry.trackers: got 'mlflow'; allowed:"):
        check_config(load_config(CONFIG, ["telemetry.trackers=('mlflow',)"]))


def test_a_warm_start_needs_an_environment_that_demonstrates(monkeypatch):
    class Silent:
        def task_ids(self, split):
            return ["one"]

    monkeypatch.setattr("seeupo_jax.envs.order_desk.environment.OrderDesk", lambda **_: Silent())
    with pytest.raises(ValueError, match="env order_desk has no demonstrations"):
        check_config(load_config(CONFIG, ["warm_start.stages=({'steps': 2},)"]))


class OddTools(OrderDesk):
    """The tools of its first task have a schema that no grammar can hold."""

    def reset(self, task_id, seed):
        messages, _ = super().reset(task_id, seed)
        return messages, ({"name": "go", "parameters": {"properties": {"a": {"type": "float"}}}},)


def test_a_tool_that_no_grammar_can_hold_is_told_before_any_episode():
    odd = f"env.name={__name__}:OddTools"
    check_config(load_config(CONFIG, [odd]))
    with pytest.raises(ValueError, match="grammar: llguidance refused tool 'go': .*type: float"):
        check_config(load_config(CONFIG, [odd, "rollout.grammar=tool_calls"]))
    check_config(load_config(CONFIG, ["rollout.grammar=tool_calls"]))


class NoTools(OrderDesk):
    def reset(self, task_id, seed):
        messages, _ = super().reset(task_id, seed)
        return messages, ()


def test_a_grammar_for_calls_is_refused_where_no_task_lists_a_tool():
    none = [f"env.name={__name__}:NoTools"]
    check_config(load_config(CONFIG, none))
    with pytest.raises(ValueError, match="grammar: got 'tool_calls'; .*NoTools list no tools"):
        check_config(load_config(CONFIG, [*none, "rollout.grammar=tool_calls"]))
    parts = [{"name": f"{__name__}:NoTools", "label": "none"}, {"name": "order_desk"}]
    mixed = ["env.name=mixture", f"env.options={{'environments': {parts}}}"]
    check_config(load_config(CONFIG, [*mixed, "rollout.grammar=tool_calls"]))


FORKS = ["recipe=spo_tree", "rollout.group_size=4"]


def test_what_plays_is_what_is_asked_whether_conversations_can_branch():
    rolling = "env.name=isolated_cases:Rolling"
    check_config(load_config(CONFIG, [*FORKS, rolling]))
    with pytest.raises(ValueError, match="cases:Rolling.reset.*called twice.*isolation=thread, or"):
        check_config(load_config(CONFIG, [*FORKS, rolling, "env.isolation=process"]))


class BadClose(OrderDesk):
    def close(self):
        raise OSError("no way out")


def test_an_environment_that_cannot_be_closed_passes_the_checks():
    check_config(
        load_config(CONFIG, [*FORKS, f"env.name={__name__}:BadClose", "rollout.grammar=tool_calls"])
    )


def test_a_process_that_hangs_in_a_check_is_killed(tmp_path, caplog):
    options = {"options": {"folder": str(tmp_path)}, "isolation": "process", "timeout_s": 1.5}
    with open_environment(schema.Env("isolated_cases:Wild", **options), calls=2) as environment:
        with pytest.raises(ProcessDied, match="signal 9"):
            environment.reset("hang", 0)
            environment.step("")
    assert "2 calls of env isolated_cases:Wild take more than 3 s" in caplog.text


def test_every_part_of_a_mixture_is_asked_whether_conversations_can_branch():
    mixture = "env={'name': 'mixture', 'options': {'environments': [%s]}}"
    rolling, steady = "{'name': 'isolated_cases:Rolling'}", "{'name': 'order_desk'}"
    check_config(load_config(CONFIG, [*FORKS, mixture % rolling]))
    with pytest.raises(ValueError, match="forks.kind: mixture.reset.'Rolling:a', .*called twice"):
        check_config(load_config(CONFIG, [*FORKS, mixture % f"{steady}, {rolling}"]))


@pytest.mark.parametrize(
    "source, reason", [("calls", "allowed: none, 'tool_calls'"), ("no.json", "no file")]
)
def test_a_grammar_that_is_not_there_is_told_before_any_weights_are_read(source, reason):
    config = load_config(CONFIG, [f"rollout.grammar={source}"])
    with pytest.raises(ValueError, match=f"config.rollout.grammar: .*{reason}"):
        check_config(config)
