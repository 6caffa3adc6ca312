"""Trajectories on disk: written by runs, read by reports, updates and people."""
