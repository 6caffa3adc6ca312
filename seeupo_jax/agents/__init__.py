"""Agents that bring their own loop, and what serves the policy to them."""
