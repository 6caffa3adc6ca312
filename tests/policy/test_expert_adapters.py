"""Adapters of experts mean the same to PEFT, there and back."""

import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_models
import transformers
from safetensors.numpy import load_file
from torch_models import torch_logits

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import Architecture, LoraAdapters, Moe
from seeupo_jax.policy.lora import (
    TARGETS,
    attach_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
    with_adapters,
)
from seeupo_jax.policy.network import join_params, split_model, split_trainable, token_logp

# PEFT 0.21 reads a name that transformers 5.23 has deprecated, and knows no shapes of experts.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

VOCAB = 62
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
ALL = LoraAdapters(3, 12.0, TARGETS)
CASES = {
    **{family: (family, ALL) for family in FAMILIES},
    "experts alone": ("mixtral", LoraAdapters(3, 12.0, TARGETS[4:])),
    "down alone": ("mixtral", LoraAdapters(2, 3.0, ("v_proj", "down_proj"), rslora=True)),
    "gate and up": ("qwen3_moe", LoraAdapters(2, 3.0, ("q_proj", "gate_proj", "up_proj"))),
}


@pytest.fixture(scope="module")
def torch_model(tmp_path_factory):
    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        return torch_models.make(family, SIZES | FAMILIES[family], 0, folder)[1]

    return make


def torch_base(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def adapted(folder, lora, **options):
    """Our model with adapters that matter."""
    model = attach_adapters(from_pretrained(folder, dtype="float32", **options)[0], lora)
    network, params = split_model(model)
    adapters, frozen = split_trainable(network, params)
    rng = np.random.default_rng(3)
    drawn = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), adapters
    )
    return network.bind(join_params(drawn, frozen))


def logits(model):
    return np.asarray(model(torch_models.tokens(VOCAB)))


def peft_model(base, folder, trainable=False):
    peft = importlib.import_module("peft")
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=trainable)


