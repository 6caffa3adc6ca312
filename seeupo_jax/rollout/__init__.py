"""Sampling: the policy's tokens, the environments' answers."""
