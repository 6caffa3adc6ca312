"""Every family of models through the commands that take a model: tiny, random, in a folder.

The models are `transformers`' own of every entry of `FAMILIES`, so a family that is added is in
each of these tests. Its logits, gradients and cached decoding are tested in `tests/policy`.
"""

import functools
import importlib

import family_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_cases
import sft_cases
import torch
import torch_models
import transformers
from places import SUPPORT, TINY
from tpu_cases import needs_libtpu

from seeupo_jax import load_config, sft, train
from seeupo_jax.aot import main as aot_main
from seeupo_jax.configuration import schema
from seeupo_jax.metrics.metrics_log import read_metrics
from seeupo_jax.parallel.mesh import constrain, make_mesh, param_shardings
from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.families import FAMILIES
from seeupo_jax.policy.kernels.attention import Tree
from seeupo_jax.policy.network import split_model, token_logp
from seeupo_jax.train import main

CHOICES = [text.removeprefix("--config.") for text in run_cases.CHOICES]
SHORT = ("iterations=1", "rollout.tasks=2", "evaluation.tasks=0", "checkpoint.every=0")
every_family = pytest.mark.parametrize("family", FAMILIES)
EVERY = jax.devices()
NOT_SHARED = "training computes what sequences share for each of them"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes, once, a family's folder; returns it and the PyTorch model."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        return str(folder), family_models.write(family, folder)

    return make


def is_recurrent(family):
    return bool(FAMILIES[family].delta)


@pytest.mark.usefixtures("one_device")
@pytest.mark.sampled("gemma3_text", "gpt_oss", "qwen3_5_text")
@every_family
def test_its_run_is_explained(family, made, tmp_path, capsys):
    folder, reference = made(family)
    overrides = [f"--config.{choice}" for choice in (f"model.path={folder}", *CHOICES, *SHORT)]
    main(["train", f"--config={TINY}", f"--workdir={tmp_path}", "--explain", *overrides])
    printed = " ".join(capsys.readouterr().out.split())
    tensors = {tensor.data_ptr(): tensor.numel() for tensor in reference.state_dict().values()}
    assert f"{sum(tensors.values()):,} parameters" in printed
    assert (NOT_SHARED in printed) == is_recurrent(family)


def iteration(folder, workdir, *choices):
    """The metrics of an iteration of training."""
    overrides = [f"model.path={folder}", *CHOICES, *SHORT, *choices]
    train(load_config(TINY, overrides), workdir)
    (metrics,) = [line for line in read_metrics(workdir) if "sweep/loss" in line]
    assert metrics["sweep/grad_norm"] > 0
    return metrics


# The default names projections that these models do not have.
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def torch_model(folder):
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_device")
@every_family
def test_it_trains_as_it_samples_and_is_exported(family, made, tmp_path):
    folder, reference = made(family)
    metrics = iteration(folder, tmp_path)
    # Rounding: log-probabilities of 896 tokens are about -7, of which float32 has ulps of 5e-7.
    assert metrics["logp/sampler_trainer_gap"] <= 3e-6
    assert (metrics["sweep/shared_fraction"] == 0) == is_recurrent(family)
    exported = torch_model(tmp_path / "policy")
    assert type(exported) is type(reference)
    model, _ = from_pretrained(tmp_path / "policy", dtype="float32")
    ids = torch_models.tokens(reference.config.vocab_size)
    logits, untrained = (torch_models.torch_logits(each, ids) for each in (exported, reference))
    np.testing.assert_allclose(model(jnp.asarray(ids)), logits, atol=1e-4 * logits.std())
    assert np.abs(logits - untrained).max() > 1e-3 * logits.std()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("one_device")