@pytest.mark.sampled("dots1", "qwen3_moe", "down alone")
@pytest.mark.parametrize("case", CASES)
def test_peft_computes_what_we_compute(case, torch_model, tmp_path):
    family, lora = CASES[case]
    folder = torch_model(family)
    model = adapted(folder, lora)
    save_adapters(model, tmp_path, folder)
    there, wanted = peft_model(torch_base(folder), tmp_path), logits(model)
    assert np.abs(torch_logits(there, torch_models.tokens(VOCAB)) - wanted).max() < 1e-4
    plain = torch_logits(torch_base(folder), torch_models.tokens(VOCAB))
    assert np.abs(wanted - plain).max() > 0.1
    again = load_adapters(from_pretrained(folder, dtype="float32")[0], tmp_path)
    assert again.arch == model.arch
    jax.tree.map(np.testing.assert_array_equal, split_model(again)[1], split_model(model)[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_that_peft_wrote_are_read(family, torch_model, tmp_path):
    peft, folder = importlib.import_module("peft"), torch_model(family)
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    there = peft.get_peft_model(torch_base(folder), settings).eval()
    there.save_pretrained(tmp_path)
    model = load_adapters(from_pretrained(folder, dtype="float32")[0], tmp_path)
    wanted = torch_logits(there, torch_models.tokens(VOCAB))
    assert np.abs(logits(model) - wanted).max() < 1e-4
    save_adapters(model, tmp_path / "again", folder)
    both = (load_file(f / "adapter_model.safetensors") for f in (tmp_path, tmp_path / "again"))
    written, original = both
    assert written.keys() == original.keys()
    for name in original:
        np.testing.assert_array_equal(written[name], original[name])


@pytest.mark.parametrize("scan", [False, True])
def test_merged_adapters_compute_the_same_in_transformers(scan, torch_model, tmp_path):
    folder = torch_model("mixtral")
    model = adapted(folder, ALL, scan_layers=scan)
    merged = merge_adapters(model)
    np.testing.assert_allclose(logits(merged), logits(model), atol=1e-4)
    save_pretrained(merged, tmp_path)
    there = torch_logits(torch_base(tmp_path), torch_models.tokens(VOCAB))
    np.testing.assert_allclose(there, logits(model), atol=1e-4)


def test_gradients_of_adapters_are_those_of_peft(torch_model, tmp_path):
    folder = torch_model("mixtral")
    model = adapted(folder, ALL)
    save_adapters(model, tmp_path, folder)
    network, params = split_model(model)
    adapters, frozen = split_trainable(network, params)
    ids = torch_models.tokens(VOCAB, 2)

    def loss(adapters):
        whole = join_params(adapters, frozen)
        hidden, _ = network.bind(whole).hidden(ids[:, :-1])
        return -token_logp(network, whole, hidden, ids[:, 1:], temperature=1.0).mean()

    grads = jax.jit(jax.grad(loss))(adapters)
    save_adapters(network.bind(join_params(grads, frozen)), tmp_path / "grads", folder)
    actual = load_file(tmp_path / "grads" / "adapter_model.safetensors")
    there = peft_model(torch_base(folder), tmp_path, trainable=True)
    out = there(torch.tensor(ids)).logits[:, :-1].reshape(-1, VOCAB)
    torch.nn.functional.cross_entropy(out, torch.tensor(ids)[:, 1:].reshape(-1)).backward()
    wanted = {
        name.replace(".default", ""): x.grad.numpy()
        for name, x in there.named_parameters()
        if x.grad is not None
    }
    assert actual.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert np.abs(actual[name] - grad).max() <= 1e-4 * np.abs(grad).max(), name


def test_new_adapters_change_nothing_and_are_of_each_expert(torch_model):
    model = from_pretrained(torch_model("mixtral"), dtype="float32")[0]
    new = attach_adapters(model, ALL, seed=1)
    np.testing.assert_array_equal(logits(new), logits(model))
    a_EDR = np.asarray(new.layers[0].mlp.lora_gate_up_a[...])
    assert a_EDR.shape == (4, 24, 3) and (a_EDR[0] != a_EDR[1]).any()
    assert np.abs(a_EDR).max() <= 24**-0.5 < 1.2 * np.abs(a_EDR).max()


@pytest.mark.exhaustive
def test_eight_devices_compute_what_one_computes(torch_model):
    folder = torch_model("mixtral")
    wanted = logits(adapted(folder, ALL))
    with jax.set_mesh(make_mesh(schema.Mesh(data=2, expert=2, tensor=2))):
        network, params = split_model(adapted(folder, ALL))
        got = jax.jit(lambda p: network.bind(p)(torch_models.tokens(VOCAB)))(params)
    np.testing.assert_allclose(got, wanted, atol=1e-4)


ARCH = Architecture(40, 16, 2, 4, 2, 6, 24, moe=Moe(4, 2, 8, True))


@pytest.mark.parametrize(
    "lora, reason",
    [
        (LoraAdapters(2, 4.0, ("gate_proj",)), "allowed: gate_proj and up_proj, or neither"),
        (LoraAdapters(2, 4.0, ("down_proj",), layers=(0,)), "allowed: experts of all layers"),
        (LoraAdapters(2, 4.0, (r".*up_proj",)), "allowed: an expression of attention's"),
    ],
)
def test_what_peft_could_not_hold_is_refused(lora, reason):
    with pytest.raises(ValueError, match=f"for a model of experts; {reason}"):
        with_adapters(ARCH, lora)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"target_parameters": ["mlp.experts.up"]}, "target_parameters is .*; allowed: one or mor"),
        ({"target_modules": ["gate_proj"]}, "with target_parameters; allowed: a list of q_proj"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            "has unknown .*base_layer.lora_A",
        ),
    ],
)
def test_other_adapters_of_experts_are_refused(changes, reason, torch_model, tmp_path):
    folder = torch_model("mixtral")
    save_adapters(adapted(folder, ALL), tmp_path, folder)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=reason):
        load_adapters(from_pretrained(folder, dtype="float32")[0], tmp_path)
