"""Rewards of finished episodes in addition to the environment's: user functions and a judge."""

from seeupo_jax.rewards.finished_episode import FinishedEpisode as FinishedEpisode
