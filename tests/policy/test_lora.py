"""Adapters: they begin at nothing, mean the same to PEFT, and leave the model as it is."""

import dataclasses
import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from twin_policy import network_of, numpy_weights

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy import save_pretrained
from seeupo_jax.policy.architecture import Architecture, LoraAdapters, Moe
from seeupo_jax.policy.lora import (
    TARGETS,
    attach_adapters,
    load_adapters,
    merge_adapters,
    read_lora,
    save_adapters,
)
from seeupo_jax.policy.network import abstract_network, join_params, split_model, split_trainable

# PEFT 0.21 reads a name that transformers 5.23 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ARCH = Architecture(
    vocab_size=40, width=16, layers=2, heads=4, kv_heads=2, head_dim=6, mlp_width=24, tied=False
)
LORA = LoraAdapters(rank=3, alpha=12.0, targets=TARGETS)
TOKENS = np.random.default_rng(2).integers(0, 40, (2, 9))


def make(arch=ARCH):
    network, params = network_of(numpy_weights(arch), arch)
    return network.bind(params)


def randomised(model, size=1.0):
    """The model with adapters that matter."""
    network, params = split_model(model)
    adapters, frozen = split_trainable(network, params)
    rng = np.random.default_rng(3)
    drawn = jax.tree.map(
        lambda x: jnp.asarray(size * rng.normal(size=x.shape), jnp.float32), adapters
    )
    return network.bind(join_params(drawn, frozen))


def logits(model):
    return np.asarray(model(jnp.asarray(TOKENS)))


@pytest.fixture
def adapted():
    return randomised(attach_adapters(make(), LORA))


def test_new_adapters_change_nothing_and_depend_on_the_seed():
    model = make()
    new = attach_adapters(model, LORA, seed=1)
    np.testing.assert_array_equal(logits(new), logits(model))
    a = [attach_adapters(model, LORA, seed=seed).layers[0].q.lora_a[...] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(a[0], a[1])
    assert (a[0] != a[2]).any()
    assert (new.layers[0].q.lora_a[...] != new.layers[1].q.lora_a[...]).any()
    assert np.abs(a[0]).max() <= 16**-0.5 < 1.2 * np.abs(a[0]).max()


def test_stacked_layers_begin_with_the_same_adapters():
    arch = dataclasses.replace(ARCH, scan_layers=True)
    stacked, plain = (
        attach_adapters(make(arch), LORA, seed=4),
        attach_adapters(make(), LORA, seed=4),
    )
    for index in range(2):
        np.testing.assert_array_equal(
            stacked.layers.mlp.down.lora_a[...][index], plain.layers[index].mlp.down.lora_a[...]
        )


def test_only_adapters_train_and_the_parts_make_the_whole(adapted):
    network, params = split_model(adapted)
    adapters, frozen = split_trainable(network, params)
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(adapters)
    ]
    assert len(paths) == 2 * 2 * len(TARGETS)
    assert all("lora_" in path for path in paths)
    assert not any("lora_" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen))
    joined = join_params(adapters, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, joined, params)
    network, params = split_model(make())
    assert split_trainable(network, params) == (params, {})


@pytest.mark.parametrize("scan_layers", [False, True])
def test_merged_kernels_give_the_same_logits(scan_layers):
    arch = dataclasses.replace(ARCH, scan_layers=scan_layers)
    model = randomised(attach_adapters(make(arch), LORA))
    merged = merge_adapters(model)
    assert merged.arch == arch
    assert np.abs(logits(model) - logits(make(arch))).max() > 0.1
    np.testing.assert_allclose(logits(merged), logits(model), atol=2e-4, rtol=2e-5)
    plain = make()
    assert merge_adapters(plain) is plain


def test_frozen_bfloat16_kernels_are_merged_in_float32_and_rounded_once():
    """Against NumPy; rounding the adapters' product first would move some of them by a bit."""
    network, params = split_model(make())
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    model = randomised(attach_adapters(network.bind(half), LORA))
    layer = model.layers[0].q
    a, b = (np.asarray(factor[...], np.float64) for factor in (layer.lora_a, layer.lora_b))
    kernel = np.asarray(layer.kernel[...]).astype(np.float64)
    wanted = (kernel + a @ b * 12 / 3).astype(np.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(merge_adapters(model).layers[0].q.kernel[...]), wanted)


