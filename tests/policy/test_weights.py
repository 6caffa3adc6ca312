"""Model folders: what is saved comes back exactly, and what is wrong is named."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import numpy_model
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from seeupo_jax import config
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy import from_pretrained, save_pretrained, weights
from seeupo_jax.policy.network import split
from seeupo_jax.policy.tokenizer import train_tokenizer
from seeupo_jax.policy.transformer import Architecture, Transformer

TEXTS = ["two cups of tea", "a cup of tea for two"]
TOKENIZER = train_tokenizer(TEXTS, (), 290, config.Chat(tools="json"))
LLAMA = Architecture(
    vocab_size=292,
    width=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=12,
    qk_norm=False,
    rope_theta=500.0,
    norm_eps=1e-4,
)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, tied=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, tied=False),
}


def make(arch, seed=0):
    """A model whose parameters are the NumPy twin's, and the twin's weights."""
    keys = "vocab_size width layers heads kv_heads head_dim mlp_width qk_norm qkv_bias tied"
    twin = numpy_model.random_weights(seed, **{key: getattr(arch, key) for key in keys.split()})
    network, _ = split(nnx.eval_shape(lambda: Transformer(arch, nnx.Rngs(0))))
    return network.bind(weights._to_params(twin, arch, Path("twin"))), twin


@pytest.fixture
def folder(tmp_path):
    """A saved qwen2 policy."""
    save_pretrained(make(ARCHITECTURES["qwen2"])[0], tmp_path, TOKENIZER)
    return tmp_path


def edit_config(folder, **changes):
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(folder, **changes):
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): v for name, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, file)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_saved_policy_comes_back_bit_for_bit(tmp_path, family, scan_layers):
    arch = dataclasses.replace(ARCHITECTURES[family], scan_layers=scan_layers)
    model, _ = make(arch)
    save_pretrained(model, tmp_path, TOKENIZER)
    layout = {"scan_layers": scan_layers, "remat": "dots"}
    loaded, tokenizer = from_pretrained(str(tmp_path), dtype="float32", **layout)
    assert loaded.arch == dataclasses.replace(arch, remat="dots")
    jax.tree.map(np.testing.assert_array_equal, split(loaded)[1], split(model)[1])
    assert tokenizer.action("tea for two") == TOKENIZER.action("tea for two")


def test_a_policy_may_change_its_layout_between_runs(tmp_path):
    save_pretrained(make(LLAMA)[0], tmp_path, TOKENIZER)
    stacked, _ = from_pretrained(str(tmp_path), dtype="float32", scan_layers=True)
    wanted, _ = make(dataclasses.replace(LLAMA, scan_layers=True))
    jax.tree.map(np.testing.assert_array_equal, split(stacked)[1], split(wanted)[1])


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_files_have_the_names_and_the_layout_of_transformers(tmp_path, family):
    model, twin = make(ARCHITECTURES[family])
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == twin.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, twin[name].astype(np.float32), err_msg=name)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == family
    assert values["architectures"] == [f"{family.capitalize()}ForCausalLM"]
    wanted = {
        "vocab_size": 292,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 12,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-4,
        "tie_word_embeddings": family == "llama",
        "hidden_act": "silu",
    }
    assert wanted.items() <= values.items()


def test_layers_are_in_order_beyond_nine():
    arch = dataclasses.replace(LLAMA, layers=11, scan_layers=True)
    model, twin = make(arch)
    for index in range(11):
        wanted = twin[f"model.layers.{index}.self_attn.q_proj.weight"].T.astype(np.float32)
        np.testing.assert_array_equal(split(model)[1]["layers"]["q"]["kernel"][index], wanted)


def test_parameters_are_float32_whatever_the_file_and_the_activations_are(folder):
    half = load_file(folder / "model.safetensors")["model.norm.weight"].astype(np.float16)
    edit_tensors(folder, model__norm__weight=half)
    model, _ = from_pretrained(str(folder))
    assert model.arch.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(split(model)[1])} == {np.dtype("float32")}
    np.testing.assert_array_equal(split(model)[1]["norm"]["scale"], half.astype(np.float32))


def test_a_mesh_takes_the_parameters_by_its_table(folder):
    mesh = make_mesh(config.Mesh(data=2, fsdp=2, tensor=2))
    model, _ = from_pretrained(str(folder), mesh=mesh)
    network, params = split(model)
    wanted = param_shardings(mesh, network.logical_axes(), params)
    assert jax.tree.map(lambda p: p.sharding, params) == wanted
    assert params["layers"][0]["q"]["kernel"].addressable_shards[0].data.shape == (4, 8)


def test_a_family_that_transformers_has_not_is_not_saved(tmp_path):
    model, _ = make(dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True))
    with pytest.raises(
        ValueError, match="got .'qk_norm': True, 'qkv_bias': True.; allowed: .*qwen3"
    ):
        save_pretrained(model, tmp_path)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; allowed: llama, qwen2, qwen3"),
        ({"model_type": ...}, "model_type is None"),
        ({"head_dim": ..., "rope_theta": ...}, "head_dim, rope_theta missing"),
        ({"vocab_size": 280}, "tokenizer has 290 tokens; allowed: at most the model's 280"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*'yarn'.*; allowed: None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu'"),
        ({"model_type": "qwen3"}, "lacks model.layers.0.self_attn.k_norm.weight, model"),
        ({"num_hidden_layers": 1}, "has unknown model.layers.1."),
        ({"hidden_size": 9}, r"model.embed_tokens.weight is \(292, 8\); allowed: \(292, 9\)"),
    ],
)
def test_a_wrong_config_is_named(folder, changes, reason):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=reason):
        from_pretrained(str(folder))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model__norm__weight": None}, "model.safetensors lacks model.norm.weight"),
        ({"lm_head__bias": np.zeros(3)}, "model.safetensors has unknown lm_head.bias"),
        ({"model__norm__weight": np.zeros(7)}, r"model.norm.weight is \(7,\); allowed: \(8,\)"),
        (
            {"model__layers__1__mlp__down_proj__weight": np.zeros((12, 8))},
            r"model.layers.1.mlp.down_proj.weight is \(12, 8\); allowed: \(8, 12\)",
        ),
    ],
)
def test_a_missing_an_extra_or_a_misshapen_tensor_is_named(folder, changes, reason):
    edit_tensors(folder, **changes)
    with pytest.raises(ValueError, match=reason):
        from_pretrained(str(folder))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.model", "chat.json"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated"])
def test_a_missing_or_damaged_file_is_named(folder, name, damage):
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    by_folder = damage != "missing" and name in ("tokenizer.model", "chat.json")
    with pytest.raises(ValueError, match=f"{folder}.*{'' if by_folder else name}"):
        from_pretrained(str(folder))


def test_a_folder_without_a_policy_and_an_unknown_package_policy_are_named(tmp_path):
    for path in (str(tmp_path), "package:no-such-policy"):
        with pytest.raises(ValueError, match=f"got '{path}'; allowed: a folder with a config.json"):
            from_pretrained(path)


def test_a_package_path_lies_among_the_package_assets(tmp_path, monkeypatch):
    monkeypatch.setattr("seeupo_jax.__path__", [str(tmp_path)])
    save_pretrained(make(LLAMA)[0], tmp_path / "assets" / "desk", TOKENIZER)
    model, _ = from_pretrained("package:desk", dtype="float32")
    assert model.arch == LLAMA
