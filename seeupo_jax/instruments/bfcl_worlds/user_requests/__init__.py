"""Kinds of user requests: one module per simulator, and requests that use two simulators."""
