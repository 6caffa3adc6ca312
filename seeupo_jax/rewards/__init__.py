"""Rewards of finished episodes: functions of the user's, and a judge, beside the environment's."""

from seeupo_jax.rewards.finished_episode import FinishedEpisode as FinishedEpisode
