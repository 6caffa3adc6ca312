"""Matrices in 8-bit floating point with a scale a block, against PyTorch's type of them."""

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
from safetensors.torch import load_file, save_file

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.files.model_config import read_architecture
from seeupo_jax.policy.network import split_model

BLOCK = (16, 12)  # of which few sizes below are multiples
SIZES = {
    "vocab_size": 64,
    "hidden_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "qwen3": {"head_dim": 18, "num_key_value_heads": 2},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # in no published folder in 8 bits
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}


def scaled(weight, scales, block=BLOCK):
    """The matrix of numbers and scales, by PyTorch."""
    every = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.to(torch.float32) * every[: weight.shape[0], : weight.shape[1]]


def in_eight_bits(tensor):
    """Numbers of any of the type's exponents, and scales of blocks; NaN is none of a model's."""
    shape = tuple(-(-n // size) for n, size in zip(tensor.shape, BLOCK, strict=True))
    scales = torch.rand(shape) * 0.02 + 1e-4
    return (tensor * 100).to(torch.float8_e4m3fn), scales


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request, tmp_path_factory):
    """A model in FP8 as it is published, and the same with float32 numbers by PyTorch."""
    plain, small = (tmp_path_factory.mktemp(request.param) / name for name in ("plain", "fp8"))
    torch_models.make(request.param, SIZES | FAMILIES[request.param], 0, plain)
    shutil.copytree(plain, small)
    written, same = {}, load_file(plain / "model.safetensors")
    for name, tensor in same.items():
        if tensor.ndim != 2 or any(part in name for part in PLAIN):
            written[name] = tensor
            continue
        weight, scales = in_eight_bits(tensor)
        written |= {name: weight, f"{name}_scale_inv": scales}
        same[name] = scaled(weight, scales)
    save_file(same, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(written, small / "model.safetensors", metadata={"format": "pt"})
    add_to_config(small, QUANTIZATION)
    return plain, small


def add_to_config(folder, quantization):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))


def params_of(folder, **options):
    return split_model(from_pretrained(folder, dtype="float32", **options)[0])[1]


def test_numbers_are_those_of_pytorch_bit_for_bit(folders):
    """With scales of blocks that rows and columns do not fill."""
    plain, small = map(params_of, folders)
    jax.tree.map(np.testing.assert_array_equal, small, plain)


def test_every_number_of_eight_bits_is_read(tmp_path, folders):
    _, small = folders
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    size = tensors[name].numel()
    numbers = (torch.arange(size) % 256).to(torch.uint8).view(torch.float8_e4m3fn)
    tensors[name] = numbers.reshape(tensors[name].shape)
    save_file(tensors, tmp_path / "model.safetensors")
    got = np.asarray(params_of(tmp_path)["layers"][0]["out"]["kernel"]).T
    wanted = scaled(tensors[name], tensors[f"{name}_scale_inv"]).numpy()
    assert len(np.unique(wanted[np.isfinite(wanted)])) > 250
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"expert": 2, "context": 4}], ids=str)
def test_every_part_of_a_matrix_is_that_of_the_whole(folders, sizes):
    mesh = make_mesh(schema.Mesh(**{"data": 1, "fsdp": 1, **sizes}))
    whole, parts = params_of(folders[1]), params_of(folders[1], mesh=mesh, scan_layers=False)
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(parts))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_transformers_computes_the_same_once_it_is_written_in_float32(folders, tmp_path):
    plain, small = folders
    model, _ = from_pretrained(small, dtype="float32")
    save_pretrained(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    read = transformers.AutoModelForCausalLM.from_pretrained
    there = read(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch_models.tokens(64)
    wanted = torch_models.torch_logits(there, ids)
    same = read(plain, dtype=torch.float32, attn_implementation="eager").eval()
    np.testing.assert_array_equal(wanted, torch_models.torch_logits(same, ids))
    assert np.abs(np.asarray(model(jnp.asarray(ids))) - wanted).max() <= 1e-4 * wanted.std()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'; allowed: e4m3"),
        ({"weight_block_size": None}, "weight_block_size is None; allowed: two whole numbers"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]; allowed: two whole numbers"),
        ({"weight_block_size": [0, 128]}, "allowed: two whole numbers from 1 to 65536"),
        ({"quant_method": "fbgemm_fp8"}, "quantization_config is .*fbgemm_fp8.*; allowed: None"),
    ],
)
def test_another_quantisation_is_refused_by_name(change, message):
    values = SIZES | {"model_type": "qwen3", "quantization_config": QUANTIZATION | change}
    with pytest.raises(ValueError, match=message):
        read_architecture(values, "config.json")


def test_scales_that_are_missing_or_do_not_fit_are_refused(folders, tmp_path):
    _, small = folders
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    tensors = load_file(small / "model.safetensors")
    scales = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"a model in FP8 lacks {name}, beside "):
        from_pretrained(tmp_path)
    save_file(tensors | {name: scales[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is .* for a matrix of .*; allowed: .* 16 x 12"):
        from_pretrained(tmp_path)


def test_eight_bits_without_a_config_of_them_are_refused_by_type(folders, tmp_path):
    plain, small = folders
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    shutil.copy(Path(plain, "config.json"), tmp_path)
    with pytest.raises(ValueError, match="is of type F8_E4M3; allowed: F32, F16, BF16"):
        from_pretrained(tmp_path)
