"""Rollouts and sweeps in several processes, against one."""
