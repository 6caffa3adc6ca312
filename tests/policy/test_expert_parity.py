"""Families of experts in PyTorch (`transformers`) and here: logits, gradients, and the way back."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import torch_models
import transformers
from safetensors.numpy import load_file, save_file
from torch_models import torch_logits

from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.parameter_names import leaf_at, stored_parameters
from seeupo_jax.policy.network import split_model, token_logp

VOCAB = 211
# Three query heads to one of keys and values.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 168,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
DOTS1 = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "head_dim": 24,
}
GLM4_MOE = {**DOTS1, "first_k_dense_replace": 1}
QWEN3_5_MOE = {
    "intermediate_size": 40,  # which it does not have
    **QWEN2_MOE,
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
# Its padding is a token by default, whose embedding has no gradient in PyTorch.
OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}
CASES = {
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2_moe window, dense layer": (
        "qwen2_moe",
        {
            **QWEN2_MOE,
            **WINDOW,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "hidden_act": "gelu",
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral window": ("mixtral", {**MIXTRAL, "sliding_window": 7, "head_dim": 24}),
    "dots1": ("dots1", DOTS1),
    "dots1 groups, dense layer": (
        "dots1",
        {
            **DOTS1,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "attention_bias": True,
        },
    ),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "glm4_moe norms, biases, groups": (
        "glm4_moe",
        {
            **GLM4_MOE,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 2,
            "norm_topk_prob": False,
            "partial_rotary_factor": 1.0,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN3_5_MOE),
    "olmoe": ("olmoe", OLMOE),
    "olmoe normalized, biases": (
        "olmoe",
        {**OLMOE, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 3},
    ),
}


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    """Makes, once, a random model of a case and the folder that `transformers` saves it in."""

    @functools.cache
    def make(case):
        family, changes = CASES[case]
        folder = tmp_path_factory.mktemp(family)
        model, _ = torch_models.make(family, SIZES | changes, list(CASES).index(case), folder)
        biases = [x for n, x in model.named_buffers() if n.endswith("e_score_correction_bias")]
        for bias_E in biases:  # of the size of the scores that it is added to
            bias_E.add_(torch.randn_like(bias_E) * 0.3)
        model.save_pretrained(folder)
        return model, str(folder)

    return make


@pytest.mark.sampled(
    *("qwen2_moe", "mixtral window", "dots1 groups, dense layer"),
    *("glm4_moe norms, biases, groups", "qwen3_5_moe"),
)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pytorch_there_and_back(case, torch_model, tmp_path):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    ids = torch_models.tokens(VOCAB)
    wanted = torch_logits(reference, ids)
    assert np.abs(np.asarray(model(ids)) - wanted).max() <= 1e-5 * np.ptp(wanted)
    save_pretrained(model, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert type(again) is type(reference)
    np.testing.assert_array_equal(torch_logits(again, ids), wanted)
    written, original = (load_file(f"{f}/model.safetensors") for f in (tmp_path, folder))
    assert written.keys() == original.keys()


@pytest.mark.sampled("dots1 groups, dense layer")
@pytest.mark.parametrize(
    "case",
    ["qwen2_moe", "mixtral", "dots1 groups, dense layer", "glm4_moe", "qwen3_5_moe", "olmoe"],
)
def test_gradients_are_those_of_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    network, params = split_model(model)
    ids = torch_models.tokens(VOCAB, 2)

    @jax.jit
    def gradient(params):
        def loss(params):
            hidden, _ = network.bind(params).hidden(ids[:, :-1])
            logp = token_logp(network, params, hidden, ids[:, 1:], temperature=1.0)
            return -logp.mean()

        return jax.grad(loss)(params)

    actual, wanted = jax.device_get(gradient(params)), torch_models.gradients(reference, ids)
    if case == "mixtral":
        wanted = {in_mixtral_files(name): gradient for name, gradient in wanted.items()}
    compared = set()
    for stored in stored_parameters(model.arch, params):
        node = leaf_at(actual, stored.path)
        for name, part in zip(stored.names, node if stored.grouped else [node], strict=True):
            if name.endswith("e_score_correction_bias"):  # a buffer there, which nothing trains
                assert not part.any()
                continue
            part = part.T if stored.transposed else part
            largest = np.abs(wanted[name]).max()  # 0 of an expert that no token went to
            assert np.abs(part - wanted[name]).max() <= 1e-4 * largest, name
            compared.add(name)
    assert compared == wanted.keys()


def in_mixtral_files(name):
    """The name of a tensor in Mixtral's files."""
    for here, there in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        name = name.replace(here, there)
    return name.replace(".mlp.", ".block_sparse_moe.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["qwen2_moe", "mixtral", "dots1"])
def test_bfloat16_is_as_exact_as_in_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    ids = torch_models.tokens(VOCAB)
    exact = torch_logits(reference, ids)
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model, _ = from_pretrained(folder, dtype="bfloat16")
    actual = np.abs(np.asarray(model(ids)) - exact)
    assert actual.mean() <= 1.1 * np.abs(torch_logits(half, ids) - exact).mean()
    assert actual.mean() > 1e-5  # it was computed in bfloat16


@pytest.mark.sampled("mixtral")
@pytest.mark.parametrize("case", ["qwen2_moe", "mixtral", "dots1 groups, dense layer"])
def test_fused_experts_are_read_as_the_same_model(case, torch_model, tmp_path):
    """A folder with the tensors as transformers has them in memory, which it loads, too."""
    reference, folder = torch_model(case)
    shutil.copy(f"{folder}/config.json", tmp_path)
    fused = {name: x.numpy() for name, x in reference.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in fused)
    save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch_models.tokens(VOCAB)
    assert np.abs(torch_logits(again.eval(), ids) - torch_logits(reference, ids)).max() < 1e-5
    params = [
        split_model(from_pretrained(place, dtype="float32")[0])[1] for place in (folder, tmp_path)
    ]
    jax.tree.map(np.testing.assert_array_equal, *params)
    del fused["model.layers.1.mlp.experts.down_proj"]
    save_file(fused, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model.layers.1.*experts.0"):
        from_pretrained(tmp_path)


@pytest.mark.exhaustive
def test_layers_after_the_last_one_are_not_read(torch_model, tmp_path, caplog):
    """GLM-4.5 predicts the token after the next one there."""
    _, folder = torch_model("glm4_moe")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    extra = {"model.layers.2.eh_proj.weight": np.zeros((4, 4), np.float32)}
    save_file(load_file(f"{folder}/model.safetensors") | extra, tmp_path / "model.safetensors")
    got, wanted = (from_pretrained(place, dtype="float32")[0] for place in (tmp_path, folder))
    assert [line for line in caplog.messages if "not read" in line] == [
        f"{tmp_path}: 1 tensors are not read: model.layers.2"
    ]
    jax.tree.map(np.testing.assert_array_equal, split_model(got)[1], split_model(wanted)[1])


def test_selection_biases_stay_float32_in_every_file_and_type(torch_model, tmp_path):
    _, folder = torch_model("dots1")
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    wanted_E = load_file(f"{folder}/model.safetensors")[name]
    model, _ = from_pretrained(folder, dtype="bfloat16", param_dtype="bfloat16")
    save_pretrained(model, tmp_path, dtype="bfloat16")
    np.testing.assert_array_equal(load_file(f"{tmp_path}/model.safetensors")[name], wanted_E)


def test_the_saved_config_says_the_same_to_transformers(torch_model, tmp_path):
    for case in CASES:
        _, folder = torch_model(case)
        model, _ = from_pretrained(folder, dtype="float32")
        save_pretrained(model, tmp_path / case)
        actual = json.loads((tmp_path / case / "config.json").read_text())
        reference = json.loads(Path(folder, "config.json").read_text())
        for key in reference.keys() - {
            *("transformers_version", "max_window_layers", "sliding_window")
        }:
            wanted = reference[key]
            if key == "head_dim" and wanted is None:  # then it is this, which Mixtral may leave out
                wanted = reference["hidden_size"] // reference["num_attention_heads"]
            if key == "rope_parameters" and wanted.get("partial_rotary_factor") == 1:
                assert actual["partial_rotary_factor"] == 1  # there it may be left out
                wanted = {k: v for k, v in wanted.items() if k != "partial_rotary_factor"}
            assert actual[key] == wanted, (case, key)
