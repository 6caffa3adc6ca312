"""What a person sees of a run: metrics, live progress, curves, summaries and trajectories.

Import the modules themselves; this package imports what reads trajectories, which costs nothing.
"""

from seeupo_jax.trajectories.reader import read_trajectories

__all__ = ["read_trajectories"]
