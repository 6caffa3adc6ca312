"""Multi-head latent attention in PyTorch (`transformers`) and here: both forms of it, and files."""

import dataclasses
import functools
import importlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_models
import transformers
from safetensors.numpy import load_file, save_file
from twin_policy import random_network, tensors_of

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings, row_shards
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import Architecture, LatentAttention, LoraAdapters
from seeupo_jax.policy.files.model_config import read_architecture
from seeupo_jax.policy.kernels.attention import NOWHERE, Tree
from seeupo_jax.policy.kernels.paged import PageTable, new_pages
from seeupo_jax.policy.lora import (
    attach_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
    with_adapters,
)
from seeupo_jax.policy.network import (
    join_params,
    split_model,
    split_trainable,
    token_logp,
)
from seeupo_jax.policy.projection import quantize

# PEFT 0.21 reads a name that transformers 5.23 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

VOCAB, LENGTH = 331, torch_models.LENGTH
SPREAD = 1e-4  # of the largest difference allowed, in standard deviations of PyTorch's logits
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 256,
    "q_lora_rank": 22,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
CASES = {
    "v3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3 biases, one matrix of queries": (
        "deepseek_v3",
        {
            "attention_bias": True,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rms_norm_eps": 1e-2,  # not of the norms of latents
            "rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.707},
            "v_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "v2": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "v2 lite": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "n_group": None,
            "topk_group": None,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
}


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    """Makes, once, a random model of a case and the folder that `transformers` saves it in."""

    @functools.cache
    def make(case):
        family, changes = CASES[case]
        folder = tmp_path_factory.mktemp(family)
        seed = list(CASES).index(case)
        model, _ = torch_models.make(family, SIZES | changes, seed, folder)
        for name, bias_E in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias_E.add_(torch.randn_like(bias_E) * 0.3)
        model.save_pretrained(folder)
        return model, str(folder)

    return make


def assert_same(got, wanted):
    assert np.abs(np.asarray(got) - wanted).max() <= SPREAD * wanted.std()


@pytest.mark.sampled("v3")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pytorch_there_and_back(case, torch_model, tmp_path):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    ids = torch_models.tokens(VOCAB)
    wanted = torch_models.torch_logits(reference, ids)
    assert_same(model(jnp.asarray(ids)), wanted)
    save_pretrained(model, tmp_path, max_file_bytes=50_000)
    read = transformers.AutoModelForCausalLM.from_pretrained
    again = read(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(again) is type(reference)
    np.testing.assert_array_equal(torch_models.torch_logits(again, ids), wanted)
    assert from_pretrained(tmp_path, dtype="float32")[0].arch == model.arch


@functools.partial(jax.jit, static_argnums=0)
def gradient(network, params, ids):
    def loss(params):
        hidden, _ = network.bind(params).hidden(ids[:, :-1])
        return -token_logp(network, params, hidden, ids[:, 1:], temperature=1.0).mean()

    return jax.grad(loss)(params)


@pytest.mark.sampled("v3 biases, one matrix of queries")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    network, params = split_model(from_pretrained(folder, dtype="float32")[0])
    ids = torch_models.tokens(VOCAB, 2)
    grads = jax.device_get(gradient(network, params, ids))
    wanted, actual = torch_models.gradients(reference, ids), tensors_of(grads, network.arch)
    biases = {name for name in actual if name.endswith("e_score_correction_bias")}  # untrained
    assert actual.keys() - biases == wanted.keys()
    for name, tensor in wanted.items():
        # A bias of keys that do not rotate moves all scores of a query alike: its gradient is 0.
        bound = 1e-4 * np.abs(tensor).max() + 1e-9
        assert np.abs(actual[name] - tensor).max() <= bound, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["v3", "v2 lite"])
def test_bfloat16_is_as_exact_as_in_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    ids = torch_models.tokens(VOCAB)
    exact = torch_models.torch_logits(reference, ids)
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    of_torch = np.abs(torch_models.torch_logits(half, ids) - exact).mean()
    model, _ = from_pretrained(folder, dtype="bfloat16")
    expanded = np.asarray(model(jnp.asarray(ids)))
    for logits in (expanded, sampled(*split_model(model), ids)):
        error = np.abs(logits - exact).mean()
        assert 1e-5 < error <= 1.1 * of_torch


PAGE = 5


@functools.partial(jax.jit, static_argnums=0)
def extend(network, params, tokens_RL, position_RL, pages, page_table):
    model = network.bind(params)
    found = model.extend(tokens_RL, position_RL, pages, page_table)
    head_VD = model.head_VD(found.hidden_NLD.dtype)
    product = jnp.einsum("rld,vd->rlv", found.hidden_NLD, head_VD, preferred_element_type="float32")
    return network.arch.logits(product), found.keys


def sampled(network, params, ids, shards=1):
    """Logits of tokens that a cache is extended by, some at a time; in the absorbed form."""
    rows, width = len(ids), -(-LENGTH // PAGE)
    each = rows // shards  # shards name their pages by numbers of their own
    table = np.random.default_rng(4).permutation(each * width).reshape(each, width)
    table = np.tile(table, (shards, 1)).astype(np.int32)
    page_table = PageTable(table, np.zeros(rows, np.int32))
    pages, logits, start = new_pages(network.arch, rows * width, PAGE), [], 0
    for chunk in (9, 1, 1, 4, 1, LENGTH - 16):
        where = np.arange(start, start + max(chunk, 2), dtype=np.int32)  # few programs
        position = np.broadcast_to(
            np.where(where < start + chunk, where, NOWHERE), (rows, len(where))
        )
        tokens = np.asarray(ids)[:, np.minimum(where, LENGTH - 1)]
        out, pages = extend(network, params, tokens, position, pages, page_table)
        logits.append(np.asarray(out)[:, :chunk])
        start += chunk
    return np.concatenate(logits, axis=1)


@pytest.mark.sampled("v3")
@pytest.mark.parametrize("case", CASES)
def test_the_sampler_gives_pytorchs_logits_from_a_cache_of_latents(case, torch_model):
    reference, folder = torch_model(case)
    network, params = split_model(from_pretrained(folder, dtype="float32")[0])
    ids = torch_models.tokens(VOCAB)
    assert_same(sampled(network, params, ids), torch_models.torch_logits(reference, ids))


def test_the_cache_holds_a_latent_and_a_key_of_one_head():
    layer, *_ = new_pages(ARCH, 7, PAGE)
    assert [x.shape for x in jax.tree.leaves(layer)] == [(1, 7, PAGE, 20 + 6)]


ARCH = Architecture(
    vocab_size=336,
    width=56,
    layers=2,
    heads=4,
    kv_heads=4,
    head_dim=16,
    mlp_width=72,
    latent=LatentAttention(q_rank=24, kv_rank=20, nope_dim=10, rope_dim=6, value_dim=12),
    qk_norm=False,
    qkv_bias=True,
    tied=False,
)
ALL = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
IDS = torch_models.tokens(VOCAB, 4)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(network, params, tokens_NL, **rows):
    model = network.bind(params)
    return network.arch.logits(model.hidden(tokens_NL, **rows)[0] @ model.head_VD("float32").T)


def test_both_forms_are_equal_with_adapters():
    network, params = random_network(dataclasses.replace(ARCH, lora=LoraAdapters(3, 3.0, ALL)))
    wanted = np.asarray(logits_of(network, params, IDS))
    assert_same(sampled(network, params, IDS), wanted)
    plain, frozen = random_network(ARCH)[0], split_trainable(network, params)[1]
    assert np.abs(sampled(plain, frozen, IDS) - wanted).max() > 0.1 * wanted.std()


@pytest.mark.exhaustive
def test_both_forms_are_equal_with_matrices_of_8_bits():
    network, params = random_network(dataclasses.replace(ARCH, int8=True))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        if path[-1].key == "kernel_scale":
            return np.float32(rng.uniform(0.5, 1.5, leaf.shape) * 1e-3)
        if path[-1].key != "kernel":
            return leaf
        return np.asarray(quantize(rng.normal(size=leaf.shape))[0])

    params = jax.tree_util.tree_map_with_path(draw, params)
    assert params["layers"][0]["latent"]["kv_b"]["kernel"].dtype == np.int8
    assert_same(sampled(network, params, IDS), np.asarray(logits_of(network, params, IDS)))


def test_tokens_of_a_tree_are_computed_as_if_their_paths_stood_alone():
    """A path of 12 tokens that two of 8 and 4 continue."""
    network, params = random_network(ARCH)
    tree = Tree(
        np.r_[:20, 12:16].astype(np.int32)[None],
        np.r_[[24] * 12, [20] * 8, [24] * 4].astype(np.int32)[None],
    )
    got = np.asarray(logits_of(network, params, IDS[:1], tree=tree))[0]
    for path in (np.r_[:20], np.r_[:12, 20:24]):
        wanted = np.asarray(logits_of(network, params, IDS[:1, path]))[0]
        assert_same(got[path], wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "tensor": 4}, {"fsdp": 2, "tensor": 2, "data": 2}, {"context": 4, "tensor": 2}],
    ids=str,
)
def test_devices_share_the_heads_and_each_holds_the_latents(sizes):
    mesh = make_mesh(schema.Mesh(**{"data": 1, "fsdp": 1, **sizes}))
    stacked = dataclasses.replace(ARCH, scan_layers=True, remat="full")
    network, params = random_network(stacked)
    wanted = np.asarray(logits_of(network, params, IDS))
    grads = gradient(network, params, IDS)
    with jax.set_mesh(mesh):
        placed = placed_on(mesh, network, params)
        assert_same(logits_of(network, placed, IDS), wanted)
        got = gradient(network, placed, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, grads)
    if "context" in sizes:  # which the sampler's mesh has none of
        return
    network, params = random_network(ARCH)
    wanted = np.asarray(logits_of(network, params, IDS))
    with jax.set_mesh(mesh):
        placed = placed_on(mesh, network, params)
        assert_same(sampled(network, placed, IDS, row_shards(mesh)), wanted)
        layer = jax.jit(lambda: new_pages(ARCH, 8, PAGE)[0])()
    assert layer.k.sharding.shard_shape(layer.k.shape)[0] == 1


def placed_on(mesh, network, params):
    return jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))


