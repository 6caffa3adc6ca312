"""Trajectories in, updated policies out."""
