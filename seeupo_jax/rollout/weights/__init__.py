"""What carries a trained policy to the samplers."""
