"""Model folders: what is saved comes back exactly, and what is wrong is named."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import loaded_python
import numpy as np
import pytest
import tokenizers
import transformers
from process_cases import environment
from safetensors.numpy import load_file, save_file
from twin_policy import network_of, numpy_weights

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import Architecture
from seeupo_jax.policy.files.sentencepiece_tokenizer import train_tokenizer
from seeupo_jax.policy.files.tokenizer import load_tokenizer, unassigned_ids
from seeupo_jax.policy.network import abstract_network, split_model
from seeupo_jax.policy.rope import Rope

TEXTS = ["two cups of tea", "a cup of tea for two"]
TOKENIZER = train_tokenizer(TEXTS, (), 290, schema.Chat(tools="json"))
LLAMA = Architecture(
    vocab_size=292,
    width=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=12,
    qk_norm=False,
    rope=Rope(500.0),
    norm_eps=1e-4,
)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, tied=False),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, tied=False),
}


def make(arch, seed=0):
    """A model whose parameters are the NumPy twin's, and the twin's weights."""
    twin = numpy_weights(arch, seed)
    network, params = network_of(twin, arch)
    return network.bind(params), twin


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
    # Weights may be read by whom the rest may be.
    assert len({(tmp_path / n).stat().st_mode for n in ("config.json", "model.safetensors")}) == 1
    compute_options = {"scan_layers": scan_layers, "remat": "dots"}
    loaded, tokenizer = from_pretrained(str(tmp_path), dtype="float32", **compute_options)
    assert loaded.arch == dataclasses.replace(arch, remat="dots", family=family)
    jax.tree.map(np.testing.assert_array_equal, split_model(loaded)[1], split_model(model)[1])
    assert tokenizer.action("tea for two") == TOKENIZER.action("tea for two")


@pytest.mark.parametrize(
    "ids, bounds",
    [
        (range(8), ()),
        (range(5), (5, 8)),
        ([0, 1, 4, 6, 7], (2, 4, 5, 6)),
        ([1, 2, 7], (0, 1, 3, 7)),
        ([2], (0, 2, 3, 8)),
    ],
)
def test_ids_without_a_token_are_known_by_their_bounds(ids, bounds):
    assert unassigned_ids(SimpleNamespace(ids=ids), 8) == bounds
    arch = dataclasses.replace(LLAMA, vocab_size=8, unassigned=bounds)
    assert arch.tokens == len(ids)
    np.testing.assert_array_equal(np.flatnonzero(~arch.unassigned_V()), ids)


def test_of_a_tokenizer_with_holes_the_ids_are_known(tmp_path):
    """The ids of added tokens need not follow the others."""
    names = {"a": 0, "b": 1, "<end>": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    library = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    library.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (set(loaded.ids), loaded.vocab_size) == ({0, 1, 4}, 5)
    assert unassigned_ids(loaded, 8) == (2, 4, 5, 8) and unassigned_ids(None, 8) == ()


def test_a_padded_network_is_saved_as_one_without_the_tokenizer(tmp_path):
    model, _ = make(LLAMA)
    network = abstract_network(dataclasses.replace(LLAMA, unassigned=(290, 292)))[0]
    save_pretrained(model, tmp_path / "plain", TOKENIZER)
    save_pretrained(network.bind(split_model(model)[1]), tmp_path / "padded", TOKENIZER)
    for name in ("config.json", "model.safetensors"):
        plain, padded = ((tmp_path / n / name).read_bytes() for n in ("plain", "padded"))
        assert plain == padded


def test_a_policy_may_change_its_compute_options_between_runs(tmp_path):
    save_pretrained(make(LLAMA)[0], tmp_path, TOKENIZER)
    stacked, _ = from_pretrained(str(tmp_path), dtype="float32", scan_layers=True)
    wanted, _ = make(dataclasses.replace(LLAMA, scan_layers=True))
    jax.tree.map(np.testing.assert_array_equal, split_model(stacked)[1], split_model(wanted)[1])


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
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
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
        np.testing.assert_array_equal(split_model(model)[1]["layers"]["q"]["kernel"][index], wanted)


def test_parameters_are_float32_whatever_the_file_and_the_activations_are(folder):
    half = load_file(folder / "model.safetensors")["model.norm.weight"].astype(np.float16)
    edit_tensors(folder, model__norm__weight=half)
    model, _ = from_pretrained(str(folder))
    assert model.arch.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(split_model(model)[1])} == {np.dtype("float32")}
    np.testing.assert_array_equal(split_model(model)[1]["norm"]["scale"], half.astype(np.float32))


def test_a_mesh_takes_the_parameters_by_its_table(folder):
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2))
    model, _ = from_pretrained(str(folder), mesh=mesh)
    network, params = split_model(model)
    wanted = param_shardings(mesh, network.logical_axes(), params)
    assert jax.tree.map(lambda p: p.sharding, params) == wanted
    assert params["layers"][0]["q"]["kernel"].addressable_shards[0].data.shape == (4, 8)


def test_a_family_that_transformers_has_not_is_not_saved(tmp_path):
    model, _ = make(dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True))
    with pytest.raises(ValueError, match="got qk_norm=True, qkv_bias=True, .*allowed: .*qwen3"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; allowed: llama, qwen2, qwen3"),
        ({"model_type": ...}, "model_type is None"),
        ({"hidden_size": ..., "vocab_size": None}, "vocab_size, hidden_size missing"),
        ({"vocab_size": 280}, "tokenizer has 290 tokens; allowed: at most the model's 280"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; allowed: 0.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; allowed: None"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: silu, gelu_pytorch_tanh, gelu"),
        ({"model_type": "qwen3"}, "lacks model.layers.0.self_attn.k_norm.weight, model"),
        ({"num_hidden_layers": 1, "layer_types": ...}, "has unknown model.layers.1."),
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
        ({"model__norm__weight": None}, "lacks model.norm.weight"),
        ({"lm_head__bias": np.zeros(3, np.float32)}, "has unknown lm_head.bias"),
        (
            {"model__norm__weight": np.zeros(7, np.float32)},
            r"model.norm.weight is \(7,\); allowed: \(8,\)",
        ),
        (
            {"model__layers__1__mlp__down_proj__weight": np.zeros((12, 8), np.float32)},
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
def test_a_missing_or_damaged_file_is_named(tmp_path, name, damage):
    folder = tmp_path
    save_pretrained(make(ARCHITECTURES["qwen3"])[0], folder, TOKENIZER)
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    by_folder = damage != "missing" and name in ("tokenizer.model", "chat.json")
    with pytest.raises(ValueError, match=f"{folder}.*{'' if by_folder else name}"):
        from_pretrained(str(folder))


def test_a_folder_need_not_have_a_tokenizer(tmp_path):
    save_pretrained(make(LLAMA)[0], tmp_path)
    assert from_pretrained(str(tmp_path))[1] is None


def test_a_folder_without_a_policy_and_an_unknown_package_policy_are_named(tmp_path):
    for path in (str(tmp_path), "package:no-such-policy"):
        with pytest.raises(ValueError, match=f"got '{path}'; allowed: a folder with a config.json"):
            from_pretrained(path)


def test_a_package_path_lies_among_the_package_assets(tmp_path, monkeypatch):
    monkeypatch.setattr("seeupo_jax.__path__", [str(tmp_path)])
    save_pretrained(make(LLAMA)[0], tmp_path / "assets" / "desk", TOKENIZER)
    model, _ = from_pretrained("package:desk", dtype="float32")
    assert model.arch == dataclasses.replace(LLAMA, family="llama")


@pytest.fixture
def sharded(tmp_path):
    """The same policy in several files."""
    model, _ = make(ARCHITECTURES["qwen2"])
    save_pretrained(model, tmp_path, TOKENIZER, max_file_bytes=5_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_several_files_hold_the_same_policy_as_one(sharded, tmp_path, scan_layers, on_mesh):
    mesh = make_mesh(schema.Mesh(data=2, fsdp=2, tensor=2)) if on_mesh else None
    compute_options = {"dtype": "float32", "scan_layers": scan_layers}
    model, _ = from_pretrained(str(sharded), mesh=mesh, **compute_options)
    wanted, _ = make(dataclasses.replace(ARCHITECTURES["qwen2"], scan_layers=scan_layers))
    jax.tree.map(np.testing.assert_array_equal, split_model(model)[1], split_model(wanted)[1])
    network, params = split_model(model)
    if on_mesh:
        placed = param_shardings(mesh, network.logical_axes(), params)
        assert jax.tree.map(lambda p: p.sharding, params) == placed


def test_saving_again_leaves_no_file_of_the_save_before(sharded):
    save_pretrained(make(ARCHITECTURES["qwen2"])[0], sharded)
    assert [file.name for file in sharded.glob("model*")] == ["model.safetensors"]


def test_a_missing_or_damaged_part_is_named(sharded):
    part = sorted(sharded.glob("model-*.safetensors"))[1]
    content = part.read_bytes()
    part.write_bytes(content[:-8])
    with pytest.raises(ValueError, match=f"{part} cannot be read"):
        from_pretrained(str(sharded))
    part.unlink()
    with pytest.raises(ValueError, match=f"no file {part}, which .*index.json names"):
        from_pretrained(str(sharded))
    part.write_bytes(content)
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    moved = next(name for name, file in values["weight_map"].items() if file == part.name)
    values["weight_map"][moved] = min(values["weight_map"].values())
    index.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"model-00001.* lacks {moved}, which the index"):
        from_pretrained(str(sharded))
    index.write_text("{")
    with pytest.raises(ValueError, match=f"{index} cannot be read"):
        from_pretrained(str(sharded))


def test_numbers_of_a_quantised_file_are_refused(folder):
    edit_tensors(folder, model__norm__weight=np.ones(8, np.int8))
    with pytest.raises(
        ValueError, match="model.norm.weight is of type I8; allowed: F32, F16, BF16"
    ):
        from_pretrained(str(folder))


def test_bfloat16_files_and_parameters_are_exact(folder, tmp_path):
    model, _ = from_pretrained(str(folder), dtype="float32")
    save_pretrained(model, tmp_path / "half", TOKENIZER, dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), split_model(model)[1])
    for param_dtype in ("float32", "bfloat16"):
        loaded, _ = from_pretrained(str(tmp_path / "half"), param_dtype=param_dtype)
        leaves = split_model(loaded)[1]
        assert {leaf.dtype for leaf in jax.tree.leaves(leaves)} == {jnp.dtype(param_dtype)}
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), leaves, rounded)


def test_tensors_that_the_model_computes_itself_are_not_read(tmp_path):
    save_pretrained(make(LLAMA)[0], tmp_path, TOKENIZER)
    head = np.asarray(split_model(from_pretrained(str(tmp_path))[0])[1]["embedding"])
    inverse = np.ones(2, np.float32)
    names = {"lm_head__weight": head, "model__layers__0__self_attn__rotary_emb__inv_freq": inverse}
    edit_tensors(tmp_path, **names)
    model, _ = from_pretrained(str(tmp_path), dtype="float32")
    assert split_model(model)[1].keys() == {"embedding", "layers", "norm"}


def test_a_single_file_is_read_where_an_index_is_left_over(tmp_path):
    """As `transformers` does, whose `save_pretrained` leaves an index of before."""
    save_pretrained(make(LLAMA)[0], tmp_path, TOKENIZER)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    wanted = split_model(from_pretrained(tmp_path)[0])[1]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = split_model(from_pretrained(tmp_path)[0])[1]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_head_of_its_own_beside_a_config_that_ties_is_refused(tmp_path):
    """`transformers` takes it then, and says so; dropped, all logits would be wrong."""
    save_pretrained(make(LLAMA)[0], tmp_path, TOKENIZER)
    head = np.array(split_model(from_pretrained(str(tmp_path))[0])[1]["embedding"])
    head[-1, -1] += 1
    edit_tensors(tmp_path, lm_head__weight=head)
    with pytest.raises(ValueError, match="lm_head.weight is another matrix than the embedding"):
        from_pretrained(str(tmp_path))


# In a process of its own; /proc's peak is set back first, since importing leaves a high one.
MEASURE = """
import pathlib, sys
import jax
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.network import split_model

