"""Experts packed into one tensor a layer, in MXFP4, against `transformers`."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_models
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.files.stacked_experts import from_mxfp4

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random_mxfp4(rng, *shape):
    """Blocks [..., out, G, 16] and scales [..., out, G] of numbers around 1/16."""
    blocks = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
    return blocks, rng.integers(120, 126, shape).astype(np.uint8)


def in_torch(blocks, scales):
    """As `transformers` computes them: [E, in, out]."""
    each = torch.tensor(blocks), torch.tensor(scales)
    return convert_moe_packed_tensors(*each, dtype=torch.float32).numpy()


def test_numbers_of_four_bits_are_those_of_transformers():
    blocks, scales = random_mxfp4(np.random.default_rng(0), 3, 10, 2)
    wanted = in_torch(blocks, scales).swapaxes(1, 2)
    np.testing.assert_array_equal(from_mxfp4(blocks, scales), wanted)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model in MXFP4 as it is published, and the same dequantised; the model in PyTorch."""
    plain, small = (tmp_path_factory.mktemp("gpt_oss") / name for name in ("plain", "mxfp4"))
    reference, _ = torch_models.make("gpt_oss", SIZES, 0, plain)
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(1)
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        del packed[name]
        each = random_mxfp4(rng, experts, outputs, inputs // 32)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = each
        tensors[name] = np.ascontiguousarray(in_torch(*each))
    shutil.copytree(plain, small)
    save_file(packed, small / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (small / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return plain, small, type(reference).from_pretrained(plain, attn_implementation="eager").eval()


def test_experts_in_mxfp4_are_computed_as_dequantised_ones(folders):
    plain, small, reference = folders
    ids = torch_models.tokens(61)
    each = [
        np.asarray(from_pretrained(folder, dtype="float32")[0](jnp.asarray(ids)))
        for folder in (plain, small)
    ]
    np.testing.assert_array_equal(*each)
    wanted = torch_models.torch_logits(reference, ids)
    assert np.abs(each[1] - wanted).max() <= 1e-4 * wanted.std()


def test_another_quantisation_and_bytes_without_one_are_refused(folders, tmp_path):
    _, small, _ = folders
    folder = Path(shutil.copytree(small, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config is .*bitsandbytes.*; allowed: None"):
        from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="MXFP4 lacks model.layers.0.mlp.experts.down_proj_scales"):
        from_pretrained(folder)
