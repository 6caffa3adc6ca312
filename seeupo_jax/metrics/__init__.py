"""Numbers of a run."""
