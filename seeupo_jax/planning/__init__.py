"""Memory, FLOPs and programs of a run, without running it."""
