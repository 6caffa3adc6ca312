"""A run's output on a terminal."""
