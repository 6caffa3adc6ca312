"""DPPO with a bound on the KL divergence of a token being sampled or not (arXiv:2602.04879)."""

from seeupo_jax.algorithms.divergence import binary_kl, trust_region

OBJECTIVE = trust_region(binary_kl)
