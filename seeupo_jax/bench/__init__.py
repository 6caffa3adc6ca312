"""Throughput, side by side with PyTorch."""
