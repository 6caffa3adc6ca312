"""Adapters per turn: each computes as it would alone, on every kind of projection and in files."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from seeupo_jax.configuration import schema
from seeupo_jax.parallel.mesh import make_mesh, param_shardings
from seeupo_jax.planning.flops import parameters
from seeupo_jax.policy import from_pretrained, save_pretrained
from seeupo_jax.policy.architecture import (
    Architecture,
    DeltaNet,
    LatentAttention,
    LoraAdapters,
    Moe,
)
from seeupo_jax.policy.kernels.attention import Tree
from seeupo_jax.policy.lora import (
    TARGETS,
    attach_adapters,
    load_adapters,
    merge_adapters,
    read_lora,
    save_adapters,
)
from seeupo_jax.policy.network import join_params, split_model, split_trainable
from seeupo_jax.policy.transformer import Transformer
from seeupo_jax.policy.turn_adapters import adapter_of

# PEFT 0.21 reads a name that transformers 5.23 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

VOCAB, ADAPTERS = 40, 3
DENSE = Architecture(
    vocab_size=VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=24, tied=False
)
MOE = Moe(4, 2, mlp_width=8, normalize=True, shared_width=12)
LATENT = LatentAttention(q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=8)
OF_LATENTS = (
    *("o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
NETWORKS = {
    "dense": (DENSE, TARGETS),
    "stacked layers": (dataclasses.replace(DENSE, scan_layers=True), TARGETS),
    "experts": (dataclasses.replace(DENSE, moe=MOE), TARGETS),
    "stacked experts": (dataclasses.replace(DENSE, moe=MOE, scan_layers=True), TARGETS),
    "latents": (
        dataclasses.replace(
            DENSE, latent=LATENT, kv_heads=4, head_dim=LATENT.head_dim, qk_norm=False
        ),
        OF_LATENTS,
    ),
    "recurrent": (
        dataclasses.replace(
            DENSE, layers=3, attention_gate=True, delta=DeltaNet((0, 2), 2, 4, 6, 5, 4)
        ),
        TARGETS,
    ),
}
# Numbers that rounding moves little: with adapters of 0.3 and other tokens, half a unit in the
# last place of every parameter moved a logit by 5e-5, so that equal formulas may differ by more
# than 2e-5; on one kind of CPU they did.
TOKENS = np.random.default_rng(6).integers(0, VOCAB, (2, 9))


@functools.cache
def make(name="dense"):
    """A model with adapters of three turns that matter and differ, and the one without them."""
    arch, targets = NETWORKS[name]
    plain = Transformer(arch, nnx.Rngs(0))
    lora = LoraAdapters(rank=3, alpha=6.0, targets=targets, per_turn=ADAPTERS)
    return drawn(attach_adapters(plain, lora)), plain


def drawn(model, seed=3):
    """The model with other adapters."""
    network, params = split_model(model)
    adapters, frozen = split_trainable(network, params)
    rng = np.random.default_rng(seed)
    numbers = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), jnp.float32), adapters
    )
    return network.bind(join_params(numbers, frozen))


def logits(model, **turn):
    return np.asarray(model(jnp.asarray(TOKENS), **turn))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_turn_is_computed_as_by_its_adapter_alone(name):
    model, plain = make(name)
    alone = [logits(adapter_of(model, number)) for number in range(ADAPTERS)]
    assert min(np.abs(one - logits(plain)).max() for one in alone) > 1e-2
    assert np.abs(alone[0] - alone[1]).max() > 1e-2
    for turn in range(5):
        wanted = alone[min(turn, ADAPTERS - 1)]
        np.testing.assert_allclose(logits(model, turn=turn), wanted, atol=2e-5)
    with pytest.raises(ValueError, match="got no adapters of the tokens for a model with 3"):
        logits(model)
    with pytest.raises(ValueError, match="turn: got -1; allowed: a number >= 0"):
        logits(model, turn=-1)
    with pytest.raises(ValueError, match="turn: got 0; allowed: None, for a model without"):
        logits(plain, turn=0)


@pytest.mark.parametrize("name", NETWORKS)
def test_other_adapters_change_no_bit_and_get_no_gradient(name):
    model, _ = make(name)
    network, params = split_model(model)
    adapters, frozen = split_trainable(network, params)
    axis = network.arch.adapter_axis
    others, _ = split_trainable(*split_model(drawn(model, seed=4)))

    def own(number, mine, rest):
        return jnp.where(
            jnp.arange(ADAPTERS).reshape((-1,) + (1,) * (mine.ndim - axis - 1)) == number,
            mine,
            rest,
        )

    def loss(adapters, number):
        model = network.bind(join_params(adapters, frozen))
        adapter_NL = jnp.full(TOKENS.shape, number)
        hidden, _ = model.hidden(jnp.asarray(TOKENS), adapter_NL=adapter_NL)
        return (hidden * jnp.cos(jnp.arange(hidden.shape[-1]))).sum()

    gradients = jax.jit(jax.grad(loss))
    with jax.numpy_rank_promotion("allow"):
        for number in range(ADAPTERS):
            mixed = jax.tree.map(functools.partial(own, number), adapters, others)
            changed = network.bind(join_params(mixed, frozen))
            pair = (logits(each, turn=number) for each in (changed, model))
            np.testing.assert_array_equal(*pair)
            for gradient in jax.tree.leaves(gradients(adapters, number)):
                by_adapter = np.moveaxis(np.abs(gradient), axis, 0).reshape(ADAPTERS, -1).max(1)
                assert by_adapter[number] > 0
                assert (np.delete(by_adapter, number) == 0).all()


@pytest.mark.parametrize("name", ["dense", "experts", "latents"])
def test_sequences_of_several_turns_share_a_row(name):
    """Packed one behind the other, and as the trees of a row."""
    model, _ = make(name)
    turns, sizes = (2, 0, 1), (9, 9, 5)
    rows = [TOKENS[0], TOKENS[1], TOKENS[1][:5]]
    tokens = jnp.asarray(np.concatenate(rows)[None])
    adapter, segment = (np.repeat(x, sizes)[None] for x in (turns, range(3)))
    padded = {"adapter_NL": jnp.asarray(adapter)}
    end = np.repeat(np.cumsum(sizes), sizes)[None]
    depth = np.concatenate([*map(np.arange, sizes)])[None]
    as_tree = {"tree": Tree(jnp.asarray(depth), jnp.asarray(end))}
    for more in ({"segment_NL": jnp.asarray(segment)}, as_tree):
        hidden, _ = model.hidden(tokens, **padded, **more)
        parts = np.split(np.asarray(hidden[0]), np.cumsum(sizes)[:-1])
        for part, row, turn in zip(parts, rows, turns, strict=True):
            alone, _ = adapter_of(model, turn).hidden(jnp.asarray(row[None]))
            np.testing.assert_allclose(part, alone[0], atol=2e-5)


@pytest.mark.parametrize("name", ["dense", "experts", "stacked experts", "latents"])
def test_eight_devices_compute_the_same(name):
    model, _ = make(name)
    network, params = split_model(model)
    mesh = make_mesh(schema.Mesh(data=2, expert=2, tensor=2))
    where = param_shardings(mesh, network.logical_axes(), params)
    tokens = np.concatenate([TOKENS, TOKENS[::-1]])
    adapter_NL = np.array([0, 1, 2, 1])[:, None] + np.zeros_like(tokens)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda params, x, own: network.bind(params).hidden(x, adapter_NL=own)[0])
        hidden = np.asarray(run(jax.device_put(params, where), tokens, adapter_NL))
    for row, turn in enumerate((0, 1, 2, 1)):
        alone, _ = adapter_of(model, turn).hidden(jnp.asarray(tokens[row : row + 1]))
        np.testing.assert_allclose(hidden[row], alone[0], atol=2e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_turns_begin_as_one_adapter_for_all_would(name):
    arch, targets = NETWORKS[name]
    plain = make(name)[1]
    lora = LoraAdapters(rank=3, alpha=6.0, targets=targets)
    one = attach_adapters(plain, lora, seed=5)
    several = attach_adapters(plain, dataclasses.replace(lora, per_turn=ADAPTERS), seed=5)
    wanted, _ = split_trainable(*split_model(one))
    for number in range(ADAPTERS):
        got, _ = split_trainable(*split_model(adapter_of(several, number)))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    sizes = [sum(x.size for x in jax.tree.leaves(split_model(m)[1])) for m in (several, one)]
    assert sizes == [parameters(several.arch), parameters(one.arch)]
    with pytest.raises(ValueError, match="merge_adapters: got 3 adapters per turn; allowed: one"):
        merge_adapters(several)


@pytest.mark.parametrize("name", NETWORKS)
def test_folders_hold_the_same_bits(name, tmp_path):
    model, plain = make(name)
    save_adapters(model, tmp_path, tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["adapter_0", "adapter_1", "adapter_2"]
    assert read_lora(tmp_path) == model.arch.lora
    again = load_adapters(plain, tmp_path)
    assert again.arch == model.arch
    jax.tree.map(np.testing.assert_array_equal, split_model(again)[1], split_model(model)[1])
    np.testing.assert_array_equal(logits(again, turn=1), logits(model, turn=1))
    # One of them is a folder like any other, also to begin all turns with.
    one = load_adapters(plain, tmp_path / "adapter_1")
    all_alike = load_adapters(plain, tmp_path / "adapter_1", per_turn=2)
    assert one.arch.lora == dataclasses.replace(model.arch.lora, per_turn=0)
    np.testing.assert_array_equal(logits(one), logits(adapter_of(model, 1)))
    for turn in range(3):
        np.testing.assert_allclose(logits(all_alike, turn=turn), logits(one), atol=2e-5)


def test_folders_of_other_settings_are_refused(tmp_path):
    model, plain = make()
    save_adapters(model, tmp_path, tmp_path)
    first, gone = tmp_path / "adapter_2", tmp_path / "adapter_3"
    first.rename(gone)
    with pytest.raises(ValueError, match="turns beyond adapter_2, which is missing; allowed: "):
        load_adapters(plain, tmp_path)
    gone.rename(first)
    with pytest.raises(ValueError, match="adapter_0/adapter_config.json: base_model_name_or_path"):
        from_pretrained(tmp_path)
    config = tmp_path / "adapter_1" / "adapter_config.json"
    text = config.read_text().replace('"lora_alpha": 6.0', '"lora_alpha": 7.0')
    config.write_text(text)
    with pytest.raises(ValueError, match="adapter_1/adapter_config.json: got other settings than"):
        load_adapters(plain, tmp_path)
    config.unlink()
    with pytest.raises(ValueError, match="got the adapter of a single turn, adapter_0; allowed: "):
        load_adapters(plain, tmp_path)


def test_peft_reads_each_folder_and_our_loader_all(tmp_path):
    peft = importlib.import_module("peft")
    model, plain = make()
    save_pretrained(plain, tmp_path / "base")
    save_adapters(model, tmp_path / "adapters", tmp_path / "base")
    loaded, _ = from_pretrained(tmp_path / "adapters", dtype="float32")
    for turn in range(ADAPTERS):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float32
        )
        folder = tmp_path / "adapters" / f"adapter_{turn}"
        reference = peft.PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad():
            wanted = reference(torch.from_numpy(TOKENS)).logits.numpy()
        np.testing.assert_allclose(logits(loaded, turn=turn), wanted, atol=2e-4, rtol=2e-5)
        assert np.abs(wanted - logits(plain)).max() > 1e-2
