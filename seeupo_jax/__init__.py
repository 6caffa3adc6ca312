"""SeeUPO in JAX: sequence-level policy optimisation for multi-turn language-model agents."""
