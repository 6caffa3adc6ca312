"""Coding agents that others wrote, as they are: how each is started and pointed at the endpoint."""
