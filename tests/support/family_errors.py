"""Prints the figures of `docs/models.md`: how far each family is from PyTorch, of all its variants.

    PYTHONPATH=tests/support:tests/policy python tests/support/family_errors.py [FAMILY ...]

Largest difference of logits, by the standard deviation of PyTorch's; largest difference of
gradients, by the largest entry of each tensor; mean error of bfloat16 logits here and in PyTorch,
by the same deviation, of the family's first variant.
"""

import os
import sys
from collections import defaultdict
from tempfile import TemporaryDirectory

os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}

import jax
import jax.numpy as jnp
import numpy as np
import test_expert_parity
import test_family_parity
import test_latent_attention
import test_parity
import torch
import torch_models
import transformers
from twin_policy import tensors_of

from seeupo_jax.policy import from_pretrained
from seeupo_jax.policy.network import split_model

TOKENS = torch_models.tokens(200)


def variants():
    """Of every family: the configs that the tests of parity have."""
    found = defaultdict(list)
    for module, common in (
        (test_parity, test_parity.SIZES),
        (test_family_parity, {}),
        (test_expert_parity, test_expert_parity.SIZES),
        (test_latent_attention, test_latent_attention.SIZES),
    ):
        for family, values in module.CASES.values():
            found[family].append(common | values)
    return found


def logits(model):
    return np.asarray(model(jnp.asarray(TOKENS)))


def exact_errors(reference, folder):
    """Of logits and of gradients, in float32."""
    model, _ = from_pretrained(folder, dtype="float32")
    wanted = torch_models.torch_logits(reference, TOKENS)
    error = np.abs(logits(model) - wanted).max() / wanted.std()
    network, params = split_model(model)
    found = tensors_of(
        jax.device_get(test_family_parity.gradient(network, params, TOKENS[:2])), network.arch
    )
    gradients = torch_models.gradients(reference, TOKENS[:2])
    if network.arch.family == "mixtral":
        named = test_expert_parity.in_mixtral_files
        gradients = {named(name): gradient for name, gradient in gradients.items()}
    worst = 0.0
    for name, tensor in gradients.items():
        # A bias of keys that do not rotate moves all scores of a query alike: its gradient is 0.
        if (largest := np.abs(tensor).max()) > 1e-9:
            worst = max(worst, np.abs(found[name] - tensor).max() / largest)
    return error, worst


def half_errors(reference, folder):
    """Of logits in bfloat16: here and in PyTorch."""
    read = transformers.AutoModelForCausalLM.from_pretrained
    half = read(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    wanted = torch_models.torch_logits(reference, TOKENS)
    each = logits(from_pretrained(folder)[0]), torch_models.torch_logits(half, TOKENS)
    return [np.abs(found - wanted).mean() / wanted.std() for found in each]


def main(families):
    found = variants()
    for family in families or found:
        errors, half = [], []
        for number, values in enumerate(found[family]):
            with TemporaryDirectory() as folder:
                model, _ = torch_models.make(family, values, number, folder)
                errors.append(exact_errors(model, folder))
                half = half or half_errors(model, folder)
        exact = " | ".join(f"{value:.1e}" for value in np.max(errors, axis=0))
        print(f"{family} ({len(errors)}): {exact} | {half[0]:.4f} / {half[1]:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
