"""Adapters of matrices that share a tensor in the files: what PEFT makes of them, and we of its."""

import functools
import importlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_models
import transformers
from safetensors.numpy import load_file, save_file
from torch_models import torch_logits

from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.architecture import LoraAdapters
from seeupo_jax.policy.lora import attach_adapters, load_adapters, save_adapters
from seeupo_jax.policy.network import split_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
IDS = torch_models.tokens(VOCAB)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @functools.cache
    def make(family):
        return torch_models.make(family, SIZES, 0, tmp_path_factory.mktemp(family))[1]

    return make


@pytest.fixture(scope="module")
def peft():
    """Takes seconds to import, and every worker imports every file of tests."""
    return importlib.import_module("peft")


def base(folder):
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(folder, dtype=torch.float32, attn_implementation="eager")


def policy(folder, **options):
    return from_pretrained(folder, dtype="float32", **options)[0]


def logits(model):
    return np.asarray(model(jnp.asarray(IDS)))


def adapted(model, targets, rslora=False):
    """The model with adapters that have an effect."""
    lora = LoraAdapters(2, 5.0, targets, rslora)
    network, params = split_model(attach_adapters(model, lora))
    rng = np.random.default_rng(0)

    def move(path, leaf):
        drawn = rng.normal(0, 0.3, leaf.shape) if path[-1].key == "lora_b" else 0
        return leaf + np.float32(drawn)

    return network.bind(jax.tree_util.tree_map_with_path(move, params))


def assert_same(got, wanted):
    assert np.abs(got - wanted).max() <= 2e-5 * np.ptp(wanted)


@pytest.mark.parametrize(
    "family, targets, rslora, scan_layers",
    [
        ("phi3", (*QKV, *GATE_UP, "down_proj"), False, True),
        ("phi3", QKV, True, False),
        ("glm4", ("q_proj", "v_proj", *GATE_UP), False, False),
    ],
)
def test_peft_computes_the_same_with_what_we_write_and_we_read_it_back(
    family, targets, rslora, scan_layers, peft, folder_of, tmp_path
):
    folder = folder_of(family)
    model = policy(folder, scan_layers=scan_layers)
    ours = adapted(model, targets, rslora)
    save_adapters(ours, tmp_path, folder)
    wanted = logits(ours)
    assert np.abs(wanted - logits(model)).max() > 0.05 * np.ptp(wanted)
    reference = peft.PeftModel.from_pretrained(base(folder), tmp_path).eval()
    assert_same(torch_logits(reference, IDS), wanted)
    again = load_adapters(model, tmp_path)
    assert again.arch == ours.arch
    jax.tree.map(np.testing.assert_array_equal, split_model(again)[1], split_model(ours)[1])
    assert_same(logits(policy(tmp_path)), wanted)  # merged


@pytest.mark.parametrize(
    "family, modules, rslora",
    [("phi3", ["qkv_proj", "gate_up_proj", "o_proj"], True), ("glm4", ["gate_up_proj"], False)],
)
def test_an_adapter_that_peft_made_of_a_tensor_is_that_of_its_parts(
    family, modules, rslora, peft, folder_of, tmp_path
):
    folder = folder_of(family)
    options = {"r": 3, "lora_alpha": 7, "use_rslora": rslora, "init_lora_weights": False}
    made = peft.get_peft_model(base(folder), peft.LoraConfig(target_modules=modules, **options))
    made.eval().save_pretrained(tmp_path / "made")
    loaded = load_adapters(policy(folder), tmp_path / "made")
    wanted = torch_logits(made, IDS)
    assert_same(logits(loaded), wanted)
    save_adapters(loaded, tmp_path / "again", folder)
    again = peft.PeftModel.from_pretrained(base(folder), tmp_path / "again").eval()
    assert_same(torch_logits(again, IDS), wanted)


@pytest.fixture
def written(folder_of, tmp_path):
    """A model without adapters, and a folder of some of its."""
    model = policy(folder_of("phi3"))
    save_adapters(adapted(model, (*QKV, *GATE_UP)), tmp_path, folder_of("phi3"))
    return model, tmp_path


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"alpha_pattern": {}}, "alpha_pattern is {}; allowed: {'qkv_proj': 15.0"),
        ({"rank_pattern": {"qkv_proj": 4}}, "rank_pattern is {'qkv_proj': 4}; allowed: {'qkv_pro"),
        ({"rank_pattern": {"o_proj": 4}}, "rank_pattern is {'o_proj': 4}; allowed: None"),
        ({"rank_pattern": "all"}, "rank_pattern is 'all'; allowed: None"),
    ],
)
def test_ranks_of_some_modules_are_refused(changes, error, written):
    model, folder = written
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=re.escape(error)):
        load_adapters(model, folder)


@pytest.mark.parametrize("module", ["qkv_proj", "gate_up_proj"])
def test_an_adapter_of_the_rank_of_all_parts_that_mixes_them_is_refused(module, written):
    model, folder = written
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(f"{module}.lora_B.weight"))
    tensors[name][0, -1] = 1  # of the first part's output, and the last part's rank
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"has numbers outside of its [23] blocks of rank 2"):
        load_adapters(model, folder)
