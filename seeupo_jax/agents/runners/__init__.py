"""Runners of agents: async functions in an event loop, and command lines."""
