"""Rollouts of agents, and requests of many clients, against servers of `transformers`."""
