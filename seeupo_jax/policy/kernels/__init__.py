"""Attention and its kernels."""
