"""The former path of `trajectories.reader.read_trajectories`."""

from seeupo_jax.trajectories.reader import read_trajectories

__all__ = ["read_trajectories"]
