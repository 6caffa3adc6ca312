"""What a run would need, without running it: memory, FLOPs, programs."""
