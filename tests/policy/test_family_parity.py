"""Families beside Llama and Qwen, random and of odd sizes, in PyTorch (`transformers`) and here."""

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
from safetensors.numpy import load_file, save_file
from twin_policy import tensors_of

from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.lora import attach_adapters, load_adapters, merge_adapters, save_adapters
from seeupo_jax.policy.network import split_model, token_logp

VOCAB = 331
SPREAD = 1e-4  # of the largest difference allowed, in standard deviations of PyTorch's logits
HEADS = {
    "vocab_size": VOCAB,
    "hidden_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SIZES = HEADS | {"head_dim": 18}  # of families whose heads are of any size
HALVES = ["sliding_attention", "full_attention"] * 2
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GEMMA = SIZES | {"sliding_window": 6, "query_pre_attn_scalar": 24}
DELTA = HEADS | {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
GPT_OSS = SIZES | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 0.3,
    "max_position_embeddings": 64,
    "rope_parameters": YARN | {"truncate": False},
}
CASES = {
    "mistral": ("mistral", SIZES | {"sliding_window": None, "rope_theta": 1e6}),
    "mistral window": ("mistral", SIZES | {"sliding_window": 7}),
    "ministral": ("ministral", SIZES | {"sliding_window": 7, "layer_types": HALVES}),
    "ministral3": (
        "ministral3",
        SIZES
        | {
            "max_position_embeddings": 64,
            "rope_parameters": YARN
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "gemma2": ("gemma2", GEMMA),
    "gemma2 without caps, untied": (
        "gemma2",
        GEMMA
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_activation": "gelu",
        },
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3 plain": ("gemma3_text", GEMMA | {"sliding_window_pattern": 2}),
    "smollm3": ("smollm3", HEADS | {"no_rope_layer_interval": 2}),
    "smollm3 window, biases": (
        "smollm3",
        HEADS
        | {
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [1, 1, 0, 1],
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": ("olmo2", HEADS),
    "olmo2 biases, as many key heads": (
        "olmo2",
        HEADS | {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "olmo3": (
        "olmo3",
        HEADS
        | {
            "sliding_window": 6,
            "rope_parameters": {
                "full_attention": YARN | {"attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
            "max_position_embeddings": 64,
        },
    ),
    "glm4": ("glm4", SIZES | {"head_dim": 20}),
    "glm4 without biases": ("glm4", SIZES | {"attention_bias": False, "head_dim": 12}),
    "phi3": ("phi3", HEADS),
    "phi3 window, as many key heads": (
        "phi3",
        HEADS | {"sliding_window": 9, "num_key_value_heads": 4},
    ),
    "phi3 longrope": (
        "phi3",
        HEADS
        | {
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 2.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
            },
        },
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss without biases": (
        "gpt_oss",
        GPT_OSS
        | {
            "attention_bias": False,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": (
        "granite",
        HEADS
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
        },
    ),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_next dense": ("qwen3_next", DELTA | EXPERTS | {"mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5 as many key heads, tied": (
        "qwen3_5_text",
        DELTA
        | {
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "partial_rotary_factor": 1.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite biases, tied": (
        "granite",
        HEADS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
}


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    """Makes, once, a random model of a case and the folder that `transformers` saves it in."""

    @functools.cache
    def make(case):
        family, values = CASES[case]
        seed = list(CASES).index(case)
        return torch_models.make(family, values, seed, tmp_path_factory.mktemp(family))

    return make


def assert_same(got, wanted):
    assert np.abs(got - wanted).max() <= SPREAD * wanted.std()


@pytest.mark.sampled("gemma2", "phi3 longrope")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_pytorch_padded_or_not(case, torch_model):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    ids = torch_models.tokens(VOCAB)
    assert_same(np.asarray(model(jnp.asarray(ids))), torch_models.torch_logits(reference, ids))
    mask = np.arange(ids.shape[1]) < np.array([24, 5, 13])[:, None]
    padded = torch_models.torch_logits(reference, ids * mask, mask.astype(int))
    assert_same(np.asarray(model(jnp.asarray(ids * mask)))[mask], padded[mask])


@functools.partial(jax.jit, static_argnums=0)
def gradient(network, params, ids):
    def loss(params):
        hidden, _ = network.bind(params).hidden(ids[:, :-1])
        return -token_logp(network, params, hidden, ids[:, 1:], temperature=1.0).mean()

    return jax.grad(loss)(params)


@pytest.mark.sampled("gemma3", "olmo3")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_pytorch(case, torch_model):
    reference, folder = torch_model(case)
    network, params = split_model(from_pretrained(folder, dtype="float32")[0])
    ids = torch_models.tokens(VOCAB, 2)
    grads = jax.device_get(gradient(network, params, ids))
    wanted = torch_models.gradients(reference, ids)
    actual = tensors_of(grads, network.arch)
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # A bias of keys that do not rotate moves all scores of a query alike: its gradient is 0.
        bound = 1e-4 * np.abs(tensor).max() + 1e-9
        assert np.abs(actual[name] - tensor).max() <= bound, name


@pytest.mark.sampled("smollm3", "phi3")
@pytest.mark.parametrize("case", CASES)
def test_what_we_write_is_the_same_model_to_pytorch(case, torch_model, tmp_path):
    reference, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    save_pretrained(model, tmp_path, max_file_bytes=50_000)
    read = transformers.AutoModelForCausalLM.from_pretrained
    again = read(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(again) is type(reference)
    ids = torch_models.tokens(VOCAB)
    wanted = torch_models.torch_logits(reference, ids)
    np.testing.assert_array_equal(torch_models.torch_logits(again, ids), wanted)
    written, original = (
        json.loads(Path(place, "config.json").read_text()) for place in (tmp_path, folder)
    )
    for key in ("architectures", "model_type"):
        assert written[key] == original[key]


def test_layers_that_predict_further_tokens_are_not_read(torch_model, tmp_path, caplog):
    reference, folder = torch_model("qwen3_5")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"mtp.fc.weight": np.zeros((4, 4), np.float32)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    model, _ = from_pretrained(tmp_path, dtype="float32")
    assert [line for line in caplog.messages if "not read" in line] == [
        f"{tmp_path}: 1 tensors are not read: mtp"
    ]
    ids = torch_models.tokens(VOCAB)
    assert_same(np.asarray(model(jnp.asarray(ids))), torch_models.torch_logits(reference, ids))


TEXT = HEADS | {"head_dim": 18, "num_hidden_layers": 2}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WITH_IMAGES = {
    "gemma3": {
        "text_config": TEXT
        | {"model_type": "gemma3_text", "sliding_window": 6, "query_pre_attn_scalar": 24},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 5,
        "boi_token_index": 6,
        "eoi_token_index": 7,
    },
    "qwen3_5": {
        "text_config": DELTA
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 56,
        },
    },
    "qwen3_5_moe": {
        "text_config": DELTA
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 56,
        },
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral"},
        "image_token_index": 5,
    },
}


@pytest.mark.sampled("gemma3")
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_of_a_model_of_texts_and_images_the_text_model_is_read(family, tmp_path, caplog):
    torch.manual_seed(0)
    values = transformers.AutoConfig.for_model(family, **WITH_IMAGES[family])
    values._attn_implementation = "eager"
    reference = transformers.AutoModelForImageTextToText.from_config(values, dtype=torch.float32)
    reference.eval().save_pretrained(tmp_path / "images")
    model, _ = from_pretrained(tmp_path / "images", dtype="float32")
    (warning,) = (line for line in caplog.messages if "not read" in line)
    seen = ("model.visual",) if "qwen3_5" in family else ("vision_tower", "multi_modal_proj")
    for part in seen:
        assert part in warning
    ids = torch_models.tokens(VOCAB)
    wanted = torch_models.torch_logits(reference, ids)
    assert_same(np.asarray(model(jnp.asarray(ids))), wanted)
    save_pretrained(model, tmp_path / "text")
    read = transformers.AutoModelForCausalLM.from_pretrained
    text = read(tmp_path / "text", dtype=torch.float32, attn_implementation="eager").eval()
    assert_same(torch_models.torch_logits(text, ids), wanted)


def adapted(model, targets):
    """The model with adapters that have an effect."""
    network, params = split_model(attach_adapters(model, LoraAdapters(2, 4.0, targets)))
    rng = np.random.default_rng(0)

    def move(path, leaf):
        drawn = rng.normal(0, 0.1, leaf.shape) if path[-1].key.startswith("lora_b") else 0
        return leaf + np.float32(drawn)

    return network.bind(jax.tree_util.tree_map_with_path(move, params))


@pytest.mark.sampled("phi3")
@pytest.mark.parametrize("case", ["gemma2", "olmo3", "glm4", "phi3"])
def test_adapters_are_merged_into_each_family(case, torch_model, tmp_path):
    _, folder = torch_model(case)
    model, _ = from_pretrained(folder, dtype="float32")
    with_them = adapted(model, ("q_proj", "v_proj", "gate_proj", "down_proj"))
    ids = jnp.asarray(torch_models.tokens(VOCAB))
    wanted = np.asarray(with_them(ids))
    assert np.abs(np.asarray(model(ids)) - wanted).max() > 0.1 * wanted.std()
    save_pretrained(merge_adapters(with_them), tmp_path)
    assert_same(np.asarray(from_pretrained(tmp_path, dtype="float32")[0](ids)), wanted)


def test_adapters_of_parts_of_a_tensor_are_stored_merged_only(torch_model, tmp_path):
    model, _ = from_pretrained(torch_model("phi3")[1], dtype="float32")
    with pytest.raises(ValueError, match="of parts of gate_up_proj, qkv_proj, each .*merge"):
        save_adapters(adapted(model, ("q_proj", "up_proj")), tmp_path, "base")
    save_adapters(adapted(model, ("o_proj", "down_proj")), tmp_path / "others", "base")


def test_adapters_of_packed_experts_are_stored_merged_only(torch_model, tmp_path):
    """PEFT would take the columns of gate and up for halves."""
    model, _ = from_pretrained(torch_model("gpt_oss")[1], dtype="float32")
    with pytest.raises(ValueError, match="got adapters of experts, which gpt_oss packs .*merge"):
        save_adapters(adapted(model, ("q_proj", "down_proj")), tmp_path, "base")
    save_adapters(adapted(model, ("q_proj", "o_proj")), tmp_path, "base")
    file = tmp_path / "adapter_config.json"
    values = json.loads(file.read_text()) | {"target_parameters": ["mlp.experts.down_proj"]}
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="got adapters of experts, which gpt_oss packs .*allowed"):
        load_adapters(model, tmp_path)