@every_family
def test_adapters_of_it_train_and_are_read_by_peft(family, made, tmp_path):
    folder, reference = made(family)
    merge = FAMILIES[family].packed_experts  # which PEFT reads in another order
    choices = ("lora.rank=2", f"lora.merge={merge}")
    if FAMILIES[family].latent:
        choices += (f"lora.targets={LATENT_TARGETS}",)
    metrics = iteration(folder, tmp_path, *choices)
    assert metrics["logp/sampler_trainer_gap"] <= 3e-6
    exported = torch_model(tmp_path / "policy" if merge else folder)
    if not merge:
        peft = importlib.import_module("peft")  # takes seconds
        exported = peft.PeftModel.from_pretrained(exported, tmp_path / "policy").eval()
    model, _ = from_pretrained(tmp_path / "policy", dtype="float32")
    ids = torch_models.tokens(reference.config.vocab_size)
    wanted = torch_models.torch_logits(exported, ids)
    np.testing.assert_allclose(model(jnp.asarray(ids)), wanted, atol=1e-4 * wanted.std())
    assert np.abs(wanted - torch_models.torch_logits(reference, ids)).max() > 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_device")
@every_family
def test_it_learns_from_conversations(family, made, tmp_path):
    folder, reference = made(family)
    choices = (*sft_cases.CHOICES, "sft.epochs=1", "sft.held_out=0", "sft.eval_every=0")
    config = load_config(TINY, [f"model.path={folder}", *choices, "checkpoint.every=0"])
    done = sft(config, sft_cases.write_desk(tmp_path / "desk.jsonl", 4), tmp_path / "run")
    (metrics,) = [line for line in read_metrics(done.workdir) if "sft/loss" in line]
    # Of a model that knows nothing: about the entropy of all tokens.
    assert metrics["sft/loss"] == pytest.approx(np.log(reference.config.vocab_size), rel=0.2)
    assert type(torch_model(done.policy)) is type(reference)


@functools.partial(jax.jit, static_argnums=0)
def logp_and_gradients(network, params, tokens_NL, rows):
    """Log-probabilities, and the gradients of their mean."""

    def loss(params):
        hidden_NLD, _ = network.bind(params).hidden(tokens_NL, **rows)
        target_NL = jnp.roll(tokens_NL, -1, axis=1)
        logp_NL = token_logp(network, params, hidden_NLD, target_NL, temperature=0.8)
        return logp_NL.mean(), constrain(logp_NL, "rows", None)

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.sampled("glm4")
@every_family
def test_devices_that_share_heads_and_rows_compute_what_one_does(family, made):
    """Of token trees; of a recurrent model, rows of sequences."""
    network, params = split_model(from_pretrained(made(family)[0], dtype="float32")[0])
    tokens_NL = np.random.default_rng(0).integers(0, network.arch.vocab_size, (2, 32))
    # A path of 12 tokens that two of 8 and 4 continue, and another tree of 8.
    depth_L = np.r_[:20, 12:16, :8].astype(np.int32)
    end_L = np.r_[[24] * 12, [20] * 8, [24] * 4, [32] * 8].astype(np.int32)
    rows = {"tree": Tree(*(np.tile(x_L, (2, 1)) for x_L in (depth_L, end_L)))}
    if is_recurrent(family):
        rows = {}
    case = (tokens_NL.astype(np.int32), rows)
    wanted = logp_and_gradients(network, params, *case)
    sizes = schema.Mesh(data=1, fsdp=1, context=1 if is_recurrent(family) else 2, tensor=2)
    mesh = make_mesh(sizes, EVERY[: 2 * sizes.context])
    placed = jax.device_put(params, param_shardings(mesh, network.logical_axes(), params))
    with jax.set_mesh(mesh):
        got = logp_and_gradients(network, placed, *case)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)


@needs_libtpu
@every_family
def test_its_programs_compile_for_a_tpu(family, tmp_path):
    """At heads of 128, as published; only their sizes are read."""
    values = family_models.config_values(family, vocab=1_024)
    wide = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2}
    if values.get("num_key_value_heads") == values["num_attention_heads"]:
        wide["num_key_value_heads"] = 2
    values |= {key: size for key, size in wide.items() if key in values}
    transformers.AutoConfig.for_model(family, **values).save_pretrained(tmp_path)
    choices = [f"model.path={tmp_path}", "model.scan_layers=False", "rollout.max_context=256"]
    choices += ["batching.buckets=(256,)", "rollout.max_turns=1"]
    flags = [f"--config.{choice}" for choice in choices]
    command = ["aot", f"--config={SUPPORT / 'aot_config.py'}", "--topology=v5e:2x2", *flags]
    assert aot_main([*command, "--programs=sweep/turn,rollout/decode"]) == 0
