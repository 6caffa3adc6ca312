"""Policies: the transformer, its weights, its tokenizer."""

from seeupo_jax.policy.files.weights import from_pretrained, save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
