"""Benchmarks of parts of the product, beyond those of an iteration."""
