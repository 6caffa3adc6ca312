"""Generated multi-turn tasks on BFCL's simulators."""
