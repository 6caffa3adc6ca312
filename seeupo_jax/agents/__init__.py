"""Agents with a loop of their own, and the endpoint that serves the policy to them."""
