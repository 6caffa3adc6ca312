"""Sandboxes of episodes: a command, its view of the machine, its limits, and its verifier."""
