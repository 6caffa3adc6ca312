"""HTML pages of a run: curves, tables and trajectories."""