def moved(model, lora):
    """The model with adapters that have an effect."""
    network, params = split_model(attach_adapters(model, lora))
    adapters, frozen = split_trainable(network, params)
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: np.float32(rng.normal(0, 0.2, x.shape)), adapters)
    return network.bind(join_params(drawn, frozen))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "targets", [ALL, (r".*\.self_attn\.(kv_b|q_a)_proj",)], ids=["names", "pattern"]
)
def test_adapters_mean_the_same_to_peft_merged_or_not(targets, torch_model, tmp_path):
    peft, (reference, folder) = importlib.import_module("peft"), torch_model("v3")
    base, _ = from_pretrained(folder, dtype="float32")
    model = moved(base, LoraAdapters(3, 12.0, targets))
    ids = torch_models.tokens(VOCAB)
    wanted = np.asarray(model(jnp.asarray(ids)))
    plain = torch_models.torch_logits(reference, ids)
    assert np.abs(wanted - plain).max() > 0.1 * plain.std()
    save_adapters(model, tmp_path / "adapters", folder)
    read = transformers.AutoModelForCausalLM.from_pretrained
    there = read(folder, dtype=torch.float32, attn_implementation="eager")
    there = peft.PeftModel.from_pretrained(there, tmp_path / "adapters").eval()
    assert_same(torch_models.torch_logits(there, ids), wanted)
    again = load_adapters(base, tmp_path / "adapters")
    assert_same(sampled(*split_model(again), ids), wanted)
    save_pretrained(merge_adapters(model), tmp_path / "merged")
    merged = read(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager").eval()
    assert_same(torch_models.torch_logits(merged, ids), wanted)


@pytest.mark.parametrize(
    "changes, target, message",
    [
        ({}, "k_proj", "of which the model has no k_proj; allowed: q_a_proj, q_b_proj, kv_a"),
        ({"latent": None}, "q_b_proj", "has no q_b_proj; allowed: q_proj, k_proj, v_proj, o_proj"),
    ],
)
def test_adapters_of_projections_that_a_model_lacks_are_refused(changes, target, message):
    arch = dataclasses.replace(ARCH, **changes)
    with pytest.raises(ValueError, match=message):
        with_adapters(arch, LoraAdapters(2, 4.0, (target, "o_proj")))


def test_layers_that_predict_further_tokens_are_not_read(torch_model, tmp_path, caplog):
    """Published folders number them after the model's own."""
    reference, folder = torch_model("v3")
    tensors = load_file(f"{folder}/model.safetensors")
    extra = {
        name.replace(".layers.2.", ".layers.3."): x
        for name, x in tensors.items()
        if ".layers.2." in name
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    shutil.copy(f"{folder}/config.json", tmp_path)
    model, _ = from_pretrained(tmp_path, dtype="float32")
    assert [line for line in caplog.messages if "not read" in line] == [
        f"{tmp_path}: {len(extra)} tensors are not read: model.layers.3"
    ]
    ids = torch_models.tokens(VOCAB)
    assert_same(model(jnp.asarray(ids)), torch_models.torch_logits(reference, ids))
    save_pretrained(model, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0


REFUSED = {
    "v_head_dim is 17; allowed: at most 16": {"v_head_dim": 17},
    "num_key_value_heads is 2; allowed with latent attention: all 4 heads": {
        "num_key_value_heads": 2
    },
    "qk_rope_head_dim is 5; allowed: an even number": {"qk_rope_head_dim": 5},
    "moe_layer_freq is 2; allowed: 1": {"moe_layer_freq": 2},
    "scoring_func is 'softmax'; allowed: sigmoid": {"scoring_func": "softmax"},
    "scoring_func is 'sigmoid'; allowed: softmax": {
        "model_type": "deepseek_v2",
        "scoring_func": "sigmoid",
    },
    "rope_interleave is 'no'; allowed: true or false": {"rope_interleave": "no"},
    "topk_method is 'random'; allowed: greedy": {
        "model_type": "deepseek_v2",
        "topk_method": "random",
    },
    "norm_topk_prob is true; allowed for deepseek_v2: false": {
        "model_type": "deepseek_v2",
        "norm_topk_prob": True,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_refused_by_name(message):
    values = {"model_type": "deepseek_v3"} | SIZES | REFUSED[message]
    with pytest.raises(ValueError, match=message):
        read_architecture(values, "config.json")
