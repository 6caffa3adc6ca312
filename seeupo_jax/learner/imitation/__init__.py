"""Supervised training: assistant messages as a sampler would produce them."""