@pytest.mark.parametrize("size, told", [(3e-3, True), (0.3, False)])
def test_what_bfloat16_loses_of_merged_adapters_is_told(caplog, size, told):
    """Of what moves a kernel by less than half a unit nothing is left; the share, against NumPy."""
    network, params = split_model(make())
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    model = randomised(attach_adapters(network.bind(half), LORA), size)
    with caplog.at_level("WARNING"):
        merge_adapters(model)
    percents = re.findall(r"keeps (\d+)% of what they add", caplog.text)
    along, whole = 0.0, 0.0
    for layer in model.layers:
        mlp = layer.mlp
        for projection in (layer.q, layer.k, layer.v, layer.out, mlp.gate, mlp.up, mlp.down):
            arrays = projection.lora_a, projection.lora_b, projection.kernel
            a, b, kernel = (np.asarray(x[...]).astype(np.float64) for x in arrays)
            delta = a @ b * 12 / 3
            change = (kernel + delta).astype(jnp.bfloat16).astype(np.float64) - kernel
            along, whole = along + np.sum(change * delta), whole + np.sum(delta**2)
    assert (along < 0.9 * whole) == told == bool(percents)
    assert not told or abs(100 * along / whole - int(percents[0])) <= 1


@pytest.fixture(scope="module")
def peft():
    """Takes seconds to import, and every worker imports every file of tests."""
    return importlib.import_module("peft")


# Queries and values of the last layer; in all layers what reads the residual stream.
LAST = r"model\.layers\.1\.self_attn\.(q|v)_proj"
READS = r".*\.(self_attn\.[qkv]|mlp\.(gate|up))_proj"


