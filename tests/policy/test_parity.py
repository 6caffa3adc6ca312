"""The same folders in PyTorch (`transformers`) and here: logits, gradients, and the way back."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_models
import transformers
from safetensors.numpy import load_file
from torch_models import torch_logits

from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.parameter_names import leaf_at, stored_parameters
from seeupo_jax.policy.network import split_model, token_logp

VOCAB, LENGTH = 517, 24
# Seven query heads to one of keys and values; heads of 128 in a width of 896.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "intermediate_size": 168,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": ROPE["llama3"]}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen2 linear": ("qwen2", {"rope_parameters": ROPE["linear"]}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3 tied, narrow heads": ("qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "qwen3 yarn": ("qwen3", {"head_dim": 128, "rope_parameters": ROPE["yarn"]}),
    "qwen3 biases": ("qwen3", {"head_dim": 128, "attention_bias": True}),
    "qwen3 window": ("qwen3", {"head_dim": 32, **WINDOW, "max_window_layers": 1}),
    "moe": ("qwen3_moe", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "moe window, dense layer": (
        "qwen3_moe",
        {**MOE, **WINDOW, "head_dim": 32, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
}


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    """Makes, once, a random model of a case and the folder that `transformers` saves it in."""

    @functools.cache
    def make(case):
        family, changes = CASES[case]
        seed = list(CASES).index(case)
        return torch_models.make(family, SIZES | changes, seed, tmp_path_factory.mktemp(family))

    return make


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    model, tokenizer = from_pretrained(folder, dtype="float32")
    assert tokenizer is None  # the folder has none
    ids = torch_models.tokens(VOCAB)
    logits = np.asarray(model(jnp.asarray(ids)))
    assert np.abs(logits - torch_logits(reference, ids)).max() <= 2e-5
    lengths = np.array([LENGTH, 5, 13])
    mask = np.arange(LENGTH) < lengths[:, None]
    padded = torch_logits(reference, ids * mask, mask.astype(int))
    actual = np.asarray(model(jnp.asarray(ids * mask)))
    assert np.abs(actual - padded)[mask].max() <= 2e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_what_we_write_is_the_same_model_to_pytorch(case, torch_model, tmp_path):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    save_pretrained(model, tmp_path, max_file_bytes=500_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert type(again) is type(reference)
    np.testing.assert_array_equal(
        torch_logits(again, torch_models.tokens(VOCAB)),
        torch_logits(reference, torch_models.tokens(VOCAB)),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "moe"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_yarn_that_a_user_adds_computes_positions_beyond_the_original_length(
    family, kind, torch_model, tmp_path
):
    """A config.json with what Qwen's model cards add, in a model made for 8 positions."""
    _, folder = torch_model(family)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    theta = values.pop("rope_parameters")["rope_theta"]
    scaling = {"factor": 4.0, "original_max_position_embeddings": 8, kind: "yarn"}
    added = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(values | added))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, _ = from_pretrained(tmp_path, dtype="float32")
    assert model.arch.max_positions == 32 > LENGTH > 8
    ids = torch_models.tokens(VOCAB)
    logits, wanted = np.asarray(model(jnp.asarray(ids))), torch_logits(reference.eval(), ids)
    assert np.abs(logits - wanted).max() <= 2e-5
    plain, _ = from_pretrained(folder, dtype="float32")
    assert np.abs(wanted - np.asarray(plain(jnp.asarray(ids)))).max() > 1e-3


def test_dynamic_scaling_is_that_of_pytorch_up_to_the_models_own_context(torch_model, tmp_path):
    """Beyond, it would depend on a text's length, and is refused."""
    _, folder = torch_model("qwen2")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    values["max_position_embeddings"] = LENGTH
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, _ = from_pretrained(tmp_path, dtype="float32")
    ids = torch_models.tokens(VOCAB)
    logits, wanted = np.asarray(model(jnp.asarray(ids))), torch_logits(reference.eval(), ids)
    assert np.abs(logits - wanted).max() <= 2e-5
    with pytest.raises(
        ValueError, match="got rows of 48 .* dynamic rope scaling; allowed: at most"
    ):
        model(jnp.tile(ids, (1, 2)))


@pytest.mark.parametrize(
    "case",
    ["llama", "llama biases", "qwen2 tied", "qwen3 tied, narrow heads", "qwen3 window", "moe"],
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

    actual = jax.device_get(gradient(params))
    wanted = torch_models.gradients(reference, ids)
    compared = set()
    for stored in stored_parameters(model.arch, params):
        node = leaf_at(actual, stored.path)
        for name, part in zip(stored.names, node if stored.grouped else [node], strict=True):
            part = part.T if stored.transposed else part
            gap = np.abs(part - wanted[name]).max() / np.abs(wanted[name]).max()
            assert gap <= 1e-4, name
            compared.add(name)
    assert compared == wanted.keys()


@pytest.mark.sampled("qwen2")
@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "moe"])
def test_bfloat16_is_as_exact_as_in_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    exact = torch_logits(reference, torch_models.tokens(VOCAB))
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model, _ = from_pretrained(folder, dtype="bfloat16")
    actual = np.abs(np.asarray(model(jnp.asarray(torch_models.tokens(VOCAB)))) - exact)
    other = np.abs(torch_logits(half, torch_models.tokens(VOCAB)) - exact)
    assert actual.mean() <= other.mean()
    assert actual.max() <= 1.5 * other.max()  # the largest of 37,000 rounding errors: chance
    assert actual.mean() > 1e-5  # it was computed in bfloat16


@pytest.mark.sampled("moe")
@pytest.mark.parametrize("case", ["qwen2", "qwen3 yarn", "moe"])
def test_stacked_layers_hold_the_same_model(case, torch_model, tmp_path):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32", scan_layers=True)
    logits = np.asarray(model(jnp.asarray(torch_models.tokens(VOCAB))))
    assert np.abs(logits - torch_logits(reference, torch_models.tokens(VOCAB))).max() <= 2e-5
    save_pretrained(model, tmp_path)
    written, original = (load_file(f"{f}/model.safetensors") for f in (tmp_path, folder))
    assert written.keys() == original.keys()
    for name in original:
        np.testing.assert_array_equal(written[name], original[name])


def test_the_saved_config_says_the_same_to_transformers(torch_model, tmp_path):
    for case in CASES:
        _, folder = torch_model(case)
        model, _ = from_pretrained(folder, dtype="float32")
        save_pretrained(model, tmp_path / case)
        actual = json.loads((tmp_path / case / "config.json").read_text())
        reference = json.loads(Path(folder, "config.json").read_text())
        for key in reference.keys() - {
            "transformers_version",
            "max_window_layers",
            "sliding_window",
        }:
            assert actual[key] == reference[key], (case, key)
