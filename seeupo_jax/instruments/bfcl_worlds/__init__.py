"""Generated multi-turn tasks over BFCL's simulators."""