def resident(kind):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024

small, *large = sys.argv[1:]
from_pretrained(small)  # whatever the first load of a process needs
for path in large:
    model = None
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model, _ = from_pretrained(path)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(split_model(model)[1]))
    print((resident("VmHWM") - before - held) / 2**20)
"""


@pytest.mark.exhaustive
def test_loading_holds_little_more_than_the_model_itself(tmp_path):
    small = dataclasses.replace(LLAMA, layers=1)
    save_pretrained(make(small)[0], tmp_path / "small", TOKENIZER)
    large = dataclasses.replace(small, vocab_size=200_000, width=256)
    network, shapes = abstract_network(large)
    model = network.bind(jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, np.float32), shapes))
    for dtype in ("float32", "bfloat16"):
        save_pretrained(model, tmp_path / dtype, TOKENIZER, dtype=dtype)
    # Memory that the first load leaves for reuse could hide a copy of the smaller type only.
    paths = [str(tmp_path / name) for name in ("small", "bfloat16", "float32")]
    (tmp_path / "measure.py").write_text(MEASURE)
    command = [sys.executable, tmp_path / "measure.py", *paths]
    done = loaded_python.run(command, env=environment())
    assert done.returncode == 0, done.stderr
    largest = large.vocab_size * large.width * 4 / 2**20  # MiB, as a parameter
    extra = [float(line) for line in done.stdout.split()]
    # Nor a second copy of it in the file's type.
    assert len(extra) == 2 and all(0 < more < 0.4 * largest for more in extra)
