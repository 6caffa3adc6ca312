"""Throughput of updates, rollouts and iterations, compared with PyTorch in one run."""
