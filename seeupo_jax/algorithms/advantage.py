"""Where `group_relative_advantage` has always been imported from."""

from seeupo_jax.algorithms.estimators.grae import group_relative_advantage

__all__ = ["group_relative_advantage"]
