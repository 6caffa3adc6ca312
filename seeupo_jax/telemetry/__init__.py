"""What a person sees of a run: metrics, live progress, curves and summaries.

Import the modules themselves; this package imports none of them, so each costs only what it needs.
"""