@pytest.mark.parametrize(
    "changes, scan_layers",
    [
        ({}, False),
        ({}, True),
        ({"targets": ("q_proj", "v_proj")}, True),
        ({"rslora": True}, True),
        ({"targets": (LAST,)}, False),
        ({"targets": (READS,), "rslora": True}, True),
        ({"layers": (1,)}, False),
    ],
    ids=str,
)
def test_peft_reads_what_we_write_and_computes_the_same(peft, tmp_path, changes, scan_layers):
    arch = dataclasses.replace(ARCH, scan_layers=scan_layers)
    model = randomised(attach_adapters(make(arch), dataclasses.replace(LORA, **changes)))
    save_pretrained(make(), tmp_path / "base")
    save_adapters(model, tmp_path / "adapters", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    reference = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    with torch.no_grad():
        wanted = reference(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(model), wanted, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options, wanted_lora",
    [
        (
            {"target_modules": ["o_proj", "up_proj"]},
            LoraAdapters(5, 7.0, ("o_proj", "up_proj")),
        ),
        (
            {"target_modules": ["o_proj"], "layers_to_transform": 1, "use_rslora": True},
            LoraAdapters(5, 7.0, ("o_proj",), rslora=True, layers=(1,)),
        ),
        ({"target_modules": LAST}, LoraAdapters(5, 7.0, (LAST,))),
    ],
    ids=("names", "one layer", "expression"),
)
def test_we_read_what_peft_writes(peft, tmp_path, options, wanted_lora):
    save_pretrained(make(), tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    options = peft.LoraConfig(r=5, lora_alpha=7, init_lora_weights=False, **options)
    reference = peft.get_peft_model(base, options).eval()
    reference.save_pretrained(tmp_path / "adapters")
    model = load_adapters(make(), tmp_path / "adapters")
    assert model.arch.lora == wanted_lora
    merged = logits(merge_adapters(model))
    np.testing.assert_allclose(merged, logits(model), atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        wanted = reference(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(model), wanted, atol=2e-5, rtol=1e-5)
    assert np.abs(wanted - logits(make())).max() > 1e-3


def test_an_expression_selects_layers_and_projections_that_train():
    lora = dataclasses.replace(LORA, targets=(LAST,))
    network, params = split_model(attach_adapters(make(), lora))
    adapters, _ = split_trainable(network, params)
    assert {layer: set(parts) for layer, parts in adapters["layers"].items()} == {1: {"q", "v"}}
    added = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert parameters(network.arch) == parameters(ARCH) + added


def stacked(targets, layers=None):
    arch = dataclasses.replace(ARCH, scan_layers=True)
    return arch, dataclasses.replace(LORA, targets=targets, layers=layers)


EXPERTS = dataclasses.replace(ARCH, moe=Moe(4, 2, 8, True))


@pytest.mark.parametrize(
    "arch, lora, reason",
    [
        (*stacked((LAST,)), "selects other projections in one layer than in another; allowed with"),
        (*stacked(("q_proj",), (0,)), "got q_proj in layers 0, which selects other proj"),
        (ARCH, dataclasses.replace(LORA, targets=(".*",)), "which matches model.embed_tokens"),
        (ARCH, dataclasses.replace(LORA, targets=("lm_hea.",)), "which matches lm_head; allowed"),
        (ARCH, dataclasses.replace(LORA, targets=(r"q_pro\w",)), "selects no projection of the m"),
        (ARCH, dataclasses.replace(LORA, layers=(2,)), "in layers 2, which selects no projection"),
        (EXPERTS, dataclasses.replace(LORA, targets=(READS.replace("mlp", ".*"),)), "of experts"),
        (EXPERTS, dataclasses.replace(LORA, targets=(r".*mlp\.up_proj",)), "a model of experts"),
    ],
)
def test_what_an_expression_cannot_select_is_refused(arch, lora, reason):
    with pytest.raises(ValueError, match=reason):
        attach_adapters(make_abstract(arch), lora)


def test_saved_adapters_come_back_bit_for_bit_and_replace_others(tmp_path, adapted):
    save_adapters(adapted, tmp_path, "base")
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    for model in (make(), attach_adapters(make(), LoraAdapters(2, 1.0, ("q_proj",)))):
        again = load_adapters(model, tmp_path, mesh=mesh)
        assert again.arch == adapted.arch
        jax.tree.map(np.testing.assert_array_equal, split_model(again)[1], split_model(adapted)[1])


def test_adapters_lie_on_the_mesh_by_the_table():
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    network, params = split_model(attach_adapters(make(), LORA, mesh=mesh))
    adapters, _ = split_trainable(network, params)
    axes, _ = split_trainable(network, network.logical_axes())
    assert jax.tree.map(lambda p: p.sharding, adapters) == param_shardings(mesh, axes, adapters)
    assert adapters["layers"][0]["q"]["lora_a"].addressable_shards[0].data.shape == (8, 3)


def edit(folder, **changes):
    file = folder / "adapter_config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"use_dora": True}, "use_dora is True; allowed: False"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; allowed: true or false"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: 'LORA'"),
        ({"bias": "all"}, "bias is 'all'; allowed: 'none'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is "),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True; allowed: False"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is "),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens is \[5, 6\]"),
        (
            {"target_modules": ["lm_head"]},
            r"target_modules is \['lm_head'\]; allowed: a list of one or more of q_p",
        ),
        ({"target_modules": "q_proj"}, "target_modules is 'q_proj'; allowed: a list"),
        ({"target_modules": "q_proj("}, "target_modules is 'q_proj.'; .* or a regular expression"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules is "),
        ({"layers_to_transform": ["1"]}, r"layers_to_transform is \['1'\]; allowed: a list of la"),
        (
            {"layers_to_transform": [1], "target_modules": ".*q_proj"},
            "layers_to_transform is .1. with target_modules '.*q_proj'; allowed: with a list",
        ),
        ({"r": ...}, "r missing"),
        ({"r": 0}, "r is 0; allowed: a whole number from 1 to"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; allowed: a number > 0"),
        ({"r": 4}, r"lora_A.weight is \(3, 16\); allowed: \(4, 16\)"),
        ({"target_modules": ["q_proj"]}, "has unknown model.layers.0.mlp.down_proj.lora_A.weight"),
    ],
)
def test_settings_that_we_do_not_compute_are_refused(tmp_path, adapted, changes, reason):
    save_adapters(adapted, tmp_path, "base")
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=reason):
        load_adapters(make(), tmp_path)


@pytest.mark.parametrize("dropout, warned", [(0.05, True), (0.0, False)])
def test_dropout_that_is_not_applied_is_warned_of(tmp_path, caplog, dropout, warned):
    values = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "lora_dropout": dropout}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with caplog.at_level("WARNING"):
        assert read_lora(tmp_path) == LoraAdapters(2, 4.0, ("q_proj",))
    assert ("adapter_config.json: lora_dropout is not applied" in caplog.text) == warned


def test_missing_and_foreign_files_are_named(tmp_path, adapted):
    with pytest.raises(ValueError, match="no file .*adapter_config.json"):
        load_adapters(make(), tmp_path)
    save_adapters(adapted, tmp_path, "base")
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.removeprefix("base_model."): value for name, value in tensors.items()}, file)
    with pytest.raises(ValueError, match="adapter_model.safetensors holds model.model.layers.0"):
        load_adapters(make(), tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="no adapter_model.safetensors"):
        load_adapters(make(), tmp_path)


def test_what_cannot_be_adapted_or_saved_is_told(tmp_path, adapted):
    with pytest.raises(ValueError, match="the model has adapters already"):
        attach_adapters(adapted, LORA)
    with pytest.raises(ValueError, match="got a model with adapters; allowed: merge"):
        save_pretrained(adapted, tmp_path)
    with pytest.raises(ValueError, match="got a model without adapters"):
        save_adapters(make(), tmp_path, "base")


def make_abstract(arch):
    network, shapes = abstract_network(arch)
    return network.bind(shapes)
