"""BFCL v4 multi-turn."""
